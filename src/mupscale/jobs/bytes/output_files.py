"""The files of an output, into which blocks are written: past the page cache where the file system can do that.

Copying a block into the page cache costs more CPU time than making it. With O_DIRECT the disk takes the bytes from
where they were made, in whole pages: the address of the bytes, their offset in the file and their number must be multiples of a page. So a
block is made at an address that leaves the same remainder as its offset (`BlockMaker.room`); then the pages in its middle are
aligned in both, and what lies before and behind them, less than a page each, is written through the cache.

    a block of 20,000 bytes at offset 5,000, made at an address ≡ 5,000 (mod 4,096)
    5,000 … 8,191   through the cache: shares its page with what is before it
    8,192 … 24,575  directly, 4 pages
    24,576 … 24,999 through the cache

Nothing here makes bytes durable: a direct write may still lie in the disk's own cache, and the file system notes where it is
only with a sync. `worker.py` syncs a file before it journals a block, whichever way it was written.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from ..job import PAGE
from ..job_check import PARTIAL
from ..work_units import Block
from .blocks import block_runs
from .durable import UNKNOWN

LEAST = 1 << 20
"""Bytes; a direct write waits for the disk, so shorter ones are left to the cache, which gathers them."""
_MOST_OPEN = 16  # output files; a worker writes them one after the other


class OutputFiles:
    """Output files that are not finished, opened when they are needed, a few at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, _OutputFile] = {}

    def __enter__(self) -> OutputFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()

    def write(self, block: Block, raw: memoryview) -> None:
        """Write the bytes of a block; they may be changed again when this returns."""
        name = block.move.target.file
        if name not in self._open:
            if len(self._open) >= _MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[name] = _OutputFile(self._folder / f"{name}{PARTIAL}")
        for offset, part in block_runs(block, raw):
            self._open[name].write(part, offset)


class _OutputFile:
    """One file, opened twice: through the cache, and past it as soon as that is worth it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cached = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._direct: int | None = None
        self._refused = False

    def close(self) -> None:
        for descriptor in (self._cached, self._direct):
            if descriptor is not None:
                os.close(descriptor)

    def write(self, raw: memoryview, offset: int) -> None:
        head, middle = direct_part(raw, offset)
        if middle:
            write_all(self._cached, raw[:head], offset)
            head += self._write_directly(raw[head : head + middle], offset + head)
            write_all(self._cached, raw[head:], offset + head)
        else:
            write_all(self._cached, raw, offset)

    def _write_directly(self, raw: memoryview, offset: int) -> int:
        """Write whole pages past the cache; returns how many bytes, fewer where the file system does not do it."""
        done = 0
        try:
            if self._direct is None and not self._refused:
                self._direct = os.open(self._path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECT)
            while self._direct is not None and done < len(raw):
                done += os.pwrite(self._direct, raw[done:], offset + done)
        except OSError as error:
            if error.errno not in UNKNOWN:
                raise
            self._refused = True
            if self._direct is not None:
                os.close(self._direct)
                self._direct = None
        return done


def direct_part(raw: memoryview, offset: int) -> tuple[int, int]:
    """Where the bytes begin that can be written directly, and how many there are; none if it is not worth it.

    >>> room = np.empty(3 << 20, np.uint8)
    >>> at = -room.ctypes.data % PAGE + 5000
    >>> direct_part(memoryview(room)[at : at + (2 << 20)], 5000)
    (3192, 2093056)
    >>> direct_part(memoryview(room)[at + 1 : at + 1 + (2 << 20)], 5000)  # an address with another remainder
    (0, 0)
    """
    head = -offset % PAGE
    middle = (len(raw) - head) // PAGE * PAGE
    if middle < max(LEAST, PAGE) or (np.frombuffer(raw, np.uint8).ctypes.data - offset) % PAGE:
        return 0, 0
    return head, middle


def write_all(descriptor: int, raw: memoryview, offset: int) -> None:
    done = 0
    while done < len(raw):
        done += os.pwrite(descriptor, raw[done:], offset + done)
