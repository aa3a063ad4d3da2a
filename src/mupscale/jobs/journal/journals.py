"""The record of finished units on disk: one append-only file per worker, every line with its own checksum.

A line counts only if it is complete, so a crash can only shorten a journal, never make it wrong. Units of all
journals count, no matter which worker wrote them. Does not know what a unit is.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from ...files.strict import os_errors
from ..bytes.durable import sync_data

_PATTERN = "journal-*.log"


@dataclass
class Journals:
    """Everything the journals of a job say."""

    units: bytearray
    """One byte per unit: 1 when it is done."""
    settled: bytearray
    """One byte per unit: 1 when a worker that ended well has recorded it."""
    sums: dict[int, str] = field(default_factory=dict)
    """Unit number -> fingerprint of its bytes, for units that are blocks."""
    used: list[str] = field(default_factory=list)
    """What the base held where blocks have read it, an entry for each block."""
    digests: dict[int, str] = field(default_factory=dict)
    """Unit number -> sums, for units that are stretches of the base."""
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

    def blocks(self, blocks: Mapping[int, tuple[str, str]]) -> None:
        """Record blocks that are done, each with its fingerprint and the sums of the base that it used.

        Returns after the record is synced to disk.
        """
        self._append([f"b {unit} {found} {used}" for unit, (found, used) in blocks.items()])

    def digests(self, digests: dict[int, str]) -> None:
        self._append([f"d {unit} {digest}" for unit, digest in digests.items()])

    def stamps(self, stamps: dict[str, str]) -> None:
        self._append([f"s {stamp} {name}" for name, stamp in stamps.items()])

    def end(self) -> None:
        """Record that the worker ended well: everything above was synced, and needs no second look."""
        self._append(["e 0 -"])

    def close(self) -> None:
        os.close(self._descriptor)

    def _append(self, entries: Sequence[str]) -> None:
        if not entries:
            return
        raw = b"".join(line(entry) for entry in entries)
        while raw:
            raw = raw[os.write(self._descriptor, raw) :]
        sync_data(self._descriptor)


def read_journals(folder: Path, units: int) -> Journals:
    """What all workers together have done so far.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     Journal(Path(name), 0, 1).blocks({0: ("a1", "-"), 3: ("a2", "-")})
    ...     bytes(read_journals(Path(name), 5).units)
    b'\\x01\\x00\\x00\\x01\\x00'
    """
    done = Journals(bytearray(units), bytearray(units))
    for path in sorted(folder.glob(_PATTERN)):
        try:
            raw = path.read_bytes()
        except FileNotFoundError:  # another worker has finished the job and cleared up
            continue
        note(done, entries_of(raw))
    return done


def entries_of(raw: bytes) -> list[str]:
    """The complete entries of a journal."""
    return [entry for one in raw.split(b"\n") if (entry := checked(one)) is not None]


def note(done: Journals, entries: Sequence[str]) -> None:
    """Add what a journal says."""
    ended = any(entry.startswith("e ") for entry in entries)
    for entry in entries:
        _note(done, entry, ended)


def _note(done: Journals, entry: str, ended: bool) -> None:
    kind, first, rest = entry.split(" ", 2)
    if kind == "s":
        done.stamps.setdefault(rest, set()).add(first)
    elif kind in ("b", "d") and 0 <= int(first) < len(done.units):
        unit = int(first)
        done.units[unit] = 1
        done.settled[unit] |= ended
        if kind == "d":
            done.digests[unit] = rest
        else:
            done.sums[unit], used = rest.split(" ", 1)
            done.used.append(used)


def line(entry: str) -> bytes:
    """An entry with its checksum, as it is appended to a journal."""
    raw = entry.encode()
    return _check(raw) + b" " + raw + b"\n"


def _check(raw: bytes) -> bytes:
    return blake2b(raw, digest_size=8, person=b"mupscale journal").hexdigest().encode()


def checked(one: bytes) -> str | None:
    """The entry of a line that is complete; None of any other."""
    check, _, raw = one.partition(b" ")
    return raw.decode() if raw and check == _check(raw) else None
