"""What is stored of new units: rows beside those of a base, which readers end lower, and what the optimizer's state is worth.

A rank is 1 for the readers whose mean of the reported seeds is lower in a case, 2 for the others, and 1.5 for both if equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from ...store import RESULTS, Store
from ..book import NOT_RUN, Book, Seen, new_units_contest, new_units_mid_run_contest, seen
from ..choose import Arm
from ..questions import directions as directions
from ..questions.new_units import KEPT, METHODS, PEERS, TIMES, arm, mid_run_names, names
from ..sizes import Finished
from ..spec import Spec
from ..train import POINTS

Cell = Callable[[Seen | None], str]
Gain = Callable[[tuple[float, bool] | None, bool], str]


def base_rows(
    book: Book, base: Finished, extras: Sequence[float], cell: Cell, gain: Gain
) -> Iterator[list[str]]:
    """Rows of a finished base: every arm that has a cell, and what the best alternative is over it."""
    for name in (*PEERS, *names(book.sizes, base)):
        found = [book.new_units(base, name, extra) for extra in extras]
        if not any(found):
            continue
        short = name.removesuffix(KEPT)
        yield [f"{short} to {TIMES * base.width}{name.removeprefix(short)}", *map(cell, found)]
        if name not in PEERS:
            gains = [new_units_contest(book, base, name, extra) for extra in extras]
            yield [f"the best alternative {_over(book)} {name}", *(gain(each, book.nats) for each in gains)]
        if name in METHODS:
            shares = [ahead_from(book, base, name, extra) for extra in extras]
            yield [f"{name}: ahead of going on from", *map(_share, shares)]


def ahead_from(book: Book, base: Finished, name: str, extra: float) -> float | None:
    """The share of the new FLOPs from which new units stay below going on; 1 if they never do, None without both curves.

    Curves are means over the reported seeds, at 20 points. A run of fewer steps has fewer points, so it is not compared.
    """
    grown, stays = book.new_units(base, name, extra), book.sunk(base, "goes on", extra)
    if grown is None or stays is None:
        return None
    ours, theirs = (_curve(book, each.chosen) for each in (grown, stays))
    if not ours or len(ours) != len(theirs):
        return None
    ahead = [one < other for one, other in zip(ours, theirs, strict=True)]
    behind = max((i for i, below in enumerate(ahead) if not below), default=-1)
    return (behind + 1) / len(ahead)


def _curve(book: Book, spec: Spec) -> list[float]:
    """The mean held-out loss of the reported seeds after each twentieth of the steps; [] where no curve is stored."""
    found = [book.known(spec.with_seed(seed)) or {} for seed in book.sizes.seeds]
    curves = [[loss for _, loss in each.get("curve", [])[-POINTS:]] for each in found]
    return [fmean(point) for point in zip(*curves, strict=True)]


def _share(share: float | None) -> str:
    if share is None:
        return ""
    return "the first twentieth" if share == 0 else "never" if share == 1 else f"{share:.0%} of these FLOPs"


def mid_run_rows(book: Book, cell: Cell, gain: Gain) -> Iterator[list[str]]:
    """Rows of growth to twice the width after a quarter of a budget for everything, beside widths throughout."""
    budgets = book.sizes.cited_mid_run
    for name in mid_run_names(book.sizes):
        yield [name, *(cell(book.new_units_mid_run(name, units)) for units in budgets)]
    for name in METHODS:
        gains = [new_units_mid_run_contest(book, name, units) for units in budgets]
        yield [f"the best width {_over(book)} {name}", *(gain(each, book.nats) for each in gains)]


def ranks(book: Book) -> dict[str, float] | None:
    """The mean rank of both kinds of readers over all cases of a study that have both; None without any."""
    sizes = book.sizes
    cases = [
        [book.new_units(base, name, extra) for name in METHODS]
        for base in sizes.cited_bases
        for extra in sizes.cited_extras
    ]
    cases += [[book.new_units_mid_run(name, units) for name in METHODS] for units in sizes.cited_mid_run]
    found: list[list[float]] = []
    for case in cases:
        means = [each.mean for each in case if each is not None]
        if len(means) == len(METHODS):
            found.append([1 + sum((m > other) + 0.5 * (m == other) for other in means) - 0.5 for m in means])
    return (
        {name: fmean(column) for name, column in zip(METHODS, zip(*found, strict=True), strict=True)}
        if found
        else None
    )


def mean_ranks(books: Sequence[Book]) -> dict[str, float] | None:
    """The mean over the studies, each with one voice."""
    told = [each for each in map(ranks, books) if each is not None]
    return {name: fmean(each[name] for each in told) for name in METHODS} if told else None


def chosen(books: Sequence[Book]) -> str | None:
    """The readers with the lowest mean rank; copied ones, as `NewUnits` has them, where both are equal."""
    told = mean_ranks(books)
    return None if told is None else min(reversed(told), key=told.__getitem__)


def kept_over_empty(book: Book) -> dict[tuple[str, float], tuple[float, ...]]:
    """By readers and budget of the first base: the loss with moments kept over that from an empty optimizer, by seed.

    In nats it is the difference. All seeds count, because nothing was chosen.
    """
    found = {}
    for extra in book.sizes.cited_extras:
        for name in METHODS:
            values = [
                _values(book, arm(book.known, book.sizes, book.sizes.bases[0], n, extra))
                for n in (name + KEPT, name)
            ]
            if all(values):
                pairs = zip(*values, strict=True)
                found[name, extra] = tuple(k - e if book.nats else k / e for k, e in pairs)
    return found


def below(text: Book, name: str) -> dict[str, tuple[float, bool]]:
    """How many nats new units on text end below each other way, with as many FLOPs again; whether seeds overlap not.

    Only ways that have all their seeds.
    """
    sizes = text.sizes
    base = sizes.bases[0]
    store = Store(RESULTS / "directions.jsonl")

    def stored(direction: str) -> Seen | None:
        known = lambda spec: store.known(spec.key)  # noqa: E731
        return seen(known, directions.arm(known, directions.Sizes(), direction), sizes.seeds)

    others = {
        "going on": text.sunk(base, "goes on", 1.0),
        "copies with the best noise": text.sunk(base, f"grown to {TIMES * base.width}", 1.0),
        "G_stack": stored("stack"),
        **{peer: text.new_units(base, peer, 1.0) for peer in PEERS},
        "sparse upcycling": stored("upcycling"),
    }
    ours = text.new_units(base, name, 1.0)
    if ours is None:
        return {}
    return {
        other: (each.mean - ours.mean, max(ours.values) < min(each.values))
        for other, each in others.items()
        if each is not None
    }


def summary(books: Sequence[Book]) -> Iterator[str]:
    """Sentences over all studies: the readers, the state, and the distances on text."""
    books = _with(books)
    for book in books:
        told = ranks(book)
        if told is not None:
            yield f"Mean rank, {book.name}: {_listed(told)}."
    both = mean_ranks(books)
    if both is not None:
        verdict = "they tie" if len(set(both.values())) == 1 else f"{chosen(books)} are lower"
        yield f"Mean rank over the studies: {_listed(both)}; {verdict}."
    for book in books:
        for (name, extra), values in kept_over_empty(book).items():
            how = "minus" if book.nats else "over"
            seeds = ", ".join(f"{value:+.4f}" if book.nats else f"{value:.4f}" for value in values)
            yield f"Moments kept {how} an empty optimizer, {book.name}, {name}, {extra:g} × the budget, by seed: {seeds}."
    for book in books:
        for name in METHODS if book.nats else ():
            found = below(book, name)
            if found:
                told_of = ", ".join(f"{other} {nats:+.4f}" for other, (nats, _) in found.items())
                yield f"Nats above {name} with as many FLOPs again, {book.name}: {told_of}."


def figures(books: Sequence[Book]) -> dict[str, str]:
    """For the readers that are chosen: the smallest gain of the first study by budget and in mid-run, and nats of the text."""
    name, first = chosen(_with(books)), books[0]
    told = dict.fromkeys(("u_readers", "u_quarter", "u_again", "u_mid_run", "u_kept", "u_nats"), NOT_RUN)
    if name is None:
        return told
    told["u_readers"] = METHODS[name]
    for figure, extra in (("u_quarter", 0.25), ("u_again", 1.0)):
        gains = [new_units_contest(first, base, name, extra) for base in first.sizes.cited_bases]
        told[figure] = _smallest(gains)
    told["u_mid_run"] = _smallest(
        [new_units_mid_run_contest(first, name, units) for units in first.sizes.cited_mid_run]
    )
    states = [value for (n, _), values in kept_over_empty(first).items() if n == name for value in values]
    told["u_kept"] = f"{fmean(states):.4f}" if states else NOT_RUN
    on_text = [
        found["going on"][0]
        for book in _with(books)
        if book.nats and "going on" in (found := below(book, name))
    ]
    told["u_nats"] = f"{min(on_text):.4f}" if on_text else NOT_RUN
    return told


def _with(books: Sequence[Book]) -> list[Book]:
    """The studies that have new units."""
    return [book for book in books if "u" in book.sizes.stages]


def _values(book: Book, made: Arm) -> tuple[float, ...]:
    """The held-out loss of every seed, the tuning seed first; () while one is missing."""
    sizes = book.sizes
    found = seen(book.known, made, (sizes.tuning_seed, *sizes.seeds))
    return () if found is None else found.values


def _smallest(gains: Sequence[tuple[float, bool] | None]) -> str:
    known = [each[0] for each in gains if each is not None]
    return f"{min(known):.4f}" if known and len(known) == len(gains) else NOT_RUN


def _over(book: Book) -> str:
    return "minus" if book.nats else "over"


def _listed(told: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in told.items())
