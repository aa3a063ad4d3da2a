"""Stage s: stage c on another optimizer, to the end. Which state copies begin with, with and without noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..choose import Arm, Known
from ..sizes import Sizes
from ..spec import Spec, State
from . import exactness

STATES: tuple[State, ...] = ("carried", "fresh", "asymmetric", "fresh_rewarmed")


def names(sizes: Sizes) -> tuple[str, ...]:
    """The arms, in the order of the table."""
    return tuple(f"{state}, {noise}" for noise in sizes.noise_of_states for state in STATES)


def arm(known: Known, sizes: Sizes, name: str) -> Arm:
    return exactness.arm(known, replace(sizes, stop=1.0), name)


def specs(known: Known, sizes: Sizes) -> Iterator[Spec]:
    """Every arm on one seed after the other, those with noise first."""
    arms = [arm(known, sizes, name) for name in names(sizes)]
    for made in arms:
        yield from made.specs
    for first in range(0, len(arms), len(STATES)):
        part = arms[first : first + len(STATES)]
        for seed in (sizes.tuning_seed, *sizes.seeds):
            yield from (made.chosen.with_seed(seed) for made in part if made.chosen is not None)
