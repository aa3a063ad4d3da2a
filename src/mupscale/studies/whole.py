"""Files that are written whole or not at all: several workers may write one at once, while others read it."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file and its folder; a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex}")
    unfinished.write_bytes(data)
    unfinished.replace(path)
