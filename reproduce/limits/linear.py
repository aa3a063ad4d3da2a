"""The limit of linear programs, exactly: every vector is a combination of independent Gaussians.

Knows: coefficients, two for each Gaussian. A Gaussian with k independent copies is its mean over the copies, of
variance 1/k, plus its deviation from that mean; one that is shared by the copies is a mean alone, of variance 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

from mupscale.errors import MupscaleError

from .kets import Kets
from .program import Kind, Vector


class LinearKets(Kets):
    """Run a linear program at infinite width, to rounding.

    >>> kets = LinearKets(k=3)
    >>> W, x = kets.matrix("W", "duplicated"), kets.vector("x", "noise")
    >>> round(kets.dot(W @ x, W @ x), 12)           # a duplicated matrix sees means over the copies only
    0.333333333333
    """

    new_above = 1e-24  # of a square: 1e-12 of the vector, far above float64's rounding

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self._weights = torch.empty(0, dtype=torch.float64, device="cpu")

    def draw_vector(self, name: str, kind: Kind, scale: float) -> Tensor:
        return self.fresh(kind) * scale

    def fresh(self, kind: Kind) -> Tensor:
        mean = 1.0 if kind == "duplicated" else 1 / self.k
        self._weights = torch.cat(
            [self._weights, torch.tensor([mean, 1 - mean], dtype=torch.float64, device="cpu")]
        )
        new = torch.zeros_like(self._weights)
        new[-2:] = torch.tensor([1.0, 0.0 if kind == "duplicated" else 1.0], device="cpu")
        return new

    def fitted(self, flat: Tensor) -> Tensor:
        return pad(flat, (0, len(self._weights) - len(flat)))

    def seen_by(self, kind: Kind, data: Tensor) -> Tensor:
        flat = self.fitted(data)
        return (
            flat * torch.tensor([1.0, 0.0], device="cpu").repeat(len(flat) // 2)
            if kind == "duplicated"
            else flat
        )

    def inners(self, rows: Tensor, flat: Tensor) -> Tensor:
        return rows @ (self._weights * flat)

    def as_ket(self, kind: Kind, flat: Tensor) -> Tensor:
        return flat

    def inner(self, x: Vector, y: Vector) -> float:
        return float(self.inners(self.fitted(x.data)[None], self.fitted(y.data)))

    def average(self, x: Vector) -> float:
        """Zero: the vectors of a linear program are centred."""
        self.check_own(x)
        return 0.0

    def combine(self, coefficients: Sequence[float], vectors: Sequence[Vector]) -> Vector:
        self.check_own(*vectors)
        total = torch.zeros_like(self._weights)
        for coefficient, vector in zip(coefficients, vectors, strict=True):
            total.add_(self.fitted(vector.data), alpha=coefficient)
        return Vector(self, total)

    def apply(self, function: Callable[..., Tensor], *xs: Vector) -> NoReturn:
        raise MupscaleError(
            "LinearKets runs linear programs only; use SampledKets for others",
            code="limits.program_not_linear",
        )

    def outer(
        self, function: Callable[..., Tensor], xs: Sequence[Vector], others: Sequence[Vector]
    ) -> NoReturn:
        self.apply(function)
