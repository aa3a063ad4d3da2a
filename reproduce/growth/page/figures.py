"""The last line: the library's default without a sweep over the best of going on, scratch and published methods at their
tuned rates, where several settings count the one where it gains least. Ratios of losses, and nats for text.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from ..book import NOT_RUN, Book, Seen, contest, new_units_regret
from ..methods import METHODS
from ..questions import unseen, widths
from ..questions.new_units import PEERS, TIMES
from ..sizes import Finished
from .directions import against_peers, results
from .repairs import best_text_width, best_width
from .sizes import ahead, cheapest_family
from .stored import Stored

DEFAULT = "copied readers"
"""What `upscale` does without options."""
PUBLISHED_DEPTH = ("stack", "llama_pro")

Gain = tuple[float, bool] | None
"""How far the default is ahead, and whether the seeds do not overlap."""


def over_the_best(stored: Stored, book: Book, base: Finished, extra: float) -> Gain:
    """The default on a finished base against the best of the others; published methods count where they have been run."""
    wide = TIMES * base.width
    controls = [book.sunk(base, n, extra) for n in ("goes on", f"grown to {wide}", f"scratch {wide}")]
    published = [book.new_units(base, name, extra) for name in PEERS]
    if book.name == "text" and extra == 1:
        found = results(stored.known, stored.dense)
        published += [found[name] for name in PUBLISHED_DEPTH]
    others = [*controls, *(one for one in published if one is not None)]
    return contest([book.new_units(base, DEFAULT, extra)], others, book.nats)


def worst(gains: Sequence[Gain]) -> float | None:
    """The smallest gain; None while one is missing."""
    known = [gain[0] for gain in gains if gain is not None]
    return min(known) if known and len(known) == len(gains) else None


def mid_run(book: Book) -> float | None:
    """The best width throughout over the default, on the reported seeds; the budget where it is smallest."""
    found = []
    for way in book.sizes.ways:
        best = best_width(book, way)
        ours = book.seen(widths.arm(book.known, book.sizes, way, DEFAULT))
        if best is None or ours is None:
            return None
        theirs = book.seen(widths.arm(book.known, book.sizes, way, best[0]))
        assert theirs is not None
        found.append(theirs.mean / ours.mean)
    return min(found) if found else None


def text_mid_run(stored: Stored) -> float | None:
    book = stored.book("text")
    if book is None or not book.sizes.cited_mid_run:
        return None
    best = best_text_width(book, stored.known)
    ours = book.new_units_mid_run(DEFAULT, book.sizes.cited_mid_run[0])
    return None if best is None or ours is None else best.mean - ours.mean


def without_sweep(book: Book) -> float | None:
    """What the default without a sweep loses to the lowest tuned point: as a share, or in nats."""
    points: list[Seen | None]
    if book.name == "text":
        units = book.sizes.cited_mid_run[0] if book.sizes.cited_mid_run else 0
        points = [book.new_units_mid_run(f"{DEFAULT}{rest}", units) for rest in ("", ", the base's rate")]
        if None in points or not units:
            return None
        ours, faster = (point.mean for point in points if point is not None)
        return ours - min(ours, faster)
    found = new_units_regret(book, DEFAULT)
    if found is None:
        return None
    own, tuned, lost = found
    if not book.sizes.centred:
        return lost
    default = book.unseen(unseen.MEANS[0])
    return None if default is None else default.mean - min(default.mean, own.mean, tuned.mean)


def figures(stored: Stored) -> dict[str, str]:
    """The figures of the last line, in its order."""
    mlp, text = stored.books[0], stored.book("text")
    told: dict[str, float | None] = {}
    larger = stored.book("large")
    family = cheapest_family(mlp)
    large = None if larger is None else ahead(larger, 1.0)
    for name, extra in (("quarter", 0.25), ("once", 1.0)):
        told[name] = worst([over_the_best(stored, mlp, base, extra) for base in mlp.sizes.cited_bases])
        on_text = [] if text is None else text.sizes.cited_bases
        told[f"lm_{name}"] = worst([over_the_best(stored, text, b, extra) for b in on_text if text])
    peers = against_peers(results(stored.known, stored.dense))
    shares = [without_sweep(book) for book in stored.books if not book.nats and book.sizes.cited_unseen]
    nats = [without_sweep(book) for book in stored.books if book.nats and book.sizes.cited_unseen]
    tried = {spec.method for spec in stored.specs if spec.grows}
    return {
        "settings": str(len(stored.books)),
        "methods": str(len(tried & METHODS.keys())),
        "runs": str(len(stored.specs)),
        "quarter": _ratio(told["quarter"]),
        "once": _ratio(told["once"]),
        "midrun": f"{_ratio(mid_run(mlp))},{_nats(text_mid_run(stored))}",
        "family": NOT_RUN if family is None else f"{family[0]:.4f},{family[1]:.4f}",
        "lm_quarter": _nats(told["lm_quarter"]),
        "lm_once": _nats(told["lm_once"]),
        "large_once": _nats(None if large is None else fmean(large[1])),
        **{f"{of}_over_peers": _nats(None if gain is None else gain[0]) for of, gain in peers.items()},
        "without_sweep": f"{_ratio(_most(shares))},{_nats(_most(nats))}",
    }


def _most(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def _ratio(value: float | None) -> str:
    return NOT_RUN if value is None else f"{value:.4f}"


def _nats(value: float | None) -> str:
    return NOT_RUN if value is None else f"{value:+.4f}"
