"""Faults of machines, disks and people: nothing wrong is published, nothing is lost, and there is no false alarm.

A small checkpoint is upscaled, with noise, while something goes wrong; then the job is resumed. What is published must
be, byte for byte, the directory of a run that nobody disturbed, and every other end must be a refusal that leaves nothing
under the output's name.

    python benchmarks/faults.py [--seed 0] [--quick]

kills     the writer is ended with SIGKILL at a random moment; the resumed job must give the same bytes
full      the disk is full at a random write; the same after room was made
changed   a file of the base is changed while it is read: in its size, in its content, or with its time put back
flips     a bit flips in the journal, in a block that is done, or in the job before a job is resumed, or in a finished
          output or its base, where `check` (and for the output `check` without the base) must see it
twice     the same worker runs twice at once; both must end well
crippled  a file system without hard links, sync of directories or fdatasync, and one that cannot sync at all, which must
          be refused at the start
settled   after one of two workers has ended well, a bit of its share flips, or a file of its share is truncated, or removed;
          what the other one then publishes must be right
header    the same for a bit of the fixed bytes: a safetensors header
zombie    a worker is stopped with SIGSTOP, another attempt of it publishes, the base is trained on and saved again in place,
          and the worker goes on; what was published must not change
norm      the base is changed with its time put back after some norms, on which the size of the noise depends, were measured and
          before the rest is, or before the first block is written; or a bit of their journal flips, which must harm nothing
syscall   the n-th open, read, write, sync, rename, stat, … of a growth fails, with an error, half of the bytes or none, for one
          worker, one with optimizer state, two workers and a store (`harness/syscalls/trials.py`)

published_wrong  a directory under the output's name that is not the undisturbed one, or damage that check does not see;
                 a file of the base that is changed before anything of it was read gives the directory of the new base,
                 which is right if check holds
lost             a resumed job that does not end with the undisturbed directory although nothing was wrong any more
spurious         an error where everything was right, or one that has no code
stuck            a process that did not end

Control: what is published wrong when files are not read back and may be open elsewhere, and the fingerprints of the base are
not compared. The last line is `faults=… published_wrong=0 lost=0 spurious=0 stuck=0 control=…`, where `faults` counts those of
all kinds; the exit code is 1 when one of the four is not 0, or the control is less than 20 (with --quick, 5).
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from harness.forks import contents, fork, wait
from harness.llama_files import Llama, job_for, write_directory
from harness.program import Outcome, option, run
from harness.syscalls import every_call_fails_once
from mupscale.checkpoints.shards import weight_moves
from mupscale.errors import MupscaleError
from mupscale.files.directory import read_directory
from mupscale.jobs import digests, same_base, worker
from mupscale.jobs import partial as partial_module
from mupscale.jobs.bytes import output_files
from mupscale.jobs.bytes.output_files import OutputFiles
from mupscale.jobs.job import PAGE, Job
from mupscale.jobs.journal.journals import read_journals
from mupscale.jobs.norms.measured import measured_in
from mupscale.jobs.norms.norm_journal import NormJournal
from mupscale.jobs.partial import partial, working_job
from mupscale.jobs.publish import publish as publish_module
from mupscale.jobs.verify_bytes import check_alone, check_bytes
from mupscale.jobs.work_units import Block, WorkUnits
from mupscale.jobs.worker import run_job, run_worker
from mupscale.noise.kinds import SignalNoise
from mupscale.noise.resolve import norms_wanted, resolve_noise
from mupscale.noise.resolved import NoisePlan

MODEL = Llama(hidden=64, ffn=176, heads=4, kv_heads=2, layers=2, vocabulary=300)
BLOCK = 16 << 10
digests._END = (
    4096  # bytes at the ends of a base file that are always compared; of these small files that would be all
)
output_files.LEAST = PAGE  # so that these small blocks are written past the page cache, as large ones are
partial_module.PATIENCE = 0.3  # seconds; of a stopped process nobody waits for long
HANGS = 300  # seconds after which a process is taken for stuck; all of them end within a few
LEAST_CONTROL = 20


class Faults:
    """A base, what an undisturbed run gives, and what has been seen."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.draw = folder, random.Random(seed)
        self.base = folder / "base"
        write_directory(self.base, MODEL.shapes(), "F32", 2)
        self.tally: Counter[str] = Counter()
        self.failed: list[str] = []
        run_job(self.job(folder / "want"))
        self.want = contents(folder / "want")
        self.units = WorkUnits(self.job(folder / "want"))

    def job(self, out: Path | None = None, base: Path | None = None, noise: NoisePlan | None = None) -> Job:
        plan = MODEL.plan(2)
        directory = read_directory(base or self.base)
        return job_for(
            plan,
            directory,
            out or self.folder / "wide",
            noise or MODEL.noise(plan),
            shard_bytes=400_000,
            block_bytes=BLOCK,
        )

    def fail(self, kind: str, what: str) -> None:
        self.tally[kind] += 1
        self.failed.append(f"{kind}: {what}")

    def clear(self, job: Job) -> None:
        for path in (job.folder, partial(job.folder)):
            shutil.rmtree(path, ignore_errors=True)

    def resumed(self, job: Job, what: str) -> None:
        """The job, run again now that nothing is wrong, must give the undisturbed directory."""
        try:
            run_job(job)
        except MupscaleError as error:
            self.fail("lost", f"{what}: {error.claim}")
        else:
            if contents(job.folder) != self.want:
                self.fail("published_wrong", f"{what}, resumed")
        self.clear(job)

    def kill(self) -> None:
        job = self.job()
        threads = self.draw.choice((1, 2))
        with slow_writes():
            child = fork(lambda: run_job(job, threads))
        time.sleep(self.draw.random() * 0.35)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        self.tally["kills"] += 1
        if job.folder.exists() and contents(job.folder) != self.want:
            self.fail("published_wrong", "killed")
        self.resumed(job, "killed")

    def fill(self) -> None:
        job, first = self.job(), self.draw.randrange(self.units.blocks)
        with from_write(first, failing(errno.ENOSPC)), self.refused(job, "full disk"):
            run_job(job)
        self.tally["full"] += 1
        self.resumed(job, "full disk")

    @contextmanager
    def refused(self, job: Job, what: str) -> Iterator[None]:
        """What happens inside must raise, or leave the undisturbed directory, or that of the base as it is now."""
        try:
            yield
        except MupscaleError:
            self.tally["refused"] += 1
            if job.folder.exists():
                self.fail("published_wrong", f"{what}: refused and visible")
        else:
            if not job.folder.exists() or (contents(job.folder) != self.want and check_bytes(job)):
                self.fail("published_wrong", what)

    def change(self, number: int, checked: bool = True) -> None:
        """Change the base at a random block: its size, its content, its content with the time put back."""
        base = self.folder / "other"
        shutil.copytree(self.base, base)
        job, first = self.job(base=base), self.draw.randrange(1, self.units.blocks) - 1
        how = ("size", "content", "time put back", "time put back")[number % 4]
        at = self.draw.random()

        def act(before: int) -> None:
            if before == 0:
                disturb(self.draw.choice(sorted(base.glob("*.safetensors"))), how, at)

        seen = self.tally["published_wrong"]
        with from_write(first, act), self.refused(job, f"base changed, {how}"):
            run_job(job)
        if checked:
            self.tally["changed"] += 1
        else:
            self.forget(seen)
        self.clear(job)
        shutil.rmtree(base)

    def forget(self, seen: int) -> None:
        """What a control publishes is counted apart."""
        self.tally["control"] += self.tally["published_wrong"] - seen
        del self.failed[len(self.failed) - (self.tally["published_wrong"] - seen) :]
        self.tally["published_wrong"] = seen

    def interrupted(self) -> Job:
        """A job of which a part is done."""
        job, first = self.job(), self.draw.randrange(20, self.units.blocks)

        with from_write(first, interrupt), suppress(KeyboardInterrupt):
            run_job(job)
        return job

    def flip_unfinished(self, what: str, checked: bool = True) -> None:
        job = self.interrupted()
        folder = partial(job.folder)
        if what == "job":
            path = folder / working_job(job.folder).name
            at = self.draw.randrange(path.stat().st_size)
        elif what == "journal":
            path = self.draw.choice(sorted(folder.glob("journal-*")))
            at = self.draw.randrange(path.stat().st_size)
        else:
            done = read_journals(folder, len(self.units))
            unit = self.draw.choice([u for u in range(self.units.blocks) if done.units[u]])
            block = self.units[unit]
            assert isinstance(block, Block)
            path = folder / f"{block.move.target.file}.partial"
            row = block.start[0] * (block.move.target.shape[1] if len(block.move.target.shape) > 1 else 1)
            at = block.move.target.offset + 4 * row + self.draw.randrange(min(4, block.bytes))
        flip(path, at, self.draw)
        seen = self.tally["published_wrong"]
        with self.refused(job, f"flip in {what}"):
            run_job(job)
        if checked:
            self.tally["flips"] += 1
        else:
            self.forget(seen)
        self.clear(job)

    def settle(self, what: str, checked: bool = True) -> None:
        """Damage the share of a worker that ended well; then another one ends and publishes."""
        job = self.job()
        run_worker(job, 0, 2)
        mine = [unit for unit in self.units.share(0, 2) if unit < self.units.blocks]
        block = self.units[self.draw.choice(mine)]
        assert isinstance(block, Block)
        file = next(file for file in job.files if file.name == block.move.target.file)
        path = partial(job.folder) / f"{file.name}.partial"
        if what == "removed":
            path.unlink()
        elif what == "truncated":
            os.truncate(path, self.draw.choice((0, file.size // 2, file.size - 1)))
        elif what == "header":
            at, raw = file.chunks[0]
            flip(path, at + self.draw.randrange(len(raw)), self.draw)
        else:
            flip(path, block.offset + self.draw.randrange(block.shape[-1] * 4), self.draw)
        seen = self.tally["published_wrong"]
        try:
            run_worker(job, 1, 2)
        except MupscaleError as error:
            self.fail("lost", f"{what} after a worker ended well: {error}")
        else:
            if not job.folder.exists() or contents(job.folder) != self.want:
                self.fail("published_wrong", f"{what} after a worker ended well")
        if checked:
            self.tally["header" if what == "header" else "settled"] += 1
        else:
            self.forget(seen)
        self.clear(job)

    def wake(self, number: int, checked: bool = True) -> None:
        """A worker that is stopped goes on after another one has published, and the base was saved again.

        It stops before it writes a random block, or at any other moment.
        """
        base = self.folder / "other"
        shutil.copytree(self.base, base)
        job, threads = self.job(base=base), self.draw.choice((1, 2))
        first = self.units.blocks if number % 4 == 3 else self.draw.randrange(self.units.blocks)
        with from_write(first, stop_at_once):
            sleeper = fork(lambda: run_job(job, threads))
        if number % 4 == 3:
            time.sleep(self.draw.random() * 0.35)
            os.kill(sleeper, signal.SIGSTOP)
        os.waitid(os.P_PID, sleeper, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        seen = self.tally["published_wrong"]
        if not self.ends(fork(lambda: run_job(job))):
            self.fail("spurious", "the same worker, while another attempt is stopped")
        elif contents(job.folder) != self.want:
            self.fail("published_wrong", "beside an attempt that is stopped")
        for file in sorted(base.glob("*.safetensors")):
            for part in range(8):
                disturb(file, "content", part / 64)
        os.kill(sleeper, signal.SIGCONT)
        well = self.ends(sleeper)
        if contents(job.folder) != self.want:
            self.fail(
                "published_wrong",
                f"an attempt that was stopped went on, and ended {'well' if well else 'badly'}",
            )
        if checked:
            self.tally["zombie"] += 1
        else:
            self.forget(seen)
        self.clear(job)
        shutil.rmtree(base)

    def measured(self, base: Path, out: Path | None = None) -> Job:
        """A job whose noise is relative to the norms of the base, which are measured here."""
        plan, noise, folder = MODEL.plan(2), SignalNoise(0.05), out or self.folder / "wide"
        moves, wanted = weight_moves(plan, read_directory(base))[1], list(norms_wanted(noise, plan=plan))
        journal = NormJournal(folder, base, [source.file for move in moves for source in move.sources])
        norms = measured_in(base, moves, {}, wanted, journal=journal)
        return self.job(folder, base, resolve_noise(lambda name, what: norms[name, what], noise, plan=plan))

    def measure(self, what: str, checked: bool = True) -> None:
        """Something happens to norms that were measured, or to what they were measured of."""
        base, out = self.folder / "other", self.folder / "wide"
        shutil.copytree(self.base, base)
        count = self.draw.randrange(1, 14) if what == "half" else 14
        with before_norm(count, interrupt), suppress(KeyboardInterrupt):
            self.measured(base)
        if what == "flipped":
            (path,) = partial(out).glob("norms-*")
            flip(path, self.draw.randrange(path.stat().st_size), self.draw)
        else:
            disturb(self.draw.choice(sorted(base.glob("*.safetensors"))), "time put back", self.draw.random())
        seen = self.tally["published_wrong"]
        try:
            run_job(self.measured(base))
        except MupscaleError as error:
            self.tally["refused"] += 1
            if out.exists():
                self.fail("published_wrong", f"norms, {what}: refused and visible")
            if what == "flipped":
                self.fail("lost", f"norms, {what}: {error}")
            shutil.rmtree(partial(out))
            run_job(self.measured(base))
        run_job(want := self.measured(base, self.folder / "anew"))
        if contents(out) != contents(want.folder):
            self.fail("published_wrong", f"norms, {what}")
        if checked:
            self.tally["norm"] += 1
        else:
            self.forget(seen)
        for folder in (out, want.folder, base):
            shutil.rmtree(folder)

    def ends(self, process: int) -> bool:
        """Whether a process ends well; one that does not end is stuck, and killed."""
        until = time.monotonic() + HANGS
        while (ended := os.waitpid(process, os.WNOHANG)) == (0, 0):
            if time.monotonic() > until:
                self.fail("stuck", "a process that did not end")
                os.kill(process, signal.SIGKILL)
                return wait([process])
            time.sleep(0.005)
        return ended[1] == 0

    def flip_finished(self, what: str) -> None:
        """A flip in an output or in its base must be seen by check."""
        out, base = self.folder / "copy", self.folder / "other"
        shutil.copytree(self.folder / "want", out)
        shutil.copytree(self.base, base)
        files = sorted((out if what == "output" else base).iterdir())
        weights = [path for path in files if path.suffix == ".safetensors"]
        path = self.draw.choice(files if what == "output" else weights)
        flip(path, self.draw.randrange(path.stat().st_size), self.draw)
        self.tally["flips"] += 1
        if not check_bytes(replace(self.job(), base=base, out=out)):
            self.fail("published_wrong", f"flip in {what}, {path.name}: not seen by check")
        if what == "output" and not check_alone(out):
            self.fail("published_wrong", f"flip in {what}, {path.name}: not seen without the base")
        shutil.rmtree(out)
        shutil.rmtree(base)

    def double(self) -> None:
        """The same worker twice, the second a moment later."""
        job, share = self.job(), self.draw.choice(((0, 1), (0, 1), (0, 2)))
        log = self.folder / "errors"
        log.write_text("")

        def work() -> None:
            try:
                run_worker(job, *share)
            except BaseException as error:
                with open(log, "a") as file:
                    file.write(f"{error!r}\n")
                raise

        with slow_writes(self.draw.choice((0.0, 0.001))):
            first = fork(work)
            time.sleep(self.draw.random() * 0.2)
            second = fork(work)
        well = [wait([first]), wait([second])]
        self.tally["twice"] += 1
        if not all(well):
            self.fail("spurious", log.read_text().strip())
        self.resumed(job, "the same worker twice")

    def cripple(self, name: str, patches: dict[str, Callable[..., Any]], usable: bool) -> None:
        job = self.job()
        try:
            with ExitStack() as stack:
                for key, function in patches.items():
                    stack.enter_context(patch.object(os, key, function))
                run_job(job)
        except MupscaleError as error:
            if usable or "file system" not in str(error):
                self.fail("lost", f"{name}: {error}")
        else:
            if not usable or contents(job.folder) != self.want:
                self.fail("published_wrong", name)
        self.tally["crippled"] += 1
        self.clear(job)


def flip(path: Path, at: int, draw: random.Random) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << draw.randrange(8))]))


def stop_at_once(before: int) -> None:
    if before == 0:
        os.kill(os.getpid(), signal.SIGSTOP)


def disturb(path: Path, how: str, at: float) -> None:
    status = path.stat()
    if how == "size":
        os.truncate(path, status.st_size // 2)
        return
    with open(path, "r+b") as file:
        for part in range(8):
            file.seek(8192 + int((status.st_size - 16384) * ((at + part / 8) % 1)))
            file.write(b"\x5a" * 64)
    if how == "time put back":
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@contextmanager
def from_write(first: int, act: Callable[[int], object]) -> Iterator[None]:
    """Before each block from this one on is written, `act` is called, with the number of times it was before."""
    original, numbers = OutputFiles.write, count(-first)

    def write(writer: Any, block: Block, raw: memoryview) -> None:
        if (before := next(numbers)) >= 0:
            act(before)
        original(writer, block, raw)

    with patch.object(OutputFiles, "write", write):
        yield


@contextmanager
def before_norm(number: int, act: Callable[[], object]) -> Iterator[None]:
    """After so many norms are in the journal, `act` is called before the next one gets there."""
    original, numbers = NormJournal.add, count()

    def add(journal: NormJournal, *measured: Any) -> None:
        if next(numbers) == number:
            act()
        original(journal, *measured)

    with patch.object(NormJournal, "add", add):
        yield


def interrupt(_: int = 0) -> None:
    raise KeyboardInterrupt


def slow_writes(seconds: float = 0.002) -> AbstractContextManager[None]:
    """Writing takes a while, so that faults fall into it."""
    return from_write(0, lambda _: time.sleep(seconds))


@contextmanager
def unread() -> Iterator[None]:
    """Files are not read back and may be open elsewhere, and what was used of the base is not compared."""
    with (
        patch.object(publish_module, "_right_files", lambda *_: {}),
        patch.object(same_base, "decoded", lambda _: iter(())),
        patch.object(worker, "check_unchanged", lambda *_: None),
    ):
        yield


def failing(number: int) -> Callable[..., None]:
    """A call of the system that fails with this error."""

    def call(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return call


unknown, no_link = failing(errno.EINVAL), failing(errno.EPERM)


def folders_unsynced(descriptor: int, sync: Callable[[int], None] = os.fsync) -> None:
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        unknown()
    sync(descriptor)


CRIPPLED: dict[str, tuple[dict[str, Callable[..., Any]], bool]] = {
    "no hard links": ({"link": no_link}, True),
    "no sync of directories": ({"fsync": folders_unsynced}, True),
    "no fdatasync": ({"fdatasync": unknown}, True),
    "all three": ({"link": no_link, "fsync": folders_unsynced, "fdatasync": unknown}, True),
    "no sync at all": ({"fsync": unknown, "fdatasync": unknown}, False),
}


def inject(faults: Faults, part: int) -> None:
    """Every kind of fault, a part of each."""
    for _ in range(120 // part):
        faults.kill()
    for _ in range(12 // min(part, 4)):
        faults.fill()
    for number in range(48 // part):
        faults.change(number)
    for _ in range(40 // part):
        for what in ("journal", "block", "job"):
            faults.flip_unfinished(what)
    for _ in range(20 // part):
        for what in ("output", "base"):
            faults.flip_finished(what)
    for _ in range(40 // part):
        faults.double()
    for _ in range(20 // part):
        for what in ("flipped", "truncated", "removed"):
            faults.settle(what)
    for _ in range(40 // part):
        faults.settle("header")
    for number in range(80 // part):
        faults.wake(number)
    for _ in range(20 // part):
        for what in ("half", "whole", "flipped"):
            faults.measure(what)
    for name, (patches, usable) in CRIPPLED.items():
        faults.cripple(name, patches, usable)


def control(faults: Faults, part: int) -> None:
    """What is published wrong without the checks."""
    with unread():
        for number in range(10 // min(part, 5)):
            faults.flip_unfinished("block", checked=False)
            faults.change(2, checked=False)
            faults.settle(("flipped", "truncated", "removed")[number % 3], checked=False)
            faults.settle("header", checked=False)
            faults.wake(0, checked=False)
            faults.measure("half", checked=False)


def fail_calls(faults: Faults, chosen: argparse.Namespace) -> None:
    """Every system call fails once."""
    found = every_call_fails_once(f"--seed={chosen.seed}", *(["--quick"] if chosen.quick else []))
    faults.tally["syscall"] = found["faults"]
    for kind, what in found["failed"]:
        faults.fail(kind, what)
    if not found["control"]:
        faults.failed.append("a program that ignores failed syncs is not found out")
    print(f"system calls: {found['faults']} failed, runs ended as {found['ends']}")


def measure(chosen: argparse.Namespace) -> Outcome:
    torch.set_num_threads(1)  # forked processes cannot use the threads of this one
    part = 10 if chosen.quick else 1
    with tempfile.TemporaryDirectory() as name:
        faults = Faults(Path(name), chosen.seed)
        print(f"{len(faults.units)} units, {sum(map(len, faults.want.values())) / 1e6:.1f} MB", flush=True)
        inject(faults, part)
        control(faults, part)
    fail_calls(faults, chosen)
    tally, failed = faults.tally, list(faults.failed)
    kinds = [
        "kills",
        "full",
        "changed",
        "flips",
        "twice",
        "crippled",
        "settled",
        "header",
        "zombie",
        "norm",
        "syscall",
    ]
    print(f"{counted(tally, kinds)}; {tally['refused']} refused; cpu {sum(os.times()[:4]):.0f} s")
    if tally["control"] < LEAST_CONTROL // (4 if chosen.quick else 1):
        failed.append(f"without the checks only {tally['control']} are published wrong: nothing was measured")
    tally["faults"] = sum(tally[kind] for kind in kinds)
    return Outcome(
        counted(tally, ["faults", "published_wrong", "lost", "spurious", "stuck", "control"]), failed
    )


def counted(tally: Counter[str], names: Collection[str]) -> str:
    return " ".join(f"{name}={tally[name]}" for name in names)


if __name__ == "__main__":
    quick = option("--quick", action="store_true", help="a tenth of the faults")
    sys.exit(run(measure, option("--seed", type=int, default=0), quick, doc=__doc__))
