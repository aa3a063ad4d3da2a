"""Blocks are written past the page cache where the file system can do that, and files have the same bytes in either way."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.llama_files import Llama, job_for, write_directory
from harness.profiles import examples
from harness.refusals import refusal
from mupscale.files.directory import read_directory
from mupscale.jobs.bytes import output_files
from mupscale.jobs.bytes.output_files import OutputFile, OutputFiles, direct_part
from mupscale.jobs.job import PAGE, Job
from mupscale.jobs.partial import partial
from mupscale.jobs.verify_bytes import check_bytes
from mupscale.jobs.worker import run_job, run_worker

MODEL = Llama(hidden=64, ffn=176, heads=4, kv_heads=2, layers=2, vocabulary=300)
PLAN = MODEL.plan(2)


class Calls:
    """Direct opens and writes of this process, and what they are answered with."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.opens = 0
        self.bytes: list[int] = []
        self.refuse_open: int | None = None
        self.refuse_write: int | None = None
        self.short: int | None = None
        self._descriptors: set[int] = set()
        self._open, self._pwrite = os.open, os.pwrite
        patched.setattr(os, "open", self.open)
        patched.setattr(os, "pwrite", self.pwrite)

    def open(self, path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if not flags & os.O_DIRECT:
            descriptor = self._open(path, flags, *rest, **options)
            self._descriptors.discard(descriptor)
            return descriptor
        self.opens += 1
        if self.refuse_open is not None:
            raise OSError(self.refuse_open, os.strerror(self.refuse_open))
        descriptor = self._open(path, flags, *rest, **options)
        self._descriptors.add(descriptor)
        return descriptor

    def pwrite(self, descriptor: int, raw: Any, offset: int) -> int:
        if descriptor in self._descriptors:
            if self.refuse_write is not None:
                raise OSError(self.refuse_write, os.strerror(self.refuse_write))
            if offset % PAGE:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            if self.short is not None:
                return self._write_short(descriptor, raw[: self.short], offset)
            self.bytes.append(len(raw))
        return self._pwrite(descriptor, raw, offset)

    def _write_short(self, descriptor: int, raw: Any, offset: int) -> int:
        """As a file system that stops in the middle of a page."""
        cached = self._open(f"/proc/self/fd/{descriptor}", os.O_WRONLY)
        try:
            return self._pwrite(cached, raw, offset)
        finally:
            os.close(cached)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    (tmp_path / "probe").touch()
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    monkeypatch.setattr(output_files, "LEAST", PAGE)
    return Calls(monkeypatch)


def placed(length: int, offset: int) -> memoryview:
    """Random bytes at an address with the remainder of the offset."""
    room: Any = np.random.default_rng(length).integers(0, 256, length + PAGE, np.uint8)
    at = (offset - room.ctypes.data) % PAGE
    return memoryview(room)[at : at + length]


def job_in(folder: Path, name: str, dtype: str = "BF16") -> Job:
    base = folder / "base"
    if not base.exists():
        write_directory(base, MODEL.shapes(), dtype, 2)
    options: Any = {"shard_bytes": 300_000, "block_bytes": 20_000}
    return job_for(PLAN, read_directory(base), folder / name, MODEL.noise(PLAN), **options)


def bytes_in(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F64"])
def test_a_job_writes_most_of_its_bytes_directly_and_the_same_as_through_the_cache(tmp_path, calls, dtype):
    run_job(job_in(tmp_path, "direct", dtype), workers=2)
    size = sum(len(raw) for name, raw in bytes_in(tmp_path / "direct").items() if "safetensors" in name)
    assert sum(calls.bytes) > 0.6 * size
    assert all(count % PAGE == 0 for count in calls.bytes)
    output_files.LEAST, before = 1 << 40, len(calls.bytes)
    run_job(job_in(tmp_path, "cached", dtype))
    assert len(calls.bytes) == before, "control: nothing is written directly"
    assert bytes_in(tmp_path / "direct") == bytes_in(tmp_path / "cached")


@pytest.mark.parametrize("where", ["open", "write"])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_where_the_file_system_says_no_the_cache_is_used(tmp_path, calls, where, number):
    run_job(job_in(tmp_path, "direct"))
    setattr(calls, f"refuse_{where}", number)
    calls.opens, written = 0, len(calls.bytes)
    job = job_in(tmp_path, "cached")
    run_job(job)
    assert len(calls.bytes) == written
    assert 0 < calls.opens <= len(job.files), "a file that was refused is not tried again"
    assert bytes_in(tmp_path / "direct") == bytes_in(tmp_path / "cached")


@pytest.mark.parametrize("short", [PAGE, PAGE + 512, 100])
def test_short_direct_writes_are_continued(tmp_path, calls, short):
    """After a part of a page the rest is not aligned any more: the kernel refuses it, and the cache takes it."""
    run_job(job_in(tmp_path, "whole"))
    calls.short = short
    job = job_in(tmp_path, "short")
    run_job(job)
    assert bytes_in(tmp_path / "short") == bytes_in(tmp_path / "whole")


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, "disk.is_full"), (errno.EIO, "disk.cannot_be_written")]
)
def test_other_errors_are_said_and_the_job_resumes(tmp_path, calls, number, code):
    run_job(job_in(tmp_path, "want"))
    job = job_in(tmp_path, "wide")
    calls.refuse_write = number
    refusal(lambda: run_job(job), code, where=[str(job.folder), os.strerror(number)])
    assert not job.folder.exists()
    calls.refuse_write = None
    run_job(job)
    assert check_bytes(job) == []
    assert bytes_in(job.folder) == bytes_in(tmp_path / "want")


def test_a_worker_that_dies_between_direct_writes_is_resumed(tmp_path, calls, monkeypatch):
    run_job(job_in(tmp_path, "want"))
    job, write, left = job_in(tmp_path, "wide"), OutputFiles.write, [30]

    def dying(self: Any, *arguments: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        write(self, *arguments)

    monkeypatch.setattr(OutputFiles, "write", dying)
    with pytest.raises(KeyboardInterrupt):
        run_worker(job, 0, 1)
    assert partial(job.folder).exists()
    left[0] = 10**9
    assert run_worker(job, 0, 1)
    assert bytes_in(job.folder) == bytes_in(tmp_path / "want")


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 30_000)), max_size=5), st.booleans())
def test_any_bytes_at_any_offset_arrive(tmp_path_factory: Any, parts: list[tuple[int, int]], congruent: bool):
    path = tmp_path_factory.mktemp("any") / "file"
    want = bytearray(80_000)
    path.write_bytes(want)
    least, output_files.LEAST = output_files.LEAST, PAGE
    file = OutputFile(path)
    try:
        for offset, length in parts:
            raw = placed(length, offset if congruent else offset + 8)
            file.write(raw, offset)
            want[offset : offset + length] = raw
    finally:
        file.close()
        output_files.LEAST = least
    assert path.read_bytes() == bytes(want)


def test_short_blocks_and_other_addresses_are_left_to_the_cache():
    long = output_files.LEAST
    assert direct_part(placed(long, 0), 0) == (0, long)
    assert direct_part(placed(long + 1000, 5000), 5000) == (0, 0), "less than that is in whole pages"
    assert direct_part(placed(long + PAGE, 5000), 5000) == (3192, long)
    assert direct_part(placed(2 * long, 8), 0) == (0, 0), "the address has another remainder"
    assert direct_part(memoryview(b""), 0) == (0, 0)


def test_a_link_in_the_place_of_a_partial_file_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(64))
    (tmp_path / "x").symlink_to(victim)
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        OutputFile(tmp_path / "x")
    OutputFile(victim).close()


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_nobody_may_read_weights_who_may_not_read_those_of_the_base(tmp_path, mode):
    write_directory(tmp_path / "base", MODEL.shapes(), "F32")
    for path in (tmp_path / "base").glob("*.safetensors"):
        path.chmod(mode)
    run_job(job_for(PLAN, read_directory(tmp_path / "base"), tmp_path / "wide"))
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "wide").glob("*.safetensors")} == {mode}
