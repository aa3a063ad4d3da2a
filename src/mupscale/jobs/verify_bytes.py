"""Compare the bytes of a finished directory with those that its job and its base determine.

Every block is made again, noise included, and compared bit for bit, in the memory of a few blocks. Does not know
models: whether the job itself is right is shown by other checks.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from ..errors import Fault, MupscaleError
from ..files.places import item_size, runs, torch_dtype
from ..files.strict import printable, read_regular
from .blocks import MoveMaker, Reader, raw_bytes
from .identity import about_text, check_base, digest_stretch, published, whole_digest
from .job import Job
from .job_check import ABOUT, JOB, check_job, sound_job
from .work_units import Block, Stretch, WorkUnits
from .worker import Report

_LONGEST = 1 << 30  # bytes; bounds what a damaged or foreign file can fill memory with
_LOADED = ("*.safetensors", "*.bin", "*.index.json", "adapter_*", "*.py", "*.pt", "*.pth")
"""Files that a loader would pick up, and that must therefore be this job's own."""


def check_bytes(
    job: Job | Path | str, base: Path | str | None = None, report: Report | None = None
) -> list[Fault]:
    """A fault per difference between a finished output and its job; none if every bit is right.

    Pass the job, or the directory and the base it was made from: the directory holds its job.
    """
    try:
        if not isinstance(job, Job):
            job = read_job(Path(job), base)
        elif base is not None:
            job = replace(job, base=Path(os.path.abspath(base)))
        check_job(job)
        check_base(job)
    except MupscaleError as error:
        return list(error.faults) or [Fault(JOB, error.claim)]
    units = WorkUnits(job)
    with Reader(job.base) as reader, Reader(job.out) as wide:
        faults = [*_sizes(job), *_chunks(job, wide), *_blocks(units, reader, wide, report)]
        digests = _digests(job, units, reader)
    return [*faults, *_small_files(job, digests), *_surplus(job)]


def read_job(out: Path, base: Path | str | None) -> Job:
    """The job that wrote a finished directory, to be compared with a base."""
    if base is None:
        raise MupscaleError(f"the base of {printable(str(out))} is not known; pass the base it was made from")
    stored = sound_job(read_regular(out / JOB, _LONGEST))
    return replace(stored, base=Path(os.path.abspath(base)), out=Path(os.path.abspath(out)))


def _sizes(job: Job) -> Iterator[Fault]:
    for file in job.files:
        try:
            size = os.stat(job.out / file.name).st_size
        except OSError as error:
            yield Fault(file.name, f"cannot be read: {error.strerror}")
            continue
        if size != file.size:
            yield Fault(file.name, f"{size} bytes, expected {file.size}")


def _chunks(job: Job, wide: Reader) -> Iterator[Fault]:
    for file in job.files:
        for offset, raw in file.chunks:
            found = bytearray(len(raw))
            if not _was_read(wide, file.name, offset, memoryview(found)):
                break  # `_sizes` has said why
            if found != raw:
                at = next(i for i, (a, b) in enumerate(zip(found, raw, strict=True)) if a != b)
                yield Fault(file.name, f"its header or other fixed bytes differ, first at byte {offset + at}")


def _blocks(units: WorkUnits, base: Reader, wide: Reader, report: Report | None) -> Iterator[Fault]:
    """One fault per tensor that differs."""
    maker, done = MoveMaker(base), 0
    first: dict[str, str] = {}
    for number in range(units.blocks):
        block = units[number]
        assert isinstance(block, Block)
        want = maker.block(block).view(-1)
        found = maker.room("found", torch_dtype(block.move.target.dtype), block.shape).view(-1)
        label = f"{block.move.name} in {block.move.target.file}"
        if not _read_block(wide, block, raw_bytes(found)):
            first.setdefault(label, "it cannot be read to its end")
        elif not torch.equal(found.view(torch.uint8), want.view(torch.uint8)):
            unequal = (found.view(torch.uint8) != want.view(torch.uint8)).view(len(want), -1).any(1)
            index = torch.unravel_index(unequal.int().argmax(), block.shape)
            entry = tuple(start + int(i) for start, i in zip(block.start, index, strict=True))
            first.setdefault(label, f"differs from what the base gives, first at entry {entry}")
        done += block.bytes
        if report is not None:
            report(done, units.total_bytes)
    for label, what in first.items():
        yield Fault(printable(label), what)


def _read_block(wide: Reader, block: Block, into: memoryview) -> bool:
    target = block.move.target
    size, origin = item_size(target.dtype), [0] * len(block.shape)
    return all(
        _was_read(wide, target.file, target.offset + far * size, into[near * size : (near + length) * size])
        for far, near, length in runs(target.shape, block.start, block.shape, origin, block.shape)
    )


def _was_read(wide: Reader, file: str, offset: int, into: memoryview) -> bool:
    try:
        wide.read_(file, offset, into)
    except MupscaleError:
        return False
    return True


def _digests(job: Job, units: WorkUnits, base: Reader) -> dict[str, str]:
    parts: dict[str, list[str]] = {file.name: [] for file in job.sources}
    for number in range(units.blocks, len(units)):
        stretch = units[number]
        assert isinstance(stretch, Stretch)
        name = job.sources[stretch.file].name
        parts[name].append(digest_stretch(base, name, stretch))
    return {name: whole_digest(digests) for name, digests in parts.items()}


def _small_files(job: Job, digests: dict[str, str]) -> Iterator[Fault]:
    texts = {text.name: text.content.encode() for text in job.texts}
    texts[ABOUT] = about_text(job, digests).encode()
    texts[JOB] = published(job).encode()
    wanted = {name: (len(raw), hashlib.sha256(raw).hexdigest()) for name, raw in texts.items()}
    wanted.update({file.name: (file.size, file.sha256) for file in job.carried})
    for name, (size, digest) in wanted.items():
        try:
            raw = read_regular(job.out / name, _LONGEST)
        except MupscaleError as error:
            yield Fault(name, error.claim)
            continue
        if len(raw) != size:
            yield Fault(name, f"{len(raw)} bytes, expected {size}")
        elif hashlib.sha256(raw).hexdigest() != digest:
            at = next(
                (i for i, (a, b) in enumerate(zip(raw, texts.get(name, raw), strict=True)) if a != b), None
            )
            yield Fault(name, "differs" if at is None else f"differs, first at byte {at}")


def _surplus(job: Job) -> Iterator[Fault]:
    """Files that the job did not write and that a loader would read."""
    own = {entry.name for part in (job.files, job.carried, job.texts) for entry in part}
    try:
        names = sorted(os.listdir(job.out))
    except OSError as error:
        yield Fault(str(job.out), f"cannot be read: {error.strerror}")
        return
    for name in names:
        if name not in own and any(fnmatchcase(name, pattern) for pattern in _LOADED):
            yield Fault(
                printable(name), "a loader would read this file, and the job did not write it", "remove it"
            )
