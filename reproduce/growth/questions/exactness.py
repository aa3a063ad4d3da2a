"""Stage c: what exactness buys. The same wide weights, and an optimizer state that is carried, copied wrongly or empty.

Growth is at a quarter of the FLOPs of the budget at which rates are tuned, to twice the width, with and without noise.
Methods of others stand beside it, at the base's rate and at one that is tuned for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..choose import Arm, Known, runs_of, scratch, search
from ..sizes import Sizes
from ..spec import Spec, State

SHARE = 0.25
STATES: tuple[State, ...] = ("carried", "wrong_units", "fresh", "fresh_rewarmed", "asymmetric")
METHODS: tuple[str, ...] = ("tiling", "net2wider", "shrink_pad")
OWN_RATE = ", own rate"


def names(sizes: Sizes) -> tuple[str, ...]:
    """The arms, in the order of the table."""
    states = (*(f"{s}, no noise" for s in STATES), *(f"{s}, noise" for s in STATES))
    return (*states, *METHODS[:2], *(f"{method}{OWN_RATE}" for method in METHODS if sizes.stop == 1))


def cited(sizes: Sizes) -> tuple[str, ...]:
    """The arms that the page cannot do without."""
    return tuple(
        name for name in names(sizes) if not name.startswith("asymmetric") and not name.endswith(OWN_RATE)
    )


def arm(known: Known, sizes: Sizes, name: str) -> Arm:
    """An arm; the noise is chosen with the state carried."""
    base = scratch(known, sizes, sizes.narrow, sizes.middle)
    if base.chosen is None:
        return base
    grown = replace(base.chosen, width=2 * sizes.narrow, start=base.chosen, at=SHARE, stop=sizes.stop)
    method = next((method for method in METHODS if name.startswith(method)), None)
    if method is not None:
        theirs = replace(grown, method=method)
        if name == method:
            return base.then(Arm((), theirs))
        rates = [factor * theirs.lr for factor in (0.5, 1.0, 2.0)]
        return base.then(search(known, lambda lr: replace(theirs, lr=lr), rates, sizes.extend))
    noise = search(known, lambda t: replace(grown, stop=1.0, noise=t), sizes.noises, sizes.extend)
    if noise.chosen is None:
        return base.then(noise)
    state, _, with_noise = name.partition(", ")
    chosen = replace(noise.chosen, stop=sizes.stop) if with_noise == "noise" else grown
    for each in STATES:
        if state == each:
            chosen = replace(chosen, state=each)
    return base.then(Arm(noise.specs, chosen))


def specs(known: Known, sizes: Sizes) -> Iterator[Spec]:
    arms = [arm(known, sizes, name) for name in names(sizes)]
    yield from runs_of(arms, (*sizes.seeds, sizes.tuning_seed))
