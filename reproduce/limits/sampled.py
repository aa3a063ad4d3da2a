"""The limit of any program, by samples: every vector is a table of draws of its random counterpart.

Knows: tables with one column where the k copies are equal, and with k columns where they are not. The error falls
with the number of samples and has nothing to do with width; Sobol points make it smallest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .draws import Draws, Sampler
from .kets import Kets
from .program import Kind, Vector


class SampledKets(Kets):
    """Run a program at infinite width on `samples` draws.

    A product with the same vector twice is the same Gaussian up to sampling error; with `white` it is the same to
    rounding. Every product that is new to its matrix keeps two rows of samples·k numbers.

    >>> kets = SampledKets(k=2, samples=2**12, seed=0)
    >>> W, x = kets.matrix("W", "noise"), kets.vector("x", "noise")
    >>> step = kets.apply(lambda h: (h > 0).double(), W @ x)
    >>> abs(kets.dot(x, W.T @ step) - 0.3989) < 2e-3      # 1/√(2π), and a step has no slope
    True
    """

    new_above = 1e-14  # of a square: 1e-7 of the vector, far below the error of sampling

    def __init__(self, k: int, samples: int = 2**13, seed: int = 0, sampler: Sampler = "sobol") -> None:
        super().__init__(k)
        self.samples = samples
        self._draws = Draws(samples, seed, sampler)

    def draw_vector(self, name: str, kind: Kind, scale: float) -> Tensor:
        return self.as_ket(kind, self.fresh(kind)) * scale

    def fresh(self, kind: Kind) -> Tensor:
        if kind == "duplicated":
            return self._draws.column()
        return torch.stack([self._draws.column() for _ in range(self.k)], 1).reshape(-1)

    def fitted(self, flat: Tensor) -> Tensor:
        return flat

    def seen_by(self, kind: Kind, data: Tensor) -> Tensor:
        return data.mean(1) if kind == "duplicated" else data.expand(-1, self.k).reshape(-1)

    def inners(self, rows: Tensor, flat: Tensor) -> Tensor:
        return rows @ flat / len(flat)

    def as_ket(self, kind: Kind, flat: Tensor) -> Tensor:
        return flat.view(self.samples, -1)

    def inner(self, x: Vector, y: Vector) -> float:
        a: Tensor = x.data
        b: Tensor = y.data
        if a.shape != b.shape:  # one is constant over the copies, so only the other's mean counts
            a, b = a.mean(1), b.mean(1)
        return float(a.reshape(-1) @ b.reshape(-1)) / a.numel()

    def average(self, x: Vector) -> float:
        self.check_own(x)
        return float(x.data.mean())

    def combine(self, coefficients: Sequence[float], vectors: Sequence[Vector]) -> Vector:
        self.check_own(*vectors)
        columns = max(vector.data.shape[1] for vector in vectors)
        total = torch.zeros(self.samples, columns, dtype=torch.float64, device="cpu")
        for coefficient, vector in zip(coefficients, vectors, strict=True):
            total.add_(vector.data, alpha=coefficient)
        return Vector(self, total)

    def apply(self, function: Callable[..., Tensor], *xs: Vector) -> Vector:
        self.check_own(*xs)
        return Vector(self, function(*(x.data for x in xs)))

    def outer(
        self, function: Callable[..., Tensor], xs: Sequence[Vector], others: Sequence[Vector]
    ) -> Vector:
        """As at finite width, against the first 2048 draws: all pairs would cost the square of the samples."""
        self.check_own(*xs, *others)
        copies = [y.data[:2048].expand(-1, self.k).reshape(-1) for y in others]
        rows = [
            function(*(x.data[i : i + 512, :, None] for x in xs), *copies).mean(-1)
            for i in range(0, self.samples, 512)
        ]
        return Vector(self, torch.cat(rows))
