"""The identity of the base's files and of the output: cheap digests before the work starts, complete ones at its end.

The ends of a file (a safetensors header, a zip's directory) are digested when a job is made and again by every
worker. Complete fingerprints are those of the bytes that were used. Knows nothing of tensors.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import Fault, MupscaleError
from ..files.opened import LocalFile, open_file, stamp_of
from ..files.places import OutFile
from ..files.strict import os_errors, printable, raise_few, read_regular
from ..storage.location import Location, Url, absolute, location
from ..storage.pages import RemoteFile
from .bytes.base_reader import CHANGED, START_AGAIN
from .bytes.blocks import Reader
from .bytes.fingerprints import Sums, grain_sums
from .job import BLOCK_BYTES, BaseFile, Carried, Job, Move, Text
from .job_check import check_job
from .work_units import Stretch

_END = 1 << 20  # bytes at either end, compared before work starts; the whole file is fingerprinted later
_READ = 4 << 20  # bytes read at a time
_LARGEST_CARRIED = 1 << 30  # bytes; carried files are read whole into memory


def make_job(
    base: Location | str,
    out: Location | str,
    files: Sequence[OutFile],
    moves: Sequence[Move],
    *,
    carried: Sequence[str] = (),
    texts: Sequence[Text] = (),
    block_bytes: int = BLOCK_BYTES,
    about: dict[str, Any] | None = None,
    trust_base: bool = False,
) -> Job:
    """A sound job, with the files of the base that it reads identified."""
    folder = absolute(base)
    check_outside(folder, location(out))
    read = sorted({source.file for move in moves for source in move.sources})
    job = Job(
        base=folder,
        out=absolute(out),
        files=tuple(files),
        moves=tuple(moves),
        sources=tuple(base_file(folder, name) for name in read),
        carried=tuple(_carried(folder, name) for name in carried),
        texts=tuple(texts),
        block_bytes=block_bytes,
        about=dict(about or {}),
        trust_base=trust_base,
    )
    check_job(job)
    return job


def check_outside(base: Location, out: Location) -> None:
    """Raise if the output would lie inside of its own base."""
    above, home = _resolved(absolute(out).parent), _resolved(base)
    if not isinstance(above, Path) or not isinstance(home, Path):
        inside = isinstance(above, Url) and above.is_relative_to(home)
    else:
        inside = above.is_relative_to(home)
    if inside:
        what = f"it lies inside of its own base {printable(str(base))}"
        raise MupscaleError(
            "the result cannot be written there",
            [Fault("job.output_inside_base", str(out), what, "name a directory next to the base")],
        )


def _resolved(where: Location) -> Location:
    return where if isinstance(where, Url) else where.resolve()


def base_file(folder: Location, name: str) -> BaseFile:
    """A file with its size and the digest of its first and last MiB."""
    return stamped_file(folder, name)[0]


def stamped_file(folder: Location, name: str) -> tuple[BaseFile, str]:
    """The same, and what changes whenever the file does."""
    with open_file(folder / name) as file, os_errors(folder / name):
        ends = _known_ends(file) if isinstance(file, RemoteFile) and file.version else _ends(file)
        return BaseFile(name, file.size, ends), file.stamp


def _ends(file: LocalFile | RemoteFile) -> str:
    raw = file.read(0, _END) + file.read(max(0, file.size - _END), _END)
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


@lru_cache(maxsize=4096)
def _known_ends(file: RemoteFile) -> str:
    """What one version of an object holds does not change, so it is read once."""
    return _ends(file)


def check_base(job: Job) -> dict[str, str]:
    """Raise unless the base's files are those the job was made for; returns a stamp of each, its size and time of change for example."""
    return check_sources(job.base, job.sources)


def check_sources(base: Location, sources: Iterable[BaseFile]) -> dict[str, str]:
    """The same, of these files."""
    faults, stamps = [], {}
    for file in sources:
        try:
            found, stamps[file.name] = stamped_file(base, file.name)
        except MupscaleError as error:
            faults.append(
                Fault(
                    error.code,
                    file.name,
                    error.claim,
                    "put it back, or start again in another output directory",
                )
            )
            continue
        if found != file:
            what = f"{found.size} bytes, digest of its ends {found.ends}; the job was made for {file.size}, {file.ends}"
            faults.append(
                Fault(
                    "job.other_base",
                    file.name,
                    what,
                    "put the old file back, or start again in another output directory",
                )
            )
    raise_few("the base is not the one this job was made for", faults)
    return stamps


def check_stamps(before: dict[str, set[str]], now: dict[str, str]) -> None:
    """Raise if a base file has changed since any worker began to read it."""
    raise_few(
        CHANGED,
        [
            Fault(
                "job.base_stamp_changed",
                name,
                f"size and time of change were {', '.join(sorted(before[name]))}, now {stamp}",
                START_AGAIN,
            )
            for name, stamp in now.items()
            if before.get(name, {stamp}) != {stamp}
        ],
    )


def check_unchanged(job: Job, stamps: Mapping[str, str], names: Collection[str]) -> None:
    """Raise if one of these base files has changed since its stamp was taken: cheap, and for a base on this machine."""
    if isinstance(job.base, Path):
        with os_errors(job.base):
            now = {name: stamp_of(os.stat(job.base / name)) for name in names}
        check_stamps({name: {stamps[name]} for name in names}, now)


def stretch_sums(reader: Reader, name: str, stretch: Stretch) -> Sums:
    """The sums of the grains in one stretch of a base file."""
    room = bytearray(min(_READ, stretch.bytes))
    found = []
    for at in range(0, stretch.bytes, _READ):
        part = memoryview(room)[: min(_READ, stretch.bytes - at)]
        reader.read_(name, stretch.offset + at, part)
        found.append(grain_sums(part, stretch.offset + at)[1])
    return np.concatenate(found)


def read_carried(folder: Location, name: str) -> bytes:
    """Read a file that is carried over, such as a tokenizer; files above 1 GiB are refused."""
    return read_regular(folder / name, _LARGEST_CARRIED)


def _carried(folder: Location, name: str) -> Carried:
    raw = read_carried(folder, name)
    return Carried(name, len(raw), hashlib.sha256(raw).hexdigest())
