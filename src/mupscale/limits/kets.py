"""Matrix products in the limit: a fresh Gaussian part, and a part that depends on earlier products with W and its transpose.

Knows: the hat by an orthonormal basis of what a matrix was given so far, and the dot by the Stein identity. With
directions e_j that Wᵀ was given and their Gaussian images ξ_j, the dot part of W x is Σ_j e_j ⟨ξ_j, x⟩; no
derivative is taken, so a step function is as good as a smooth one, and the k equal entries that a duplicated matrix
produces are one scalar. Knows nothing about how a random vector is stored: that is for `linear.py` and `sampled.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from .program import Backend, Kind, Matrix, Vector


class Rows:
    """A matrix that grows by rows, doubling its memory when it must; longer rows pad the earlier ones with zeros."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, 0, dtype=torch.float64)
        self._count = 0

    def append(self, row: Tensor) -> None:
        """Add a row at the end."""
        height, width = self._memory.shape
        if self._count == height or len(row) > width:
            larger = torch.zeros(max(4, 2 * self._count), max(width, len(row)), dtype=torch.float64)
            larger[: self._count, :width] = self._memory[: self._count]
            self._memory = larger
        self._memory[self._count, : len(row)] = row
        self._count += 1

    def all(self, width: int) -> Tensor:
        """The rows, padded to a width."""
        rows = self._memory[: self._count]
        return rows if rows.shape[1] == width else torch.nn.functional.pad(rows, (0, width - rows.shape[1]))


class Side:
    """What one side of a matrix was given: orthonormal directions, and the image of each."""

    def __init__(self) -> None:
        self.directions = Rows()
        self.images = Rows()


class Kets(Backend):
    """A backend whose vectors are random: k numbers for each unit, the same distribution for all units."""

    new_above: float
    """A vector counts as new to a matrix when this share of its square lies outside what the matrix has met."""

    def draw_matrix(self, name: str, kind: Kind, scale: float) -> tuple[Side, Side]:
        return Side(), Side()

    def product(self, matrix: Matrix, x: Vector) -> Vector:
        here, back = matrix.state[matrix.transposed], matrix.state[not matrix.transposed]
        seen = self.seen_by(matrix.kind, x.data)
        directions = here.directions.all(len(seen))
        coordinates = self.inners(directions, seen)
        rest = seen - coordinates @ directions
        # A second pass: the rounding of the first is as large as small rests.
        again = self.inners(directions, rest)
        rest, coordinates = rest - again @ directions, coordinates + again
        square = float(self.inners(rest[None], rest))
        if square > self.new_above * float(self.inners(seen[None], seen)):
            here.directions.append(rest / sqrt(square))
            here.images.append(self.fresh(matrix.kind))
            coordinates = torch.cat([coordinates, torch.tensor([sqrt(square)], dtype=torch.float64)])
        seen = self.fitted(seen)
        images = here.images.all(len(seen))
        remembered = self.inners(back.images.all(len(seen)), seen) @ back.directions.all(len(seen))
        result = (coordinates @ images + remembered) * matrix.scale
        return Vector(self, self.as_ket(matrix.kind, result))

    @abstractmethod
    def seen_by(self, kind: Kind, data: Any) -> Tensor:
        """A vector as a matrix sees it, flat: means over the k copies if the matrix is duplicated."""

    @abstractmethod
    def inners(self, rows: Tensor, flat: Tensor) -> Tensor:
        """⟨row, flat⟩ for every row."""

    @abstractmethod
    def fresh(self, kind: Kind) -> Tensor:
        """A Gaussian that is independent of everything so far, flat."""

    @abstractmethod
    def fitted(self, flat: Tensor) -> Tensor:
        """A flat vector at its present length, which a fresh Gaussian may have changed."""

    @abstractmethod
    def as_ket(self, kind: Kind, flat: Tensor) -> Any:
        """What a vector of this backend holds, from what a matrix returned."""
