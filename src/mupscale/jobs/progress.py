"""Progress of a job: counted bytes, and a bar on a terminal as tqdm draws it, nothing elsewhere.

Knows: bytes, seconds and the width of a terminal. Knows nothing of what is being written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from shutil import get_terminal_size
from threading import Lock
from time import monotonic
from typing import TextIO

from ..text import clock, size

Report = Callable[[int, int], None]
"""Called with the bytes written so far and the bytes to be written."""
_EVERY = 0.1  # seconds between two drawings, as tqdm's
_EIGHTHS = " ▏▎▍▌▋▊▉█"


class Count:
    """The finished bytes of a share, counted by its threads and reported."""

    def __init__(self, total: int, left: int, report: Report | None) -> None:
        self.total, self.left, self._report = total, left, report
        self._lock = Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.left -= count
            if self._report is not None:
                self._report(self.total - self.left, self.total)


class Progress:
    """Call it with the bytes done and the bytes to do; close it at the end. Nothing is shown off a terminal.

    >>> progress = Progress(sys.stdout)
    >>> progress(0, 4_000_000_000); progress.close()
    """

    def __init__(self, stream: TextIO | None = None, what: str = "") -> None:
        self._stream = sys.stderr if stream is None else stream
        self._what = what
        self._terminal = self._stream.isatty()
        self._first: tuple[float, int] | None = None
        self._last = (0, 0)
        self._shown = monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = monotonic()
        if self._first is None:
            self._first = (now, done)
        self._last = (done, total)
        if self._terminal and now - self._shown >= _EVERY:
            self._shown = now
            self._show("")

    def close(self) -> None:
        """Show the final state, and leave the cursor on a new line."""
        if self._terminal and self._first is not None:
            self._show("\n")

    def _show(self, after: str) -> None:
        assert self._first is not None
        began, start = self._first
        width = get_terminal_size().columns - 1
        line = bar(self._what, start, *self._last, max(monotonic() - began, 1e-9), width)
        self._stream.write(f"\r{line.ljust(width)}{after}")
        self._stream.flush()


def bar(what: str, start: int, done: int, total: int, seconds: float, width: int) -> str:
    """One line as tqdm draws it: share, bar, amounts, time gone and left, rate. The bar takes the room that is left.

    `start` is what was done when the time began, so that a resumed job has the rate of this run.

    >>> print(bar("writing", 0, 300_000, 1_200_000, 2.0, 70))
    writing:  25%|████▎            | 300 kB/1.2 MB [00:02<00:06, 150 kB/s]
    >>> print(bar("writing", 0, 30_000_000_000, 60_000_000_000, 3600.0, 40))
    writing:  50%| [1:00:00<1:00:00]
    """
    share = done / total if total else 1.0
    rate = (done - start) / seconds
    left = clock((total - done) / rate) if rate > 0 else "?"
    head = f"{what}: {100 * share:3.0f}%|"
    tail = f"| {size(done)}/{size(total)} [{clock(seconds)}<{left}, {size(rate)}/s]"
    room = width - len(head) - len(tail)
    if room < 1:
        return f"{head} [{clock(seconds)}<{left}]"[
            :width
        ]  # in a narrow terminal, the time left is what is wanted
    eighths = round(8 * room * share)
    drawn = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
    return f"{head}{drawn.ljust(room)}{tail}"


@contextmanager
def shown_progress(what: str, quiet: bool = False) -> Iterator[Report | None]:
    """A progress callback for a job, shown on standard error until the block ends; None if it is turned off."""
    if quiet:
        yield None
        return
    progress = Progress(what=what)
    try:
        yield progress
    finally:
        progress.close()
