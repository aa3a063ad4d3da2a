"""A file somewhere, opened to be read at any offset: one of this machine by its descriptor, one of a store by requests.

Knows locations. Does not know what the bytes mean.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import IO, Any, cast

from ..storage.location import Location, Url
from ..storage.pages import RemoteFile, RemoteStream
from .strict import open_regular, os_errors, shorter

_BUFFER = 1 << 14  # bytes that readers of archives get at once; they ask for a few at a time


class LocalFile:
    """A regular file of this machine."""

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor = path, open_regular(path)
        status = os.fstat(self._descriptor)
        self.size = status.st_size
        self.stamp = stamp_of(status)
        """What changes whenever the file does."""

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read(self, offset: int, count: int) -> bytes:
        """The bytes at an offset, fewer at the end of the file."""
        raw, wanted = b"", max(0, min(count, self.size - offset))
        while len(raw) < wanted:  # the system may give fewer
            part = os.pread(self._descriptor, wanted - len(raw), offset + len(raw))
            if not part:
                raise shorter(self._path, offset + len(raw), self.size)
            raw = raw + part if raw else part
        return raw


def stamp_of(status: os.stat_result) -> str:
    """What changes whenever a file of this machine does."""
    return f"{status.st_size}:{status.st_mtime_ns}"


def open_file(where: Location) -> LocalFile | RemoteFile:
    """Open a file to be read at any offset."""
    with os_errors(where):
        return RemoteFile(where) if isinstance(where, Url) else LocalFile(where)


def open_stream(where: Location) -> IO[bytes]:
    """Open a file as a file object, for readers of archives."""
    if not isinstance(where, Url):
        return open(open_regular(where), "rb")
    with os_errors(where):
        return cast(IO[bytes], io.BufferedReader(cast(Any, RemoteStream(RemoteFile(where))), _BUFFER))


def file_size(file: IO[bytes]) -> int:
    """The size of a file object that was opened here, which is then at its beginning."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    return size
