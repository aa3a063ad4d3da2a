"""What this machine has left."""

from __future__ import annotations

import os
from pathlib import Path


def free_memory() -> int:
    """Bytes that a new process may take without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("MemAvailable"))) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
