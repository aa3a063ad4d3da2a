"""What the journals of a job say together: which units are done, and with what.

Units of all journals count, no matter which worker wrote them. Does not know what a unit is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from ...files.strict import read_regular
from ...storage.location import Location, Url
from ...storage.looking import names_in
from ..job_check import JOURNAL
from .entries import BaseStamp, BlockDone, Entry, PartSent, StretchRead, read_lines

_LONGEST = 1 << 30  # bytes of a journal; bounds what a foreign object can fill memory with


@dataclass
class Journals:
    """Everything the journals of a job say."""

    units: bytearray
    """One byte per unit: 1 when it is done."""
    sums: dict[int, str] = field(default_factory=dict)
    """Unit number -> fingerprint of its bytes, for units that are blocks."""
    used: list[str] = field(default_factory=list)
    """What the base held where blocks have read it, an entry for each block."""
    digests: dict[int, str] = field(default_factory=dict)
    """Unit number -> sums, for units that are stretches of the base."""
    stamps: dict[str, set[str]] = field(default_factory=dict)
    """Base file -> every size and time of change under which a worker has read it."""
    parts: dict[int, dict[str, set[str]]] = field(default_factory=dict)
    """Part of a file -> upload -> its names in the store, which may give the same bytes another one each time."""

    @property
    def all(self) -> bool:
        return 0 not in self.units

    def note(self, entries: Collection[Entry]) -> None:
        """Add what one journal says."""
        for entry in entries:
            match entry:
                case BaseStamp(name, stamp):
                    self.stamps.setdefault(name, set()).add(stamp)
                case PartSent(part, upload, etag):
                    self.parts.setdefault(part, {}).setdefault(upload, set()).add(etag)
                case BlockDone(unit, found, used) if 0 <= unit < len(self.units):
                    self.units[unit] = 1
                    self.sums[unit] = found
                    self.used.append(used)
                case StretchRead(unit, sums) if 0 <= unit < len(self.units):
                    self.units[unit] = 1
                    self.digests[unit] = sums


def read_journals(folder: Location, units: int) -> Journals:
    """What all workers together have done so far."""
    done = Journals(bytearray(units))
    for raw in _stored(folder):
        done.note(list(read_lines(raw)))
    return done


def _stored(folder: Location) -> Iterator[bytes]:
    if isinstance(folder, Url):
        names = [name for name in names_in(folder) if name.startswith(JOURNAL)]
        yield from (read_regular(folder / name, _LONGEST) for name in names)
        return
    for path in sorted(folder.glob(f"{JOURNAL}*.log")):
        try:
            yield path.read_bytes()
        except FileNotFoundError:  # another worker has finished the job and cleared up
            continue
