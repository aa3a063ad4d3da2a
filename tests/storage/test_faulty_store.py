"""A store that drops, stalls or refuses requests: nothing is lost, and what keeps failing is said in one line."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from harness.llama_files import Llama, job_for, write_directory
from harness.object_store import object_store
from harness.refusals import refusal
from mupscale.cli.main import main
from mupscale.errors import MupscaleError
from mupscale.files.directory import read_directory
from mupscale.jobs import upload, upload_parts
from mupscale.jobs.job import Job
from mupscale.jobs.verify_bytes import check_alone
from mupscale.jobs.worker import run_job
from mupscale.storage import pages, remote, uploads
from mupscale.storage.location import Url, location

SIZES = Llama(hidden=64, ffn=160, heads=4, kv_heads=2, layers=2, vocabulary=128)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(upload_parts, "PART_BYTES", 64 << 10)
    monkeypatch.setattr(upload_parts, "SMALLEST_PART", 1024)
    monkeypatch.setattr(pages, "KEPT", 4)
    monkeypatch.setattr(remote, "PAUSES", (0.0, 0.01, 0.1, 0.1, 0.1))


@pytest.fixture(autouse=True)
def healed(store):
    yield
    store.traffic.drop = store.traffic.stall = store.traffic.flip = store.traffic.rename = (
        store.traffic.page
    ) = 0
    store.traffic.forbid = False


def job_to(base: Path | str, out: Path | str) -> Job:
    plan = SIZES.plan(2)
    made = job_for(plan, read_directory(base), Path("x"), SIZES.noise(plan), block_bytes=16 << 10)
    return replace(made, out=location(out))


def prepared(store, tmp_path: Path, name: str) -> dict[str, bytes]:
    """A base in a bucket of its own, and what a local job makes of it."""
    write_directory(tmp_path / "base", SIZES.shapes(), "F32")
    store.put(tmp_path / "base", f"{name}/base")
    run_job(job_to(tmp_path / "base", tmp_path / "near"))
    return {path.name: path.read_bytes() for path in (tmp_path / "near").iterdir()}


@pytest.mark.parametrize("threads", [1, 2])
def test_every_tenth_request_that_is_dropped_loses_nothing(store, tmp_path, threads):
    near = prepared(store, tmp_path, f"drop{threads}")
    store.traffic.reset()
    store.traffic.drop = 10
    job = job_to(f"s3://drop{threads}/base", f"s3://drop{threads}/wide")
    run_job(job, threads)
    assert check_alone(job.out) == []
    assert store.traffic.harmed >= 8, "each of the four kinds, twice"
    assert {name: store.get(f"drop{threads}/wide/{name}") for name in near} == near
    assert b"<UploadId>" not in store.call("GET", f"/drop{threads}?uploads")[1]


def test_a_single_try_does_lose(store, tmp_path, monkeypatch):
    """Control: the dropped requests are those that are tried again."""
    prepared(store, tmp_path, "control")
    monkeypatch.setattr(remote, "PAUSES", ())
    store.traffic.reset()
    store.traffic.drop = 10
    refusal(lambda: run_job(job_to("s3://control/base", "s3://control/wide")), "store.does_not_answer")


def test_requests_that_stall_are_given_up_and_tried_again(store, tmp_path, monkeypatch):
    near = prepared(store, tmp_path, "stall")
    monkeypatch.setenv(remote.TIMEOUT, "2")
    store.traffic.reset()
    store.traffic.stall = 40
    run_job(job_to("s3://stall/base", "s3://stall/wide"))
    assert store.traffic.harmed >= 2
    assert {name: store.get(f"stall/wide/{name}") for name in near} == near


def test_a_store_that_is_down_ends_with_one_line_and_the_job_resumes(store, tmp_path, monkeypatch, capsys):
    near = prepared(store, tmp_path, "down")
    job = job_to("s3://down/base", "s3://down/wide")
    store.traffic.reset()
    store.traffic.drop = 1
    refusal(lambda: run_job(job), "store.does_not_answer")
    assert store.traffic.harmed >= 6, "the first try, and one after each pause"
    assert main(["plan", "s3://down/base", "-k", "2"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "[store.does_not_answer]" in said
    store.traffic.drop = 0
    run_job(job)
    assert {name: store.get(f"down/wide/{name}") for name in near} == near


def test_what_is_forbidden_is_said_at_once(store, tmp_path, capsys):
    near = prepared(store, tmp_path, "secret")
    assert near
    job = job_to(tmp_path / "base", "s3://secret/wide")
    store.traffic.reset()
    store.traffic.forbid = True
    refusal(lambda: read_directory("s3://secret/base"), "file.no_permission", where="s3://secret/base")
    refusal(lambda: run_job(job), "file.no_permission", where="s3://secret/wide")
    assert store.traffic.seen < 8, "a refusal is no reason to try again"
    for code, words in {"file.no_permission": ["plan", "-k", "2"], "file.unreadable": ["check"]}.items():
        assert main([*words, "s3://secret/base"]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert f"[{code}]" in said


def test_without_credentials_what_to_set_is_said(store, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    refusal(lambda: read_directory("s3://nobody/base"), "store.no_credentials", where="s3://nobody/base")


def test_a_bucket_that_is_not_there_is_named(store, tmp_path):
    write_directory(tmp_path / "base", SIZES.shapes(), "F32")
    refusal(
        lambda: run_job(job_to(tmp_path / "base", "s3://nobucket/wide")),
        "store.no_such_bucket",
        where="nobucket",
    )
    refusal(
        lambda: read_directory("s3://Not_A_Bucket!/x"), "store.invalid_request", where="s3://Not_A_Bucket!/x"
    )


def test_a_wrong_timeout_is_refused(store, monkeypatch):
    monkeypatch.setenv(remote.TIMEOUT, "soon")
    refusal(
        lambda: read_directory("s3://anywhere/x"), "store.timeout_not_seconds", where=[remote.TIMEOUT, "soon"]
    )


def test_a_server_that_is_gone_is_named(tmp_path, monkeypatch):
    pytest.importorskip("moto")
    with object_store() as gone:
        pass
    for name, value in gone.environment.items():
        monkeypatch.setenv(name, value)
    refusal(lambda: read_directory("s3://gone/x"), "store.does_not_answer", where="s3://gone/x")


@pytest.mark.parametrize(("fault", "every"), [("flip", 5), ("rename", 3), ("page", 15)])
def test_changed_parts_other_names_and_pages_of_a_proxy_lose_nothing(store, tmp_path, fault, every):
    near = prepared(store, tmp_path, fault)
    store.traffic.reset()
    setattr(store.traffic, fault, every)
    with suppress(MupscaleError):  # a part may meet the fault each time it is sent
        run_job(job_to(tmp_path / "base", f"s3://{fault}/wide"))
    assert store.traffic.harmed
    setattr(store.traffic, fault, 0)
    run_job(job_to(tmp_path / "base", f"s3://{fault}/wide"))
    assert {name: store.get(f"{fault}/wide/{name}") for name in near} == near
    assert b"<UploadId>" not in store.call("GET", f"/{fault}?uploads")[1]


def test_a_changed_part_is_published_where_its_name_is_not_compared(store, tmp_path, monkeypatch):
    """Control: this server does not look at Content-MD5."""
    near = prepared(store, tmp_path, "unseen")
    monkeypatch.setattr(upload, "probe", lambda folder: False)
    store.traffic.reset()
    store.traffic.flip = 2
    run_job(job_to(tmp_path / "base", "s3://unseen/wide"))
    assert {name: store.get(f"unseen/wide/{name}") for name in near} != near


def test_a_store_that_cannot_list_parts_is_refused_before_anything_is_sent(store, tmp_path, monkeypatch):
    prepared(store, tmp_path, "blind")

    def forbidden(*_):
        raise PermissionError("MethodNotAllowed")

    monkeypatch.setattr(uploads, "sent", forbidden)
    refusal(lambda: run_job(job_to(tmp_path / "base", "s3://blind/wide")), "store.cannot_list_parts")
    assert b"<Key>wide" not in store.call("GET", "/blind?list-type=2")[1]
    assert b"<UploadId>" not in store.call("GET", "/blind?uploads")[1]


def test_uploads_of_several_pages_are_found(store, tmp_path, monkeypatch):
    store.call("PUT", "/many")
    folder = location("s3://many/wide")
    assert isinstance(folder, Url)
    own = [uploads.begin(folder / f"{n}", "x") for n in range(5)]
    pages, whole = [], remote.request

    def paged(url, method, name, options):
        if name != "list_multipart_uploads":
            return whole(url, method, name, options)
        after = int(options.get("KeyMarker", 0))
        pages.append(after)
        answer = whole(url, method, name, {k: v for k, v in options.items() if "Marker" not in k})
        last = after + 2 >= len(own)
        more = (
            {} if last else {"IsTruncated": True, "NextKeyMarker": str(after + 2), "NextUploadIdMarker": "x"}
        )
        return {"Uploads": answer["Uploads"][after : after + 2], **more}

    monkeypatch.setattr(uploads, "request", paged)
    assert sorted(id for _, id in uploads.uploads_in(folder)) == sorted(own)
    assert pages == [0, 2, 4]
