"""Stage c: what exactness buys. The same wide weights, and an optimizer state that is carried, copied wrongly or empty.

Growth is at a quarter of the FLOPs of the budget at which rates are tuned, to twice the width, with and without noise.
Two methods of others stand beside it at the same rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from .choose import Arm, Known, runs_of, scratch, search
from .sizes import Sizes
from .spec import Method, Spec, State

SHARE = 0.25


def names() -> tuple[str, ...]:
    """The arms, in the order of the table."""
    states = get_args(State)
    return (*(f"{s}, no noise" for s in states), *(f"{s}, noise" for s in states), *get_args(Method)[1:])


def arm(known: Known, sizes: Sizes, name: str) -> Arm:
    """An arm; the noise is chosen with the state carried."""
    base = scratch(known, sizes, sizes.narrow, sizes.middle)
    if base.chosen is None:
        return base
    grown = replace(base.chosen, width=2 * sizes.narrow, start=base.chosen, at=SHARE)
    noise = search(known, lambda t: replace(grown, noise=t), sizes.noises, sizes.extend)
    if noise.chosen is None:
        return base.then(noise)
    for method in get_args(Method)[1:]:
        if name == method:
            return base.then(Arm(noise.specs, replace(grown, method=method)))
    state, _, with_noise = name.partition(", ")
    chosen = noise.chosen if with_noise == "noise" else grown
    for each in get_args(State):
        if state == each:
            chosen = replace(chosen, state=each)
    return base.then(Arm(noise.specs, chosen))


def specs(known: Known, sizes: Sizes) -> Iterator[Spec]:
    arms = [arm(known, sizes, name) for name in names()]
    yield from runs_of(arms, (*sizes.seeds, sizes.tuning_seed))
