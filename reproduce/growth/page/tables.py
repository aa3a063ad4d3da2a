"""Tables of single studies: finished bases, growth on the way, noise, the optimizer's state, and no sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..book import Book, Seen, mid_run_contest, new_units_regret, regret, ruled_contest, sunk_contest
from ..choose import Arm
from ..questions import exactness, midrun, sunk, unseen
from ..questions.new_units import METHODS
from ..questions.noise_rule import RULES, regrets
from ..sizes import Finished
from . import new_units
from .cells import cell, gain_cell, mean_cell, table


def base_table(book: Book, base: Finished) -> str:
    """What a finished base may become, by what may still be spent, for the budgets that have every arm."""
    sizes = book.sizes
    extras = [extra for extra in sizes.extras if sunk_contest(book, base, extra) is not None]
    if not extras:
        return ""
    over = "the best alternative minus" if book.nats else "the best alternative over"

    def gains(name: str, found: Sequence[tuple[float, bool] | None]) -> list[str]:
        return [f"{over} {name}", *(gain_cell(each, book.nats) for each in found)]

    rows = [["the base itself", mean_cell(_own(book, base)), *("" for _ in extras[1:])]]
    for name in sunk.names(sizes, base):
        rows.append([name, *(cell(book.sunk(base, name, extra)) for extra in extras)])
    rows.append(gains("the best grown", [sunk_contest(book, base, extra) for extra in extras]))
    by_rule = [ruled_contest(book, base, extra) for extra in extras]
    if any(by_rule):
        for name in sunk.ruled(sizes, base):
            rows.append([name, *(cell(book.sunk(base, name, extra)) for extra in extras)])
        rows.append(gains("the best grown by rule", by_rule))
    rows += new_units.base_rows(book, base, extras, cell, gain_cell)
    return table(["", *(f"{extra:g} × its budget" for extra in extras)], rows)


def _own(book: Book, base: Finished) -> Seen | None:
    chosen = sunk.arm(book.known, book.sizes, base, "goes on", 1.0).chosen
    return None if chosen is None or chosen.start is None else book.seen(Arm((), chosen.start))


def mid_run_table(book: Book) -> str:
    """Growth by copies on the way to the widest model, for the budgets whose runs are all stored."""
    sizes = book.sizes
    found = {units: mid_run_contest(book, units) for units in sizes.mid_run if "a" in sizes.stages}
    kept = {units: gain for units, gain in found.items() if gain is not None}
    rows = [
        [name, *(cell(book.mid_run(name, units)) for units in kept)] for name in midrun.names(sizes) if kept
    ]
    against = "the best width throughout minus" if book.nats else "the best width throughout over"
    rows.append([f"{against} the best grown", *(gain_cell(gain, book.nats) for gain in kept.values())])
    return table(["", *(f"{units} units" for units in kept)], rows) if kept else ""


def noise_table(book: Book) -> str:
    """How far rules for the noise end above the best noise."""
    told = {name: regrets(book.grown, rule) for name, rule in RULES.items()} if book.grown else {}
    rows = [[name, f"{100 * mean:.1f} %", f"{100 * worst:.1f} %"] for name, (mean, worst) in told.items()]
    return table(["share of what was learned", "mean", "worst"], rows) if rows else ""


def state_table(book: Book) -> str:
    """What carried optimizer state is worth, for the arms that are stored."""
    rows = []
    for name in exactness.names(book.sizes):
        end, early = book.exactness(name), book.exactness(name, "early")
        if end is not None and early is not None:
            rows.append([state_name(name), mean_cell(end), mean_cell(early)])
    return table(["", "held out, at the end", "training, over the first 1 %"], rows) if rows else ""


def state_name(name: str) -> str:
    """An arm of the question about state in words.

    >>> state_name("wrong_units, noise"), state_name("shrink_pad, own rate")
    ('state in wrong units, noise', 'shrink, pad and perturb, own rate')
    """
    words = {
        "carried": "state carried",
        "wrong_units": "state in wrong units",
        "fresh_rewarmed": "state fresh, warmed up again",
        "fresh": "state fresh",
        "asymmetric": "state of one copy only, warmed up again",
        "net2wider": "Net2WiderNet",
        "shrink_pad": "shrink, pad and perturb",
        "tiling": "tiling (HyperCloning)",
    }
    first, comma, rest = name.partition(", ")
    return words[first] + comma + rest


def recipe_table(books: Sequence[Book]) -> str:
    """Copies by the recipe against their tuned point, for every study that has both."""
    rows = []
    for book in books:
        recipe, tuned = (book.unseen(name) for name in unseen.NAMES)
        lost = regret(book)
        if recipe is None or tuned is None or lost is None:
            continue
        result = book.known(recipe.chosen)
        assert result is not None
        by_rule = f"{mean_cell(recipe)}, t = {result['noise']['t']:g} on seed {book.sizes.tuning_seed}"
        rows.append([_unseen(book), by_rule, cell(tuned), _lost(book, lost)])
    return table(["", "copies by the recipe", "tuned copies", "regret"], rows) if rows else ""


def untuned_table(books: Sequence[Book]) -> str:
    """New units at half of the base's rate against the lowest tuned point of every way."""
    rows = []
    for book in books:
        for name in METHODS:
            if (found := new_units_regret(book, name)) is not None:
                ours, best, lost = found
                how = "copies" if best.chosen.method == "ours" else best.chosen.method.replace("_", " ")
                rows.append(
                    [f"{_unseen(book)}, {name}", cell(ours), f"{cell(best)}, {how}", _lost(book, lost)]
                )
    return table(["", "without a sweep", "tuned", "regret"], rows) if rows else ""


def centred_table(books: Sequence[Book]) -> str:
    """Streams that LayerNorm centres, by both ways of growing them."""
    rows = []
    for book in (book for book in books if book.sizes.centred):
        tuned, copied = book.unseen("tuned"), book.unseen("copied readers")
        left, ruled, flat = (book.unseen(name) for name in unseen.MEANS)
        if tuned and copied and left and ruled and flat:
            over = _lost(book, left.mean - tuned.mean)
            fold = _lost(book, left.mean - flat.mean)
            rows.append([_unseen(book), *map(cell, (copied, ruled, left, flat)), over, fold])
    head = (
        "",
        "stream by copies",
        "new channels",
        "new channels, nothing else done",
        "the same, one rate",
        "the third minus tuned copies",
        "the third minus the fourth",
    )
    return table(head, rows) if rows else ""


def open_questions(books: Sequence[Book]) -> Iterator[str]:
    """The questions that no stored runs answer yet."""
    for book in books:
        of = "" if book.name == "mlp" else f" ({book.name})"
        for base in book.sizes.bases:
            for extra in book.sizes.extras:
                if sunk_contest(book, base, extra) is None:
                    yield f"a base of width {base.width}, {base.units} units, with {extra:g} × its budget{of}"
        for units in book.sizes.mid_run if "a" in book.sizes.stages else ():
            if mid_run_contest(book, units) is None:
                yield f"growth by copies on the way, {units} units for everything{of}"


def _unseen(book: Book) -> str:
    """A setting of stage d in words."""
    what = {
        "mlp": f"MLP of {book.sizes.depth} layers",
        "text": "Llama on text",
        "images": "ResNet on CIFAR-10",
        "layernorm": "GPT-2 on text",
    }
    return f"{what[book.name]}, {book.sizes.wide // book.sizes.unseen_k} → {book.sizes.wide}"


def _lost(book: Book, lost: float) -> str:
    return f"{lost:+.4f} nats" if book.nats else f"{100 * lost:+.1f} %"
