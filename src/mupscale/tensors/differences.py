"""How far two numbers, two tensors or two loss curves are apart, as a relative difference with one floor.

Every check in this package that asks "equal up to rounding?" measures with this file. A sharded tensor is
measured part by part: the parts of all ranks together give the numbers of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import inf, isfinite

import torch
from torch import Tensor

from .devices import exact

FLOOR = 1e-6
"""The smallest size, in its unit, that a difference is divided by.

A number far below the terms it was computed from is mostly their rounding: a loss that is exactly zero in theory is
1e-16 in float64, and has no meaningful relative error. With this floor the rounding of such a number stays below 1e-9, the
tolerance of float64, while a wrong factor on anything above 1e-15 is still above it.
"""

_CHUNK = 2**22
"""Entries that are measured at once: their copies in float64 are 32 MB each, whatever the size of the tensor."""


def relative(gap: float, size: float, unit: float = 1.0) -> float:
    """`gap` divided by `size`, which counts as FLOOR · unit where it is smaller; infinite where it is not a number.

    `unit` is what the quantity is usually as large as: 1 for losses and weights, the largest gradient for gradients.

    >>> relative(0.5, 2.0), relative(1e-16, 0.0) < 1e-9, relative(float("nan"), 1.0)
    (0.25, True, inf)
    """
    if gap == 0.0:
        return 0.0
    return gap / max(size, FLOOR * unit) if isfinite(gap) else inf


def loss_gap(base: float, wide: float) -> float:
    """The relative difference of two losses.

    >>> loss_gap(-2.0, -1.5), loss_gap(0.0, 1e-16) < 1e-9
    (0.25, True)
    """
    return relative(abs(base - wide), abs(base))


def curve_gap(base: Sequence[float], wide: Sequence[float]) -> float:
    """The largest relative difference of two runs' losses; infinite when only one diverged, or nothing was compared.

    >>> curve_gap([1.0, 0.5], [1.0, 0.625]), curve_gap([1.0, float("nan")], [1.0, float("nan")])
    (0.25, 0.0)
    >>> curve_gap([1.0, 0.9, 0.8], [1.0, float("nan")])
    inf
    """
    largest = 0.0
    for one, other in zip_longest(base, wide, fillvalue=inf):
        if not (isfinite(one) or isfinite(other)):  # both diverged, and what follows is not comparable
            break
        largest = max(largest, loss_gap(one, other))
    return largest if base and wide else inf


@dataclass(frozen=True)
class Difference:
    """What was measured between a tensor and what it should be, or between parts of them."""

    gap: float = 0.0
    """The largest absolute difference of an entry; infinite where one is not a number."""
    size: float = 0.0
    """The largest absolute value that was expected."""
    along: float = 0.0
    """The inner product of what was found with what was expected."""
    norm: float = 0.0
    """The squared norm of what was expected."""
    off: float = 0.0
    """The squared norm of the difference."""

    @property
    def spread(self) -> float:
        """The root mean square of the difference, relative to that of what was expected."""
        return (self.off / self.norm) ** 0.5 if self.norm else 0.0

    @property
    def ratio(self) -> float:
        """The least-squares factor between what was found and what was expected: 1 when they agree."""
        return self.along / self.norm if self.norm else 1.0

    def relative(self, unit: float = 1.0) -> float:
        """The gap relative to the size."""
        return relative(self.gap, self.size, unit)


def difference(found: Tensor, want: Tensor) -> Difference:
    """Measure two tensors of one shape.

    >>> import torch
    >>> measured = difference(torch.tensor([2.0, 4.5]), torch.tensor([2.0, 4.0]))
    >>> measured.gap, measured.relative(), measured.ratio
    (0.5, 0.125, 1.1)
    """
    if not want.numel():
        return Difference()
    pairs = zip(*(torch.split(t.reshape(-1), _CHUNK) for t in (found, want)), strict=True)
    return whole([_measured(a, b) for a, b in pairs])


def _measured(found: Tensor, want: Tensor) -> Difference:
    # Sums in 16 bits would be too coarse.
    dtype = torch.complex128 if want.is_complex() else torch.float64
    a, b = exact(found, dtype), exact(want, dtype)
    apart = a - b
    gap = _largest(apart)
    return Difference(
        gap if gap == gap else inf,
        _largest(b),
        float(torch.vdot(b, a).real),
        float(torch.vdot(b, b).real),
        float(torch.vdot(apart, apart).real),
    )


def _largest(values: Tensor) -> float:
    """The largest absolute value. Real values are read once and not copied, since gradients of large models come here."""
    if values.is_complex():
        return float(values.abs().max())
    least, most = torch.aminmax(values)
    return max(-float(least), float(most))


def whole(parts: Sequence[Difference]) -> Difference:
    """The difference of a whole tensor from those of its parts.

    >>> whole([Difference(0.5, 2.0, 4.0, 4.0), Difference(0.0, 4.0, 16.0, 16.0)])
    Difference(gap=0.5, size=4.0, along=20.0, norm=20.0, off=0.0)
    """
    return Difference(
        max(p.gap for p in parts),
        max(p.size for p in parts),
        sum(p.along for p in parts),
        sum(p.norm for p in parts),
        sum(p.off for p in parts),
    )
