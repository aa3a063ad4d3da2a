"""What is stored of new units: rows beside those of a base, which readers end lower, and what the optimizer's state is worth.

A rank is 1 for the readers whose mean of the reported seeds is lower in a case, 2 for the others, and 1.5 for both if equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from ..book import Book, Seen, new_units_contest, seen
from ..choose import Arm
from ..questions.new_units import KEPT, METHODS, PEERS, TIMES, arm, names
from ..sizes import Finished
from ..spec import Spec
from ..train import POINTS
from .cells import by_seed, table

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
    told = [each for each in map(ranks, _with(books)) if each is not None]
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


def kept_table(books: Sequence[Book]) -> str:
    """What moments that are kept end above an empty optimizer, by seed, the tuning seed first."""
    rows = []
    for book in _with(books):
        for (name, extra), values in kept_over_empty(book).items():
            how = "minus" if book.nats else "over"
            rows.append([book.name, name, f"{extra:g} ×", f"{how}: {by_seed(values, book.nats)}"])
    return table(["", "readers", "budget", "moments kept, and an empty optimizer"], rows)


def ranks_table(books: Sequence[Book]) -> str:
    """The mean rank of both kinds of readers, by study and over the studies."""
    found = {book.name: ranks(book) for book in _with(books)} | {"both": mean_ranks(books)}
    rows = [[name, *(f"{each[reader]:.2f}" for reader in METHODS)] for name, each in found.items() if each]
    return table(["mean rank", *METHODS], rows)


def _with(books: Sequence[Book]) -> list[Book]:
    """The studies that have new units."""
    return [book for book in books if "u" in book.sizes.stages]


def _values(book: Book, made: Arm) -> tuple[float, ...]:
    """The held-out loss of every seed, the tuning seed first; () while one is missing."""
    sizes = book.sizes
    found = seen(book.known, made, (sizes.tuning_seed, *sizes.seeds))
    return () if found is None else found.values


def _over(book: Book) -> str:
    return "minus" if book.nats else "over"
