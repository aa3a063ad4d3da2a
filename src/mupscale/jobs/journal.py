"""The record of finished units on disk: one append-only file per worker, every line with its own checksum.

A line counts only if it is complete, so a crash can only shorten a journal, never make it wrong. Units of all
journals count, no matter which worker wrote them. Does not know what a unit is.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from ..files.strict import os_errors

_PATTERN = "journal-*.log"


@dataclass
class Done:
    """Everything the journals of a job say."""

    units: bytearray
    """One byte per unit: 1 when it is done."""
    digests: dict[int, str] = field(default_factory=dict)
    """Unit number -> digest, for units that are digests."""
    stamps: dict[str, set[str]] = field(default_factory=dict)
    """Base file -> every size and time of change under which a worker has read it."""

    @property
    def all(self) -> bool:
        return 0 not in self.units


class Journal:
    """The journal of one worker, with a unique file name, so that no two processes write to one file."""

    def __init__(self, folder: Path, worker: int, workers: int) -> None:
        self.path = folder / f"journal-{worker:05d}-of-{workers:05d}-{secrets.token_hex(4)}.log"
        with os_errors(self.path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o644)

    def units(self, units: Iterable[int]) -> None:
        """Record that units are done; returns after the record is synced to disk."""
        self._append([f"u {first} {last}" for first, last in _ranges(sorted(units))])

    def digests(self, digests: dict[int, str]) -> None:
        self._append([f"d {unit} {digest}" for unit, digest in digests.items()])

    def stamps(self, stamps: dict[str, str]) -> None:
        self._append([f"s {stamp} {name}" for name, stamp in stamps.items()])

    def close(self) -> None:
        os.close(self._descriptor)

    def _append(self, entries: Sequence[str]) -> None:
        if not entries:
            return
        raw = b"".join(_line(entry) for entry in entries)
        while raw:
            raw = raw[os.write(self._descriptor, raw) :]
        os.fdatasync(self._descriptor)


def read_journals(folder: Path, units: int) -> Done:
    """What all workers together have done so far.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     Journal(Path(name), 0, 1).units([0, 1, 3])
    ...     bytes(read_journals(Path(name), 5).units)
    b'\\x01\\x01\\x00\\x01\\x00'
    """
    done = Done(bytearray(units))
    for path in sorted(folder.glob(_PATTERN)):
        try:
            raw = path.read_bytes()
        except FileNotFoundError:  # another worker has finished the job and cleared up
            continue
        for line in raw.split(b"\n"):
            entry = _checked(line)
            if entry is not None:
                _note(done, entry)
    return done


def _note(done: Done, entry: str) -> None:
    kind, first, rest = entry.split(" ", 2)
    if kind == "u" and 0 <= int(first) <= int(rest) < len(done.units):
        done.units[int(first) : int(rest) + 1] = b"\x01" * (int(rest) + 1 - int(first))
    elif kind == "d" and 0 <= int(first) < len(done.units):
        done.digests[int(first)] = rest
        done.units[int(first)] = 1
    elif kind == "s":
        done.stamps.setdefault(rest, set()).add(first)


def _line(entry: str) -> bytes:
    raw = entry.encode()
    return _check(raw) + b" " + raw + b"\n"


def _check(raw: bytes) -> bytes:
    return blake2b(raw, digest_size=8, person=b"mupscale journal").hexdigest().encode()


def _checked(line: bytes) -> str | None:
    check, _, raw = line.partition(b" ")
    return raw.decode() if raw and check == _check(raw) else None


def _ranges(units: Sequence[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for unit in units:
        if found and found[-1][1] == unit - 1:
            found[-1] = (found[-1][0], unit)
        else:
            found.append((unit, unit))
    return found
