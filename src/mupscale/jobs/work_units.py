"""The units of work of a job, and which worker does which of them.

A unit is a rectangle of one wide tensor of about `block_bytes`, or one stretch of a base file to be read once more.
Both are numbered, so that "done" is a set of numbers. Knows nothing of disks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from ..errors import MupscaleError
from ..files.places import item_size
from ..rules.axes import Axis
from ..tensors.making import Making
from .job import Job, Move

DIGEST_BYTES = 64 << 20
"""Base files are digested in stretches of this size, whatever the blocks are."""


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of a wide tensor."""

    move: Move
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * item_size(self.move.target.dtype)

    @property
    def offset(self) -> int:
        """Where its first byte lies in its file."""
        target, far = self.move.target, 0
        for size, at in zip(target.shape, self.start, strict=True):
            far = far * size + at
        return target.offset + far * item_size(target.dtype)


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a base file to be digested: file number, part number, byte range."""

    file: int
    part: int
    offset: int
    bytes: int


def block_shape(making: Making, whole: Sequence[int], item_bytes: int, block_bytes: int) -> tuple[int, ...]:
    """The shape of the largest block: whole inner dimensions of `whole`, a part of the wide tensor.

    Outer dimensions are cut first, so that a block is one run of bytes. Paired noise needs all copies of an
    entry at once: if they lie too far apart for one block, their dimension is left whole and others are cut.
    """
    shape = list(whole)
    paired = making.noise.paired if making.noise is not None else None
    for dim in range(len(shape)):
        rest = prod(shape[:dim]) * prod(shape[dim + 1 :]) * item_bytes
        if rest * shape[dim] <= block_bytes:
            break
        if dim != paired or 2 * _reach(making.axes[dim]) * rest <= block_bytes:
            shape[dim] = max(1, block_bytes // rest)
    return tuple(shape)


def _reach(axis: Axis) -> int:
    """How far apart the copies of one index lie at most."""
    reaches = [1]
    for segment in axis.segments:
        for outer, factor in enumerate(segment):
            if factor.k != 1:
                reaches.append(int(factor.k) * prod(f.wide for f in segment[outer + 1 :]))
                break
    return max(reaches)


class WorkUnits:
    """Every unit of a job: blocks first, in the order of the moves, then stretches of base files.

    Finding a worker's share costs a binary search, however many workers there are.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._shapes = [
            block_shape(move.making, move.target.shape, item_size(move.target.dtype), job.block_bytes)
            for move in job.moves
        ]
        self._first, self._bytes = [0], [0]
        for move, shape in zip(job.moves, self._shapes, strict=True):
            self._first.append(self._first[-1] + prod(_grid(move.target.shape, shape)))
            self._bytes.append(self._bytes[-1] + move.target.bytes)
        self._stretches = [0]
        for file in job.sources:
            count = 0 if job.trust_base else -(-file.size // DIGEST_BYTES)
            self._stretches.append(self._stretches[-1] + count)

    @property
    def blocks(self) -> int:
        return self._first[-1]

    def __len__(self) -> int:
        return self.blocks + self._stretches[-1]

    @property
    def stretches(self) -> list[int]:
        """How many stretches each base file has."""
        return [b - a for a, b in pairwise(self._stretches)]

    @property
    def total_bytes(self) -> int:
        return self._bytes[-1]

    def __getitem__(self, unit: int) -> Block | Stretch:
        if not 0 <= unit < len(self):
            raise IndexError(unit)
        if unit >= self.blocks:
            unit -= self.blocks
            file = bisect_right(self._stretches, unit) - 1
            part = unit - self._stretches[file]
            offset = part * DIGEST_BYTES
            return Stretch(file, part, offset, min(DIGEST_BYTES, self.job.sources[file].size - offset))
        at = bisect_right(self._first, unit) - 1
        move, shape = self.job.moves[at], self._shapes[at]
        index = unit - self._first[at]
        start: list[tuple[int, int]] = []
        for whole, count, step in reversed(
            list(zip(move.target.shape, _grid(move.target.shape, shape), shape, strict=True))
        ):
            index, digit = divmod(index, count)
            start.insert(0, (digit * step, min(step, whole - digit * step)))
        return Block(move, tuple(s for s, _ in start), tuple(n for _, n in start))

    def file_of(self, block: int) -> str:
        """The output file that a block belongs to."""
        return self.job.moves[bisect_right(self._first, block) - 1].target.file

    def files(self, worker: int, workers: int) -> set[str]:
        """The output files that a worker writes into; those that hold no block are made at the end."""
        first, last = self._cut(worker, workers), self._cut(worker + 1, workers)
        moves = range(bisect_right(self._first, first) - 1, bisect_left(self._first, last))
        return {self.job.moves[at].target.file for at in moves} if first < last else set()

    def share(self, worker: int, workers: int) -> Iterator[int]:
        """The units of one worker: a contiguous part of the output, and then a part of the second read of the base."""
        if not 0 <= worker < workers:
            raise MupscaleError(
                f"worker {worker} of {workers}: workers are numbered from 0 to {workers - 1}",
                code="job.no_such_worker",
            )
        count = len(self) - self.blocks
        yield from range(self._cut(worker, workers), self._cut(worker + 1, workers))
        yield from range(
            self.blocks + count * worker // workers, self.blocks + count * (worker + 1) // workers
        )

    def _cut(self, worker: int, workers: int) -> int:
        if worker == workers:
            return self.blocks
        return bisect_left(range(self.blocks), self.total_bytes * worker // workers, key=self._position)

    def _position(self, unit: int) -> int:
        """About how many bytes lie before a unit; grows with its number."""
        at = bisect_right(self._first, unit) - 1
        count = self._first[at + 1] - self._first[at]
        size = self._bytes[at + 1] - self._bytes[at]
        return self._bytes[at] + size * (unit - self._first[at]) // count


def _grid(whole: tuple[int, ...], shape: tuple[int, ...]) -> list[int]:
    """How many blocks lie along each dimension."""
    return [-(-n // step) if step else 0 for n, step in zip(whole, shape, strict=True)]
