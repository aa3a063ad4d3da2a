"""Compare the bytes of a finished directory with those that its job and its base determine, or with its own record.

Every block is made again, noise included, and compared bit for bit, in the memory of a few blocks. Does not know
models: whether the job itself is right is shown by other checks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from threading import Lock

import torch
from torch import Tensor

from ..errors import Fault, MupscaleError
from ..files.opened import open_file
from ..files.places import torch_dtype
from ..files.strict import Reason, os_errors, printable, read_regular
from ..runs.growth_record import NAME as ABOUT
from ..storage.location import Location
from ..storage.looking import names_in
from .bytes.base_reader import BaseReader, encoded
from .bytes.blocks import MoveMaker, Reader, block_runs, block_sum, raw_bytes
from .bytes.compiled_sums import expect
from .digests import check_base, check_sources
from .finished import (
    Contents,
    about_text,
    contents_of,
    has_job,
    recorded,
    recorded_contents,
    recorded_sources,
)
from .job import Job
from .job_check import check_job
from .journal.journals import Journals
from .progress import Report
from .publish.read_back import fingerprints_of, was_read
from .same_base import base_fingerprints, output_fingerprints
from .threads import check_threads, in_threads
from .work_units import Block, WorkUnits

_LONGEST = 1 << 30  # bytes; bounds what a damaged or foreign file can fill memory with
_LOADED = ("*.safetensors", "*.bin", "*.index.json", "adapter_*", "*.py", "*.pt", "*.pth")
"""Files that a loader would pick up, and that must therefore be this job's own."""


def check_bytes(job: Job, report: Report | None = None, threads: int = 1) -> list[Fault]:
    """A fault per difference between a finished output and its job; none if every bit is right. Threads share the work.

    A base that holds other bytes than those that were grown says nothing about the output: its files are named, and the
    output is compared with its own record.
    """
    check_threads(threads)
    try:
        check_job(job)
        check_base(job)
    except MupscaleError as error:
        return list(error.faults) or [Fault(error.code, str(job.base), error.claim)]
    units = WorkUnits(
        replace(job, trust_base=True)
    )  # each byte of the base is read once, by the block that uses it
    expect(units.total_bytes)
    made = _Blocks(job, units, report)
    try:
        in_threads(threads, range(units.blocks), made.compare)
        read = Journals(bytearray(), used=made.used)
        base_sums = base_fingerprints(job, units, read)
    except MupscaleError as error:
        return list(error.faults) or [Fault(error.code, str(job.base), error.claim)]
    if changed := _changed_files(job, base_sums):
        return [*changed, *check_alone(job.out, threads=threads)]
    output = output_fingerprints(job, units, made.sums)
    held = contents_of(job, about_text(job, base_sums, output, early=has_job(job.out)), output)
    with Reader(job.out) as wide:
        faults = [*_sizes(job.out, held), *_chunks(job, wide), *made.faults()]
    return [*faults, *_small_files(job.out, held), *_surplus(job.out, held)]


def changed_ends(base: Location, out: Location) -> list[Fault]:
    """A fault per file of a base that is gone, or has another size or other ends than the one that was grown: cheap."""
    try:
        sources = recorded_sources(out) if _is_intact(out) else ()
    except MupscaleError:
        return []  # what is wrong with the record is found where files are compared
    try:
        check_sources(base, sources)
    except MupscaleError as error:
        return [fault._replace(where=str(base / fault.where)) for fault in error.faults]
    return []


def _changed_files(job: Job, found: Mapping[str, str]) -> list[Fault]:
    """A fault per file of the base whose fingerprint is not the recorded one; none where the record itself is damaged."""
    try:
        known = recorded(job.out, job)[0] if _is_intact(job.out) else found
    except MupscaleError:
        return []
    what = f"its bytes are not those that were grown, by the digest in {ABOUT}"
    return [
        Fault("job.other_base", str(job.base / name), what, "name the base that was grown")
        for name, value in found.items()
        if known.get(name) != value
    ]


def _is_intact(out: Location) -> bool:
    """Whether the record of an output has the text that its own entries, and the digest at its end, give."""
    return recorded_contents(out).texts[ABOUT] == read_regular(out / ABOUT, _LONGEST)


def check_alone(out: Location, report: Report | None = None, threads: int = 1) -> list[Fault]:
    """A fault per file of a finished output that is not as its record says, found without its base.

    Weights are compared by the fingerprints that were stored when they were written, every other file by its digest.
    """
    check_threads(threads)
    try:
        held = recorded_contents(out)
    except MupscaleError as error:
        return list(error.faults) or [Fault(error.code, ABOUT, error.claim)]
    faults = list(_sizes(out, held))
    short = {fault.where for fault in faults}
    sizes = {name: size for name, (size, _) in held.weights.items()}
    found = fingerprints_of(out, sizes, threads, report)
    faults += [
        Fault("job.bytes_differ", name, "its bytes are not those that were written")
        for name, value in found.items()
        if value != held.weights[name][1] and name not in short
    ]
    return [*faults, *_small_files(out, held), *_surplus(out, held)]


def _sizes(out: Location, held: Contents) -> Iterator[Fault]:
    for name, (size, _) in held.weights.items():
        try:
            with open_file(out / name) as file:
                found = file.size
        except MupscaleError as error:
            yield Fault(error.code, name, error.claim)
            continue
        if found != size:
            yield Fault("job.other_file_size", name, f"{found} bytes, expected {size}")


def _chunks(job: Job, wide: Reader) -> Iterator[Fault]:
    for file in job.files:
        for offset, raw in file.chunks:
            found = bytearray(len(raw))
            if not was_read(wide, file.name, offset, memoryview(found)):
                break  # `_sizes` has said why
            if found != raw:
                at = next(i for i, (a, b) in enumerate(zip(found, raw, strict=True)) if a != b)
                yield Fault(
                    "job.fixed_bytes_differ",
                    file.name,
                    f"its header or other fixed bytes differ, first at byte {offset + at}",
                )


class _Blocks:
    """Blocks made again and compared with those on disk, by any number of threads."""

    def __init__(self, job: Job, units: WorkUnits, report: Report | None) -> None:
        self._job, self._units, self._report = job, units, report
        self._lock = Lock()
        self._done = 0
        self._first: dict[str, tuple[int, Reason]] = {}
        self.sums: dict[int, str] = {}
        """The fingerprint of every block as it should be."""
        self.used: list[str] = []
        """What the base held where blocks have read it, an entry for each block."""

    def compare(self, todo: Iterator[int]) -> None:
        sizes = {file.name: file.size for file in self._job.sources}
        numbers = {name: number for number, name in enumerate(sizes)}
        with BaseReader(self._job.base, sizes) as base, Reader(self._job.out) as wide:
            maker = MoveMaker(base)
            for number in todo:
                block = self._units[number]
                assert isinstance(block, Block)
                want = maker.block(block).view(-1)
                made = block_sum(block, raw_bytes(want))
                wrong = _difference(wide, block, want, maker)
                used = encoded(base.taken(), numbers)
                with self._lock:
                    self.used.append(used)
                    self._note(number, block, made, wrong)

    def _note(self, number: int, block: Block, made: str, wrong: Reason | None) -> None:
        self.sums[number] = made
        label = f"{block.move.name} in {block.move.target.file}"
        if wrong is not None and (label not in self._first or number <= self._first[label][0]):
            self._first[label] = (number, wrong)
        self._done += block.bytes
        if self._report is not None:
            self._report(self._done, self._units.total_bytes)

    def faults(self) -> Iterator[Fault]:
        """One fault per tensor that differs, in the order of the tensors."""
        for label, (_, wrong) in sorted(self._first.items(), key=lambda item: item[1][0]):
            yield Fault(wrong.code, printable(label), wrong.what)


def _difference(wide: Reader, block: Block, want: Tensor, maker: MoveMaker) -> Reason | None:
    found = maker.room("found", torch_dtype(block.move.target.dtype), block.shape).view(-1)
    for offset, part in block_runs(block, raw_bytes(found)):
        if not was_read(wide, block.move.target.file, offset, part):
            return Reason("file.cut_short", "it cannot be read to its end")
    if torch.equal(found.view(torch.uint8), want.view(torch.uint8)):
        return None
    unequal = (found.view(torch.uint8) != want.view(torch.uint8)).view(len(want), -1).any(1)
    index = torch.unravel_index(unequal.int().argmax(), block.shape)
    entry = tuple(start + int(i) for start, i in zip(block.start, index, strict=True))
    return Reason("job.tensor_differs", f"differs from what the base gives, first at entry {entry}")


def _small_files(out: Location, held: Contents) -> Iterator[Fault]:
    for name, (size, digest) in held.small.items():
        try:
            raw = read_regular(out / name, _LONGEST)
        except MupscaleError as error:
            yield Fault(error.code, name, error.claim)
            continue
        if len(raw) != size:
            yield Fault("job.other_file_size", name, f"{len(raw)} bytes, expected {size}")
        elif hashlib.sha256(raw).hexdigest() != digest:
            want = held.texts.get(name, raw)
            at = next((i for i, (a, b) in enumerate(zip(raw, want, strict=True)) if a != b), None)
            yield Fault(
                "job.small_file_differs", name, "differs" if at is None else f"differs, first at byte {at}"
            )


def _surplus(out: Location, held: Contents) -> Iterator[Fault]:
    """Files that the job did not write and that a loader would read."""
    try:
        with os_errors(out):
            names = names_in(out)
    except MupscaleError as error:
        yield Fault(error.code, str(out), error.claim)
        return
    for name in names:
        if name not in held.sizes and any(fnmatchcase(name, pattern) for pattern in _LOADED):
            yield Fault(
                "job.surplus_file",
                printable(name),
                "a loader would read this file, and the job did not write it",
                "remove it",
            )
