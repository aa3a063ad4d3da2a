"""A whole job or one worker's share of it: units in, bytes at fixed offsets out, in memory that does not grow with the model.

Every unit is independent and may be done twice, so any worker may do any unit, be killed, and start again.
`blocks.py` makes the bytes of a unit; `partial.py` decides when the output becomes visible.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from threading import Condition, Event, Lock, Thread
from time import monotonic

import torch

from ..errors import Fault, MupscaleError
from ..files.places import item_size, runs
from .blocks import MoveMaker, Reader, raw_bytes
from .identity import check_base, check_stamps, digest_stretch
from .job import Job
from .job_check import PARTIAL, check_job
from .journal import Done, Journal, read_journals
from .partial import finish, is_finished, partial, prepare, write_all
from .work_units import Block, WorkUnits

Report = Callable[[int, int], None]
"""Called with the bytes written so far and the bytes to be written."""

_GROUP_BYTES = (
    128 << 20
)  # synced and journalled together, because a sync per block is slow; a crash repeats one group
_GROUP_SECONDS = 0.25  # or after this time, so that slow work is kept too


def run_job(job: Job, workers: int = 1, report: Report | None = None) -> None:
    """Write the whole output with `workers` threads; run it again to resume."""
    if not run_worker(job, 0, 1, report, threads=workers):
        raise MupscaleError(f"{partial(job.out)} is not complete although all of it was done; run it again")


def run_worker(
    job: Job, worker: int, workers: int, report: Report | None = None, *, threads: int = 1
) -> bool:
    """Do the share of one worker, numbered from 0, and finish the job if nothing is left of any share.

    True when the output is complete. Other numbers of workers may have been used before: what any of them
    did counts. Threads share the work of a worker unit by unit.
    """
    check_job(job)
    if threads < 1:
        raise MupscaleError(f"threads={threads}, expected 1 or more; write threads=1")
    units = WorkUnits(job)
    share = list(units.share(worker, workers))
    with _finished_by_another(job):
        if is_finished(job):
            return True
        done = read_journals(partial(job.out), len(units))
        count = _Count(units, share, done, report)
        check_space(job, count.left)
        if prepare(job):
            return True
        stamps = check_base(job)
        check_stamps(done.stamps, stamps)
        todo = [unit for unit in share if not done.units[unit]]
        if todo:
            journal = Journal(partial(job.out), worker, workers)
            with _disk_errors(job), _Keeper(partial(job.out), journal) as keeper:
                journal.stamps(stamps)
                _in_threads(threads, todo, lambda mine: _do(job, units, mine, keeper, count))
            check_stamps({name: {stamp} for name, stamp in stamps.items()}, check_base(job))
        done = read_journals(partial(job.out), len(units))
        if done.all:
            finish(job, units, done)
    return is_finished(job)


def check_space(job: Job, needed: int) -> None:
    """Raise unless the disk of the output has room for this many more bytes."""
    with _disk_errors(job):
        free = _free(job)
    if free < needed:
        what = f"{needed / 1e9:.2f} GB are still to be written, {free / 1e9:.2f} GB are free"
        remedy = f"free {(needed - free) / 1e9:.2f} GB or write to another disk"
        raise MupscaleError("the disk is too small", [Fault(str(job.out.parent), what, remedy)])


class _Count:
    """Counts the finished bytes of a share and reports them."""

    def __init__(self, units: WorkUnits, share: list[int], done: Done, report: Report | None) -> None:
        sizes = [(unit, units[unit].bytes) for unit in share if unit < units.blocks]
        self.total = sum(size for _, size in sizes)
        self.left = sum(size for unit, size in sizes if not done.units[unit])
        self._report = report
        self._lock = Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.left -= count
            if self._report is not None:
                self._report(self.total - self.left, self.total)


def _in_threads(count: int, todo: list[int], work: Callable[[Iterator[int]], None]) -> None:
    """Threads take units from one list, in order; the first failure, or an interrupt, ends them all.

    Everything that takes time (reading, the kernel, writing, digests) releases the interpreter lock.
    """
    if count == 1:
        work(iter(todo))
        return
    stop, lock, units = Event(), Lock(), iter(todo)

    def mine() -> Iterator[int]:
        while not stop.is_set():
            with lock:
                unit = next(units, None)
            if unit is None:
                return
            yield unit

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count, thread_name_prefix="mupscale") as pool:
            try:
                for done in as_completed([pool.submit(work, mine()) for _ in range(count)]):
                    done.result()
            finally:
                stop.set()
    finally:
        torch.set_num_threads(before)


def _do(job: Job, units: WorkUnits, todo: Iterator[int], keeper: _Keeper, count: _Count) -> None:
    with Reader(job.base) as reader, _Writer(partial(job.out)) as writer:
        maker = MoveMaker(reader)
        for number in todo:
            unit = units[number]
            if isinstance(unit, Block):
                writer.write(unit, raw_bytes(maker.block(unit)))
                keeper.add(number, unit.move.target.file, unit.bytes)
                count.add(unit.bytes)
            else:
                keeper.digest(number, digest_stretch(reader, job.sources[unit.file].name, unit))


class _Writer:
    """Output files, opened when they are needed, a few at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def write(self, block: Block, raw: memoryview) -> None:
        target = block.move.target
        if target.file not in self._open:
            if len(self._open) >= 16:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[target.file] = os.open(
                self._folder / f"{target.file}{PARTIAL}", os.O_WRONLY | os.O_CLOEXEC
            )
        size = item_size(target.dtype)
        origin = [0] * len(block.shape)
        for far, near, length in runs(target.shape, block.start, block.shape, origin, block.shape):
            part = raw[near * size : (near + length) * size]
            write_all(self._open[target.file], part, target.offset + far * size)


class _Keeper(Thread):
    """Syncs written blocks to disk and then records them in the journal, while the next blocks are made.

    A unit is in the journal only after its bytes are on disk, so the journal stays true after a crash.
    """

    def __init__(self, folder: Path, journal: Journal) -> None:
        super().__init__(name="mupscale journal", daemon=True)
        self._folder, self._journal = folder, journal
        self._news = Condition()
        self._units: dict[int, str] = {}
        self._digests: dict[int, str] = {}
        self._bytes = 0
        self._closing = False
        self._error: BaseException | None = None

    def __enter__(self) -> _Keeper:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._news:
            self._closing = True
            self._news.notify()
        self.join()
        self._journal.close()
        if kind is None:
            self._check()

    def add(self, unit: int, file: str, count: int) -> None:
        with self._news:
            self._check()
            self._units[unit] = file
            self._bytes += count
            if self._bytes >= _GROUP_BYTES:
                self._news.notify()

    def digest(self, unit: int, digest: str) -> None:
        with self._news:
            self._check()
            self._digests[unit] = digest

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        try:
            while self._keep():
                pass
        except BaseException as error:
            self._error = error

    def _keep(self) -> bool:
        """Wait for a group of blocks, sync their files, write the journal; False when there will be no more."""
        until = monotonic() + _GROUP_SECONDS
        with self._news:
            while not self._closing and self._bytes < _GROUP_BYTES and monotonic() < until:
                self._news.wait(until - monotonic())
            units, digests, last = self._units, self._digests, self._closing
            self._units, self._digests, self._bytes = {}, {}, 0
        for file in dict.fromkeys(units.values()):
            descriptor = os.open(self._folder / f"{file}{PARTIAL}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
        self._journal.units(units)
        self._journal.digests(digests)
        return not last


@contextmanager
def _finished_by_another(job: Job) -> Iterator[None]:
    """Ignore files that vanish because another process finished the job; then nothing is left to do."""
    try:
        yield
    except MupscaleError:
        if not is_finished(job):
            raise
    except FileNotFoundError as error:
        if not is_finished(job):
            remedy = "start again; nothing else was written"
            fault = Fault(str(error.filename), "it vanished while the job ran", remedy)
            raise MupscaleError("the output cannot be written", [fault]) from None


@contextmanager
def _disk_errors(job: Job) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise  # what vanished may have been finished by another
    except OSError as error:
        what = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what += f"; {_free(job) / 1e9:.2f} GB are free"
        remedy = "what is written is kept: make room and run the same command again to resume"
        raise MupscaleError("the output cannot be written", [Fault(str(job.out), what, remedy)]) from None


def _free(job: Job) -> int:
    status = os.statvfs(next(folder for folder in job.out.parents if folder.exists()))
    return status.f_bavail * status.f_frsize
