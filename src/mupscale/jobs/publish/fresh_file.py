"""A new file with the right bytes, in the place of one that is damaged or that somebody else may still write into.

It is copied from the old one (on some file systems without moving a byte), read back, and blocks that are not as they should be
are made again. Nobody else knows its name until it is right and closed. Does not know when this is needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ...errors import Fault, MupscaleError
from ...files.places import OutFile
from ..bytes.base_reader import CHANGED, START_AGAIN
from ..bytes.blocks import MoveMaker, Reader, block_runs, block_sum, raw_bytes
from ..bytes.output_files import OutputFile, write_all
from ..job import Job
from ..partial import drafted, file_mode, fill_fixed
from ..threads import in_threads
from ..work_units import Block, WorkUnits
from .read_back import PART, State, damaged, fingerprints_of, forget, state

TRIES = 3  # a disk that changes what is written to it this often in a row is refused


def renew(
    job: Job, units: WorkUnits, path: Path, file: OutFile, sums: Mapping[int, str], wanted: str, threads: int
) -> State:
    """Put a new file in the place of `path`, with the fingerprint `wanted`."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with drafted(path) as draft:
        descriptor = os.open(draft, flags, file_mode(job))
        try:
            _copy(path, descriptor, file.size)
            for _ in range(TRIES):
                fill_fixed(descriptor, file)
                found = read_back(draft, file.size, threads)
                if found[1] == wanted:
                    break
                _make_again(job, units, draft, _damaged(units, draft, file, sums, threads), sums, threads)
            else:
                raise differs(path)
        finally:
            os.close(descriptor)
        os.replace(draft, path)
    return found[0]


def read_back(path: Path, size: int, threads: int) -> tuple[State, str]:
    """What the disk holds under a name, and its fingerprint."""
    forget(path)
    before = state(path)
    assert before is not None
    found = fingerprints_of(path.parent, {path.name: size}, threads)[path.name]
    return before, found if before[1] == size else ""


def differs(path: Path) -> MupscaleError:
    """The refusal of a disk that gives back other bytes than were written."""
    fault = Fault(
        "disk.reads_back_differently",
        str(path),
        "it was written and synced, and what is read from it is something else",
        "write to another disk; this one, its cable or the memory of the machine is damaged",
    )
    return MupscaleError("the output cannot be written", [fault])


def _copy(path: Path, descriptor: int, size: int) -> None:
    """Copy as many bytes as can be read; what cannot is made again later."""
    try:
        source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        at = _copied_at_once(source, descriptor, size)
        for start in range(at, size, PART):
            raw = b""
            with suppress(OSError):
                raw = os.pread(source, min(PART, size - start), start)
            write_all(descriptor, memoryview(raw), start)
    finally:
        os.close(source)


def _copied_at_once(source: int, target: int, size: int) -> int:
    """Let the file system copy; returns how many bytes it did."""
    done = 0
    with suppress(OSError):
        while done < size and (count := os.copy_file_range(source, target, size - done, done, done)):
            done += count
    return done


def _damaged(
    units: WorkUnits, draft: Path, file: OutFile, sums: Mapping[int, str], threads: int
) -> list[int]:
    found: list[int] = []
    own = [unit for unit in range(units.blocks) if units.file_of(unit) == file.name]
    in_threads(threads, own, lambda mine: found.extend(damaged(draft.parent, draft.name, units, mine, sums)))
    return sorted(found)


def _make_again(
    job: Job, units: WorkUnits, draft: Path, todo: list[int], sums: Mapping[int, str], threads: int
) -> None:
    def make(mine: Iterator[int]) -> None:
        file = OutputFile(draft)
        try:
            with Reader(job.base) as reader:
                maker = MoveMaker(reader)
                for unit in mine:
                    block = units[unit]
                    assert isinstance(block, Block)
                    raw = raw_bytes(maker.block(block))
                    if block_sum(block, raw) != sums.get(unit, block_sum(block, raw)):
                        what = f"block {unit} of {block.move.name} had other bytes when it was made first"
                        source = block.move.sources[0].file if block.move.sources else str(job.base)
                        raise MupscaleError(
                            CHANGED, [Fault("job.base_bytes_changed", source, what, START_AGAIN)]
                        )
                    for offset, part in block_runs(block, raw):
                        file.write(part, offset)
        finally:
            file.close()

    in_threads(threads, todo, make)
