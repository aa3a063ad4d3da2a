"""Which entries of a wide axis are copies of the same base entry, and which entry of the base a new unit is like."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ..rules.axes import Axis


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


def models_of(axis: Axis) -> Tensor:
    """For every wide index, the base index that it copies, or is like: new units are like the units of their factor in turn.

    A new head is like a whole head, entry by entry:

    >>> models_of(Axis.parse("out: 2+3")).tolist(), models_of(Axis.parse("out: 2x2+1 * 3")).tolist()
    ([0, 1, 0, 1, 0], [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5, 0, 1, 2])
    """
    parts, offset = [], 0
    for segment in axis.segments:
        index = torch.zeros(1, dtype=torch.int64, device="cpu")
        for factor in segment:
            # Zeros count k to a unit, as copies do, so that "2+1 * 3x2" and its normal form "6x2+6" agree.
            unit = torch.arange(factor.wide, device="cpu") // int(factor.k) % factor.size
            index = (index[:, None] * factor.size + unit).flatten()
        parts.append(index + offset)
        offset += prod(factor.size for factor in segment)
    return torch.cat(parts)
