"""Choosing rates and noise on the tuning seed: grids as lists of specs, and the best of those that are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from .sizes import Sizes
from .spec import Spec
from .train import Known as Known
from .train import Result


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: every run that its choice needs, and the chosen one once all are stored."""

    specs: tuple[Spec, ...]
    chosen: Spec | None

    def then(self, other: Arm) -> Arm:
        """The runs of both, and the choice of the second."""
        return Arm((*self.specs, *other.specs), other.chosen)


def runs_of(arms: Sequence[Arm], seeds: Sequence[int]) -> Iterator[Spec]:
    """Every run that the choices need, then the chosen ones with the reported seeds."""
    for arm in arms:
        yield from arm.specs
    for seed in seeds:
        yield from (arm.chosen.with_seed(seed) for arm in arms if arm.chosen is not None)


def best(known: Known, specs: Sequence[Spec]) -> Arm:
    """The spec with the lowest loss on the rows for choosing; none while a result is missing."""
    results = {spec: known(spec) for spec in specs}
    if not specs or any(result is None for result in results.values()):
        return Arm(tuple(results), None)
    return Arm(tuple(results), min(specs, key=lambda spec: _loss(results[spec])))


def search(known: Known, make: Callable[[float], Spec], grid: Sequence[float], extend: int) -> Arm:
    """The best of a grid. A best point at the edge asks for one factor of two beyond it, at most `extend` times.

    >>> losses = {1.0: 3.0, 2.0: 2.0, 4.0: 1.5, 8.0: 1.7}
    >>> make = lambda lr: Spec(8, 1, lr, 0)
    >>> known = lambda spec: {"choose": losses[spec.lr]} if spec.lr in losses else None
    >>> search(known, make, (1.0, 2.0, 4.0), 1).chosen.lr, search(known, make, (2.0, 4.0), 0).chosen.lr
    (4.0, 4.0)
    >>> [spec.lr for spec in search(known, make, (1.0, 2.0, 4.0), 1).specs]
    [1.0, 2.0, 4.0, 8.0]
    """
    values = list(grid)
    arm = best(known, [make(value) for value in values])
    for _ in range(extend):
        if arm.chosen == make(max(values)):
            values.append(2 * max(values))
        elif arm.chosen == make(min(values)):
            values.append(min(values) / 2)
        else:
            break
        arm = best(known, [make(value) for value in values])
    return arm


def scratch(known: Known, sizes: Sizes, width: int, units: float, layers: int = 4) -> Arm:
    """From scratch: rates are tuned at the middle budget, and moved by at most a factor of two elsewhere.

    Larger budgets may halve the rate and smaller ones may double it.
    """

    def make(lr: float, units: float = units) -> Spec:
        return Spec(width, sizes.flops(units), lr, sizes.tuning_seed, layers)

    middle = search(known, lambda lr: make(lr, sizes.middle), sizes.rates, sizes.extend)
    if units == sizes.middle or middle.chosen is None:
        return middle
    lr = middle.chosen.lr
    return middle.then(best(known, [make(lr), make(lr / 2 if units > sizes.middle else 2 * lr)]))


def _loss(result: Result | None) -> float:
    if result is None or result["choose"] is None:
        return inf
    return float(result["choose"])
