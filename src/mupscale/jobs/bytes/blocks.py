"""One block of a wide tensor from the bytes of the base: read the covering range, expand, round once.

The writer and the check both make their blocks here, so a check is a second run of the same function. Memory
is a few buffers that are reused. Does not know journals, or where the block is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import prod
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from ...errors import MupscaleError
from ...files.floats import refuse_not_finite
from ...files.places import Place, item_size, runs, torch_dtype
from ...files.strict import open_regular, printable
from ...storage.location import Location, Url
from ...storage.pages import RemoteFile
from ...tensors.expand import RUN, compute_dtype, cut_at_means, expand_, mean_along
from ...tensors.making import Making
from ...tensors.parts import Rectangle
from ..job import PAGE, Move, window
from ..work_units import Block
from .fingerprints import as_text, fingerprint
from .staging import Staging

CPU = torch.device("cpu")
_MOST_OPEN = 64  # files; far below the 1024 descriptors that a process usually has, for several threads
_SMALL = 1 << 16  # entries; reading this many in excess costs less than splitting a block
_NOISY = 1 << 19  # entries that get their noise at a time
_MEANS = 1 << 14  # means that are taken at a time, each of RUN entries that are read at a time


class Reader:
    """The files of one folder, opened for reading as they are needed."""

    def __init__(self, folder: Location) -> None:
        self.folder = folder
        self.bytes = 0
        """How many have been read."""
        self._open: dict[str, int] = {}
        self._remote: dict[str, RemoteFile] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def descriptor(self, file: str) -> int:
        """An open file; the one that was not used for the longest time is closed for it."""
        found = self._open.pop(file, None)
        if found is None:
            if len(self._open) >= _MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            assert not isinstance(self.folder, Url)
            found = open_regular(self.folder / file)
        self._open[file] = found
        return found

    def ahead(self, file: str, offset: int, length: int) -> None:
        """Ask the system to read bytes in the background that will be asked for soon; it may decline."""
        if isinstance(self.folder, Url):
            return
        with suppress(OSError):
            os.posix_fadvise(self.descriptor(file), offset, length, os.POSIX_FADV_WILLNEED)

    def read_(self, file: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes of the file that start at `offset`."""
        done = 0
        while done < len(into):
            done += self.read_some_(file, offset + done, [into[done:]])
        self.bytes += done

    def read_some_(self, file: str, offset: int, rooms: Sequence[memoryview]) -> int:
        """Read at least one byte into the rooms, one after the other; returns how many."""
        try:
            if isinstance(self.folder, Url):
                count = self._in_store(self.folder / file).read_into_(offset, rooms)
            else:
                count = os.preadv(self.descriptor(file), rooms, offset)
        except OSError as error:
            raise MupscaleError(
                f"{printable(file)} of the base cannot be read: {error.strerror}",
                code="job.base_cannot_be_read",
            ) from None
        if count == 0:
            raise MupscaleError(
                f"{printable(file)} of {printable(str(self.folder))} ends at byte {offset}, "
                f"expected {offset + sum(map(len, rooms))}: it changed while it was read",
                code="file.changed_while_read",
            )
        return count

    def _in_store(self, url: Url) -> RemoteFile:
        if str(url) not in self._remote:
            self._remote[str(url)] = RemoteFile(url)
        return self._remote[str(url)]


@dataclass(frozen=True, slots=True)
class StoredBase:
    """A base tensor, or the part of one that is stored: where it begins in the tensor, and how it is read."""

    dtype: torch.dtype
    start: tuple[int, ...]
    shape: tuple[int, ...]
    read_: Callable[[list[int], Tensor], None]
    """Fills a contiguous tensor with the rectangle that starts at an index of the whole base tensor."""
    means: dict[Rectangle, Tensor] = field(default_factory=dict, compare=False)
    """Means that were taken, by the rectangle of the base that they are the means of: blocks that lie above each other share them."""


def stored_base(move: Move, reader: Reader) -> StoredBase | None:
    """The base tensor of a move, its sources joined; None for a new tensor."""
    if not move.sources:
        return None
    start, shape = window(move.making.base_shape, move.read_cells)
    dtype = torch_dtype(move.sources[0].dtype)
    return StoredBase(dtype, tuple(start), tuple(shape), partial(_read_move, reader, move))


class BlockMaker:
    """Makes any rectangle of a wide tensor on a device, in memory that is reused."""

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device
        self._staging = Staging(device)
        self._rooms: dict[str, Tensor] = {}

    def make(
        self,
        making: Making,
        base: StoredBase | None,
        start: Sequence[int],
        shape: Sequence[int],
        dtype: torch.dtype,
        offset: int = 0,
    ) -> Tensor:
        """The rectangle as a contiguous tensor, valid until the next call; a making with a filling needs no base.

        `offset` is where it goes in a file, so that it can be written without a copy (`output_files.py`).
        """
        out = self.room("out", dtype, shape, offset)
        if base is None:
            return expand_(out, None, making, out_start=start)
        for part, at in _parts(out, making, list(start)):
            for same, low, new in cut_at_means(part, making, at):
                if new:
                    self._fill_mean_(same, making, base, low, *new)
                else:
                    self._fill_(same, making, base, low)
        return out

    def room(self, use: str, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> Tensor:
        """A tensor in memory that is kept for one use and grows when it must, at an address ≡ `offset` modulo a page."""
        size = prod(shape) * dtype.itemsize
        if use not in self._rooms or self._rooms[use].numel() < size + PAGE:
            self._rooms.pop(use, None)
            self._rooms[use] = torch.empty(size + PAGE, dtype=torch.uint8, device=self._device)
        skip = (offset - self._rooms[use].data_ptr()) % PAGE // dtype.itemsize * dtype.itemsize
        return self._rooms[use][skip : skip + size].view(dtype).view(list(shape))

    @property
    def room_bytes(self) -> int:
        """The memory that is kept, in bytes."""
        return self._staging.room_bytes + sum(room.numel() for room in self._rooms.values())

    def _fill_(self, out: Tensor, making: Making, base: StoredBase, start: list[int]) -> None:
        wanted = making.reads.cover(Rectangle(tuple(start), tuple(out.shape)))
        if wanted.numel > max(out.numel(), _SMALL):
            self._split_(out, making, base, start, wanted.shape)
            return
        self._expand_(out, making, start, self._read(base, wanted), list(wanted.start), base.dtype)

    def _read(self, base: StoredBase, wanted: Rectangle) -> Tensor:
        """A rectangle of the base on the device, valid until the next call."""
        room = self._staging.room(base.dtype, wanted.shape)
        base.read_(list(wanted.start), room)
        return self._staging.on_device(room)

    def _expand_(
        self,
        out: Tensor,
        making: Making,
        start: list[int],
        read: Tensor,
        lows: list[int],
        stored: torch.dtype,
    ) -> None:
        """Expand what was read of a base of dtype `stored`, or its mean."""
        compute = torch.promote_types(compute_dtype(stored), compute_dtype(out.dtype))
        if read.dtype == stored and compute_dtype(stored) != compute:
            read = read.to(compute)
        exact = out if compute_dtype(out.dtype) == compute else torch.empty_like(out, dtype=compute)
        expand_(exact, read, making, out_start=start, base_start=lows)
        if exact is not out:
            out.copy_(exact)

    def _fill_mean_(self, out: Tensor, making: Making, base: StoredBase, start: list[int], dim: int) -> None:
        """Fill a part that has nothing but means along `dim`, which are taken of what is read in pieces."""
        wanted = making.reads.cover(Rectangle(tuple(start), tuple(out.shape)))
        size, means = wanted.shape[dim], wanted.numel // max(1, wanted.shape[dim])
        across = max((d for d in range(out.dim()) if d != dim), key=lambda d: out.shape[d], default=dim)
        if means > _MEANS and across != dim and out.shape[across] > 1:
            half = out.shape[across] // 2
            for low, length in ((0, half), (half, out.shape[across] - half)):
                at = [*start[:across], start[across] + low, *start[across + 1 :]]
                self._fill_mean_(out.narrow(across, low, length), making, base, at, dim)
            return
        if wanted not in base.means:
            step = RUN * max(1, _MEANS // max(1, means))

            def pieces() -> Iterator[Tensor]:
                for at in range(0, size, step):
                    low, shape = list(wanted.start), list(wanted.shape)
                    low[dim], shape[dim] = at, min(step, size - at)
                    yield self._read(base, Rectangle(tuple(low), tuple(shape)))

            base.means[wanted] = mean_along(pieces(), dim, size)
        lows = list(wanted.start)
        lows[dim] = size
        self._expand_(out, making, start, base.means[wanted], lows, base.dtype)

    def _split_(
        self, out: Tensor, making: Making, base: StoredBase, start: list[int], read: Sequence[int]
    ) -> None:
        """Fill in parts, where a few rows on both sides of a seam would read everything between them.

        The dimension that reads the most for its length is cut at its seams. New units that are copies have seams of their
        own, wherever they begin again with the first of their models: those are found by halving.
        """
        dim = max(range(out.dim()), key=lambda d: read[d] / out.shape[d])
        at, length = start[dim], out.shape[dim]
        seams = [piece.start for piece in making.axes[dim].pieces(at, at + length)]
        if len(seams) == 1:
            seams.append(at + length // 2)
        for low, high in pairwise([*seams, at + length]):
            part = out.narrow(dim, low - at, high - low)
            self._fill_(part, making, base, [*start[:dim], low, *start[dim + 1 :]])


class MoveMaker(BlockMaker):
    """Makes the blocks of moves from the files of the base."""

    def __init__(self, reader: Reader, finite: Collection[str] = ()) -> None:
        super().__init__()
        self._reader = reader
        self._finite = finite
        """Names of moves that are refused where their base has NaN or inf (`finite_moves`)."""
        self._last: tuple[Move, StoredBase | None] | None = None

    def block(self, block: Block) -> Tensor:
        """The block as a contiguous tensor, valid until the next call."""
        move = block.move
        first, _ = window(move.making.wide_shape, move.cells)
        start = [a + b for a, b in zip(first, block.start, strict=True)]
        if self._last is None or self._last[0] is not move:
            base = stored_base(move, self._reader)
            self._last = move, finite_base(base, move) if base and move.name in self._finite else base
        dtype = torch_dtype(move.target.dtype)
        return self.make(move.making, self._last[1], start, block.shape, dtype, block.offset)


def finite_moves(moves: Sequence[Move], about: Mapping[str, Any]) -> frozenset[str]:
    """The moves that write parameters of a model. A buffer may hold inf, as masks do.

    >>> finite_moves((), {})
    frozenset()
    """
    names, entries = (
        _part(_part(about, one), two) for one, two in (("spelling", "names"), ("plan", "tensors"))
    )
    return frozenset(
        move.name
        for move in moves
        if move.target.file.endswith(".safetensors")
        and (name := str(names.get(move.name, move.name))) in entries
        and _part(entries, name).get("kind") != "buffer"
    )


def _part(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """One part of a record; empty where it is not there or something else, because records of jobs are free."""
    found = record.get(key)
    return found if isinstance(found, Mapping) else {}


def finite_base(base: StoredBase, move: Move) -> StoredBase:
    """The base tensor of a move, refused where what is read of it is not finite.

    A sum is not finite if one of its terms is not, and it is an order of magnitude faster than `isfinite` of each.
    """
    return replace(base, read_=partial(_read_finite, base.read_, move))


def _read_finite(
    read_: Callable[[list[int], Tensor], None], move: Move, lows: list[int], room: Tensor
) -> None:
    read_(lows, room)
    if not room.is_floating_point() or room.itemsize == 1 or bool(room.sum().isfinite()):
        return
    if not bool(room.isfinite().all()):  # else the sum alone was too large for its dtype
        refuse_not_finite([move.name])


def _read_move(reader: Reader, move: Move, lows: list[int], room: Tensor) -> None:
    """A rectangle of the base tensor, sources joined."""
    join = move.making.join
    first = window(move.making.base_shape, move.read_cells)[0]
    inside = [low - start for low, start in zip(lows, first, strict=True)]
    if join is None:
        read_rectangle_(reader, move.sources[0], inside, room, [0] * room.dim(), list(room.shape))
        return
    before, dim = 0, join.dim
    for source in move.sources:
        shape = join.part(source.shape)
        low, high = max(inside[dim], before), min(inside[dim] + room.shape[dim], before + shape[dim])
        if low < high:
            start, at, part = list(inside), [0] * room.dim(), list(room.shape)
            start[dim], at[dim], part[dim] = low - before, low - inside[dim], high - low
            read_rectangle_(reader, replace(source, shape=shape), start, room, at, part)
        before += shape[dim]


def read_rectangle_(
    reader: Reader,
    source: Place,
    start: Sequence[int],
    room: Tensor,
    at: Sequence[int],
    shape: Sequence[int],
) -> None:
    """Read the rectangle `shape` from `start` of a stored tensor to `at` of a contiguous one."""
    size, raw = item_size(source.dtype), raw_bytes(room)
    for far, near, count in runs(source.shape, start, room.shape, at, shape):
        into = raw[near * size : (near + count) * size]
        reader.read_(source.file, source.offset + far * size, into)


def _parts(out: Tensor, making: Making, start: list[int]) -> Iterator[tuple[Tensor, list[int]]]:
    """A block in one piece, or in small pieces if it gets noise, which takes several times the memory of the block."""
    noise = making.noise
    cuttable = [] if noise is None else [d for d, n in enumerate(out.shape) if n > 1 and d != noise.paired]
    if not cuttable or out.numel() <= _NOISY:
        yield out, start
        return
    dim = cuttable[0]
    step = max(1, out.shape[dim] * _NOISY // out.numel())
    for at in range(0, out.shape[dim], step):
        part = out.narrow(dim, at, min(step, out.shape[dim] - at))
        yield part, [*start[:dim], start[dim] + at, *start[dim + 1 :]]


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, without a copy."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def block_sum(block: Block, raw: memoryview) -> str:
    """The share of a block in the fingerprint of its file."""
    return as_text(sum(fingerprint(part, offset) for offset, part in block_runs(block, raw)))


def block_runs(block: Block, raw: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The bytes of a block, run by run, with the offset of each in its file."""
    target = block.move.target
    size, origin = item_size(target.dtype), [0] * len(block.shape)
    for far, near, length in runs(target.shape, block.start, block.shape, origin, block.shape):
        yield target.offset + far * size, raw[near * size : (near + length) * size]
