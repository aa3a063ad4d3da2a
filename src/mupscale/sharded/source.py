"""The source of a wide job: base tensors by planned name, any rectangle of which can be read.

Knows: rectangles in files. Does not know which directory they came from, or what they are used for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import MupscaleError
from ..files.dcp.chunks import chunk_place
from ..files.dcp.table import Chunk, ChunkedTensor
from ..files.places import Place, item_size, torch_dtype
from ..jobs.bytes.blocks import Reader, read_rectangle_
from ..plans.plan import Plan
from ..runs.provenance import Provenance
from ..storage.location import Location
from ..tensors.making import Making
from ..tensors.parts import Rectangle

_AHEAD = 64 << 20  # bytes of one tensor that are read ahead; the rest would push others out of the cache


@dataclass(frozen=True)
class FiledTensor:
    """A base tensor in files: its rectangles, and what each of them is in files."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[Rectangle, Place | ChunkedTensor], ...]

    @staticmethod
    def whole(place: Place) -> FiledTensor:
        return FiledTensor(
            place.dtype, place.shape, ((Rectangle((0,) * len(place.shape), place.shape), place),)
        )

    @staticmethod
    def joined(places: Sequence[Place], dim: int) -> FiledTensor:
        """Several tensors as one, one behind the other along a dimension."""
        pieces, start = [], [0] * len(places[0].shape)
        for place in places:
            pieces.append((Rectangle(tuple(start), place.shape), place))
            start[dim] += place.shape[dim]
        shape = (*places[0].shape[:dim], start[dim], *places[0].shape[dim + 1 :])
        return FiledTensor(places[0].dtype, shape, tuple(pieces))


class AnySource(Protocol):
    """Handles of base tensors by the name of the wide tensor made from them. Each source has its own handle type."""

    identity: str
    """A text that must be equal on all ranks."""
    weights: Mapping[str, Any]
    states: Mapping[str, Mapping[str, Any]]
    """Optimizer state by name and key: the handle of a tensor, or a plain number."""
    settings: Mapping[str, Mapping[str, Any]]
    """The base's optimizer settings by name, as far as they are known."""
    since: Plan | None
    """The plan from the reference to the base, where the source knows it."""
    provenance: Provenance
    """How the base was made, where the source knows it."""

    others_wait: bool
    """Whether other ranks wait for this one while it reads."""

    @property
    def bytes(self) -> int:
        """How many were read, or received from other ranks."""
        ...

    @property
    def messages(self) -> int:
        """How many were received from other ranks."""
        ...

    def kind_of(self, stored: Any) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of a base tensor."""
        ...

    def number(self, stored: Any) -> Tensor:
        """A tensor without dimensions."""
        ...

    def aligned(self, stored: Any, making: Making, wide: Tensor) -> bool:
        """Whether every rank can read what it needs without the others."""
        ...

    def hold(self, stored: Any, making: Making, wide: Tensor) -> None:
        """Receive the slices that this rank needs, and send others the slices they need."""
        ...

    def whole(self, stored: Any) -> Tensor | None:
        """The whole base tensor if reading it is collective; None if any rank can read it alone."""
        ...

    def read(self, stored: Any, lows: list[int], room: Tensor) -> None:
        """Fill a contiguous tensor with the rectangle of a base tensor that starts at `lows`."""
        ...

    def lies(self, stored: Any, wanted: Rectangle) -> tuple[str, int]:
        """About where a rectangle of a base tensor lies: what is read in this order is read in the order of files."""
        ...

    def ahead(self, stored: Any, wanted: Rectangle) -> None:
        """Tell that a rectangle of a base tensor will be read soon."""
        ...

    def close(self) -> None: ...


@dataclass
class Source:
    """Tensors in files: any rank reads any slice."""

    folder: Location
    identity: str
    weights: Mapping[str, Any]
    states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    since: Plan | None = None
    provenance: Provenance = field(default_factory=Provenance)
    messages: int = 0
    others_wait: bool = False

    def __post_init__(self) -> None:
        self._reader = Reader(self.folder)
        self._places: dict[tuple[str, int], Place] = {}

    def close(self) -> None:
        self._reader.__exit__(None, None, None)

    @property
    def bytes(self) -> int:
        """How many were read."""
        return self._reader.bytes

    def kind_of(self, stored: FiledTensor) -> tuple[torch.dtype, tuple[int, ...]]:
        return torch_dtype(stored.dtype), stored.shape

    def number(self, stored: FiledTensor) -> Tensor:
        room = torch.empty((), dtype=torch_dtype(stored.dtype), device="cpu")
        self.read(stored, [], room)
        return room

    def aligned(self, stored: FiledTensor, making: Making, wide: Tensor) -> bool:
        return True

    def hold(self, stored: FiledTensor, making: Making, wide: Tensor) -> None:
        pass

    def whole(self, stored: FiledTensor) -> Tensor | None:
        return None

    def read(self, stored: FiledTensor, lows: list[int], room: Tensor) -> None:
        wanted, missing = Rectangle(tuple(lows), tuple(room.shape)), room.numel()
        for part, start, place in self._parts(stored, wanted):
            at = [a - b for a, b in zip(part.start, lows, strict=True)]
            read_rectangle_(self._reader, place, start, room, at, list(part.shape))
            missing -= part.numel
        if missing:
            raise MupscaleError(
                f"{missing} entries of a tensor of shape {stored.shape} are stored nowhere",
                code="dcp.entries_stored_nowhere",
            )

    def lies(self, stored: FiledTensor, wanted: Rectangle) -> tuple[str, int]:
        found = []
        for rectangle, where in stored.pieces:
            met = rectangle.meet(wanted)
            if met.numel and isinstance(where, Place):
                found.append((where.file, where.offset))
            elif met.numel and isinstance(where, ChunkedTensor):
                inside = [a - b for a, b in zip(met.start, rectangle.start, strict=True)]
                found += [(chunk.file, chunk.offset) for chunk in where.meeting(inside, met.shape)]
        return min(found, default=("", 0))

    def ahead(self, stored: FiledTensor, wanted: Rectangle) -> None:
        left = _AHEAD
        for part, start, place in self._parts(stored, wanted):
            strides = [prod(place.shape[dim + 1 :]) for dim in range(len(start))]
            first = sum(a * stride for a, stride in zip(start, strides, strict=True))
            last = first + sum((n - 1) * stride for n, stride in zip(part.shape, strides, strict=True))
            size = item_size(place.dtype)
            length = min(left, (last + 1 - first) * size)
            self._reader.ahead(place.file, place.offset + first * size, length)
            left -= length
            if left <= 0:
                return

    def _parts(self, stored: FiledTensor, wanted: Rectangle) -> Iterator[tuple[Rectangle, list[int], Place]]:
        """What a rectangle of a base tensor consists of: a part of it, and where that starts in a place of a file."""
        for rectangle, where in stored.pieces:
            met = rectangle.meet(wanted)
            if not met.numel:
                continue
            inside = [a - b for a, b in zip(met.start, rectangle.start, strict=True)]
            if isinstance(where, Place):
                yield met, inside, where
                continue
            for chunk in where.meeting(inside, met.shape):
                part = Rectangle(chunk.start, chunk.shape).meet(Rectangle(tuple(inside), met.shape))
                start = [a - b for a, b in zip(part.start, chunk.start, strict=True)]
                origin = tuple(a + b for a, b in zip(part.start, rectangle.start, strict=True))
                yield Rectangle(origin, part.shape), start, self._place(chunk, stored.dtype)

    def _place(self, chunk: Chunk, dtype: str) -> Place:
        key = (chunk.file, chunk.offset)
        if key not in self._places:
            self._places[key] = chunk_place(self.folder, chunk, dtype)
        return self._places[key]
