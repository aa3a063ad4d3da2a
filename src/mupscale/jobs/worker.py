"""A whole job or one worker's share of it: units in, bytes at fixed offsets out, in memory that does not grow with the model.

Every unit is independent and may be done twice, so any worker may do any unit, be killed, and start again.
`bytes/blocks.py` makes the bytes of a unit; `partial.py` decides when the output becomes visible.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import prod

from ..errors import Fault, MupscaleError
from ..files.strict import system_errors
from ..storage.location import Url
from ..tensors.compiled import expect as expect_numbers
from .bytes.base_reader import BaseReader, encoded, encoded_sums
from .bytes.blocks import MoveMaker, Reader, block_sum, finite_moves, raw_bytes
from .bytes.compiled_sums import expect as expect_bytes
from .bytes.output_files import OutputFiles
from .digests import check_base, check_stamps, check_unchanged, stretch_sums
from .job import Job
from .job_check import check_job
from .journal.entries import BaseStamp, BlockDone, StretchRead
from .journal.journals import Journals, read_journals
from .journal.writer import FileSink, JournalWriter
from .partial import create, finished_by_another, half_published, is_finished, partial, prepare
from .progress import Count, Report
from .publish.publish import publish
from .same_base import base_fingerprints, output_fingerprints, used_by_norms
from .threads import check_threads, in_threads
from .work_units import Block, WorkUnits

_TRIES = 3  # a finisher that is killed half-way makes files vanish once


def run_job(job: Job, workers: int = 1, report: Report | None = None) -> None:
    """Write the whole output with `workers` threads; run it again to resume."""
    if not run_worker(job, 0, 1, report, threads=workers):
        raise MupscaleError(
            f"{job.out} is not complete although all of it was done; run it again", code="job.not_complete"
        )


@system_errors()
def run_worker(
    job: Job, worker: int, workers: int, report: Report | None = None, *, threads: int = 1
) -> bool:
    """Do the share of one worker, numbered from 0, and finish the job if nothing is left of any share.

    True when the output is complete. Other numbers of workers may have been used before: what any of them
    did counts. The same worker may run twice at once: both do the same, and either finishes. Threads share the work of
    a worker unit by unit.
    """
    check_job(job)
    check_threads(threads)
    if isinstance(job.out, Url):
        from .upload import upload_share

        return upload_share(job, job.out, (worker, workers), threads, report)
    share = _Share(job, worker, workers, threads, report)
    for _ in range(_TRIES):
        try:
            with _disk_errors(job):
                return share.run()
        except FileNotFoundError as error:  # another process gives files their final names
            vanished = error
            if finished_by_another(job):
                return True
        except MupscaleError:
            if finished_by_another(job):
                return True
            raise
    fault = Fault(
        "job.file_vanished",
        str(vanished.filename),
        "it vanished while the job ran",
        "run the same command again",
    )
    raise MupscaleError("the output cannot be written", [fault])


class _Share:
    """What one worker does, from the journals that it finds to the finished output."""

    def __init__(self, job: Job, worker: int, workers: int, threads: int, report: Report | None) -> None:
        self.job, self.worker, self.workers, self.threads, self.report = job, worker, workers, threads, report
        self.units = WorkUnits(job)
        self.share = list(self.units.share(worker, workers))
        self.files = {file.name: number for number, file in enumerate(job.sources)}
        self.finite = finite_moves(job.moves, job.about)

    def run(self) -> bool:
        job, units, folder = self.job, self.units, partial(self.job.folder)
        if is_finished(job):
            return True
        done = read_journals(folder, len(units))
        complete = done.all
        count, noisy = _count(units, self.share, done, self.report)
        check_space(job, count.left)
        expect_bytes(count.total)
        expect_numbers(noisy)
        if prepare(job):
            return True
        if (known := half_published(job)) is not None:
            publish(job, units, *known, done.sums, self.threads)
            return True
        stamps = check_base(job)
        check_stamps(done.stamps, stamps)
        new = [unit for unit in self.share if not done.units[unit]]
        if new:
            self._work(new, count, stamps)
        done = read_journals(folder, len(units))
        if done.all:
            done.used += used_by_norms(job, stamps)
            base = base_fingerprints(job, units, done)
            publish(job, units, base, output_fingerprints(job, units, done.sums), done.sums, self.threads)
        # If all was done when this worker came, another one may be finishing just now.
        return is_finished(job) or (complete and finished_by_another(job))

    def _work(self, new: list[int], count: Count, stamps: dict[str, str]) -> None:
        """Make what is not done yet."""
        job, units = self.job, self.units
        sink = FileSink(partial(job.folder), self.worker, self.workers)
        with JournalWriter(sink, lambda read: check_unchanged(job, stamps, read)) as journal:
            # With the journal there, everybody knows that this worker may write.
            create(job, {units.file_of(unit) for unit in new if unit < units.blocks})
            journal.add(*(BaseStamp(name, stamp) for name, stamp in stamps.items()))
            in_threads(self.threads, new, lambda mine: self._do(mine, journal, count, sink.descriptor))
        check_stamps({name: {stamp} for name, stamp in stamps.items()}, check_base(job))

    def _do(self, todo: Iterator[int], journal: JournalWriter, count: Count, lock: int | None = None) -> None:
        job, sizes = self.job, {file.name: file.size for file in self.job.sources}
        with BaseReader(job.base, sizes) as reader, OutputFiles(partial(job.folder), lock) as writer:
            maker, again = MoveMaker(reader, self.finite), Reader(job.base)
            with again:
                for number in todo:
                    unit = self.units[number]
                    if isinstance(unit, Block):
                        raw = raw_bytes(maker.block(unit))
                        used = reader.taken()
                        entry = BlockDone(number, block_sum(unit, raw), encoded(used, self.files))
                        writer.write(unit, raw)
                        read = {file for file, _, _ in used}
                        journal.add(entry, size=unit.bytes, file=writer.file(unit), read=read)
                        count.add(unit.bytes)
                    else:
                        sums = stretch_sums(again, job.sources[unit.file].name, unit)
                        journal.add(StretchRead(number, encoded_sums(sums)))


def check_space(job: Job, needed: int) -> None:
    """Raise unless the disk of the output has room for this many more bytes."""
    with _disk_errors(job):
        free = _free(job)
    if free < needed:
        what = f"{needed / 1e9:.2f} GB are still to be written, {free / 1e9:.2f} GB are free"
        remedy = f"free {(needed - free) / 1e9:.2f} GB or write to another disk"
        raise MupscaleError(
            "the disk is too small", [Fault("disk.too_small", str(job.folder.parent), what, remedy)]
        )


def _count(units: WorkUnits, share: list[int], done: Journals, report: Report | None) -> tuple[Count, int]:
    """The bytes of a share, and how many entries will get noise."""
    blocks = {unit: block for unit in share if isinstance(block := units[unit], Block)}
    left = [block for unit, block in blocks.items() if not done.units[unit]]
    total = sum(block.bytes for block in blocks.values())
    noisy = sum(prod(block.shape) for block in left if block.move.making.noise is not None)
    return Count(total, sum(block.bytes for block in left), report), noisy


@contextmanager
def _disk_errors(job: Job) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise  # what vanished may have been finished by another
    except OSError as error:
        what = error.strerror or str(error)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full:
            with suppress(OSError):  # a disk that cannot even say how full it is
                what += f"; {_free(job) / 1e9:.2f} GB are free"
        remedy = "what is written is kept: make room and run the same command again to resume"
        raise MupscaleError(
            "the output cannot be written",
            [Fault("disk.is_full" if full else "disk.cannot_be_written", str(job.folder), what, remedy)],
        ) from None


def _free(job: Job) -> int:
    status = os.statvfs(next(folder for folder in job.folder.parents if folder.exists()))
    return status.f_bavail * status.f_frsize
