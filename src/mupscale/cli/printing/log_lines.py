"""Log records of the library as lines on the terminal. The library logs; only the command line prints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Lines(logging.Handler):
    def __init__(self, say: Callable[[str], object]) -> None:
        super().__init__()
        self.say = say

    def emit(self, record: logging.LogRecord) -> None:
        self.say(record.getMessage())  # errors propagate: a closed pipe ends the command


@contextmanager
def log_lines(say: Callable[[str], object], level: int = logging.INFO) -> Iterator[None]:
    """Pass every message that the library logs at this level or above to `say`, as long as the block runs.

    >>> with log_lines(print):
    ...     logging.getLogger("mupscale.studies").info("loss %g", 0.5)
    loss 0.5
    """
    logger, handler = logging.getLogger("mupscale"), _Lines(say)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
