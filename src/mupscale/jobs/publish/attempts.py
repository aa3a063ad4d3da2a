"""Which output files another attempt may still have open for writing.

An attempt is one run of a worker. Before it opens an output file it makes a journal of its own, whose name says which share it
does, and locks it; the lock is held until its last output file is closed, and only then it may write that it ended well. So an
attempt cannot write any more

- if its journal says that it ended, or
- if it ran on this system, as this machine was started last, and the lock on its journal is free: its process is gone.

Of any other attempt nothing is known: it may have been stopped and go on tomorrow, here or elsewhere.

>>> import tempfile
>>> from ..journal.writer import FileSink
>>> with tempfile.TemporaryDirectory() as name:
...     sink = FileSink(Path(name), 2, 3)
...     before = alive(Path(name))
...     sink.close()
...     before, alive(Path(name))
({(2, 3)}, set())
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from ..job_check import JOURNAL
from ..journal.entries import Ended, Holds, lines
from ..journal.writer import system
from ..work_units import WorkUnits

Share = tuple[int, int]
_NAME = re.compile(rf"{JOURNAL}(\d+)-of-(\d+)-[0-9a-f]+\.log")


def open_elsewhere(folder: Path, units: WorkUnits) -> set[str]:
    """The output files of all attempts that may still write."""
    return {name for share in alive(folder) for name in units.files(*share)}


def alive(folder: Path) -> set[Share]:
    """The shares of attempts that may still write; all of the job for a journal of another name."""
    found = set()
    for path in folder.glob(f"{JOURNAL}*.log"):
        if not _has_ended(path):
            share = _NAME.fullmatch(path.name)
            worker, workers = map(int, share.groups()) if share else (0, 1)
            found.add((worker, workers) if worker < workers else (0, 1))
    return found


def _has_ended(path: Path) -> bool:
    raw = path.read_bytes()
    if lines([Ended()]) in raw:
        return True
    name = system()
    return name is not None and lines([Holds(name)]) in raw and _is_free(path)


def _is_free(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
