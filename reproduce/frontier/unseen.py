"""Stage d: the recipe without a sweep against the tuned point, on a setting that chose nothing: another depth, k = 8.

The recipe is the base's own rate, a quarter of the FLOPs, and the documented noise. The tuned point is the best of the
grid of noises, at the base's rate and at half and twice of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mupscale.rules.noise_defaults import DEFAULT_T

from .choose import Arm, Known, best, runs_of, scratch, search
from .sizes import Sizes
from .spec import Spec

K, SHARE = 8, 0.25
NAMES = ("recipe", "tuned")


def arm(known: Known, sizes: Sizes, name: str) -> Arm:
    narrow = sizes.wide // K
    base = scratch(known, sizes, narrow, sizes.middle, layers=sizes.depth)
    if base.chosen is None:
        return base

    def at(start: Spec, noise: float) -> Spec:
        return replace(start, width=sizes.wide, start=start, at=SHARE, noise=noise)

    chosen = base.chosen
    if name == "recipe":
        return base.then(best(known, [at(chosen, DEFAULT_T)]))
    noise = search(known, lambda t: at(chosen, t), sizes.noises, sizes.extend)
    if noise.chosen is None:
        return base.then(noise)
    t = noise.chosen.noise
    rates = [at(replace(chosen, lr=chosen.lr * factor), t) for factor in (1.0, 0.5, 2.0)]
    return base.then(noise).then(best(known, rates))


def specs(known: Known, sizes: Sizes) -> Iterator[Spec]:
    arms = [arm(known, sizes, name) for name in NAMES]
    yield from runs_of(arms, sizes.seeds)
