"""Stage f: three models to ship, small, middle and large. Grown from one plateau, or trained one by one.

The small run is decayed as always and shipped. What it was after a quarter of the middle one's FLOPs grows to twice the
width by new units, and so does the middle one on its way to the large one. So every model is charged for its own way from
the first step, and the parts that they share are paid once:

    small   4 units, all its own
    middle  8 units, of which 2 are the small one's
    large  16 units, of which 4 are the middle one's: 2 of them the small one's

That is 4 + 6 + 12 = 22 units, against 28 for three runs. With a share of 1.1 the two grown ones get 8.8 and 17.6 units.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..choose import Arm, Known, best, scratch
from ..sizes import Sizes
from ..spec import Spec
from .new_units import SHARE, TIMES, untuned

READERS = "copied readers"
RATES = ((0.5, 0.5), (1.0, 1.0), (1.0, 0.5))
"""What the first and the second growth multiply the rate by; the tuning seed chooses."""
THIRD = 1 / 3
"""Of its own steps, after which the middle one grows: they begin after a quarter of its FLOPs, and a half are spent then."""


def independent(known: Known, sizes: Sizes) -> list[Arm]:
    """The three runs from scratch, each at its tuned rate; their FLOPs double with the width."""
    small = sizes.family
    return [scratch(known, sizes, TIMES**i * small.width, TIMES**i * small.units) for i in range(3)]


def grown(known: Known, sizes: Sizes, share: float) -> list[Arm]:
    """The middle and the large model, with so much of the FLOPs of a run from scratch."""
    first = independent(known, sizes)[0]
    if first.chosen is None:
        return [first, first]
    ways = [_grown(sizes, first.chosen, share, *rates) for rates in RATES]
    large = best(known, [large for _, large in ways])
    middles = tuple(middle for middle, _ in ways)
    chosen = None if large.chosen is None else large.chosen.start
    return [first.then(Arm(middles, chosen)), first.then(large)]


def _grown(sizes: Sizes, small: Spec, share: float, first: float, second: float) -> tuple[Spec, Spec]:
    units = share * TIMES * sizes.family.units
    at = SHARE * units / sizes.family.units
    wide = replace(small, width=TIMES * small.width, budget=sizes.flops(units), start=small, at=at)
    middle = untuned(wide, READERS, first)
    wider = replace(middle, width=TIMES * middle.width, budget=TIMES * middle.budget, start=middle, at=THIRD)
    return middle, untuned(wider, READERS, second)


def saved(share: float) -> float:
    """The share of the FLOPs of three runs that the family does without."""
    parts = [1.0, TIMES * (1 - SHARE) * share, TIMES**2 * (1 - SHARE) * share]
    return 1 - sum(parts) / (1 + TIMES + TIMES**2)


def specs(known: Known, sizes: Sizes) -> Iterator[Spec]:
    """The runs from scratch, then a family for each share, on every seed."""
    seeds = (sizes.tuning_seed, *sizes.seeds)
    for arm in independent(known, sizes):
        yield from arm.specs
        if arm.chosen is not None:
            yield from (arm.chosen.with_seed(seed) for seed in seeds)
    for share in sizes.family_shares:
        for arm in grown(known, sizes, share):
            yield from arm.specs
        for seed in seeds:
            for arm in grown(known, sizes, share):
                if arm.chosen is not None:
                    yield arm.chosen.with_seed(seed)
