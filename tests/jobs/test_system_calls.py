"""Every call of the system may fail: files are read to their end or refused, what fails has a code, what a disk does not say is
not taken for an answer. `harness/syscalls` fails them one by one; here is what it found, and that it finds what it looks for."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import mupscale as mu
from harness.native import NotBuiltError
from harness.refusals import refusal
from harness.syscalls import CALLS, environment
from mupscale.checkpoints.shards import weight_moves
from mupscale.files.directory import read_directory
from mupscale.files.opened import LocalFile
from mupscale.files.strict import read_regular, system_errors
from mupscale.jobs.bytes.durable import append
from mupscale.jobs.digests import make_job
from mupscale.jobs.job import Job
from mupscale.jobs.verify_bytes import check_bytes
from mupscale.jobs.worker import run_job
from mupscale.storage.looking import exists, is_dir, is_file

SCRIPT = """
import os, sys
from pathlib import Path
from harness.syscalls import Shim

folder = Path(sys.argv[1])
shim = Shim(folder)
def write(name="a"):
    try:
        with open(folder / name, "wb+", buffering=0) as file:
            return file.write(b"123456"), os.pread(file.fileno(), 6, 0), os.fsync(file.fileno())
    except OSError as error:
        return error.errno
said = []
shim.count(); said += [write(), shim.fired]; shim.stop()
shim.fail("write", 2, "ENOSPC"); said += [write(), write(), write(), shim.fired, shim.where]; shim.stop()
shim.fail("write", 1, "short"); said += [write()]; shim.stop()
shim.fail("pread", 1, "zero"); said += [write()]; shim.stop()
shim.fail("fsync", 1, "EIO", 2); said += [write(), write("journal-0")]; shim.stop()
shim.fail("fsync", 1, "EIO"); said += [write(), write("journal-0"), shim.journalled, shim.unsynced]; shim.stop()
shim.fail("stat", 1, "EIO"); said += [os.path.exists("/"), os.path.exists(folder)]; shim.stop()
print(said)
"""


def failing(number: int):
    def call(*_, **__):
        raise OSError(number, os.strerror(number), "somewhere")

    return call


def test_the_shim_fails_what_it_is_asked_to_and_nothing_else(tmp_path):
    try:
        variables = environment()
    except NotBuiltError as reason:
        pytest.skip(str(reason))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    right = (6, b"123456", None)
    assert eval(done.stdout) == [
        right, 0,
        right, errno.ENOSPC, right, 1, "a",
        (3, b"123", None),
        (6, b"", None),
        errno.EIO, errno.EIO,
        errno.EIO, right, 1, 1,
        True, False,
    ]  # fmt: skip
    assert len(set(CALLS)) == len(CALLS)


def test_files_are_read_to_their_end_or_refused(tmp_path, monkeypatch):
    path, raw = tmp_path / "x", bytes(range(200))
    path.write_bytes(raw)
    real = os.pread
    with LocalFile(path) as file:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", lambda fd, count, at: real(fd, max(1, count // 3), at))
            assert file.read(0, 1000) == raw
            assert file.read(150, 20) == raw[150:170]
            assert file.read(300, 20) == b""
        os.truncate(path, 100)
        refusal(lambda: file.read(0, 200), "file.changed_while_read")
    monkeypatch.setattr(os, "fstat", lambda fd, real=os.fstat: _longer(real(fd)))
    refusal(lambda: read_regular(path), "file.changed_while_read")


def _longer(status: os.stat_result) -> os.stat_result:
    return os.stat_result((*status[:6], status.st_size + 1, *status[7:]))


def test_a_disk_that_does_not_answer_is_no_file_that_is_missing(job, tmp_path, monkeypatch):
    """A carried file was left out of the result when its stat failed."""
    assert "tokenizer.json" in read_directory(tmp_path / "base").carried
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert not any(
        ask(tmp_path / name) for ask in (exists, is_dir, is_file) for name in ("no", "loop", "no\0")
    )
    real = os.stat

    def stat(path, **options):
        return failing(errno.EIO)() if str(path).endswith("tokenizer.json") else real(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    for ask in (exists, is_dir, is_file):
        with pytest.raises(OSError, match="output error"):
            ask(tmp_path / "base" / "tokenizer.json")
    refusal(lambda: read_directory(tmp_path / "base"), "file.cannot_be_used")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "llama"}')
    (base / "tokenizer.json").write_text("{}")
    save_file({"w": torch.arange(600.0).view(20, 30)}, base / "model.safetensors")
    axes = tuple(map(mu.rules.Axis.parse, ("out: 20x2", "in: 30x2")))
    directory = read_directory(base)
    files, moves, _ = weight_moves(mu.Plan({"w": mu.plans.TensorPlan(("w",), axes)}), directory)
    return make_job(base, tmp_path / "wide", files, moves, carried=directory.carried, block_bytes=1024)


CALLED = [
    "open",
    "close",
    "rename",
    "replace",
    "mkdir",
    "link",
    "unlink",
    "statvfs",
    "fsync",
    "fdatasync",
    "ftruncate",
    "pwrite",
]


@pytest.mark.parametrize("call", CALLED)
def test_whatever_the_system_refuses_has_a_code_and_the_job_goes_on(job, monkeypatch, call):
    """From the n-th call on everything fails; the first n at which nothing does is the control that all were met."""
    real, wide = getattr(os, call), Path(str(job.out))
    for first in count(1):
        calls = count(1)

        def called(*args, calls=calls, first=first, **options):
            done = real(*args, **options) if call == "close" else None
            if next(calls) >= first:
                failing(errno.EIO)()
            return done if call == "close" else real(*args, **options)

        with monkeypatch.context() as patch, suppress(mu.MupscaleError):
            patch.setattr(os, call, called)
            run_job(job)
        failed = next(calls) > first
        run_job(job)
        assert check_bytes(job) == []
        assert not os.path.lexists(f"{wide}.partial")
        shutil.rmtree(wide)
        if not failed:
            break
    assert first > 1, "control: the call is made"


def test_what_a_printer_meets_is_no_error_of_a_file():
    with pytest.raises(BrokenPipeError), system_errors():
        failing(errno.EPIPE)()
    refusal(lambda: system_errors()(failing(errno.EIO))(), "file.cannot_be_used", where="somewhere")
    refusal(lambda: system_errors("here")(failing(errno.ENOENT))(), "file.does_not_exist", where="here")


def test_a_write_of_none_of_the_bytes_ends(tmp_path, monkeypatch):
    with (tmp_path / "x").open("wb") as file:
        real = os.write
        monkeypatch.setattr(os, "write", lambda fd, raw: real(fd, raw[: max(1, len(raw) // 2)]))
        append(file.fileno(), b"123456")
        monkeypatch.setattr(os, "write", lambda *_: 0)
        with pytest.raises(OSError, match="none"):
            append(file.fileno(), b"7")
    assert (tmp_path / "x").read_bytes() == b"123456"
