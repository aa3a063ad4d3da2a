"""A matrix while it is trained: what it started from, the noise of growth, and one rank-one term for each gradient.

Knows: how to multiply by such a sum without writing it out. Knows nothing about losses or layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from .program import Backend, Matrix, Vector


class Weight:
    """A trained matrix: `weight.times(x)`, or with its transpose.

    >>> from reproduce.limits import LinearKets
    >>> kets = LinearKets(k=2)
    >>> x, u = kets.vector("x", "noise"), kets.vector("u", "noise")
    >>> weight = Weight(kets, kets.matrix("W", "noise"))
    >>> weight.add_update(-0.5, u, x)                         # W - 0.5 u xᵀ/N
    >>> kets.dot(u, weight.times(x))
    -0.5
    """

    def __init__(self, backend: Backend, start: Matrix) -> None:
        self.backend = backend
        self.matrices = [start]
        self._sizes: list[float] = []
        self._left: list[Vector] = []
        self._right: list[Vector] = []

    def grow(self, noise: Matrix) -> None:
        """Add the noise of growth."""
        self.matrices.append(noise)

    def add_update(self, size: float, left: Vector, right: Vector) -> None:
        """Add size · left rightᵀ / N."""
        self._sizes.append(size)
        self._left.append(left)
        self._right.append(right)

    def times(self, x: Vector, transpose: bool = False) -> Vector:
        """The product with a vector, of the matrix or its transpose."""
        parts = [(matrix.T if transpose else matrix) @ x for matrix in self.matrices]
        met, given = (self._left, self._right) if transpose else (self._right, self._left)
        weights = [size * dot for size, dot in zip(self._sizes, self.backend.dots(met, x), strict=True)]
        return self.backend.combine([1.0] * len(parts) + weights, [*parts, *given])


def step(backend: Backend, vector: Vector, sizes: Sequence[float], directions: Sequence[Vector]) -> Vector:
    """A vector after an update, which is a sum."""
    return backend.combine([1.0, *sizes], [vector, *directions])
