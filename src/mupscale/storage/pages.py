"""Objects of a store read at any offset: pages that were read lately are kept, and shared by all threads.

A checkpoint is read in pieces that meet: the end of one and the beginning of the next lie in one page, small tensors lie
side by side, headers are read again to see whether a file changed. With pages, each byte is requested about once.
Knows: offsets. Does not know what the bytes mean.

A read of bytes 100,000 to 300,000 needs pages 1 to 4. If another thread has asked for page 1, this one requests 2 to 4 and
waits for 1. If page 1 was there, the read continues where another ended, and pages up to a MiB are requested at once.
"""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Sequence
from secrets import token_hex
from threading import Condition
from typing import Any

from ..errors import MupscaleError
from .location import Url
from .remote import Entry, entry, fetch

PAGE = 1 << 16
"""Bytes; as large as what fingerprints are taken of, so that reads widened to those are whole pages."""
KEPT = (64 << 20) // PAGE
"""Pages that a process keeps: a few blocks for each of several threads."""
_AHEAD = (
    1 << 20
) // PAGE  # pages requested at least where reading continues: a request costs as much as a MiB
_MOST = (8 << 20) // PAGE  # pages of one request, which has to be answered in time


class _Pages:
    """The pages of all objects that were read lately."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str, int], memoryview] = OrderedDict()
        self._requested: set[tuple[str, str, int]] = set()
        self._news = Condition()

    def get(self, file: RemoteFile, first: int, last: int) -> list[memoryview]:
        """Pages `first` to `last`, the end not included."""
        found: dict[int, memoryview] = {}
        while True:
            with self._news:
                for page in range(first, last):
                    if page not in found and (kept := self._kept.get(file.key(page))) is not None:
                        self._kept.move_to_end(file.key(page))
                        found[page] = kept
                if len(found) == last - first:
                    return [found[page] for page in range(first, last)]
                start, end = self._claim(file, found, first, last)
                if start == end:
                    self._news.wait()
                    continue
            self._fetch(file, start, end)

    def _claim(
        self, file: RemoteFile, found: dict[int, memoryview], first: int, last: int
    ) -> tuple[int, int]:
        """The next pages to request, marked as requested; none if all that are missing are requested already."""

        def known(page: int) -> bool:
            return page in found or file.key(page) in self._requested or file.key(page) in self._kept

        start = next((page for page in range(first, last) if not known(page)), last)
        if start == last:
            return last, last
        goes_on = start > 0 and known(start - 1)
        most = min(max(last, start + _AHEAD) if goes_on else last, start + _MOST, file.pages)
        end = start
        while end < most and not known(end):
            self._requested.add(file.key(end))
            end += 1
        return start, end

    def _fetch(self, file: RemoteFile, start: int, end: int) -> None:
        keys = [file.key(page) for page in range(start, end)]
        try:
            until = min(end * PAGE, file.size)
            raw = memoryview(fetch(file.url, file.version, start * PAGE, until))
            if len(raw) != until - start * PAGE:
                raise MupscaleError(
                    f"{file.url} gave {len(raw)} bytes at byte {start * PAGE}, expected {until - start * PAGE}: it changed "
                    "while it was read",
                    code="file.changed_while_read",
                )
            with self._news:
                for number, key in enumerate(keys):
                    self._kept[key] = raw[number * PAGE : (number + 1) * PAGE]
                while len(self._kept) > max(KEPT, len(keys)):
                    self._kept.popitem(last=False)
        finally:
            with self._news:
                self._requested.difference_update(keys)
                self._news.notify_all()


_pages = _Pages()


class RemoteFile:
    """An object, as it was when it was opened."""

    def __init__(self, url: Url, known: Entry | None = None) -> None:
        """`known` is what the store says about the object, where it was looked up before."""
        known = known or entry(url)
        if known is None or not known.is_file:
            raise MupscaleError(f"{url}: the store has no such file", code="store.no_such_file")
        self.url, self.size, self.version = url, known.size, known.version
        self.pages = -(-self.size // PAGE)
        self._known_as = (
            self.stamp if self.version else token_hex(8)
        )  # without versions, no two opened files share pages

    def __enter__(self) -> RemoteFile:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteFile) and self.key(0) == other.key(0)

    def __hash__(self) -> int:
        return hash(self.key(0))

    @property
    def stamp(self) -> str:
        """What changes whenever the object does."""
        return f"{self.size}:{''.join(self.version.split())}"

    def key(self, page: int) -> tuple[str, str, int]:
        return str(self.url), self._known_as, page

    def read(self, offset: int, count: int) -> bytes:
        """The bytes at an offset, fewer at the end of the file."""
        room = bytearray(max(0, min(count, self.size - offset)))
        self.read_into_(offset, [memoryview(room)])
        return bytes(room)

    def read_into_(self, offset: int, rooms: Sequence[memoryview]) -> int:
        """Fill rooms, one after the other, with the bytes at an offset; returns how many there were."""
        done = 0
        for room in rooms:
            at, count = 0, min(len(room), self.size - offset - done)
            while at < count:
                start = offset + done + at
                last = min(-(-(start + count - at) // PAGE), start // PAGE + _MOST)
                for page in _pages.get(self, start // PAGE, last):
                    skipped = (offset + done + at) % PAGE
                    part = page[skipped : skipped + count - at]
                    room[at : at + len(part)] = part
                    at += len(part)
            done += max(0, at)
        return done


class RemoteStream(io.RawIOBase):
    """An object as a file object, for readers of archives."""

    def __init__(self, file: RemoteFile) -> None:
        super().__init__()
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, room: Any) -> int:
        count = self._file.read_into_(self._at, [memoryview(room).cast("B")])
        self._at += count
        return count
