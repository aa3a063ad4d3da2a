"""Which entries of a wide axis are copies of the same base entry."""

from __future__ import annotations

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
