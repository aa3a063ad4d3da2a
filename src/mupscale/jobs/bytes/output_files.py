"""The files of an output, into which blocks are written: past the page cache where the file system can do that.

Copying a block into the page cache costs more CPU time than making it. With O_DIRECT the disk takes the bytes from
where they were made, in whole pages: the address of the bytes, their offset in the file and their number must be multiples of a page. So a
block is made at an address that leaves the same remainder as its offset (`BlockMaker.room`); then the pages in its middle are
aligned in both, and what lies before and behind them, less than a page each, is written through the cache.

    a block of 20,000 bytes at offset 5,000, made at an address ≡ 5,000 (mod 4,096)
    5,000 … 8,191   through the cache: shares its page with what is before it
    8,192 … 24,575  directly, 4 pages
    24,576 … 24,999 through the cache

Nothing is durable before a sync: a direct write may still lie in the disk's own cache, and the file system notes where it is
only then. A file is synced before its blocks are journalled, through the descriptor that wrote them: an error of writing
back is reported once to every descriptor that was open by then, and to no later one. After such an error a file is never
taken for synced again.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from threading import Lock

import numpy as np

from ..job import PAGE
from ..job_check import PARTIAL
from ..work_units import Block
from .blocks import block_runs
from .durable import UNKNOWN, sync_data, written

LEAST = 1 << 20
"""Bytes; a direct write waits for the disk, so shorter ones are left to the cache, which gathers them."""
_MOST_OPEN = 16  # output files; a worker writes them one after the other


class OutputFiles:
    """Output files that are not finished, opened when they are needed, a few at a time.

    A file that has its final name already is left alone: whoever gave it that name saw all of its blocks in journals, and it is
    read back before it is published.
    `lock` is a descriptor of a locked file. The lock is held until the last of the output files is closed.
    """

    def __init__(self, folder: Path, lock: int | None = None) -> None:
        self._folder = folder
        self._lock = None if lock is None else os.dup(lock)
        self._open: dict[str, OutputFile] = {}

    def __enter__(self) -> OutputFiles:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as last:
            if self._lock is not None:
                last.callback(os.close, self._lock)
            for file in self._open.values():
                last.callback(file.close)

    def write(self, block: Block, raw: memoryview) -> None:
        """Write the bytes of a block; they may be changed again when this returns."""
        file = self.file(block)
        if file is not None:
            for offset, part in block_runs(block, raw):
                file.write(part, offset)

    def file(self, block: Block) -> OutputFile | None:
        """The file that a block belongs to, which its writer syncs; None if it has its final name."""
        name = block.move.target.file
        if name not in self._open:
            if len(self._open) >= _MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            try:
                self._open[name] = OutputFile(self._folder / f"{name}{PARTIAL}")
            except FileNotFoundError:
                if os.path.lexists(self._folder / name):
                    return None
                raise
        return self._open[name]


class OutputFile:
    """One file, opened twice: through the cache, and past it as soon as that is worth it. Another thread may sync it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cached = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._direct: int | None = None
        self._refused = False
        self._syncing = Lock()
        self._unsynced = False
        self._error: BaseException | None = None

    def close(self) -> None:
        """Sync and close."""
        with ExitStack() as last:
            for descriptor in (self._cached, self._direct):
                if descriptor is not None:
                    last.callback(os.close, descriptor)
            self.sync()

    def sync(self) -> None:
        """Bring to disk what was written; fails for ever once it has failed. A closed file has been synced."""
        with self._syncing:
            if self._error is not None:
                raise self._error
            if self._unsynced:
                self._unsynced = False
                try:
                    sync_data(self._cached)
                except BaseException as error:
                    self._error = error
                    raise

    def write(self, raw: memoryview, offset: int) -> None:
        self._write(raw, offset)
        self._unsynced = True  # after the bytes: a sync that runs meanwhile may leave them out

    def _write(self, raw: memoryview, offset: int) -> None:
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
                done += written(os.pwrite(self._direct, raw[done:], offset + done))
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
        done += written(os.pwrite(descriptor, raw[done:], offset + done))
