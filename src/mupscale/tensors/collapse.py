"""The way back: the average of the copies.

`collapse(expand(W))` is W, bit for bit when s is a power of two, because the average is taken of
differences from the first copy and those are exact zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..rules.axes import Axis
from ..rules.scale import ONE, Scale
from .expand import compute_dtype, expand, rescale


def collapse(wide: Tensor, axes: Sequence[Axis], scale: Scale = ONE, *, shift: int = 0) -> Tensor:
    """The base tensor whose widening is nearest to `wide`: average the copies, divide by s, drop pads.

    >>> import torch
    >>> collapse(torch.tensor([1.0, 3.0, 4.0, 4.0, 0.0]), [Axis.parse("out: 2x2+1")])
    tensor([2., 4.])
    """
    base = wide
    averages = wide.is_floating_point() or wide.is_complex()
    if averages:
        base = base.to(compute_dtype(wide.dtype))
    for dim, axis in enumerate(axes):
        if not axis.grows:
            continue
        copies = copies_of(axis).to(wide.device)
        first = base.index_select(dim, copies[:, 0])
        others = [base.index_select(dim, copies[:, copy]) for copy in range(1, copies.shape[1])]
        differences = sum((other - first for other in others), torch.zeros_like(first))
        # Integer buffers are copied, never averaged: their copies are equal or have no mean.
        base = first + differences / copies.shape[1] if averages else first
    return rescale(base, scale**-1, shift).to(wide.dtype).clone()


def copies_of(axis: Axis) -> Tensor:
    """Row b lists the wide indices that copy base index b, in order."""
    sources = expand(torch.arange(1, axis.base + 1), [axis])  # 0 marks padding
    order = torch.argsort(sources, stable=True)
    return order[axis.wide - axis.base * int(axis.k) :].view(axis.base, int(axis.k))
