"""Which rectangle of a tensor this process holds: all of it, or the shard of a DTensor.

Knows: how FSDP2 and tensor parallelism cut a tensor over a device mesh, for any rank, without communication.
Moves nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from ..errors import MupscaleError


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A part of a tensor: where it starts and how far it goes in every dimension.

    >>> Rectangle((2, 0), (3, 4)).meet(Rectangle((4, 1), (9, 9)))
    Rectangle(start=(4, 1), shape=(1, 3))
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def meet(self, other: Rectangle) -> Rectangle:
        """The intersection of two rectangles; an empty one has a size of 0."""
        low = [max(a, b) for a, b in zip(self.start, other.start, strict=True)]
        ends = zip(self.start, self.shape, other.start, other.shape, strict=True)
        high = [min(a + n, b + m) for a, n, b, m in ends]
        if any(h <= a for a, h in zip(low, high, strict=True)):
            return Rectangle(tuple(low), (0,) * len(low))
        return Rectangle(tuple(low), tuple(h - a for a, h in zip(low, high, strict=True)))

    def within(self, tensor: Tensor, origin: Sequence[int]) -> Tensor:
        """This part of a tensor whose first entry has the index `origin`, as a view."""
        for dim, (at, low, n) in enumerate(zip(self.start, origin, self.shape, strict=True)):
            tensor = tensor.narrow(dim, at - low, n)
        return tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; does not import torch.distributed.tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """The memory of this process behind a tensor."""
    local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return local


def local_rectangle(tensor: Tensor) -> Rectangle:
    """The rectangle of a tensor that this process holds.

    >>> import torch
    >>> local_rectangle(torch.ones(3, 4))
    Rectangle(start=(0, 0), shape=(3, 4))
    """
    if not is_sharded(tensor):
        return Rectangle((0,) * tensor.dim(), tuple(tensor.shape))
    sharded: Any = tensor
    coordinate = sharded.device_mesh.get_coordinate()
    if coordinate is None:
        return Rectangle((0,) * tensor.dim(), (0,) * tensor.dim())
    found = rank_rectangle(
        tuple(tensor.shape), tuple(sharded.device_mesh.shape), sharded.placements, coordinate
    )
    local = tuple(sharded._local_tensor.shape)
    if found.shape != local and not 0 == found.numel == prod(local):
        raise MupscaleError(
            f"a tensor of shape {tuple(tensor.shape)} placed as {sharded.placements} has a shard of shape {local} here, "
            f"expected {found.shape}; shard it by Shard and Replicate, which cut it evenly",
            code="rank.uneven_shard",
        )
    return found


def rank_rectangle(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: Sequence[Any], coordinate: Sequence[int]
) -> Rectangle:
    """The rectangle that the rank at a mesh coordinate holds of a tensor of `shape`.

    Every mesh dimension cuts what the ones before it left, into chunks of equal size but for the last ones; a
    strided shard (FSDP over tensor parallelism on one dimension) is cut after those it is strided over.
    """
    start, sizes = [0] * len(shape), list(shape)
    order = [i for i, p in enumerate(placements) if not _strided(p)]
    order += [i for i, p in reversed(list(enumerate(placements))) if _strided(p)]
    for i in order:
        placement = placements[i]
        if placement.is_partial():
            raise MupscaleError(
                "a tensor whose ranks hold partial sums cannot be grown; reduce it first",
                code="rank.partial_sums",
            )
        if placement.is_replicate():
            continue
        dim = placement.dim
        step = -(-sizes[dim] // mesh[i])
        low = min(coordinate[i] * step, sizes[dim])
        start[dim] += low
        sizes[dim] = min(step, sizes[dim] - low)
    return Rectangle(tuple(start), tuple(sizes))


def _strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"
