"""Which entries of a wide axis are copies of the same base entry, which one a new unit is like, and what a slice reads."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..rules.axes import Axis
from .parts import Rectangle


def copies_of(axis: Axis) -> Tensor:
    """Row b lists the wide indices that copy base index b, in order.

    >>> copies_of(Axis.parse("out: 2x2 * 2+1")).tolist()
    [[0, 3], [1, 4], [6, 9], [7, 10]]
    """
    sources = torch.full((axis.wide,), -1, device="cpu")  # -1 marks padding
    for piece in axis.pieces(0, axis.wide):
        if piece.factors is not None:
            indices = torch.arange(piece.base_start, piece.base_start + piece.base_length, device="cpu")
            indices = indices.view([size for size, _ in piece.factors])
            for dim, (_, k) in enumerate(piece.factors):
                indices = indices.repeat_interleave(k, dim)
            sources[piece.start : piece.start + piece.length] = indices.flatten()
    order = torch.argsort(sources, stable=True)
    return order[axis.wide - axis.base * int(axis.k) :].view(axis.base, int(axis.k))


def numbered(axis: Axis) -> tuple[Tensor, Tensor]:
    """For every wide index, that of the first copy of its base index, and which of the copies it is; -1 for zeros.

    >>> [part.tolist() for part in numbered(Axis.parse("in: 2x2+1"))]
    [[0, 0, 2, 2, -1], [0, 1, 0, 1, -1]]
    """
    copies = copies_of(axis)
    first, number = torch.full((2, axis.wide), -1, device="cpu")
    first[copies] = copies[:, :1].expand_as(copies)
    number[copies] = torch.arange(copies.shape[1], device="cpu").expand_as(copies)
    return first, number


def models_of(axis: Axis, start: int = 0, stop: int | None = None) -> Tensor:
    """For wide indices, the base index that each copies, or is like: new units are like the units of their factor in turn.

    A new head is like a whole head, entry by entry:

    >>> models_of(Axis.parse("out: 2+3")).tolist(), models_of(Axis.parse("out: 2x2+1 * 3")).tolist()
    ([0, 1, 0, 1, 0], [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5, 0, 1, 2])
    """
    parts, before, offset = [torch.arange(0, device="cpu")], 0, 0
    stop = axis.wide if stop is None else stop
    for segment in axis.segments:
        inner = prod(factor.wide for factor in segment)
        low, high = (min(max(end - before, 0), inner) for end in (start, stop))
        rest = torch.arange(low, high, device="cpu")
        before += inner
        if low == high:
            offset += prod(factor.size for factor in segment)
            continue
        index = torch.zeros_like(rest)
        for factor in segment:
            inner //= factor.wide
            # Zeros count k to a unit, as copies do, so that "2+1 * 3x2" and its normal form "6x2+6" agree.
            index = index * factor.size + rest // inner // int(factor.k) % factor.size
            rest = rest % inner
        parts.append(index + offset)
        offset += prod(factor.size for factor in segment)
    return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class Reads:
    """What any rectangle of a wide tensor reads of its base tensor.

    >>> axes, part = (Axis.parse("out: 4+3"), Axis.parse("in: 2x2")), Rectangle((3, 0), (3, 2))
    >>> Reads(axes).cover(part), Reads(axes, (0,)).cover(part)
    (Rectangle(start=(3, 0), shape=(1, 1)), Rectangle(start=(0, 0), shape=(4, 1)))
    """

    axes: tuple[Axis, ...]
    copied: tuple[int, ...] = ()
    """Dimensions whose new units are copies of trained ones."""
    mean: tuple[int, ...] = ()
    """Dimensions whose new channels are the mean of all others."""

    def cover(self, part: Rectangle) -> Rectangle:
        """The smallest rectangle of the base tensor that holds all that a part of the wide one is made from."""
        wide = zip(part.start, part.shape, strict=True)
        ends = [self.along(dim, low, low + length) for dim, (low, length) in enumerate(wide)]
        return Rectangle(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))

    def along(self, dim: int, start: int, stop: int) -> tuple[int, int]:
        """The same for one dimension: the base range that wide [start, stop) reads; (0, 0) if it reads none."""
        axis = self.axes[dim]
        if dim in self.mean and any(piece.factors is None for piece in axis.pieces(start, stop)):
            return 0, axis.base
        if start == stop or dim not in self.copied:
            return axis.cover(start, stop)
        models = models_of(self.axes[dim], start, stop)
        return int(models.min()), int(models.max()) + 1
