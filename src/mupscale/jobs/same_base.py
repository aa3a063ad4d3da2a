"""Whether every read of the base agrees with every other, and the fingerprints that follow for base and output.

Blocks record what the base held where they read it, grain by grain; stretches record one more read of all of it. Knows
journals and sums. Reads only what no block has used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from urllib.parse import quote

import numpy as np

from ..errors import Fault, MupscaleError
from ..files.strict import raise_few
from .bytes.base_reader import CHANGED, START_AGAIN, decoded, decoded_sums
from .bytes.blocks import Reader
from .bytes.fingerprints import GRAIN, Sums, as_text, fingerprint, total
from .digests import stretch_sums
from .job import Job
from .journal.entries import BaseStamp, Measured, read_lines
from .journal.journals import Journals
from .partial import EARLIER, partial
from .work_units import DIGEST_BYTES, Stretch, WorkUnits


def base_fingerprints(job: Job, units: WorkUnits, done: Journals) -> dict[str, str]:
    """The fingerprint of every base file, of the bytes that blocks have used; raises if two reads disagree.

    With a second read, its sums are those that every use must have had. Without one, uses must agree with each other,
    and grains that no block has used (a long header, tensors that are left out) are read now.
    """
    counts = [-(-file.size // GRAIN) for file in job.sources]
    sums = [np.zeros(count, np.uint64) for count in counts]
    known = [np.zeros(count, bool) for count in counts]
    for number in range(units.blocks, len(units)):
        stretch = units[number]
        assert isinstance(stretch, Stretch)
        first = stretch.offset // GRAIN
        found = decoded_sums(done.digests[number])
        sums[stretch.file][first : first + len(found)] = found
        known[stretch.file][first : first + len(found)] = True
    faults: dict[str, Fault] = {}
    for word in done.used:
        for file, first, used in decoded(word):
            part = slice(first, first + len(used))
            unequal = known[file][part] & (sums[file][part] != used)
            if unequal.any():
                at = (first + int(unequal.argmax())) * GRAIN
                name = job.sources[file].name
                what = f"bytes {at} to {at + GRAIN} were not the same whenever they were read"
                faults.setdefault(name, Fault("job.base_bytes_changed", name, what, START_AGAIN))
            sums[file][part], known[file][part] = used, True
    raise_few(CHANGED, faults.values())
    with Reader(job.base) as reader:
        for file, missing in enumerate(known):
            for grain in np.flatnonzero(~missing).tolist():
                sums[file][grain] = _grain(job, reader, file, grain)[0]
    return {file.name: as_text(total(0, found)) for file, found in zip(job.sources, sums, strict=True)}


def used_by_norms(job: Job, stamps: Mapping[str, str]) -> Iterator[str]:
    """What norms were measured of, as the journals of a job say it of blocks; those of a base with other stamps are left out."""
    files = {quote(file.name, safe=""): number for number, file in enumerate(job.sources)}
    for path in sorted(partial(job.folder).glob(f"{EARLIER}*.log")):
        try:
            entries = list(read_lines(path.read_bytes()))
        except FileNotFoundError:  # another process publishes the output, and has compared them
            continue
        found = {entry.name: entry.stamp for entry in entries if isinstance(entry, BaseStamp)}
        if any(stamps.get(name, stamp) != stamp for name, stamp in found.items()):
            continue
        for entry in entries:
            if isinstance(entry, Measured) and entry.used != "-":
                parts = [part.split(":", 1) for part in entry.used.split(",")]
                yield ",".join(f"{files[file]}:{rest}" for file, rest in parts if file in files) or "-"


def _grain(job: Job, reader: Reader, file: int, grain: int) -> Sums:
    length = min(GRAIN, job.sources[file].size - grain * GRAIN)
    part = Stretch(file, grain * GRAIN // DIGEST_BYTES, grain * GRAIN, length)
    return stretch_sums(reader, job.sources[file].name, part)


def output_fingerprints(job: Job, units: WorkUnits, sums: dict[int, str]) -> dict[str, str]:
    """The fingerprint of every output file, from those of its blocks and of its fixed bytes."""
    found = {file.name: sum(fingerprint(raw, at) for at, raw in file.chunks) for file in job.files}
    for unit in range(units.blocks):
        if unit not in sums:
            raise MupscaleError(
                f"block {unit} has no fingerprint; run the same command again",
                code="job.block_without_fingerprint",
            )
        found[units.file_of(unit)] += int(sums[unit], 16)
    return {name: as_text(value) for name, value in found.items()}
