"""An output in an object store: the bytes of a local one, invisible until it is complete, resumed after any stop."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from harness import trainer
from harness.llama_files import Llama, job_for, write_directory
from harness.object_store import ObjectStore
from harness.refusals import refusal
from mupscale.cli.main import main
from mupscale.files.directory import Directory
from mupscale.jobs import upload, upload_parts
from mupscale.jobs.job import Job
from mupscale.jobs.journal import writer
from mupscale.jobs.upload_parts import parts_of, share_of
from mupscale.jobs.verify_bytes import check_alone, check_bytes
from mupscale.jobs.work_units import WorkUnits
from mupscale.jobs.worker import run_job, run_worker
from mupscale.storage.location import Url, location
from mupscale.storage.uploads import abort, begin, uploads_in

SIZES = Llama(hidden=64, ffn=160, heads=4, kv_heads=2, layers=2, vocabulary=128)
PART = 64 << 10


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(upload_parts, "PART_BYTES", PART)
    monkeypatch.setattr(upload_parts, "SMALLEST_PART", 1024)
    monkeypatch.setattr(writer, "GROUP_BYTES", 1)  # every part is written down at once


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Directory:
    return write_directory(tmp_path_factory.mktemp("x") / "base", SIZES.shapes(), "F32", 2)


def job_to(base: Directory, out: Path | str, seed: int = 0) -> Job:
    plan = SIZES.plan(2)
    made = job_for(
        plan, base, Path("x"), SIZES.noise(plan, seed=seed), shard_bytes=600_000, block_bytes=16 << 10
    )
    return replace(made, out=location(out))


def url_of(job: Job) -> Url:
    assert isinstance(job.out, Url)
    return job.out


def local(base: Directory, folder: Path) -> dict[str, bytes]:
    run_job(job_to(base, folder))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def keys(store: ObjectStore, prefix: str) -> list[str]:
    bucket, _, rest = prefix.partition("/")
    store.call("PUT", f"/{bucket}")
    _, raw = store.call("GET", f"/{bucket}?list-type=2&prefix={rest}")
    return [key.removeprefix(rest) for key in re.findall(r"<Key>([^<]*)</Key>", raw.decode())]


def stored(store: ObjectStore, prefix: str) -> dict[str, bytes]:
    return {name: store.get(f"{prefix}{name}") for name in keys(store, prefix)}


class StoppedError(Exception):
    """What a test raises in the middle of a job."""


def stop_after(monkeypatch, count: int, name: str = "send") -> list[int]:
    """Let so many calls pass, then none; returns the calls so far."""
    real, calls = getattr(upload, name), list[int]()

    def some(*arguments, **named):
        if len(calls) >= count:
            raise StoppedError
        calls.append(0)
        return real(*arguments, **named)

    monkeypatch.setattr(upload, name, some)
    return calls


@pytest.mark.parametrize("threads", [1, 3])
def test_the_bytes_are_those_of_a_local_output(store, base, tmp_path, threads):
    keys(store, "out/x")
    job = job_to(base, f"s3://out/same{threads}")
    run_job(job, threads)
    assert stored(store, f"out/same{threads}/") == local(base, tmp_path / f"same{threads}")
    assert keys(store, f"out/same{threads}.partial/") == []
    assert uploads_in(url_of(job)) == []
    assert check_bytes(job) == []
    assert check_alone(job.out) == []
    run_job(job)  # again is no error


def test_an_unfinished_output_is_invisible_and_goes_on_where_it_stopped(store, base, tmp_path, monkeypatch):
    keys(store, "out/x")
    job = job_to(base, "s3://out/stopped")
    count = len(parts_of(job, WorkUnits(job)))
    assert count > 8
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(StoppedError):
            run_job(job)
    assert keys(store, "out/stopped/") == []
    assert len(uploads_in(url_of(job))) == len(job.files)
    calls = stop_after(monkeypatch, 1000)
    run_job(job)
    assert len(calls) == count - 5, "what was sent is not sent again"
    assert stored(store, "out/stopped/") == local(base, tmp_path / "stopped")


@pytest.mark.parametrize("name", ["complete", "put", "remove"])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_stop_while_it_is_published_is_repaired(store, base, tmp_path, monkeypatch, name, count):
    keys(store, "out/x")
    out = f"published-{name}{count}"
    job = job_to(base, f"s3://out/{out}")
    with monkeypatch.context() as patch:
        real = upload._Upload._publish
        patch.setattr(
            upload._Upload, "_publish", lambda *given: (stop_after(monkeypatch, count, name), real(*given))
        )
        with pytest.raises(StoppedError):
            run_job(job)
    assert "config.json" not in keys(store, f"out/{out}/") or name == "remove"
    monkeypatch.undo()
    monkeypatch.setattr(upload_parts, "PART_BYTES", PART)
    monkeypatch.setattr(upload_parts, "SMALLEST_PART", 1024)
    for variable, value in store.environment.items():
        monkeypatch.setenv(variable, value)
    run_job(job)
    assert stored(store, f"out/{out}/") == local(base, tmp_path / "wide")
    assert keys(store, f"out/{out}.partial/") == []


def test_uploads_that_are_nobodys_are_given_up_and_lost_ones_begin_again(store, base, tmp_path, monkeypatch):
    keys(store, "out/x")
    job = job_to(base, "s3://out/strays")
    stray = begin(url_of(job) / "model.safetensors", "another")
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(StoppedError):
            run_job(job)
    uploads = uploads_in(url_of(job))
    assert stray not in [one for _, one in uploads]
    assert len(uploads) == len(job.files)
    abort(*sorted(uploads, key=str)[0])
    run_job(job)
    assert stored(store, "out/strays/") == local(base, tmp_path / "strays")


def test_workers_share_the_parts_and_the_last_one_publishes(store, base, tmp_path):
    keys(store, "out/x")
    job = job_to(base, "s3://out/shared")
    assert [run_worker(job, worker, 3) for worker in (2, 0)] == [False, False]
    assert keys(store, "out/shared/") == []
    assert run_worker(job, 1, 3)
    assert stored(store, "out/shared/") == local(base, tmp_path / "shared")


def test_another_job_and_other_files_are_not_touched(store, base, monkeypatch):
    keys(store, "out/x")
    job = job_to(base, "s3://out/taken")
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(StoppedError):
            run_job(job)
    refusal(
        lambda: run_job(job_to(base, "s3://out/taken", seed=1)), "job.entry_differs", where="about.noise.seed"
    )
    store.call("PUT", "/out/full/notes.txt", b"mine")
    refusal(lambda: run_job(job_to(base, "s3://out/full")), "directory.not_empty", where="notes.txt")
    refusal(
        lambda: run_job(job_to(base, "memory://out/other")),
        "store.cannot_be_written",
        where="memory://out/other",
    )


@pytest.mark.parametrize("paired", [False, True])
def test_parts_tile_every_file(base, paired, monkeypatch):
    """Copies of paired noise lie so far apart that its blocks are cut across rows."""
    plan = SIZES.plan(2)
    noise = SIZES.noise(plan)
    if paired:
        tensors = {n: replace(one, paired=0 if "k_proj" in n else None) for n, one in noise.tensors.items()}
        noise = replace(noise, tensors=tensors)
    job = job_for(plan, base, Path("x"), noise, shard_bytes=600_000, block_bytes=1 << 10)
    units = WorkUnits(job)
    parts = parts_of(job, units)
    assert sorted(unit for part in parts for unit in part.blocks) == list(range(units.blocks))
    for file in job.files:
        mine = [part for part in parts if part.file == file]
        assert [part.number for part in mine] == list(range(1, len(mine) + 1))
        assert [part.start for part in mine] == [0, *(part.end for part in mine[:-1])]
        assert mine[-1].end == file.size
        assert all(part.size >= PART for part in mine[:-1])
    for workers in (1, 2, 3, 100):
        shares = [share_of(parts, worker, workers) for worker in range(workers)]
        assert [number for share in shares for number in share] == list(range(len(parts)))


def test_the_command_line_writes_to_a_store(store, tmp_path, capsys):
    keys(store, "out/x")
    trainer.silence()
    trainer.model().save_pretrained(tmp_path / "base")
    words = ["-k", "2", "--noise", "sigma=0.01", "--no-loss", "--quiet"]
    outs = ("s3://out/line", str(tmp_path / "wide"))
    for out in outs:
        assert main(["upscale", str(tmp_path / "base"), out, *words]) == 0, capsys.readouterr().err
    near = {path.name: path.read_bytes() for path in (tmp_path / "wide").iterdir()}
    assert stored(store, "out/line/") == near
    assert main(["upscale", str(tmp_path / "base"), outs[0], *words]) == 0
    assert "already complete" in capsys.readouterr().out
    assert main(["check", outs[0], "--base", str(tmp_path / "base"), "--levels", "bytes", "--quiet"]) == 0
    assert main(["check", outs[0], "--quiet"]) == 0
    raw = bytearray(near["model.safetensors"])
    raw[-1] ^= 1
    store.call("PUT", "/out/line/model.safetensors", bytes(raw))
    assert main(["check", outs[0], "--quiet"]) == 1
    assert json.loads(near["config.json"])
