"""Tables of the larger Llama, and of three models that are grown from one plateau."""

from __future__ import annotations

from statistics import fmean

from ..book import Book, Seen
from ..methods import METHODS
from ..questions import family, large
from ..questions.new_units import TIMES
from .cells import by_seed, mean_cell, peak, table
from .repairs import ratios

PUBLISHED = ("goes on", large.SCRATCH, "copies, noise of the small one", "G_stack", "HyperCloning")
"""What the default is compared with: going on, a new model, the paper's copies, and methods of others."""


def ends(book: Book, extra: float) -> dict[str, Seen]:
    """The arms that are stored on every seed, the tuning seed first."""
    arms = {name: large.arm(book.known, book.sizes, name, extra) for name in large.NAMES}
    found = {name: book.paired(made) for name, made in arms.items() if made.chosen is not None}
    return {name: one for name, one in found.items() if one is not None}


def ahead(book: Book, extra: float) -> tuple[str, list[float]] | None:
    """The best of the others by its mean, and by how many nats the default ends below it, by seed."""
    found = ends(book, extra)
    others = [name for name in PUBLISHED if name in found]
    if large.DEFAULT not in found or not set(PUBLISHED) - {"HyperCloning"} <= set(others):
        return None
    best = min(others, key=lambda name: found[name].mean)
    return best, ratios(book, found[large.DEFAULT], found[best])


def large_table(book: Book) -> str:
    """Every arm with each budget: where it ends, what it ends above the default by seed, and its peak."""
    columns = {extra: ends(book, extra) for extra in reversed(large.EXTRAS)}
    rows = []
    for name in large.NAMES:
        cells = []
        for found in columns.values():
            one, ours = found.get(name), found.get(large.DEFAULT)
            compared = one is not None and ours is not None and name != large.DEFAULT
            over = by_seed(ratios(book, ours, one), book.nats) if compared and ours and one else ""
            cells += [mean_cell(one), over, "" if one is None else peak(one.chosen)]
        if any(cells):
            rows.append([_label(name), *cells])
    head = [part for extra in columns for part in (f"{extra:g} × its budget", "above the default", "peak")]
    own = book.paired(large.base(book.known, book.sizes))
    rows.insert(0, ["the base itself", mean_cell(own), *[""] * (len(head) - 1)])
    return table(["", *head], rows)


def _label(name: str) -> str:
    return METHODS["copied_readers"].label + " (the default)" if name == large.DEFAULT else name


def over_independent(book: Book, share: float) -> list[list[float]] | None:
    """The losses of the middle and the large model over those of runs of their own, by seed; None while one is missing."""
    pairs = zip(
        family.grown(book.known, book.sizes, share),
        family.independent(book.known, book.sizes)[1:],
        strict=True,
    )
    found = [(book.paired(ours), book.paired(own)) for ours, own in pairs]
    return [ratios(book, own, ours) for ours, own in found if ours and own] if all(map(all, found)) else None


def cheapest_family(book: Book) -> tuple[float, float] | None:
    """The share of FLOPs that a family saves, and the loss of its worst model over a run of its own.

    Of the stored families, the one that saves most while no model ends above; else the one whose worst model ends lowest.
    """
    found = []
    for share in book.sizes.family_shares:
        over = over_independent(book, share)
        if over is not None:
            found.append((family.saved(share), max(map(fmean, over))))
    level = [one for one in found if one[1] <= 1]
    return max(level) if level else min(found, key=lambda one: one[1], default=None)


def family_table(book: Book) -> str:
    """Runs of their own, and families with several shares of their FLOPs."""
    own = [book.paired(arm) for arm in family.independent(book.known, book.sizes)]
    widths = [TIMES**i * book.sizes.family.width for i in range(3)]
    rows = [["three runs", "", *map(mean_cell, own), ""]]
    for share in book.sizes.family_shares:
        grown = [book.paired(arm) for arm in family.grown(book.known, book.sizes, share)]
        over = over_independent(book, share)
        if over is not None:
            cells = [
                f"{mean_cell(one)}: {by_seed(values, nats=False)}"
                for one, values in zip(grown, over, strict=True)
            ]
            peaks = "" if grown[1] is None else peak(grown[1].chosen)
            rows.append([f"{share:g} ×", f"{family.saved(share):.1%}", "the same", *cells, peaks])
    return table(["", "FLOPs saved", *(f"width {width}" for width in widths), "last peak"], rows)
