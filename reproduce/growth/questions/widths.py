"""Stage w: growing to the right width. A budget for everything, growth to twice the width after a quarter of it by new
units, and beside it every width near the grown one for all of the budget.

Nothing of growth is tuned. Widths throughout are, on the tuning seed, which favours them. A width that ends more than a
twentieth above the best one on that seed is not run on the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..choose import Arm, Known, scratch
from ..sizes import Sizes, Way
from ..spec import Spec
from .new_units import BASE_RATE, METHODS, SHARE, TIMES, untuned

BEHIND = 1.05
"""A width whose loss on the tuning seed is so many times the best one is not run on the others."""


def throughout(way: Way) -> tuple[str, ...]:
    return tuple(f"{width} throughout" for width in way.widths)


def grown(way: Way) -> tuple[str, ...]:
    faster = tuple(f"{name}{BASE_RATE}" for name in METHODS if way.both_rates)
    return (*METHODS, *faster)


def names(way: Way) -> tuple[str, ...]:
    """The arms, in the order of the table."""
    return (*throughout(way), *grown(way))


def arm(known: Known, sizes: Sizes, way: Way, name: str) -> Arm:
    if name in throughout(way):
        return scratch(known, sizes, int(name.split()[0]), way.units)
    narrow = scratch(known, sizes, way.narrow, way.units)
    if narrow.chosen is None:
        return narrow
    wide = replace(narrow.chosen, width=TIMES * way.narrow, start=narrow.chosen, at=SHARE)
    return narrow.then(Arm((), untuned(wide, name)))


def near(known: Known, sizes: Sizes, way: Way) -> tuple[str, ...]:
    """The widths throughout that are run on every seed; none before all have been tuned."""
    ends = {}
    for name in throughout(way):
        chosen = arm(known, sizes, way, name).chosen
        result = None if chosen is None else known(chosen)
        if result is None or result["choose"] is None:
            return ()
        ends[name] = float(result["choose"])
    return tuple(name for name, loss in ends.items() if loss <= BEHIND * min(ends.values()))


def specs(known: Known, sizes: Sizes) -> Iterator[Spec]:
    """Growth on every seed, then the tuning of widths, then those that are near on the other seeds."""
    for way in sizes.ways:
        for name in grown(way):
            made = arm(known, sizes, way, name)
            yield from made.specs
            if made.chosen is not None:
                yield from (made.chosen.with_seed(seed) for seed in (sizes.tuning_seed, *sizes.seeds))
        for name in throughout(way):
            yield from arm(known, sizes, way, name).specs
    for way in sizes.ways:
        for seed in sizes.seeds:
            for name in near(known, sizes, way):
                chosen = arm(known, sizes, way, name).chosen
                assert chosen is not None
                yield chosen.with_seed(seed)
