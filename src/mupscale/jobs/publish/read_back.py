"""What a disk holds, by reading it: fingerprints of whole files, and which blocks of a file are not as their journal says.

Fingerprints add up (`bytes/fingerprints.py`), so what a file must have follows from its fixed bytes and from the fingerprints
that its blocks had in memory when they were written. Makes nothing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock

from ...errors import MupscaleError
from ...storage.location import Location
from ..bytes.blocks import Reader, block_runs, block_sum
from ..bytes.compiled_sums import expect
from ..bytes.durable import sync_file
from ..bytes.fingerprints import as_text, fingerprint
from ..progress import Report
from ..threads import in_threads
from ..work_units import Block, WorkUnits

PART = 8 << 20  # bytes read at a time
State = tuple[int, int, int]
"""Which file lies under a name, its size, and when it was last written."""


def fingerprints_of(
    folder: Location, sizes: Mapping[str, int], threads: int, report: Report | None = None
) -> dict[str, str]:
    """The fingerprint of the first bytes of every file; of one that cannot be read so far, another than it should have."""
    parts = [(name, at) for name, size in sizes.items() for at in range(0, size, PART)]
    expect(sum(sizes.values()))
    found, lock = dict.fromkeys(sizes, 0), Lock()

    def read(mine: Iterator[int]) -> None:
        room = memoryview(bytearray(min(PART, max(sizes.values(), default=0))))
        with Reader(folder) as reader:
            for number in mine:
                name, at = parts[number]
                raw = room[: min(PART, sizes[name] - at)]
                share = fingerprint(raw, at) if was_read(reader, name, at, raw) else 1
                with lock:
                    found[name] += share
                    if report is not None:
                        report(min(number + 1, len(parts)) * PART, len(parts) * PART)

    in_threads(threads, range(len(parts)), read)
    return {name: as_text(value) for name, value in found.items()}


def state(path: Path) -> State | None:
    """What lies under a name now, and None for anything but a file of its own."""
    with suppress(FileNotFoundError):
        found = os.lstat(path)
        if stat.S_ISREG(found.st_mode):
            return found.st_ino, found.st_size, found.st_mtime_ns
    return None


def forget(path: Path) -> None:
    """Bring a file to disk and let the system forget what it knows of it, so that the next reader reads the disk.

    A file system that lies in memory remembers; what it holds is what there is.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        sync_file(descriptor)
        with suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def damaged(
    folder: Path, name: str, units: WorkUnits, todo: Iterator[int], sums: Mapping[int, str]
) -> list[int]:
    """Which of these blocks are not in a file as their journal says, or in no journal."""
    found = []
    with Reader(folder) as reader:
        for unit in todo:
            block = units[unit]
            assert isinstance(block, Block)
            raw = memoryview(bytearray(block.bytes))
            runs = block_runs(block, raw)
            if not all(was_read(reader, name, *run) for run in runs) or block_sum(block, raw) != sums.get(
                unit
            ):
                found.append(unit)
    return found


def was_read(reader: Reader, name: str, offset: int, into: memoryview) -> bool:
    """Read a range of a file into memory; False where it cannot be read."""
    try:
        reader.read_(name, offset, into)
    except MupscaleError:
        return False
    return True
