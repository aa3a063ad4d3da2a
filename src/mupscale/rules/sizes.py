"""Sizes of initialisation and noise: std = σ̄ · fold · q, the one thing that is not s^a r^b.

q depends on how a tensor grows from the reference: (N_in/n_in)^-1/2 when both in and out grow, 1 when
only out grows, (N_in/n_in)^-1 when only in grows. An untied readout is a matrix for the optimizer and
is not one for its noise.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import TYPE_CHECKING

from .scale import ONE, Scale

if TYPE_CHECKING:
    from .axes import Axis, Role


def noise_size(axes: Iterable[Axis], fold: Scale = ONE) -> Scale:
    """fold · q for a tensor whose axes grow from the reference to its present width.

    >>> from .axes import Axis
    >>> matrix = [Axis.parse("out: 8x4"), Axis.parse("in: 8x4")]
    >>> str(noise_size(matrix)), str(noise_size([Axis.fixed(3), Axis.parse("in: 8x4")]))
    ('1/2', '1/4')
    """
    return size_of_ratios(((a.role, Fraction(a.wide, a.base)) for a in axes if a.grows), fold)


def size_of_ratios(ratios: Iterable[tuple[Role | None, Fraction]], fold: Scale = ONE) -> Scale:
    """The same from the role and the ratio of every width axis; a ratio of 1 is a width all the same."""
    known = list(ratios)
    inward = Scale.of(1)
    for role, ratio in known:
        if role == "in":
            inward = inward * Scale.of(ratio)
    outward = any(role == "out" for role, _ in known)
    return fold * inward ** (Fraction(-1, 2) if outward else Fraction(-1))
