"""The paper's two worked examples as programs: deep linear networks whose first and last layer are frozen.

Knows: their layers, named as in the paper, A the readout. Their closed recursions are in `recursions.py`, and
nothing here knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .program import Backend
from .schedule import Schedule, check_noise
from .weights import Weight

Slope = Callable[[float], float]
"""The derivative of the loss by the output."""


def three_layer(
    backend: Backend, schedule: Schedule, *, x: float, sigma: float, noise: Mapping[str, float], slope: Slope
) -> list[float]:
    """y = ⟨A, B C x⟩ with B trained: the outputs, one for each step. All weights start at size σ̄.

    >>> from reproduce.limits import LinearKets
    >>> settings = dict(x=1.0, sigma=1.0, noise={"A": 0.5, "B": 0.5, "C": 0.5}, slope=lambda y: y - 1)
    >>> [round(y, 6) for y in three_layer(LinearKets(k=2), Schedule(steps=4, grow_at=2, rate=0.5), **settings)]
    [0.0, 0.5, 0.75, 0.945312]
    """
    check_noise(noise, "ABC")
    a = backend.vector("A", "duplicated", sigma)
    b = Weight(backend, backend.matrix("B", "duplicated", sigma))
    c = backend.vector("C", "duplicated", sigma)
    outputs: list[float] = []
    for t, rate in enumerate(schedule.rates()):
        if t == schedule.grow_at:
            a = a + backend.vector("noise of A", "noise", noise["A"])
            b.grow(backend.matrix("noise of B", "noise", noise["B"]))
            c = c + backend.vector("noise of C", "noise", noise["C"])
        h1 = x * c
        outputs.append(backend.dot(a, b.times(h1)))
        if rate:
            b.add_update(-rate * slope(outputs[-1]), a, h1)
    return outputs


def four_layer(
    backend: Backend, schedule: Schedule, *, x: float, sigma: float, noise: Mapping[str, float], slope: Slope
) -> list[float]:
    """y = ⟨A, B C D x⟩ with B and C trained: the outputs, one for each step. All weights start at size σ̄."""
    check_noise(noise, "ABCD")
    a = backend.vector("A", "duplicated", sigma)
    b = Weight(backend, backend.matrix("B", "duplicated", sigma))
    c = Weight(backend, backend.matrix("C", "duplicated", sigma))
    d = backend.vector("D", "duplicated", sigma)
    outputs: list[float] = []
    for t, rate in enumerate(schedule.rates()):
        if t == schedule.grow_at:
            a = a + backend.vector("noise of A", "noise", noise["A"])
            b.grow(backend.matrix("noise of B", "noise", noise["B"]))
            c.grow(backend.matrix("noise of C", "noise", noise["C"]))
            d = d + backend.vector("noise of D", "noise", noise["D"])
        h1 = x * d
        h2 = c.times(h1)
        outputs.append(backend.dot(a, b.times(h2)))
        if rate:
            size = -rate * slope(outputs[-1])
            backward = b.times(a, transpose=True)
            b.add_update(size, a, h2)
            c.add_update(size, backward, h1)
    return outputs
