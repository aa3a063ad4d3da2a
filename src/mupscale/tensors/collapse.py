"""The way back: the average of the copies, and how far they have moved apart.

`collapse(expand(W))` is W, bit for bit when s is a power of two, because the average is taken of
differences from the first copy and those are exact zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from torch import Tensor

from ..rules.axes import Axis
from ..rules.scale import ONE, Scale
from .expand import compute_dtype, rescale


def collapse(wide: Tensor, axes: Sequence[Axis], scale: Scale = ONE, *, shift: int = 0) -> Tensor:
    """The base tensor whose widening is nearest to `wide`: average the copies, divide by s, drop pads.

    >>> import torch
    >>> collapse(torch.tensor([1.0, 3.0, 4.0, 4.0, 0.0]), [Axis.parse("out: 2x2+1")])
    tensor([2., 4.])
    """
    base = wide.new_zeros([axis.base for axis in axes])
    if not axes:
        return rescale(wide, scale**-1, shift).to(wide.dtype).clone()
    for pieces in product(*(list(axis.pieces()) for axis in axes)):
        if any(piece.factors is None for piece in pieces):
            continue
        source, target = wide, base
        for dim, piece in enumerate(pieces):
            source = source.narrow(dim, piece.start, piece.length)
            target = target.narrow(dim, piece.base_start, piece.base_length)
        digits = [pair for piece in pieces for pair in piece.factors or ()]
        copies = source.reshape([size for n, k in digits for size in (n, k)])
        dims = list(range(1, 2 * len(digits), 2))
        first = copies
        for dim in dims:
            first = first.narrow(dim, 0, 1)
        mean = first
        if wide.is_floating_point():
            wider = compute_dtype(wide.dtype)
            mean = first.to(wider) + (copies.to(wider) - first.to(wider)).mean(dims, keepdim=True)
        target.copy_(rescale(mean, scale**-1, shift).reshape(target.shape))
    return base
