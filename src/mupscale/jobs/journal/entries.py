"""What workers write down about a job: one entry a line, each line with its own checksum.

    line     = checksum " " entry "\\n"        16 hex digits of blake2b of the entry
    entry    = "b" unit fingerprint used      a block is written; `used` is what the base held where it was read
             | "d" unit sums                  a stretch of the base was read once more
             | "s" stamp name                 a file of the base had this size and time of change when it was read
             | "p" part upload etag           a part of a file is in the store, under this name
             | "h" system "-"                 the worker runs on this system, and holds a lock on its journal while it may write
             | "e" "0" "-"                    the worker ended well, and had closed its output files before it said so
             | "m" used statistic values name a norm or mean of a tensor; the values as hexadecimal floats, `used` as for "b"

Words are separated by one space; the last one of "s" and of "m" may hold spaces. A line counts only if it is
complete, so a crash can only shorten a journal, never make it wrong. Entries of any other kind are passed over. Files and
objects written by earlier versions have the same lines, but for norms, which were bound to no bytes and are measured again.
Does not know where lines are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class BlockDone:
    """A block was written."""

    unit: int
    fingerprint: str
    used: str = "-"
    """The sums of the base's grains that it was made of (`bytes/base_reader.py`)."""


@dataclass(frozen=True, slots=True)
class StretchRead:
    """A stretch of the base was read once more."""

    unit: int
    sums: str


@dataclass(frozen=True, slots=True)
class BaseStamp:
    """What changes whenever a file of the base does, as a worker found it before it read the file."""

    name: str
    stamp: str


@dataclass(frozen=True, slots=True)
class PartSent:
    """A part of an output file is in the store."""

    part: int
    upload: str
    etag: str


@dataclass(frozen=True, slots=True)
class Holds:
    """The worker holds a lock on this journal as long as it has an output file open."""

    system: str
    """What distinguishes one start of one machine from every other."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The worker ended well, and had closed its output files before it said so."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A statistic of a tensor of the base."""

    statistic: str
    values: tuple[float, ...]
    name: str
    used: str = "-"
    """The sums of the base's grains that it was measured of; files by name, because no job numbers them yet."""


Entry = BlockDone | StretchRead | BaseStamp | PartSent | Holds | Ended | Measured


def lines(entries: Iterable[Entry]) -> bytes:
    """Entries as a journal holds them.

    >>> entries = [BaseStamp("a b.safetensors", "12-34"), BlockDone(3, "a1"), Measured("norm", (0.1, 2.0), "w"), Ended()]
    >>> print(lines(entries).decode(), end="")
    3fbdc3ab456359d2 s 12-34 a b.safetensors
    a6929d4afa4267f1 b 3 a1 -
    4b5dfec13e414db2 m - norm 0x1.999999999999ap-4,0x1.0000000000000p+1 w
    9199c9d790b6e327 e 0 -
    >>> list(read_lines(lines(entries))) == entries
    True
    """
    return b"".join(_line(_words(entry)) for entry in entries)


def read_lines(raw: bytes) -> Iterator[Entry]:
    """The complete entries of a journal."""
    for line in raw.split(b"\n"):
        check, _, words = line.partition(b" ")
        if words and check == _checksum(words):
            with suppress(ValueError):
                yield _entry(words.decode())


def _words(entry: Entry) -> str:
    match entry:
        case BlockDone(unit, fingerprint, used):
            return f"b {unit} {fingerprint} {used}"
        case StretchRead(unit, sums):
            return f"d {unit} {sums}"
        case BaseStamp(name, stamp):
            return f"s {stamp} {name}"
        case PartSent(part, upload, etag):
            return f"p {part} {upload} {etag}"
        case Holds(system):
            return f"h {system} -"
        case Ended():
            return "e 0 -"
        case Measured(statistic, values, name, used):
            return f"m {used} {statistic} {','.join(value.hex() for value in values)} {name}"


def _entry(words: str) -> Entry:
    """What a line says; a ValueError if it is of another kind."""
    kind, first, rest = words.split(" ", 2)
    match kind:
        case "b":
            fingerprint, used = rest.split(" ")
            return BlockDone(int(first), fingerprint, used)
        case "d":
            return StretchRead(int(first), rest)
        case "s":
            return BaseStamp(rest, first)
        case "p":
            upload, etag = rest.split(" ")
            return PartSent(int(first), upload, etag)
        case "h":
            return Holds(first)
        case "e":
            return Ended()
        case "m":
            statistic, values, name = rest.split(" ", 2)
            return Measured(statistic, tuple(map(float.fromhex, values.split(","))), name, first)
        case _:
            raise ValueError(kind)


def _line(words: str) -> bytes:
    raw = words.encode()
    return _checksum(raw) + b" " + raw + b"\n"


def _checksum(raw: bytes) -> bytes:
    return blake2b(raw, digest_size=8, person=b"mupscale journal").hexdigest().encode()
