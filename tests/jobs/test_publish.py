"""Nothing is published that was not read back from the disk, nor a file that another attempt may still write into."""

import errno
import fcntl
import os
from contextlib import suppress
from functools import partial as partial_call
from pathlib import Path
from typing import Any

import pytest

from harness.llama_files import Llama, job_for, write_directory
from harness.refusals import refusal
from mupscale.files.directory import read_directory
from mupscale.jobs import partial as partial_module
from mupscale.jobs.bytes import output_files
from mupscale.jobs.bytes.durable import sync_file
from mupscale.jobs.bytes.output_files import OutputFile, OutputFiles
from mupscale.jobs.job import Job
from mupscale.jobs.journal.entries import BlockDone, Ended, Holds, lines, read_lines
from mupscale.jobs.journal.journals import read_journals
from mupscale.jobs.journal.writer import FileSink, JournalWriter, system
from mupscale.jobs.partial import partial
from mupscale.jobs.publish import publish as publish_module
from mupscale.jobs.publish.attempts import alive, open_elsewhere
from mupscale.jobs.work_units import Block, WorkUnits
from mupscale.jobs.worker import run_job, run_worker

MODEL = Llama(hidden=32, ffn=48, heads=4, kv_heads=2, layers=2, vocabulary=50)
PLAN = MODEL.plan(2)
NOISE = MODEL.noise(PLAN)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("publish") / "base"
    write_directory(path, MODEL.shapes(), "F32", 2)
    return path


def job_in(base: Path, out: Path) -> Job:
    return job_for(PLAN, read_directory(base), out, NOISE, shard_bytes=60_000, block_bytes=8192)


def bytes_in(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


@pytest.fixture(scope="module")
def want(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("want") / "wide"
    run_job(job_in(base, out))
    return bytes_in(out)


def unfinished(job: Job, name: str) -> Path:
    return partial(job.folder) / f"{name}.partial"


def first_block(job: Job) -> Block:
    block = WorkUnits(job)[0]
    assert isinstance(block, Block)
    return block


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)


def inodes(folder: Path) -> dict[str, int]:
    return {path.name.removesuffix(".partial"): path.stat().st_ino for path in folder.glob("*.safetensors*")}


@pytest.mark.parametrize("how", ["block", "header", "shorter", "longer", "gone"])
def test_damage_to_the_share_of_a_worker_that_ended_well_is_repaired(base, want, tmp_path, monkeypatch, how):
    for checked in (True, False):
        job = job_in(base, tmp_path / f"wide{checked}")
        assert not run_worker(job, 0, 2)
        block = first_block(job)
        path = unfinished(job, block.move.target.file)
        size = path.stat().st_size
        if how == "gone":
            path.unlink()
        elif how in ("shorter", "longer"):
            os.truncate(path, size - 1000 if how == "shorter" else size + 1000)
        else:
            flip(path, 12 if how == "header" else block.offset + 5)
        with monkeypatch.context() as patched:
            if not checked:
                patched.setattr(publish_module, "_right_files", lambda *_: {})
            assert run_worker(job, 1, 2)
        assert (bytes_in(job.folder) == want) == checked, "control: without reading it back it is published"


def test_a_partial_file_that_is_lost_is_written_again(base, want, tmp_path):
    """By whichever command comes next, be it the same worker or the other one."""
    for rest in ([(0, 1)], [(0, 2), (1, 2)]):
        job = job_in(base, tmp_path / f"wide{len(rest)}")
        run_worker(job, 0, 2)
        for file in partial(job.folder).glob("*.safetensors.partial"):
            file.unlink()
        assert [run_worker(job, *share) for share in rest][-1]
        assert bytes_in(job.folder) == want


def test_a_file_is_copied_only_if_an_attempt_may_still_write_into_it(base, want, tmp_path):
    """After a worker that ended, or whose process is gone from this machine, files are published where they are."""
    job = job_in(base, tmp_path / "ended")
    run_worker(job, 0, 2)
    before = inodes(partial(job.folder))
    assert before
    run_worker(job, 1, 2)
    assert before.items() <= inodes(job.folder).items(), "all have ended: nothing is copied"
    for name, held, copied in (
        ("gone", system(), False),
        ("elsewhere", "another-machine", True),
        ("older", None, True),
    ):
        job = job_in(base, tmp_path / name)
        run_worker(job, 0, 2)
        journal = next(partial(job.folder).glob("journal-*"))
        entries = [
            entry for entry in read_lines(journal.read_bytes()) if not isinstance(entry, Holds | Ended)
        ]
        journal.write_bytes(lines([*([] if held is None else [Holds(held)]), *entries]))
        before = inodes(partial(job.folder))
        run_worker(job, 1, 2)
        after = inodes(job.folder)
        assert bytes_in(job.folder) == want
        assert any(after[file] != inode for file, inode in before.items()) == copied, name


def test_a_late_write_of_another_attempt_reaches_no_published_file(base, want, tmp_path, monkeypatch):
    """A worker that was stopped before it wrote a block: its journal is open, and so is the file."""
    for checked in (True, False):
        job = job_in(base, tmp_path / f"wide{checked}")
        run_worker(job, 0, 2)
        sink = FileSink(partial(job.folder), 0, 2)
        block = first_block(job)
        with OutputFiles(partial(job.folder), sink.descriptor) as late:
            file = late.file(block)
            assert file is not None
            sink.close()
            assert open_elsewhere(partial(job.folder), WorkUnits(job)), (
                "the file keeps the lock of the journal"
            )
            with monkeypatch.context() as patched:
                if not checked:
                    patched.setattr(publish_module, "open_elsewhere", lambda *_: set())
                assert run_worker(job, 1, 2)
            assert bytes_in(job.folder) == want
            file.write(memoryview(bytes(64)), block.offset)
        assert (bytes_in(job.folder) == want) == checked, "control: a file that it has open is changed"


def test_shares_of_attempts_are_read_from_names_of_journals(base, tmp_path):
    job = job_in(base, tmp_path / "wide")
    units, files = WorkUnits(job), {file.name for file in job.files}
    for workers in (1, 2, 3, 40):
        shares = [units.files(worker, workers) for worker in range(workers)]
        assert set().union(*shares) == files
        for worker, names in enumerate(shares):
            assert {units.file_of(u) for u in units.share(worker, workers) if u < units.blocks} == names
    for name in ("journal-x.log", "journal-00003-of-00002-ab.log"):
        (tmp_path / name).touch()
        assert alive(tmp_path) == {(0, 1)}, "of an unknown journal the worst is assumed"
        (tmp_path / name).unlink()
    assert alive(tmp_path) == set()


def test_a_process_that_dies_before_the_last_rename_leaves_what_is_read_again(
    base, want, tmp_path, monkeypatch
):
    """The journals are gone by then; the record of the result says what the files must hold."""
    rename = os.rename

    def dies(source: Any, target: Any) -> None:
        if Path(target) == job.folder:
            raise KeyboardInterrupt
        rename(source, target)

    for damage in (None, "block", "gone", "mupscale.json"):
        job = job_in(base, tmp_path / f"wide{damage}")
        with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
            patched.setattr(os, "rename", dies)
            run_job(job)
        folder, block = partial(job.folder), first_block(job)
        assert not list(folder.glob("journal-*"))
        if damage == "gone":
            (folder / block.move.target.file).unlink()
        elif damage == "block":
            flip(folder / block.move.target.file, block.offset + 5)
        elif damage is not None:
            flip(folder / damage, 100)
        if damage == "mupscale.json":
            refusal(partial_call(run_job, job), "job.directory_without_job", where=str(folder))
            assert not job.folder.exists()
        else:
            run_job(job)
            assert bytes_in(job.folder) == want


def test_a_process_that_dies_while_it_reads_back_may_lose_a_line_of_a_journal(
    base, want, tmp_path, monkeypatch
):
    """The files have their final names by then, so a block that no journal names any more is journalled, not written."""
    job = job_in(base, tmp_path / "wide")
    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        patched.setattr(
            publish_module, "carried_files", lambda job: (_ for _ in ()).throw(KeyboardInterrupt())
        )
        run_job(job)
    assert not list(partial(job.folder).glob("*.partial"))
    journal = next(partial(job.folder).glob("journal-*"))
    flip(journal, journal.stat().st_size // 2)
    run_job(job)
    assert bytes_in(job.folder) == want


def test_what_cannot_be_read_back_is_made_again_and_a_disk_that_changes_bytes_is_refused(
    base, want, tmp_path, monkeypatch
):
    read, left = os.preadv, [1]

    def failing(descriptor: int, rooms: Any, offset: int) -> int:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if "wide" in name and left[0] > 0:
            left[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, rooms, offset)

    monkeypatch.setattr(os, "preadv", failing)
    job = job_in(base, tmp_path / "wide")
    run_job(job)
    assert left == [0]
    assert bytes_in(job.folder) == want
    left[0] = 10**9
    other = job_in(base, tmp_path / "wide2")
    refusal(lambda: run_job(other), "disk.reads_back_differently", where=str(partial(other.folder)))
    assert not other.folder.exists()
    assert not list(partial(other.folder).glob(".model*")), "drafts are removed"
    left[0] = 0
    run_job(other)
    assert bytes_in(other.folder) == want


def test_a_file_that_changes_after_it_was_read_is_read_once_more(base, want, tmp_path, monkeypatch):
    job, done = job_in(base, tmp_path / "wide"), [False]
    carried = partial_module.carried_files

    def meanwhile(found: Job) -> Any:
        if not done[0]:
            done[0] = True
            block = first_block(job)
            flip(partial(job.folder) / block.move.target.file, block.offset + 5)
        return carried(found)

    monkeypatch.setattr(publish_module, "carried_files", meanwhile)
    run_job(job)
    assert done == [True]
    assert bytes_in(job.folder) == want


def test_a_lock_that_a_stopped_process_holds_stops_nobody(base, want, tmp_path, monkeypatch):
    monkeypatch.setattr(partial_module, "PATIENCE", 0.05)
    job = job_in(base, tmp_path / "wide")
    run_worker(job, 0, 2)
    descriptor = os.open(partial(job.folder), os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert run_worker(job, 1, 2)
    finally:
        os.close(descriptor)
    assert bytes_in(job.folder) == want


def test_a_process_that_is_overtaken_leaves_no_draft_in_what_was_published(base, want, tmp_path, monkeypatch):
    job, write, sync = job_in(base, tmp_path / "wide"), partial_module.write_file, sync_file
    monkeypatch.setattr(partial_module, "PATIENCE", 0.0)

    def overtaken(descriptor):
        monkeypatch.setattr(partial_module, "sync_file", sync)
        run_job(job)
        sync(descriptor)

    def write_first(path, raw):
        monkeypatch.setattr(publish_module, "write_file", write)
        monkeypatch.setattr(partial_module, "sync_file", overtaken)
        write(path, raw)

    monkeypatch.setattr(publish_module, "write_file", write_first)
    run_job(job)
    assert bytes_in(job.folder) == want


def test_a_directory_of_an_earlier_version_is_resumed(base, want, tmp_path, monkeypatch):
    """It has all files from the start, an empty file `ready`, and journals that do not say who holds them."""
    job, write, left = job_in(base, tmp_path / "wide"), OutputFiles.write, [20]

    def dying(self: Any, *arguments: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        write(self, *arguments)

    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        patched.setattr(OutputFiles, "write", dying)
        run_job(job)
    folder = partial(job.folder)
    partial_module.create(job, {file.name for file in job.files})
    (folder / "ready").touch()
    for journal in folder.glob("journal-*"):
        raw = journal.read_bytes()
        journal.write_bytes(lines([entry for entry in read_lines(raw) if not isinstance(entry, Holds)]))
    done = sum(read_journals(folder, len(WorkUnits(job))).units)
    left[0] = 10**6
    monkeypatch.setattr(OutputFiles, "write", dying)
    run_job(job)
    assert done == 20
    assert 10**6 - left[0] == WorkUnits(job).blocks - done, "no block is made twice"
    assert bytes_in(job.folder) == want


def test_a_failed_sync_is_followed_by_no_line(tmp_path, monkeypatch):
    """The system reports an error of writing back once; a later sync that succeeds says nothing."""
    (tmp_path / "x").write_bytes(bytes(100))
    file, calls = OutputFile(tmp_path / "x"), []

    def fails_once(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(output_files, "sync_data", fails_once)
    sink = FileSink(tmp_path, 0, 1)

    def write_three() -> None:
        with JournalWriter(sink) as journal:
            for unit in range(3):
                file.write(memoryview(b"abc"), unit)
                journal.add(BlockDone(unit, "a1"), size=1 << 30, file=file)
                journal.join(0.2)

    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        write_three()
    assert calls == [file._cached], "through the descriptor that wrote"
    assert not [entry for entry in read_lines(sink.path.read_bytes()) if not isinstance(entry, Holds)]
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        file.close()


def test_a_file_is_synced_before_it_is_closed(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(bytes(100))
    synced: list[int] = []
    monkeypatch.setattr(output_files, "sync_data", synced.append)
    file = OutputFile(tmp_path / "x")
    file.sync()
    assert synced == [], "nothing was written"
    file.write(memoryview(b"abc"), 0)
    file.close()
    file.sync()
    assert synced == [file._cached]


def test_blocks_made_of_a_base_that_has_changed_are_not_journalled(base, tmp_path):
    own = tmp_path / "base"
    own.mkdir()
    for path in base.iterdir():
        (own / path.name).write_bytes(path.read_bytes())
    job = job_in(own, tmp_path / "wide")
    write, left = OutputFiles.write, [10]

    def changing(self: Any, *arguments: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            for path in own.glob("*.safetensors"):
                os.utime(path)
        write(self, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(OutputFiles, "write", changing)
        patched.setattr(FileSink, "seconds", 60.0)  # all of them are one group
        refusal(lambda: run_job(job), "job.base_stamp_changed")
    sums = read_journals(partial(job.folder), len(WorkUnits(job))).sums
    assert sums == {}
    assert not job.folder.exists()


def test_errors_while_a_failure_is_handled_and_writes_of_nothing_are_refusals(base, tmp_path, monkeypatch):
    def failing(number: int) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            raise OSError(number, os.strerror(number))

        return call

    job, space = job_in(base, tmp_path / "wide"), [os.statvfs(tmp_path)]
    with monkeypatch.context() as patched:
        patched.setattr(output_files, "write_all", failing(errno.ENOSPC))
        patched.setattr(os, "statvfs", lambda path: space.pop() if space else failing(errno.EIO)())
        refusal(lambda: run_job(job), "disk.is_full", where=str(job.folder))
    assert space == []
    with monkeypatch.context() as patched:
        patched.setattr(partial_module, "locked", failing(errno.EIO))
        refusal(lambda: run_job(job), "disk.cannot_be_written", where=str(job.folder))
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", lambda *_: 0)
        refusal(lambda: run_job(job), "disk.cannot_be_written", where=str(job.folder))
    run_job(job)
