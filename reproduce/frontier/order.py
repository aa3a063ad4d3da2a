"""The stages of the study, and the order in which their runs are made: the most telling first.

Core hours at one thread, with 2 ms a step at widths 32 and 64, 4 ms at 128 and 8 ms at 256:

    b  the first base, 1/4 and 1 times its budget     0.2
    c  what exactness buys                            0.1
    b  the other bases, 1/4 and 1 times their budget  0.3 (32 at 4 units), 0.3 (64 at 4), 1.0 (64 at 16)
    d  the recipe on a setting that chose nothing     0.2
    a  growth in mid-run at equal total FLOPs         0.9
    b  4 times their budget                           0.2, 0.5, 0.3, 0.9
"""

from __future__ import annotations

from collections.abc import Iterator

from . import exactness, midrun, sunk, unseen
from .choose import Known
from .sizes import Sizes
from .spec import Spec

STAGES = ("a", "b", "c", "d")


def specs(known: Known, sizes: Sizes, stage: str = "all") -> Iterator[Spec]:
    """The runs of a stage, or of all, as far as what is stored decides them."""
    early = tuple(extra for extra in sizes.extras if extra <= 1)
    if stage in ("all", "b"):
        yield from sunk.specs(known, sizes, sizes.bases[0], early)
    if stage in ("all", "c"):
        yield from exactness.specs(known, sizes)
    if stage in ("all", "b"):
        for base in sizes.bases:
            yield from sunk.specs(known, sizes, base, early)
    if stage in ("all", "d"):
        yield from unseen.specs(known, sizes)
    if stage in ("all", "a"):
        yield from midrun.specs(known, sizes)
    if stage in ("all", "b"):
        for base in sizes.bases:
            yield from sunk.specs(known, sizes, base, sizes.extras)


def next_missing(known: Known, sizes: Sizes, stage: str = "all") -> Spec | None:
    """The first run that is not stored; None when the stage is done."""
    return next((spec for spec in specs(known, sizes, stage) if known(spec) is None), None)
