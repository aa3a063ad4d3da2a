"""Stage l: a larger Llama, 279,104 parameters that become 984,192, at the rates of the small one.

The base's peak is chosen on runs of an eighth of its length. Every other peak and noise is what the Llama of width 32 chose,
as a share of the base's; new units take half of it, as always. Where both neighbours of a peak are stored on the tuning seed,
the best of the three is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..choose import Arm, Known, best
from ..sizes import Sizes
from ..spec import Spec
from .new_units import TIMES, untuned

LAYERS = 4
EXTRAS = (1.0, 0.25)
SHORT = 0.125
"""Of the length of the base: the runs that choose its peak."""


@dataclass(frozen=True)
class Carried:
    """An arm, and its peak over that of the base for each of `EXTRAS`."""

    peaks: tuple[float, float]
    noises: tuple[float, float] = (0.0, 0.0)
    width: int = 1
    layers: int = 1
    method: str = "ours"


ASLEEP = "twice the layers, asleep and woken"
ARMS: Mapping[str, Carried] = {
    "goes on": Carried((0.25, 0.125)),
    "copies, noise of the small one": Carried((1.0, 0.5), noises=(0.2, 0.1), width=TIMES),
    "G_stack": Carried((0.25, 0.25), layers=2, method="stack"),
    ASLEEP: Carried((0.25, 0.25), layers=2, method="copied_readers"),
    "HyperCloning": Carried((1.0, 1.0), width=TIMES, method="tiling"),
}
"""All that start from the base, but for new units of a width."""
DEFAULT = "copied readers"
SCRATCH = "a new model of that width"
FIRST = (DEFAULT, "G_stack", "goes on", "copies, noise of the small one", SCRATCH)
NAMES = (*FIRST, "HyperCloning", ASLEEP)


def base(known: Known, sizes: Sizes) -> Arm:
    """The finished base, at the peak that short runs chose."""
    short = [Spec(sizes.narrow, sizes.flops(SHORT), lr, sizes.tuning_seed, LAYERS) for lr in sizes.rates]
    tuned = best(known, short)
    if tuned.chosen is None:
        return tuned
    return tuned.then(Arm((), replace(tuned.chosen, budget=sizes.flops(1))))


def carried(sizes: Sizes, start: Spec, name: str, extra: float) -> Spec:
    """The run of an arm at the rate of the small Llama."""
    budget = round(extra * start.budget)
    if name == SCRATCH:
        return replace(start, width=sizes.wide, budget=budget)
    grown = replace(start, budget=budget, start=start)
    if name == DEFAULT:
        return untuned(replace(grown, width=sizes.wide), name)
    arm, number = ARMS[name], EXTRAS.index(extra)
    return replace(
        grown,
        width=arm.width * start.width,
        layers=arm.layers * start.layers,
        lr=arm.peaks[number] * start.lr,
        noise=arm.noises[number],
        method=arm.method,
    )


def arm(known: Known, sizes: Sizes, name: str, extra: float) -> Arm:
    """An arm; its choice is the rate of the small Llama until both neighbours are stored."""
    started = base(known, sizes)
    if started.chosen is None:
        return started
    middle = carried(sizes, started.chosen, name, extra)
    if name == DEFAULT:
        return started.then(Arm((middle,), middle))
    three = best(known, [replace(middle, lr=factor * middle.lr) for factor in (1.0, 0.5, 2.0)])
    return started.then(Arm(three.specs, three.chosen or middle))


def specs(known: Known, sizes: Sizes) -> Iterator[Spec]:
    """First what decides, on every seed; then the neighbours, and what they choose."""
    started = base(known, sizes)
    yield from started.specs
    if started.chosen is None:
        return
    for names in (FIRST, NAMES):
        for seed in (sizes.tuning_seed, *sizes.seeds):
            for extra in EXTRAS:
                yield from (carried(sizes, started.chosen, name, extra).with_seed(seed) for name in names)
    for extra in EXTRAS:
        for name in NAMES:
            made = arm(known, sizes, name, extra)
            yield from made.specs
            if made.chosen is not None:
                yield from (made.chosen.with_seed(seed) for seed in sizes.seeds)
