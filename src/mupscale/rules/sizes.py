"""Sizes of initialisation and noise: std = σ̄ · fold · q, the one thing that is not s^a r^b.

q depends on how a tensor grows from the reference: (N_in/n_in)^-1/2 when both in and out grow, 1 when
only out grows, (N_in/n_in)^-1 when only in grows. An untied readout is a matrix for the optimizer and
is not one for its noise.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from .axes import Axis
from .scale import ONE, Scale


def noise_size(axes: Iterable[Axis], fold: Scale = ONE) -> Scale:
    """fold · q for a tensor whose axes grow from the reference to its present width.

    >>> matrix = [Axis.parse("out: 8x4"), Axis.parse("in: 8x4")]
    >>> str(noise_size(matrix)), str(noise_size([Axis.fixed(3), Axis.parse("in: 8x4")]))
    ('1/2', '1/4')
    """
    growing = [axis for axis in axes if axis.grows]
    inward = Scale.of(1)
    for axis in growing:
        if axis.role == "in":
            inward = inward * Scale.of(Fraction(axis.wide, axis.base))
    outward = any(axis.role == "out" for axis in growing)
    return fold * inward ** (Fraction(-1, 2) if outward else Fraction(-1))
