"""Progress of a job: a bar on a terminal, a periodic log line elsewhere.

Knows: bytes, seconds and the width of a terminal. Knows nothing of what is being written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from shutil import get_terminal_size
from time import monotonic
from typing import TextIO

_BAR_EVERY, _LINE_EVERY = 0.1, 10.0


class Progress:
    """Call it with the bytes done and the bytes to do; close it at the end.

    >>> progress = Progress(sys.stdout)
    >>> progress(0, 4_000_000_000); progress(4_000_000_000, 4_000_000_000); progress.close()   # doctest: +ELLIPSIS
    4.00 of 4.00 GB  100 %  ... GB/s
    """

    def __init__(self, stream: TextIO | None = None, what: str = "") -> None:
        self._stream = sys.stderr if stream is None else stream
        self._what = f"{what}  " if what else ""
        self._terminal = self._stream.isatty()
        self._first: tuple[float, int] | None = None
        self._last = (0, 0)
        self._shown = monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = monotonic()
        if self._first is None:
            self._first = (now, done)
        self._last = (done, total)
        if now - self._shown >= (_BAR_EVERY if self._terminal else _LINE_EVERY):
            self._shown = now
            self._show("\r" if self._terminal else "", "" if self._terminal else "\n")

    def close(self) -> None:
        """Show the final state, and leave the cursor on a new line."""
        if self._first is not None:
            self._show("\r" if self._terminal else "", "\n")

    def _show(self, before: str, after: str) -> None:
        text = self._text()
        if self._terminal:
            columns = get_terminal_size().columns
            text = text[: columns - 1].ljust(columns - 1)
        self._stream.write(f"{before}{text}{after}")
        self._stream.flush()

    def _text(self) -> str:
        assert self._first is not None
        done, total = self._last
        seconds = max(monotonic() - self._first[0], 1e-9)
        rate = (done - self._first[1]) / seconds
        share = done / total if total else 1.0
        parts = [
            f"{self._what}{done / 1e9:.2f} of {total / 1e9:.2f} GB",
            f"{100 * share:.0f} %",
            f"{rate / 1e9:.2f} GB/s",
        ]
        if self._terminal:
            parts.insert(0, "█" * round(24 * share) + "·" * (24 - round(24 * share)))
        if rate > 0 and done < total:
            left = round((total - done) / rate)
            parts.append(f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left")
        return "  ".join(parts)


@contextmanager
def shown_progress(what: str, quiet: bool = False) -> Iterator[Callable[[int, int], None] | None]:
    """A progress callback for a job, shown on standard error until the block ends; None if it is turned off."""
    if quiet:
        yield None
        return
    progress = Progress(what=what)
    try:
        yield progress
    finally:
        progress.close()
