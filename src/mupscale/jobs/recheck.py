"""Blocks that a journal holds as done, read again: a block whose fingerprint differs is made once more.

Knows journals and the unfinished directory. Makes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..errors import MupscaleError
from .bytes.blocks import Reader, block_runs, block_sum
from .job_check import PARTIAL
from .work_units import Block, WorkUnits


def damaged(folder: Path, units: WorkUnits, todo: Iterator[int], sums: dict[int, str]) -> list[int]:
    """Which of these blocks are not on disk as their journal says."""
    found = []
    with Reader(folder) as reader:
        for unit in todo:
            block = units[unit]
            assert isinstance(block, Block)
            if not _holds(folder, reader, block, sums[unit]):
                found.append(unit)
    return found


def _holds(folder: Path, reader: Reader, block: Block, wanted: str) -> bool:
    raw = memoryview(bytearray(block.bytes))
    name = block.move.target.file
    if not (folder / name).exists():  # files get their own names when the job is being finished
        name += PARTIAL
    try:
        for offset, part in block_runs(block, raw):
            reader.read_(name, offset, part)
    except MupscaleError:
        return False
    return block_sum(block, raw) == wanted
