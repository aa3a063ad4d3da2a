"""What is at a location: a file, a folder or nothing; the same questions for paths and URLs."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from .location import Location, Url
from .remote import entry, listing


def exists(where: Location) -> bool:
    return _kind(where) is not None if not isinstance(where, Url) else entry(where) is not None


def is_dir(where: Location) -> bool:
    if not isinstance(where, Url):
        return _kind(where) == stat.S_IFDIR
    found = entry(where)
    return found is not None and not found.is_file


def is_file(where: Location) -> bool:
    if not isinstance(where, Url):
        return _kind(where) == stat.S_IFREG
    found = entry(where)
    return found is not None and found.is_file


def _kind(path: Path) -> int | None:
    """What a path, or the link that it is, leads to; None if to nothing. A disk that does not answer is no such answer."""
    try:
        return stat.S_IFMT(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in a path
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link to itself
            return None
        raise


def names_in(where: Location) -> list[str]:
    """The names in a folder, sorted; a store has no folder that is empty."""
    if isinstance(where, Url):
        return [one.name for one in listing(where)]
    return sorted(os.listdir(where))


def sizes_in(where: Location) -> list[tuple[str, int]]:
    """Name and size of everything in a folder."""
    if isinstance(where, Url):
        return [(one.name, one.size) for one in listing(where)]
    return [(one.name, one.stat().st_size) for one in os.scandir(where)]


def has_versions(file: Location) -> bool:
    """Whether a file gets another version whenever it changes: objects of most stores do, files of a disk do not."""
    if not isinstance(file, Url):
        return False
    found = entry(file)
    return found is not None and bool(found.version)


def same_place(one: Location, other: Location) -> bool:
    """Whether two locations are the same, however they are spelled."""
    if isinstance(one, Url) or isinstance(other, Url):
        return one == other
    return one.exists() and other.exists() and os.path.samefile(one, other)
