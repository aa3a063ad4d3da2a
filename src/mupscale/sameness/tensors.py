"""How far two stored tensors are apart, block by block, in the memory of a few blocks.

Equal bytes are seen without computing anything. Knows: blocks, dtypes and profiles. Does not know what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf, prod, sqrt
from operator import add

import numpy as np
import torch
from torch import Tensor

from ..files.places import torch_dtype
from ..formats.snapshot import Filed, Rows
from ..sharded.source import FiledTensor, Source
from ..storage.location import Location
from ..tensors.parts import Rectangle
from .profiles import SINGLE, Profile

_READ = 1 << 21  # bytes of each tensor that are compared at a time
_BLOCK = 1 << 18  # entries that are measured at a time, in float64
_SMALL = 1 << 24  # entries; only of such tensors is it looked for how they differ


@dataclass
class Apart:
    """What was measured between two tensors."""

    entries: int = 0
    differing: int = 0
    """Entries whose values differ."""
    bits: bool = False
    """Whether any bytes differ."""
    gap: float = 0.0
    """The largest difference."""
    squares: float = 0.0
    """The sum of squares of the first tensor."""
    beyond: float = 0.0
    """The largest difference beyond what the profile grants an entry for its own size."""
    eps: float = 0.0
    first: tuple[int, ...] = ()

    @property
    def size(self) -> float:
        """The root mean square of the first tensor."""
        return sqrt(self.squares / max(self.entries, 1))

    def within(self, profile: Profile) -> bool:
        if profile.bits:
            return not self.bits
        return self.beyond <= profile.sums * min(self.eps, SINGLE) * self.size


class Pages:
    """The folders of two checkpoints, read by one thread."""

    def __init__(self) -> None:
        self._sources: dict[str, Source] = {}
        self._rooms: dict[tuple[int, torch.dtype], Tensor] = {}
        self._closing = ExitStack()

    def __enter__(self) -> Pages:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    @property
    def bytes(self) -> int:
        """How many were read."""
        return sum(source.bytes for source in self._sources.values())

    def read(self, stored: Filed, lows: tuple[int, ...], shape: tuple[int, ...], side: int = 0) -> Tensor:
        """A rectangle of a tensor, valid until the next call for the same side."""
        dtype = torch_dtype(stored.dtype)
        key, count = (side, dtype), prod(shape)
        if key not in self._rooms or self._rooms[key].numel() < count:
            self._rooms[key] = torch.empty(count, dtype=dtype, device="cpu")
        room = self._rooms[key][:count].view(shape)
        at, low, high = 0, lows[0] if lows else 0, lows[0] + shape[0] if lows else 1
        for rows in stored.parts:
            first, last = max(low, at), min(high, at + rows.count)
            if first < last:
                part = room[first - low : last - low] if lows else room
                self._read_rows_(rows, first - at, lows[1:], part)
            at += rows.count
        return room

    def _read_rows_(self, rows: Rows, first: int, inner: tuple[int, ...], room: Tensor) -> None:
        """Fill a tensor with rows of a stored one, from the `first` of them on."""
        start = () if not room.dim() else (rows.start + first * rows.step, *inner)
        into = room
        if rows.step > 1:  # what lies between is read as well
            into = room.new_empty(((len(room) - 1) * rows.step + 1, *room.shape[1:]))
        source = self._source(rows.folder)
        whole = Rectangle((0,) * len(rows.stored.shape), rows.stored.shape)
        tensor = FiledTensor(rows.stored.dtype, rows.stored.shape, ((whole, rows.stored),))
        if rows.layer is not None:
            source.read(tensor, [rows.layer, *start], into[None])
        else:
            source.read(tensor, list(start), into)
        if into is not room:
            room.copy_(into[:: rows.step])

    def _source(self, folder: Location) -> Source:
        if str(folder) not in self._sources:
            source = self._sources[str(folder)] = Source(folder, "", {})
            self._closing.callback(source.close)
        return self._sources[str(folder)]


def blocks(shape: tuple[int, ...], most: int = _BLOCK) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The parts of a tensor, each one run of bytes: where it starts, and its shape.

    >>> list(blocks((5, 2), 4))
    [((0, 0), (2, 2)), ((2, 0), (2, 2)), ((4, 0), (1, 2))]
    >>> list(blocks((2, 3), 2))
    [((0, 0), (1, 2)), ((0, 2), (1, 1)), ((1, 0), (1, 2)), ((1, 2), (1, 1))]
    """
    inner = prod(shape[1:])
    if not prod(shape):
        return
    if prod(shape) <= most:
        yield (0,) * len(shape), shape
    elif inner <= most:
        step = most // inner
        for at in range(0, shape[0], step):
            yield (at, *(0,) * (len(shape) - 1)), (min(step, shape[0] - at), *shape[1:])
    else:
        for at in range(shape[0]):
            for low, part in blocks(shape[1:], most):
                yield (at, *low), (1, *part)


def apart(a: Filed, b: Filed, pages: Pages, profile: Profile, rounds: bool = False) -> Apart:
    """Measure two tensors of one shape. With `rounds`, or a profile with tolerances, the finer one is rounded first."""
    found = Apart(prod(a.shape))
    kinds = torch_dtype(a.dtype), torch_dtype(b.dtype)
    found.eps = max((torch.finfo(kind).eps for kind in kinds if kind.is_floating_point), default=0.0)
    coarse = max(kinds, key=lambda kind: torch.finfo(kind).eps if kind.is_floating_point else 0.0)
    for lows, shape in blocks(a.shape, _READ // max(kind.itemsize for kind in kinds)):
        x, y = pages.read(a, lows, shape), pages.read(b, lows, shape, 1)
        if kinds[0] == kinds[1] and _equal_bytes(x, y):
            if not profile.bits:
                found.squares += float(x.double().square().sum()) if x.is_floating_point() else 0.0
            continue
        if kinds[0] != kinds[1] and (rounds or not profile.bits):
            x, y = x.to(coarse), y.to(coarse)
        for start, part in blocks(shape):
            inside = tuple(slice(low, low + many) for low, many in zip(start, part, strict=True))
            at = tuple(map(add, lows, start))
            _measure(found, x[inside], y[inside], at, profile)
        found.bits = found.bits or kinds[0] == kinds[1] or found.differing > 0
    return found


def _equal_bytes(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same bytes, compared in words of 8 where that many bytes make them up.

    >>> _equal_bytes(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])), _equal_bytes(torch.ones(3), torch.ones(3))
    (False, True)
    """
    ours, theirs = (t.reshape(-1).view(torch.uint8).numpy() for t in (x, y))
    word = np.int64 if ours.size % 8 == 0 else np.uint8
    return np.array_equal(ours.view(word), theirs.view(word))


def _measure(found: Apart, x: Tensor, y: Tensor, lows: tuple[int, ...], profile: Profile) -> None:
    """Add what a block with different bytes shows."""
    x, y = (t.to(torch.complex128) if t.is_complex() else t.double() for t in (x, y))
    unequal = (x != y) & ~(x.isnan() & y.isnan())
    found.squares += float(x.abs().nan_to_num(0.0, 0.0, 0.0).square().sum())
    count = int(unequal.sum())
    if not count:
        return
    if not found.differing:
        index = torch.unravel_index(unequal.view(-1).int().argmax(), unequal.shape)
        found.first = tuple(low + int(i) for low, i in zip(lows, index, strict=True))
    found.differing += count
    gap = (x - y).abs()[unequal].nan_to_num(inf, inf)
    share = profile.entry * found.eps + profile.sums * min(found.eps, SINGLE)
    granted = share * torch.maximum(x.abs(), y.abs())[unequal].nan_to_num(0.0, 0.0)
    found.gap = max(found.gap, float(gap.max()))
    found.beyond = max(found.beyond, float((gap - granted).max()))


def resemblance(a: Filed, b: Filed, pages: Pages) -> str:
    """How two tensors that differ are related, in words; "" where nothing simple relates them.

    Looked for: a transposed tensor, halves in the other order, the other sign, one factor for all entries.
    """
    if prod(a.shape) > _SMALL or prod(a.shape) != prod(b.shape) or not a.shape:
        return ""
    x, y = (pages.read(t, (0,) * len(t.shape), t.shape, side).double() for side, t in enumerate((a, b)))
    if len(a.shape) == len(b.shape) == 2 and x.shape == y.T.shape and torch.equal(x, y.T):
        return "B holds it transposed"
    if x.shape != y.shape:
        return ""
    for dim, size in enumerate(x.shape):
        if size % 2 == 0 and torch.equal(torch.cat(x.chunk(2, dim)[::-1], dim), y):
            return f"B holds its halves along dimension {dim} in the other order"
    if torch.equal(x, -y):
        return "B holds it with the other sign"
    at = int(x.abs().argmax())
    factor = float(y.view(-1)[at] / x.view(-1)[at]) if float(x.view(-1)[at]) else 0.0
    near = torch.finfo(torch.float32).eps
    if factor and torch.allclose(x * factor, y, rtol=near, atol=0):
        return "" if f"{factor:.6g}" == "1" else f"B holds it times {factor:.6g}"
    return ""
