"""What this machine has left, and how fast its disk is."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

_PROBE = 64 << 20  # bytes written to measure the disk


def free_memory() -> int:
    """Bytes that a new process may take without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("MemAvailable"))) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def disk_speed(where: Path) -> float:
    """Write speed for a new file here in bytes per second, fsync included."""
    block = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=where) as file:
            started = time.perf_counter()
            for _ in range(_PROBE >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return _PROBE / (time.perf_counter() - started)
    except OSError:
        return 5e8  # a folder that cannot be written to: the speed of a plain SSD
