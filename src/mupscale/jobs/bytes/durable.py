"""Bytes brought to disk on every kind of file system, or a refusal that says why that cannot be done.

Some file systems (FUSE, SMB, object stores that are mounted) have no fdatasync, or cannot sync a directory. The first
falls back to fsync; a directory that cannot be synced is left to the file system, which then keeps names by itself.
A file that cannot be synced at all is refused: after a crash the journal would name blocks that are not there.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ...errors import MupscaleError

UNKNOWN = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)
"""What a file system answers to an operation that it does not have."""


def written(count: int) -> int:
    """How many bytes a write took. None is an error: whoever writes the rest in a loop would never end."""
    if count == 0:
        raise OSError(errno.EIO, "the file system takes none of the bytes that are written")
    return count


def append(descriptor: int, raw: bytes) -> None:
    """Write all of it where the file ends."""
    while raw:
        raw = raw[written(os.write(descriptor, raw)) :]


def sync_data(descriptor: int) -> None:
    """Bring the bytes of a file to disk."""
    try:
        os.fdatasync(descriptor)
    except OSError as error:
        if error.errno not in UNKNOWN:
            raise
        sync_file(descriptor)


def sync_file(descriptor: int) -> None:
    """Bring the bytes of a file and its size to disk."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNKNOWN:
            raise
        raise MupscaleError(
            "the file system of the output cannot bring a file to disk (fsync: "
            f"{error.strerror}), so nothing written there survives a crash; write to another file system and copy "
            "the result",
            code="disk.cannot_sync",
        ) from None


def sync_path(path: Path) -> None:
    """Bring a file, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if path.is_dir():
            try:
                os.fsync(descriptor)
            except OSError as error:
                if error.errno not in UNKNOWN:
                    raise
        else:
            sync_file(descriptor)
    finally:
        os.close(descriptor)
