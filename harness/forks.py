"""Forked processes that may be killed, and what they leave in a folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path


def fork(work: Callable[[], object], group: int = 0) -> int:
    """A process in the group of `group`, or in one of its own, that does `work` and ends; without starting Python anew."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setpgid(0, group)
            work()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.setpgid(child, group or child)
    return child


def wait(processes: Iterable[int]) -> bool:
    """Whether all processes ended well; each is waited for."""
    codes = [os.waitpid(process, 0)[1] for process in processes]
    return not any(codes)


def contents(folder: Path, without: Collection[str] = ()) -> dict[str, bytes]:
    """Every file below a folder with its bytes, by its path from there."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name not in without}
