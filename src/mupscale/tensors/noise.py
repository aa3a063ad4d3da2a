"""Noise for any slice of a wide tensor, the same bits however the tensor is cut.

Element i of the wide tensor, in row-major order, gets σ · z_i with z from the tensor's own stream. Paired noise
is made zero-sum over the copies along one dimension, so that a layer's output does not move at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod, sqrt

import torch
from torch import Tensor

from ..errors import MupscaleError
from ..rules.axes import Axis
from .collapse import copies_of
from .philox import Stream, normals

_BLOCK = 1 << 16  # numbers drawn at a time: the integer temporaries stay in cache


@dataclass(frozen=True)
class TensorNoise:
    """The noise of one tensor: its stream, its absolute size, and the dimension it is paired along."""

    stream: Stream
    std: float | tuple[float, ...]
    """One number, or one for every index of dimension 0 (stacked experts)."""
    paired: int | None = None

    def slice(self, axes: Sequence[Axis], start: Sequence[int], shape: Sequence[int], like: Tensor) -> Tensor:
        """The noise of the rectangle at `start`, on the device of `like`, in float32 or its wider dtype."""
        lows, sizes = list(start), list(shape)
        if self.paired is not None:  # all copies are needed, whatever part of the axis is asked for
            lows[self.paired], sizes[self.paired] = 0, axes[self.paired].wide
        z = rectangle(self.stream, [axis.wide for axis in axes], lows, sizes, like.device)
        z = z.to(torch.promote_types(like.dtype, torch.float32))
        if self.paired is not None:
            z = pair(z, axes[self.paired], self.paired)
            z = z.narrow(self.paired, start[self.paired], shape[self.paired])
        if isinstance(self.std, float):
            return z * self.std
        part = self.std[start[0] : start[0] + shape[0]]
        return z * z.new_tensor(part).view(-1, *[1] * (z.dim() - 1))


def rectangle(
    stream: Stream,
    whole: Sequence[int],
    start: Sequence[int],
    shape: Sequence[int],
    device: torch.device,
    draw: Callable[[Stream, Tensor, int], Tensor] = normals,
) -> Tensor:
    """Random numbers, standard normal by default, for the rectangle `start`, `shape` of a tensor of shape `whole`.

    >>> stream, cpu = Stream(0, "w"), torch.device("cpu")
    >>> full = rectangle(stream, (5, 7), (0, 0), (5, 7), cpu)
    >>> torch.equal(rectangle(stream, (5, 7), (1, 2), (3, 4), cpu), full[1:4, 2:6])
    True
    """
    strides = [prod(whole[d + 1 :]) for d in range(len(whole))]
    inner = len(whole)
    while inner and (inner == len(whole) or shape[inner] == whole[inner]):
        inner -= 1  # dimensions after `inner` are taken whole, so a run goes on through them
    run = prod(shape[inner:])
    starts = torch.zeros(1, dtype=torch.int64, device=device)
    for d in range(inner):
        along = (torch.arange(shape[d], device=device) + start[d]) * strides[d]
        starts = (starts[:, None] + along).flatten()
    starts = starts + (start[inner] * strides[inner] if whole else 0)
    out = torch.empty(len(starts), run, device=device)
    if run > _BLOCK:
        for row in range(len(starts)):
            for at in range(0, run, _BLOCK):
                size = min(_BLOCK, run - at)
                out[row, at : at + size] = draw(stream, starts[row : row + 1] + at, size)[0]
    else:
        step = max(1, _BLOCK // max(1, run))
        for row in range(0, len(starts), step):
            out[row : row + step] = draw(stream, starts[row : row + step], run)
    return out.view(list(shape))


def pair(z: Tensor, axis: Axis, dim: int) -> Tensor:
    """Subtract the mean over the copies along `dim`, and restore the variance; padding is left alone."""
    k = int(axis.k)
    if k < 2:
        raise MupscaleError(f"paired noise needs copies, and axis {axis} has {k}")
    copies = copies_of(axis).to(z.device)
    total = z.index_select(dim, copies[:, 0])
    for copy in range(1, k):  # in a fixed order, so that the bits do not depend on threads
        total = total + z.index_select(dim, copies[:, copy])
    out = z.clone()
    for copy in range(k):
        centred = z.index_select(dim, copies[:, copy]) - total / k
        out.index_copy_(dim, copies[:, copy], centred * sqrt(k / (k - 1)))
    return out
