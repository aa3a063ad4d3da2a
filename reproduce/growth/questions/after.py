"""Stage r: the rate after growth alone. A run that grows after a quarter of its FLOPs, to the width of stage d; the base
keeps its own rate, and only the peak that follows growth differs. For copies the base is also trained at twice its rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..choose import Arm, Known, scratch, search
from ..sizes import Sizes
from ..spec import Spec
from .new_units import METHODS, untuned
from .unseen import SHARE

COPIES = "copies"


def names(sizes: Sizes) -> tuple[str, ...]:
    """The arms, in the order of the table: a way of growing, the base's rate and the one that follows, over the tuned one."""
    copies = [f"{COPIES}, 1, {after:g}" for after in sizes.after]
    copies += [f"{COPIES}, 2, {after:g}" for after in (1.0, 2.0)]
    units = [f"{name}, 1, {after / 2:g}" for name in sizes.rates_after for after in sizes.after]
    return (*copies, *units)


def arm(known: Known, sizes: Sizes, name: str) -> Arm:
    way, before, after = name.split(", ")
    base = scratch(known, sizes, sizes.wide // sizes.unseen_k, sizes.middle, layers=sizes.depth)
    if base.chosen is None:
        return base
    chosen = base.chosen
    start = replace(chosen, lr=float(before) * chosen.lr)
    grown = replace(start, width=sizes.wide, start=start, at=SHARE)
    if way in METHODS:
        return base.then(Arm((), untuned(grown, way, float(after) / float(before))))
    noise = search(
        known,
        lambda t: replace(chosen, width=sizes.wide, start=chosen, at=SHARE, noise=t),
        sizes.noises,
        sizes.extend,
    )
    if noise.chosen is None:
        return base.then(noise)
    spec = replace(grown, lr=float(after) * chosen.lr, noise=noise.chosen.noise)
    return base.then(noise).then(Arm((), spec))


def specs(known: Known, sizes: Sizes) -> Iterator[Spec]:
    """Every arm on one seed after the other, copies first."""
    arms = {name: arm(known, sizes, name) for name in names(sizes)}
    for way in (COPIES, *sizes.rates_after):
        mine = [made for name, made in arms.items() if name.startswith(way)]
        for made in mine:
            yield from made.specs
        for seed in (sizes.tuning_seed, *sizes.seeds):
            yield from (made.chosen.with_seed(seed) for made in mine if made.chosen is not None)
