"""Stage d: growing without a sweep against the tuned point, on a setting that chose nothing.

The recipe of copies is the base's own rate, a quarter of the FLOPs, and noise by the library's rule for the steps that
follow. Its tuned point is the best of the grid of noises, at the base's rate and at half and twice of it. New units grow
after the same share at half of the base's rate; their tuned point is the best of a quarter, a half and one. Where LayerNorm
centres the stream, its new channels carry the mean, by the same rule and as `upscale` leaves a run to which nothing is done: its
schedule and its moments go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..choose import Arm, Known, best, runs_of, scratch, search
from ..sizes import Sizes
from ..spec import Spec
from .new_units import METHODS, ONE_RATE, RATE, untuned

SHARE = 0.25
NAMES = ("recipe", "tuned")
TUNED = ", tuned"
CENTRED = ", channels of the mean"
GOES_ON = ", nothing else done"
MEANS = tuple(f"copied readers{CENTRED}{rest}" for rest in (GOES_ON, "", f"{GOES_ON}{ONE_RATE}"))
"""The rule, what nothing is done to, and that with one rate for all tensors; of the readers that are chosen."""
NEW_UNITS = tuple(name + tuned for name in METHODS for tuned in ("", TUNED))


def arm(known: Known, sizes: Sizes, name: str) -> Arm:
    narrow = sizes.wide // sizes.unseen_k
    base = scratch(known, sizes, narrow, sizes.middle, layers=sizes.depth)
    if base.chosen is None:
        return base

    def at(start: Spec, noise: float) -> Spec:
        return replace(start, width=sizes.wide, start=start, at=SHARE, noise=noise)

    chosen = base.chosen
    if name in MEANS:
        grown = replace(chosen, width=sizes.wide, start=chosen, at=SHARE, centred=True)
        scaled = name.removesuffix(ONE_RATE)
        short = scaled.removesuffix(GOES_ON)
        ruled = untuned(grown, short.removesuffix(CENTRED))
        carried = replace(ruled, lr=chosen.lr, state="carried", one_rate=scaled != name)
        return base.then(Arm((), ruled if short == scaled else carried))
    if name in NEW_UNITS:
        grown = replace(chosen, width=sizes.wide, start=chosen, at=SHARE)
        factors = (RATE, 0.5 * RATE, 1.0) if name.endswith(TUNED) else (RATE,)
        runs = [untuned(grown, name.removesuffix(TUNED), factor) for factor in factors]
        return base.then(best(known, runs))
    if name == "recipe":
        return base.then(best(known, [replace(at(chosen, 0.0), by_rule=True)]))
    noise = search(known, lambda t: at(chosen, t), sizes.noises, sizes.extend)
    if noise.chosen is None:
        return base.then(noise)
    t = noise.chosen.noise
    rates = [at(replace(chosen, lr=chosen.lr * factor), t) for factor in (1.0, 0.5, 2.0)]
    return base.then(noise).then(best(known, rates))


def specs(known: Known, sizes: Sizes) -> Iterator[Spec]:
    arms = [arm(known, sizes, name) for name in (*NAMES, *NEW_UNITS)]
    yield from runs_of(arms, sizes.seeds)
    means = [arm(known, sizes, name) for name in MEANS if sizes.centred]
    yield from runs_of(means, (sizes.tuning_seed, *sizes.seeds))
