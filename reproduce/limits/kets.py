"""Matrix products in the limit: a fresh Gaussian part, and a part that depends on earlier products with W and Wᵀ.

Knows: the first part (the paper's hat) by an orthonormal basis of the vectors that a matrix was multiplied by
so far, and the second (the dot) by the Stein identity. With directions e_j that Wᵀ was multiplied by and
their Gaussian images ξ_j = Wᵀ e_j, the dot part of W x is Σ_j e_j ⟨ξ_j, x⟩. No derivative is taken, so a step
function is as good as a smooth one, and the k equal entries that a duplicated matrix produces are one scalar.

An example: y = Wᵀ W x for a Gaussian matrix W and a random x of size 1.

    W x        x is new to W: direction e = x, image ξ fresh.    W x = ξ
    Wᵀ (W x)   ξ is new to Wᵀ: direction ξ, image ζ fresh, and W was multiplied by e = x before:
                                                                 y = ζ + x ⟨ξ, W x⟩ = ζ + x

so ⟨x, y⟩ = |W x|² = 1 and |y|² = 2, as the law of Marchenko and Pastur says:

>>> from reproduce.limits import LinearKets
>>> kets = LinearKets(k=1)
>>> W, x = kets.matrix("W", "noise"), kets.vector("x", "noise")
>>> y = W.T @ (W @ x)
>>> kets.dot(x, y), kets.dot(y, y)
(1.0, 2.0)
>>> kets.dot(W @ (3 * x), W @ x)  # 3x is not new to W: no Gaussian is drawn
3.0

Knows nothing about how a random vector is stored: that is the task of `linear.py` and `sampled.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from .program import Backend, Kind, Matrix, Vector


class Rows:
    """A matrix that grows by rows; when a row is longer than the earlier ones, those are padded with zeros.

    >>> rows = Rows()
    >>> rows.append(torch.tensor([1.0])), rows.append(torch.tensor([2.0, 3.0]))
    (None, None)
    >>> rows.all(width=3).tolist()
    [[1.0, 0.0, 0.0], [2.0, 3.0, 0.0]]
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, 0, dtype=torch.float64, device="cpu")
        self._count = 0

    def append(self, row: Tensor) -> None:
        """Add a row at the end."""
        height, width = self._memory.shape
        if self._count == height or len(row) > width:
            # Twice the rows, so that n appends copy 2n rows in all; 4 at first, because most matrices meet
            # few vectors.
            larger = torch.zeros(
                max(4, 2 * self._count), max(width, len(row)), dtype=torch.float64, device="cpu"
            )
            larger[: self._count, :width] = self._memory[: self._count]
            self._memory = larger
        self._memory[self._count, : len(row)] = row
        self._count += 1

    def all(self, width: int) -> Tensor:
        """The rows, padded to a width."""
        rows = self._memory[: self._count]
        return rows if rows.shape[1] == width else torch.nn.functional.pad(rows, (0, width - rows.shape[1]))


class Side:
    """What W (or Wᵀ) was multiplied by: orthonormal directions, and the image of each."""

    def __init__(self) -> None:
        self.directions = Rows()
        self.images = Rows()


class Kets(Backend):
    """A backend whose vectors are random: k numbers for each unit, the same distribution for all units."""

    new_above: float
    """A vector is new to a matrix if more than this share of its square lies outside the matrix's directions."""

    def draw_matrix(self, name: str, kind: Kind, scale: float) -> tuple[Side, Side]:
        return Side(), Side()

    def product(self, matrix: Matrix, x: Vector) -> Vector:
        """W x, as in the example above; `here` is the side that is multiplied, `back` the other."""
        here, back = matrix.state[matrix.transposed], matrix.state[not matrix.transposed]
        seen = self.seen_by(matrix.kind, x.data)
        directions = here.directions.all(len(seen))
        coordinates = self.inners(directions, seen)
        rest = seen - coordinates @ directions
        # Gram-Schmidt a second time: the rounding of the first pass is as large as a small rest.
        again = self.inners(directions, rest)
        rest, coordinates = rest - again @ directions, coordinates + again
        square = float(self.inners(rest[None], rest))
        if square > self.new_above * float(self.inners(seen[None], seen)):
            here.directions.append(rest / sqrt(square))
            here.images.append(self.fresh(matrix.kind))
            coordinates = torch.cat(
                [coordinates, torch.tensor([sqrt(square)], dtype=torch.float64, device="cpu")]
            )
        # The hat: the image of each direction, times x's coordinate. The dot: what Wᵀ contributes.
        seen = self.fitted(seen)
        images = here.images.all(len(seen))
        remembered = self.inners(back.images.all(len(seen)), seen) @ back.directions.all(len(seen))
        result = (coordinates @ images + remembered) * matrix.scale
        return Vector(self, self.as_ket(matrix.kind, result))

    @abstractmethod
    def seen_by(self, kind: Kind, data: Any) -> Tensor:
        """A vector as it enters a product, flat: means over the k copies if the matrix is duplicated."""

    @abstractmethod
    def inners(self, rows: Tensor, flat: Tensor) -> Tensor:
        """⟨row, flat⟩ for every row."""

    @abstractmethod
    def fresh(self, kind: Kind) -> Tensor:
        """A Gaussian that is independent of everything so far, flat."""

    @abstractmethod
    def fitted(self, flat: Tensor) -> Tensor:
        """A flat vector padded to the present length, which a fresh Gaussian may have changed."""

    @abstractmethod
    def as_ket(self, kind: Kind, flat: Tensor) -> Any:
        """The data of a `Vector` of this backend, from the flat result of a product."""
