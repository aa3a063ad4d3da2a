"""The way back: the average of the copies.

`collapse(expand(W))` is W, bit for bit when s is a power of two, because the average is taken of
differences from the first copy and those are exact zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .entry_sources import copies_of
from .expand import compute_dtype, rescale
from .making import Making


def collapse(wide: Tensor, making: Making) -> Tensor:
    """The base tensor whose widening is nearest to `wide`: average the copies, divide by s, drop pads.

    >>> from mupscale.rules import Axis
    >>> collapse(torch.tensor([1.0, 3.0, 4.0, 4.0, 0.0]), Making((Axis.parse("out: 2x2+1"),)))
    tensor([2., 4.])
    """
    base = wide
    averages = wide.is_floating_point() or wide.is_complex()
    if averages:
        base = base.to(compute_dtype(wide.dtype))
    for dim, axis in enumerate(making.axes):
        if not axis.grows:
            continue
        copies = copies_of(axis).to(wide.device)
        first = base.index_select(dim, copies[:, 0])
        others = [base.index_select(dim, copies[:, copy]) for copy in range(1, copies.shape[1])]
        differences = sum((other - first for other in others), torch.zeros_like(first))
        # Integer buffers are copied, never averaged: their copies are equal or have no mean.
        base = first + differences / copies.shape[1] if averages else first
    return rescale(base, making.scale**-1, making.shift).to(wide.dtype).clone()
