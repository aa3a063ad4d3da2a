"""The parts in which a file is uploaded: runs of whole blocks and of the fixed bytes between them.

A part is made in memory and sent at once, so it must be one range of bytes. Most blocks are one; blocks that are cut across
rows (paired noise, whose copies lie far apart) are taken together until they are. Knows offsets. Sends nothing.

A tensor of 4 rows whose blocks are its left and its right half, at byte 100 of a file, 8 bytes a row: the left half reaches from
byte 100 to 128 and has 16 bytes, so it is no range; with the right half, 32 bytes from 100 to 132, it is one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from ..errors import Fault, MupscaleError
from ..files.places import OutFile, item_size
from ..storage.uploads import MOST_PARTS, SMALLEST_PART
from .job import Job
from .work_units import Block, WorkUnits

PART_BYTES = 16 << 20
"""Of a part, at least: as a request takes a while, a few blocks in one."""
_LARGEST = 1 << 30  # bytes of a part that is held in memory


@dataclass(frozen=True, slots=True)
class FilePart:
    """A range of bytes of an output file, and the blocks that fill it."""

    file: OutFile
    number: int
    start: int
    end: int
    blocks: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.end - self.start

    def fixed(self) -> Iterator[tuple[int, bytes]]:
        """The bytes that no block writes, with where they lie in the part."""
        for at, raw in self.file.chunks:
            if self.start <= at < self.end:
                yield at - self.start, raw


def parts_of(job: Job, units: WorkUnits) -> list[FilePart]:
    """Every part of a job, file by file."""
    ranges: dict[str, list[tuple[int, int, tuple[int, ...]]]] = {file.name: [] for file in job.files}
    for file in job.files:
        ranges[file.name] += [(at, at + len(raw), ()) for at, raw in file.chunks]
    for name, found in _ranges(units):
        ranges[name].append(found)
    parts: list[FilePart] = []
    for file in job.files:
        wanted = max(PART_BYTES, SMALLEST_PART, -(-file.size // (MOST_PARTS - 1)))
        number, start, blocks = 1, 0, list[int]()
        for _, end, more in sorted(ranges[file.name]):
            blocks += more
            if end - start >= wanted or end == file.size:
                parts.append(FilePart(file, number, start, end, tuple(blocks)))
                number, start, blocks = number + 1, end, []
    return parts


def share_of(parts: list[FilePart], worker: int, workers: int) -> list[int]:
    """The numbers of the parts of one worker: about as many bytes as every other's."""
    before = [0, *accumulate(part.size for part in parts)]
    cut = [bisect_left(before, before[-1] * at // workers) for at in (worker, worker + 1)]
    return list(range(cut[0], min(cut[1], len(parts))))


def _ranges(units: WorkUnits) -> Iterator[tuple[str, tuple[int, int, tuple[int, ...]]]]:
    """The fewest blocks, in order, that are one range of bytes together."""
    held: list[int] = []
    count, start, end = 0, 0, 0
    for number in range(units.blocks):
        block = units[number]
        assert isinstance(block, Block)
        first, last = _reach(block)
        start, end = (min(start, first), max(end, last)) if held else (first, last)
        held.append(number)
        count += block.bytes
        if end - start > _LARGEST:
            what = f"its copies lie so far apart that {end - start:,} bytes would be held in memory"
            remedy = "write to a folder of this machine, and copy the result"
            raise MupscaleError(
                "the result cannot be uploaded",
                [Fault("job.copies_too_far_apart", block.move.name, what, remedy)],
            )
        if count == end - start:
            yield block.move.target.file, (start, end, tuple(held))
            held, count = [], 0


def _reach(block: Block) -> tuple[int, int]:
    """The first byte of a block in its file, and the one behind its last."""
    target = block.move.target
    strides = [prod(target.shape[d + 1 :]) for d in range(len(target.shape))]
    first = sum(a * b for a, b in zip(block.start, strides, strict=True))
    last = sum((a + n - 1) * b for a, n, b in zip(block.start, block.shape, strides, strict=True))
    size = item_size(target.dtype)
    return target.offset + first * size, target.offset + (last + 1) * size
