"""Tables of three paired seeds: the default on finished bases, growth to the right width, the rate after growth alone, and
the state on text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..book import Book, Seen, seen
from ..choose import Known
from ..questions import after, directions, new_units, states, sunk, widths
from ..sizes import Way
from .cells import by_seed, cell, mean_cell, table


def ratios(book: Book, ours: Seen, other: Seen) -> list[float]:
    """The other over ours by seed; in nats the difference."""
    pairs = zip(other.values, ours.values, strict=True)
    return [theirs - mine if book.nats else theirs / mine for theirs, mine in pairs]


def default_table(books: Sequence[Book], default: str) -> str:
    """On finished bases: what going on, copies and a new model of the same width end above the default, by seed."""
    rows = []
    for book in books:
        for base in book.sizes.cited_bases:
            for extra in book.sizes.cited_extras:
                made = new_units.arm(book.known, book.sizes, base, default, extra)
                wide = new_units.TIMES * base.width
                others = [
                    book.paired(sunk.arm(book.known, book.sizes, base, name, extra))
                    for name in ("goes on", f"grown to {wide}", f"scratch {wide}")
                ]
                ours = book.paired(made)
                if ours is not None and all(others):
                    cells = [by_seed(ratios(book, ours, other), book.nats) for other in others if other]
                    rows.append([f"{book.name}, {base.width}, {base.units} u", f"{extra:g} ×", *cells])
    head = ["base", "budget", "going on", "copies, tuned noise", "a new model of that width"]
    return table(head, rows) if rows else ""


def best_width(book: Book, way: Way) -> tuple[str, Seen] | None:
    """The width throughout that ends lowest on the tuning seed, on every seed; None before all are tuned."""
    found = {}
    for name in widths.throughout(way):
        one = book.on_tuning_seed(widths.arm(book.known, book.sizes, way, name))
        if one is None:
            return None
        found[name] = one
    name = min(found, key=lambda each: found[each].choose)
    whole = book.paired(widths.arm(book.known, book.sizes, way, name))
    return None if whole is None else (name, whole)


def over_best_width(book: Book, way: Way, name: str) -> list[float] | None:
    """The best width throughout over growth by one kind of readers, by seed; None while a run is missing."""
    best, ours = best_width(book, way), book.paired(widths.arm(book.known, book.sizes, way, name))
    return None if best is None or ours is None else ratios(book, ours, best[1])


def ways_to_the_right_width(book: Book, *, from_narrow: bool) -> list[Way]:
    """The ways to the right width that begin at the width which grows in mid-run, or all others."""
    return [way for way in book.sizes.ways if (way.narrow == book.sizes.narrow) is from_narrow]


def widths_table(book: Book, ways: Sequence[Way]) -> str:
    """Widths throughout and growth to twice the width; a width that lies far behind has its tuning seed alone."""

    def told(way: Way, name: str) -> str:
        if name not in widths.names(way):
            return ""
        made = widths.arm(book.known, book.sizes, way, name)
        whole = book.paired(made)
        if whole is not None:
            return cell(whole)
        one = book.on_tuning_seed(made)
        return "not run" if one is None else mean_cell(one)

    rows = [[name, *(told(way, name) for way in ways)] for name in _names(ways)]
    for name in dict.fromkeys(name for way in ways for name in widths.grown(way)):
        found = [over_best_width(book, way, name) for way in ways]
        if any(found):
            cells = ["" if values is None else by_seed(values, book.nats) for values in found]
            rows.append([f"the best width over {name}, by seed", *cells])
    return table(["", *(f"{way.units} units" for way in ways)], rows)


def _names(ways: Sequence[Way]) -> list[str]:
    """The arms of several ways, widths first."""
    told = [name for way in ways for name in widths.throughout(way)]
    told += [name for way in ways for name in widths.grown(way)]
    return list(dict.fromkeys(told))


def after_table(book: Book) -> str:
    """The loss by the peak after growth, over the base's own tuned rate."""
    names = [tuple(name.split(", ")) for name in after.names(book.sizes)]
    factors = sorted({float(factor) for _, _, factor in names})
    rows = []
    for way, before in dict.fromkeys((way, before) for way, before, _ in names):
        cells = []
        for factor in factors:
            name = f"{way}, {before}, {factor:g}"
            known = name in after.names(book.sizes)
            cells.append(mean_cell(book.paired(after.arm(book.known, book.sizes, name))) if known else "")
        if any(cells):
            rows.append([way + (", the base at twice its rate" if before == "2" else ""), *cells])
    return table(["the peak after growth", *(f"{factor:g} ×" for factor in factors)], rows)


def states_table(book: Book, name_of: Callable[[str], str]) -> str:
    """Which state copies begin with, to the end, by seed; a cell is empty while its run is missing."""
    seeds = (book.sizes.tuning_seed, *book.sizes.seeds)
    rows = []
    for name in states.names(book.sizes):
        ends = state_ends(book, name)
        if ends:
            rows.append([name_of(name), *(f"{ends[seed]:.4f}" if seed in ends else "" for seed in seeds)])
    return table(["", *(f"ends at, seed {seed}" for seed in seeds)], rows)


def state_ends(book: Book, name: str) -> dict[int, float]:
    """The held-out loss by seed, for the seeds that are stored."""
    chosen = states.arm(book.known, book.sizes, name).chosen
    seeds = (book.sizes.tuning_seed, *book.sizes.seeds)
    found = {} if chosen is None else {seed: book.known(chosen.with_seed(seed)) for seed in seeds}
    return {seed: float(one["held"]) for seed, one in found.items() if one is not None and one["held"]}


def text_widths_table(text: Book, known: Known) -> str:
    """A quarter of one budget on the base and the rest grown, beside widths throughout, on the Llama; reported seeds."""
    units = text.sizes.cited_mid_run[0]
    rows = [[name, cell(text.new_units_mid_run(name, units))] for name in new_units.mid_run_names(text.sizes)]
    middle = between(text, known)
    rows.insert(1, [f"{3 * text.sizes.narrow // 2} throughout", cell(middle)])
    best = best_text_width(text, known)
    for name in new_units.METHODS:
        for each in (name, f"{name}{new_units.BASE_RATE}"):
            ours = text.new_units_mid_run(each, units)
            if best is not None and ours is not None:
                rows.append(
                    [
                        f"the best width minus {each}, by seed",
                        by_seed(ratios(text, ours, best), nats=True),
                    ]
                )
    return table(["", f"{units} unit"], [row for row in rows if row[1]])


def between(text: Book, known: Known) -> Seen | None:
    """The width between both, throughout: it is stored beside the blocks and experts."""
    made = directions.arm(known, directions.Sizes(), "pads scratch")
    return seen(known, made, text.sizes.seeds)


def best_text_width(text: Book, known: Known) -> Seen | None:
    units, sizes = text.sizes.cited_mid_run[0], text.sizes
    told = [text.new_units_mid_run(f"{width} throughout", units) for width in (sizes.narrow, sizes.wide)]
    found = [one for one in (*told, between(text, known)) if one is not None]
    return min(found, key=lambda one: one.choose) if len(found) == len(told) + 1 else None
