"""Fingerprints of the base's files: cheap ones before the work starts, complete ones spread over the workers.

The ends of a file (a safetensors header, a zip's directory) are digested when a job is made and again by every
worker. The complete file is digested once, in stretches, by the workers. Knows nothing of tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import Fault, MupscaleError
from ..files.places import OutFile
from ..files.strict import open_regular, os_errors, raise_few, read_regular
from .blocks import Reader
from .job import BLOCK_BYTES, BaseFile, Carried, Job, Move, Text
from .job_check import check_job
from .work_units import DIGEST_BYTES, Stretch

_END = 1 << 20  # bytes at either end, compared before work starts; the whole file is fingerprinted later
_READ = 4 << 20  # bytes read at a time
_LARGEST_CARRIED = 1 << 30  # bytes; carried files are read whole into memory
_WORDS = 1 << 17  # of 64 bits, a MiB
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
ALGORITHM = f"mupscale fingerprint 1, of every {DIGEST_BYTES >> 20} MiB"


def make_job(
    base: Path | str,
    out: Path | str,
    files: Sequence[OutFile],
    moves: Sequence[Move],
    *,
    carried: Sequence[str] = (),
    texts: Sequence[Text] = (),
    block_bytes: int = BLOCK_BYTES,
    about: dict[str, Any] | None = None,
) -> Job:
    """A sound job, with the files of the base that it reads identified."""
    folder = Path(os.path.abspath(base))
    read = sorted({source.file for move in moves for source in move.sources})
    job = Job(
        base=folder,
        out=Path(os.path.abspath(out)),
        files=tuple(files),
        moves=tuple(moves),
        sources=tuple(base_file(folder, name) for name in read),
        carried=tuple(_carried(folder, name) for name in carried),
        texts=tuple(texts),
        block_bytes=block_bytes,
        about=dict(about or {}),
    )
    check_job(job)
    return job


def base_file(folder: Path, name: str) -> BaseFile:
    """A file with its size and the digest of its first and last MiB."""
    descriptor = open_regular(folder / name)
    try:
        with os_errors(folder / name):
            size = os.fstat(descriptor).st_size
            ends = os.pread(descriptor, _END, 0) + os.pread(descriptor, _END, max(0, size - _END))
    finally:
        os.close(descriptor)
    return BaseFile(name, size, hashlib.blake2b(ends, digest_size=16).hexdigest())


def check_base(job: Job) -> dict[str, str]:
    """Raise unless the base's files are those the job was made for; returns size and modification time of each."""
    faults, stamps = [], {}
    for file in job.sources:
        try:
            found = base_file(job.base, file.name)
            status = os.stat(job.base / file.name)
        except (MupscaleError, OSError) as error:
            what = error.claim if isinstance(error, MupscaleError) else str(error)
            faults.append(Fault(file.name, what, "put it back, or start again in another output directory"))
            continue
        if found != file:
            what = f"{found.size} bytes, digest of its ends {found.ends}; the job was made for {file.size}, {file.ends}"
            faults.append(
                Fault(file.name, what, "put the old file back, or start again in another output directory")
            )
        stamps[file.name] = f"{status.st_size}:{status.st_mtime_ns}"
    raise_few("the base is not the one this job was made for", faults)
    return stamps


def check_stamps(before: dict[str, set[str]], now: dict[str, str]) -> None:
    """Raise if a base file has changed since any worker began to read it."""
    raise_few(
        "the base changed while the job ran, so the output may mix two versions of the base",
        [
            Fault(
                name,
                f"size and time of change were {', '.join(sorted(before[name]))}, now {stamp}",
                "remove the .partial directory and start again",
            )
            for name, stamp in now.items()
            if before.get(name, {stamp}) != {stamp}
        ],
    )


def digest_stretch(reader: Reader, name: str, stretch: Stretch) -> str:
    """The fingerprint of one stretch of a base file, several times as fast as a cryptographic one.

    Every MiB becomes the sum, modulo 2^64, of its 32-bit words times fixed odd numbers, and the sums are digested. A
    single changed word is always detected; any other change is missed with a probability of about 2^-32. It detects
    accidents, not forgery.
    """
    digest, room = hashlib.blake2b(digest_size=32), np.empty(-(-min(_READ, stretch.bytes) // 8), np.uint64)
    raw = memoryview(room.view(np.uint8))  # type: ignore[arg-type]
    for at in range(0, stretch.bytes, _READ):
        length = min(_READ, stretch.bytes - at)
        count = -(-length // 8)
        room[count - 1] = 0  # what lies behind the last byte
        reader.read_(name, stretch.offset + at, raw[:length])
        for start in range(0, count, _WORDS):
            part = room[start : min(start + _WORDS, count)]
            low, high = (weights[: len(part)] for weights in _weights())
            total = int(np.dot(part & _LOW, low)) + int(np.dot(part >> _HALF, high))
            digest.update((total % 2**64).to_bytes(8, "little"))
    digest.update(stretch.bytes.to_bytes(8, "little"))
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _weights() -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Odd numbers for the lower and for the upper halves of words."""
    raw = hashlib.shake_128(b"mupscale fingerprint 1").digest(16 * _WORDS)
    odd = np.frombuffer(raw, np.uint64) | np.uint64(1)
    return odd[:_WORDS], odd[_WORDS:]


def whole_digest(stretches: Iterable[str]) -> str:
    """The digest of a file from those of its stretches, in order."""
    digest = hashlib.blake2b(digest_size=32)
    for stretch in stretches:
        digest.update(bytes.fromhex(stretch))
    return digest.hexdigest()


def published(job: Job) -> str:
    """The job as the finished directory keeps it: without paths of this machine and without its block size."""
    return replace(job, base=Path(), out=Path(), block_bytes=BLOCK_BYTES).to_json()


def about_text(job: Job, digests: dict[str, str]) -> str:
    """The text of `mupscale.json`: the job's `about`, the digest of the job and of every base file."""
    files = {file.name: {"size": file.size, "digest": digests[file.name]} for file in job.sources}
    base = job.about.get("base")
    known = base if isinstance(base, dict) else {}
    about = {
        **job.about,
        "base": {**known, "files": files, "digest": ALGORITHM},
        "job": hashlib.blake2b(published(job).encode(), digest_size=32).hexdigest(),
    }
    return json.dumps(about, indent=1, sort_keys=True) + "\n"


def read_carried(folder: Path, name: str) -> bytes:
    """Read a file that is carried over, such as a tokenizer; files above 1 GiB are refused."""
    return read_regular(folder / name, _LARGEST_CARRIED)


def _carried(folder: Path, name: str) -> Carried:
    raw = read_carried(folder, name)
    return Carried(name, len(raw), hashlib.sha256(raw).hexdigest())
