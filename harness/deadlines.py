"""A deadline for a piece of a test: what waits longer fails with the line where it waited, instead of stopping the suite."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise an AssertionError inside the block once `seconds` have passed. Main thread and POSIX only."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise AssertionError(f"not done after {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, end)
    outer, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if outer:  # a deadline around this one continues, less the time spent here
            signal.setitimer(signal.ITIMER_REAL, max(outer - (seconds - left), 0.001))
