"""The journal of one worker: what was done is collected, and a thread writes it down group by group.

Where it goes is a sink: a file of the unfinished directory, or small objects of a store. An entry is written only after the
bytes that it names are on disk or in the store, so the journal stays true after a crash. When that fails, nothing is written
any more.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread
from time import monotonic
from typing import Protocol, Self

from ...files.strict import os_errors
from ...storage.location import Url
from ..bytes.durable import append, sync_data
from ..job_check import JOURNAL
from .entries import Ended, Entry, Holds, lines

GROUP_BYTES = 128 << 20
"""Of blocks that are written down together, because a sync or an object for each is slow; a crash repeats one group."""


_SYSTEM = Path("/proc/sys/kernel/random/boot_id")


def system() -> str | None:
    """What distinguishes this start of this machine from every other, if it says so."""
    with suppress(OSError):
        return _SYSTEM.read_text(encoding="ascii").strip() or None
    return None


class Synced(Protocol):
    """A file that was written to."""

    def sync(self) -> None:
        """Bring to disk what was written."""


class Sink(Protocol):
    """Where the journal of one worker lies."""

    seconds: float
    """A group is written after this time although it is small, so that slow work is kept too."""

    def write(self, files: Collection[Synced], raw: bytes) -> None:
        """Bring these output files to disk and then the lines of a group; returns when they are safe."""

    def close(self) -> None: ...


class FileSink:
    """One append-only file with a unique name, so that no two processes write to it.

    It begins with the name of this system if it is locked; see `publish/attempts.py`.
    """

    seconds = 0.25

    def __init__(self, folder: Path, worker: int, workers: int) -> None:
        self.path = folder / f"{_name(worker, workers)}.log"
        with os_errors(self.path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self.descriptor = os.open(self.path, flags, 0o644)
            try:
                append(self.descriptor, lines(_held(self.descriptor)))
            except BaseException:
                os.close(self.descriptor)
                raise

    def write(self, files: Collection[Synced], raw: bytes) -> None:
        for file in files:
            file.sync()
        if raw:
            append(self.descriptor, raw)
            sync_data(self.descriptor)

    def close(self) -> None:
        os.close(self.descriptor)


def _held(descriptor: int) -> list[Entry]:
    """Lock a journal; what it says of that."""
    name = system()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a file system without locks
        return []
    return [] if name is None else [Holds(name)]


class StoreSink:
    """Numbered objects, one for each group: an object cannot be appended to."""

    seconds = 2.0

    def __init__(self, folder: Url, worker: int, workers: int) -> None:
        self._folder, self._name, self._count = folder, _name(worker, workers), 0

    def write(
        self, files: Collection[Synced], raw: bytes
    ) -> None:  # parts are in the store once they are sent
        if raw:
            from ...storage.uploads import put

            put(self._folder / f"{self._name}-{self._count:06d}.log", raw)
            self._count += 1

    def close(self) -> None: ...


def _name(worker: int, workers: int) -> str:
    return f"{JOURNAL}{worker:05d}-of-{workers:05d}-{secrets.token_hex(4)}"


class JournalWriter(Thread):
    """Writes entries while the next blocks are made; a block that ends well also writes that it did.

    Before each group `unchanged` is called with the files of the base that were read for it; if it raises, nothing of the
    group is written.

    >>> import tempfile
    >>> from .journals import read_journals
    >>> from .entries import BlockDone
    >>> with tempfile.TemporaryDirectory() as name:
    ...     with JournalWriter(FileSink(Path(name), 0, 1)) as journal:
    ...         journal.add(BlockDone(0, "a1"), BlockDone(3, "a2"))
    ...     bytes(read_journals(Path(name), 5).units)
    b'\\x01\\x00\\x00\\x01\\x00'
    """

    def __init__(self, sink: Sink, unchanged: Callable[[Collection[str]], None] = lambda read: None) -> None:
        super().__init__(name="mupscale journal", daemon=True)
        self._sink, self._unchanged = sink, unchanged
        self._news = Condition()
        self._files: set[Synced] = set()
        self._read: set[str] = set()
        self._entries: list[Entry] = []
        self._bytes = 0
        self._closing = False
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._news:
            if kind is None:
                self._entries.append(Ended())
            self._closing = True
            self._news.notify()
        self.join()
        self._sink.close()
        if kind is None:
            self._check()

    def add(
        self, *entries: Entry, size: int = 0, file: Synced | None = None, read: Collection[str] = ()
    ) -> None:
        """Something is done: so many bytes, made of these files of the base, were written into a file that is not synced."""
        with self._news:
            self._check()
            self._entries += entries
            self._files |= set() if file is None else {file}
            self._read.update(read)
            self._bytes += size
            if self._bytes >= GROUP_BYTES:
                self._news.notify()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        try:
            while self._write_group():
                pass
        except BaseException as error:
            self._error = error

    def _write_group(self) -> bool:
        """Wait for a group and write it; False when there will be no more."""
        until = monotonic() + self._sink.seconds
        with self._news:
            while not self._closing and self._bytes < GROUP_BYTES and monotonic() < until:
                self._news.wait(until - monotonic())
            files, entries, read, last = self._files, self._entries, self._read, self._closing
            self._files, self._entries, self._read, self._bytes = set(), [], set(), 0
        self._unchanged(read)
        self._sink.write(files, lines(entries))
        return not last
