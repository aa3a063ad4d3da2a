"""Calls of the operating system that fail when they are asked to: the n-th of a kind, below one folder or to one port.

`shim.c` is preloaded into a process of its own (`environment`), so it sees the calls of Python and of every library.
There `Shim` counts and fails calls of this process and of those that it forks. glibc's own calls of itself, such as those
behind `fopen`, do not pass through it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.native import library

CALLS = (
    "open", "read", "pread", "write", "pwrite", "fsync", "fdatasync", "rename", "link", "unlink", "mkdir", "rmdir", "stat",
    "fstat", "ftruncate", "close", "listdir", "readdir", "access", "flock", "statvfs", "lseek", "connect", "send", "recv",
)  # fmt: skip
"""The kinds of calls, in the order of `shim.c`."""
SHORT, ZERO = -1, -2
"""A read or write of half of the bytes, and of none."""
_MADE = ("EIO", "ENOSPC", "EINTR")
_SOURCE = Path(__file__).with_name("shim.c")
HOW: dict[str, tuple[str, ...]] = {
    "open": (*_MADE, "EMFILE"), "read": ("EIO", "EINTR", "short", "zero"), "pread": ("EIO", "EINTR", "short", "zero"),
    "write": (*_MADE, "short", "zero"), "pwrite": (*_MADE, "short", "zero"), "fsync": _MADE, "fdatasync": _MADE,
    "rename": _MADE, "link": _MADE, "mkdir": _MADE, "ftruncate": _MADE,
    "connect": ("ECONNREFUSED", "EIO"), "send": ("EIO", "ECONNRESET", "short"), "recv": ("EIO", "ECONNRESET", "short", "zero"),
}  # fmt: skip
"""How calls fail; those that are not named, with EIO."""


_kept: list[ctypes.Structure] = []  # the shim reads what it was given until the process ends


class _Control(ctypes.Structure):
    """The struct of `shim.c`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("armed", "call", "at", "how", "lasting", "port")),
        *((name, ctypes.c_int64) for name in ("fired", "journalled", "unsynced")),
        ("counts", ctypes.c_int64 * len(CALLS)),
        ("folder", ctypes.c_char * 512),
        ("where", ctypes.c_char * 512),
    )


def every_call_fails_once(*options: str) -> dict[str, Any]:
    """What `trials.py` finds: how many faults there were, how runs ended, what failed, what its control failed."""
    command = [sys.executable, "-m", f"{__name__}.trials", *options]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def environment() -> dict[str, str]:
    """The variables under which a new process has the shim; compiles it, or raises `NotBuiltError`."""
    made = library(_SOURCE, (), ("-x", "c", "-O1", "-fPIC", "-shared"), ("-ldl",))
    return {**os.environ, "LD_PRELOAD": str(made)}


class Shim:
    """The shim of this process: what it does is decided before a fork and holds in all processes forked after it."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self._control = _Control.from_buffer(mmap.mmap(-1, ctypes.sizeof(_Control)))
        self._control.folder, self._control.port = str(folder).encode(), port
        _kept.append(self._control)
        ctypes.CDLL(None).shim_use(ctypes.c_void_p(ctypes.addressof(self._control)))
        self.stop()

    def fail(self, call: str, at: int, how: str, lasting: int = 0) -> None:
        """From now on the call number `at` of a kind fails; with 1 all after it, with 2 every call after it of any kind."""
        control = self._control
        control.call, control.at, control.lasting = CALLS.index(call), at, lasting
        control.how = {"short": SHORT, "zero": ZERO}.get(how) or getattr(errno, how)
        self.count()

    def count(self) -> None:
        """Begin to count."""
        control = self._control
        control.fired = control.journalled = control.unsynced = 0
        control.counts[:] = [0] * len(CALLS)
        control.armed = 1

    def stop(self) -> None:
        """Let every call pass from now on, uncounted."""
        self._control.armed, self._control.call, self._control.lasting = 0, -1, 0

    @property
    def counts(self) -> dict[str, int]:
        """How many calls of each kind there were."""
        return dict(zip(CALLS, self._control.counts, strict=True))

    @property
    def fired(self) -> int:
        """How many calls failed."""
        return int(self._control.fired)

    @property
    def where(self) -> str:
        """The file of the first call that failed."""
        return Path(os.fsdecode(self._control.where)).name

    @property
    def journalled(self) -> int:
        """How often a process wrote to a journal, or published, after one of its syncs had failed."""
        return int(self._control.journalled)

    @property
    def unsynced(self) -> int:
        """Descriptors that were closed with bytes that were not synced through them."""
        return int(self._control.unsynced)
