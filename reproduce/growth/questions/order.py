"""The stages of the study, and the order in which their runs are made: the most telling first.

Core hours at one thread, for the MLP with 2 ms a step at widths 32 and 64, 4 ms at 128 and 8 ms at 256:

    b  the first base, 1/4 and 1 times its budget     0.2
    c  what exactness buys                            0.3
    b  the other bases, 1/4 and 1 times their budget  0.3 (32 at 4 units), 0.3 (64 at 4), 1.0 (64 at 16)
    b  the same with noise by the rule                0.1 (32 at 1 unit), 0.2, 0.2, 0.8
    d  the recipe on a setting that chose nothing     0.2
    a  growth in mid-run at equal total FLOPs         0.9
    u  new units in the place of copies               0.4, and 0.2 for others and widths beside them
    b  4 times their budget                           0.2, 0.5, 0.3, 0.9

    f  three models from one plateau                  0.5
    l  the larger Llama                               4

Text takes 0.9 in all (d 0.35, b 0.5, a and c 0.05), and images 0.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain

from ..choose import Known
from ..sizes import Finished, Sizes
from ..spec import Spec
from . import after, exactness, family, large, midrun, new_units, states, sunk, unseen, widths

STAGES = ("a", "b", "c", "d", "f", "l", "r", "s", "u", "w")


def _early(sizes: Sizes) -> tuple[float, ...]:
    return tuple(extra for extra in sizes.extras if extra <= 1)


def _sunk(
    known: Known, sizes: Sizes, bases: tuple[Finished, ...], extras: tuple[float, ...]
) -> Iterator[Spec]:
    for base in bases:
        yield from sunk.specs(known, sizes, base, extras)


PARTS: Mapping[str, Callable[[Known, Sizes], Iterator[Spec]]] = {
    "a": midrun.specs,
    "b, first base": lambda known, sizes: _sunk(known, sizes, sizes.bases[:1], _early(sizes)),
    "b": lambda known, sizes: _sunk(known, sizes, sizes.bases, _early(sizes)),
    "b, all budgets": lambda known, sizes: _sunk(known, sizes, sizes.bases, sizes.extras),
    "b, noise by rule": lambda known, sizes: chain.from_iterable(
        sunk.ruled_specs(known, sizes, base, _early(sizes)) for base in sizes.bases
    ),
    "c": exactness.specs,
    "d": unseen.specs,
    "f": family.specs,
    "l": large.specs,
    "r": after.specs,
    "s": states.specs,
    "u": new_units.specs,
    "w": widths.specs,
}
"""Parts of the study, each named after its stage."""


def specs(known: Known, sizes: Sizes, stage: str = "all") -> Iterator[Spec]:
    """The runs of a stage, or of all, as far as what is stored decides them."""
    for part in sizes.order:
        if stage in ("all", part[0]):
            yield from PARTS[part](known, sizes)


def next_missing(known: Known, sizes: Sizes, stage: str = "all") -> Spec | None:
    """The first run that is not stored; None when the stage is done."""
    return next((spec for spec in specs(known, sizes, stage) if known(spec) is None), None)
