"""A base in an object store: what is read is what is there, about once, and the result is that of a local base."""

import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

import mupscale as mu
from harness import trainer
from harness.llama_files import Llama, job_for, write_directory
from harness.object_store import ObjectStore
from harness.refusals import refusal
from mupscale.cli.main import main
from mupscale.files.directory import read_directory
from mupscale.jobs.verify_bytes import check_alone, check_bytes
from mupscale.jobs.worker import run_job
from mupscale.storage import pages, remote
from mupscale.storage.location import Url, location
from mupscale.storage.pages import PAGE, RemoteFile
from mupscale.storage.remote import entry, listing

SIZES = Llama(hidden=128, ffn=320, heads=4, kv_heads=2, layers=2, vocabulary=512)


def put(store: ObjectStore, folder: Path, name: str) -> str:
    store.put(folder, f"models/{name}")
    store.traffic.reset()
    return f"s3://models/{name}"


def bytes_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_any_range_is_read_and_each_page_is_requested_once(store, tmp_path):
    raw = os.urandom(40 * PAGE + 17)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a.bin").write_bytes(raw)
    url = location(put(store, tmp_path / "x", "ranges"))
    assert isinstance(url, Url)
    assert [one.name for one in listing(url)] == ["a.bin"]
    assert entry(url / "b.bin") is None
    file = RemoteFile(url / "a.bin")
    spans = [
        (0, 8), (8, 100), (PAGE - 1, 2), (5 * PAGE + 3, 9 * PAGE), (len(raw) - 5, 100), (0, len(raw) + 9),
    ]  # fmt: skip
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda span: file.read(*span), spans * 3))
    assert found == [raw[at : at + count] for at, count in spans * 3]
    assert file.read(len(raw) + 1, 4) == b""
    assert len(raw) <= store.traffic.received < len(raw) + 2000, "the rest is the listing"


def test_a_file_that_is_replaced_is_not_mixed_with_the_old_one(store, tmp_path):
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "a.bin").write_bytes(b"a" * 3 * PAGE)
    url = location(put(store, folder, "replaced")) / "a.bin"
    assert isinstance(url, Url)
    old = RemoteFile(url)
    assert old.read(0, 4) == b"aaaa"
    (folder / "a.bin").write_bytes(b"b" * 3 * PAGE)
    put(store, folder, "replaced")
    assert RemoteFile(url).read(0, 4) == b"bbbb", "pages of the old one are not given for the new one"
    refusal(lambda: old.read(2 * PAGE, 4), "file.changed_while_read", where=str(url))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_job_from_a_store_writes_the_bytes_of_a_local_one(store, tmp_path, monkeypatch, threads):
    monkeypatch.setattr(pages, "KEPT", 32)  # 2 MiB, less than the base
    plan = SIZES.plan(2)
    near = write_directory(tmp_path / "base", SIZES.shapes(), "F32", 2)
    far = read_directory(put(store, tmp_path / "base", f"whole{threads}"))
    assert (far.config, far.tensors, far.carried) == (near.config, near.tensors, near.carried)
    ends = []
    for directory, name in ((near, "near"), (far, "far")):
        job = job_for(plan, directory, tmp_path / name, SIZES.noise(plan), block_bytes=1 << 20)
        run_job(job, threads)
        ends.append(job)
    assert bytes_in(tmp_path / "far") == bytes_in(tmp_path / "near")
    assert check_bytes(ends[1], threads=threads) == []
    total = sum(path.stat().st_size for path in (tmp_path / "base").iterdir())
    assert store.traffic.received < 3.6 * total, (
        "twice for the job, once for the check, and the ends of small files"
    )


def test_a_result_in_a_store_is_checked_there(store, tmp_path):
    plan = SIZES.plan(2)
    near = write_directory(tmp_path / "base", SIZES.shapes(), "BF16")
    job = job_for(plan, near, tmp_path / "wide")
    run_job(job)
    base = put(store, tmp_path / "base", "checked")
    wide = put(store, tmp_path / "wide", "checked-wide")
    far = replace(job, base=location(base), out=location(wide))
    assert check_bytes(far) == []
    assert check_alone(location(wide)) == []
    weights = tmp_path / "wide" / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[len(raw) // 2] ^= 1
    weights.write_bytes(raw)
    put(store, tmp_path / "wide", "checked-wide")
    assert len(check_bytes(far)) >= 1
    assert "model.safetensors" in [fault.where for fault in check_alone(location(wide))]


def test_load_wide_reads_both_kinds_of_directories_from_a_store(store, tmp_path):
    def make(n: int) -> nn.Module:
        return nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1))

    torch.manual_seed(0)
    base, plan, x = make(4), mu.plans.plan_between(make, 4, 8), torch.ones(1, 3)
    optimizer = torch.optim.AdamW(base.parameters(), lr=0.1)
    base(x).sum().backward()
    optimizer.step()
    with warnings.catch_warnings(action="ignore"):
        save({"model": base.state_dict()}, checkpoint_id=tmp_path / "dcp")
    wide = mu.load_grown_(put(store, tmp_path / "dcp", "dcp"), mu.plans.on_meta(lambda: make(8)), plan=plan)
    near = mu.load_grown_(tmp_path / "dcp", mu.plans.on_meta(lambda: make(8)), plan=plan)
    assert torch.allclose(wide.model(x), base(x))
    assert all(map(torch.equal, wide.model.parameters(), near.model.parameters()))
    assert wide.provenance is not None
    assert near.provenance is not None
    assert wide.provenance["loaded"]["source"] == near.provenance["loaded"]["source"]

    trainer.silence()
    model = trainer.model()
    model.save_pretrained(tmp_path / "hf")
    url = put(store, tmp_path / "hf", "hf")
    family = mu.plans.family_plan(url, 2)
    grown = [
        mu.load_grown_(where, mu.plans.on_meta(lambda: trainer.model(2)), plan=family, prove=False).model
        for where in (url, tmp_path / "hf")
    ]
    assert all(map(torch.equal, grown[0].parameters(), grown[1].parameters()))


def test_any_store_of_fsspec_is_read(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    near = write_directory(tmp_path / "base", SIZES.shapes(), "BF16")
    for path in (tmp_path / "base").iterdir():
        fsspec.filesystem("memory").pipe_file(f"/models/any/{path.name}", path.read_bytes())
    far = read_directory("memory://models/any")
    assert (far.tensors, far.carried) == (near.tensors, near.carried)
    for directory, name in ((near, "near"), (far, "far")):
        run_job(job_for(SIZES.plan(2), directory, tmp_path / name))
    assert bytes_in(tmp_path / "far") == bytes_in(tmp_path / "near")


def test_what_is_not_there_is_said_in_one_line(store, tmp_path, capsys, monkeypatch):
    store.call("PUT", "/models")
    refusal(lambda: read_directory("s3://nowhere/model"), "store.no_such_bucket", where="nowhere")
    refusal(
        lambda: read_directory("s3://models/absent"), "directory.does_not_exist", where="s3://models/absent"
    )
    refusal(lambda: read_directory("nosuch://models/absent"), "store.unknown_scheme", where="nosuch")
    assert main(["plan", "s3://models/absent", "-k", "2"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "s3://models/absent" in said
    assert "[directory.does_not_exist]" in said
    monkeypatch.setitem(sys.modules, "s3fs", None)
    refusal(lambda: read_directory("s3a://bucket/model"), "extra.missing", where="mupscale[remote]")


@pytest.mark.nightly
def test_the_command_line_grows_a_trainer_checkpoint_from_a_store(store, tmp_path, capsys):
    trainer.silence()
    model = trainer.model()
    model.save_pretrained(tmp_path / "base", max_shard_size="60KB")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(16).view(2, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    state = optimizer.state_dict()
    decayed = {**state["param_groups"][0]}
    plain = {**decayed, "weight_decay": 0.0}
    names = [name for name, _ in model.named_parameters()]
    first = [i for i, name in enumerate(names) if "norm" not in name]
    order = [*first, *(i for i in range(len(names)) if i not in first)]
    decayed["params"], plain["params"] = list(range(len(first))), list(range(len(first), len(names)))
    moved = {new: state["state"][old] for new, old in enumerate(order)}
    torch.save({"state": moved, "param_groups": [decayed, plain]}, tmp_path / "base" / "optimizer.pt")
    url = put(store, tmp_path / "base", "base")
    words = ["-k", "2", "--noise", "t=0.1", "--no-loss", "--trust-base", "--quiet"]
    for base, out in ((url, "far"), (str(tmp_path / "base"), "near")):
        assert main(["upscale", base, str(tmp_path / out), *words]) == 0, capsys.readouterr().err
    assert bytes_in(tmp_path / "far") == bytes_in(tmp_path / "near")
    assert (tmp_path / "far" / "optimizer.pt").exists()
    assert main(["check", str(tmp_path / "far"), "--base", url, "--levels", "bytes", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["upscale", url, str(tmp_path / "auto"), "-k", "2", "--noise", "auto", "--quiet"]) == 2
    assert "[directory.not_on_this_machine]" in capsys.readouterr().err


def test_no_secret_of_a_url_reaches_a_message_or_a_job(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(remote, "PAUSES", ())
    urls = (
        "http://me:secret@127.0.0.1:1/base", "http://127.0.0.1:1/base?X-Amz-Signature=secret", "s3://KEY:secret@bucket/base",
        "postgresql://me:secret@127.0.0.1:1/db",
    )  # fmt: skip
    for url in urls:
        for words in (["plan", url, "-k", "2"], ["report", url], ["plan", "x", "--no-such", url]):
            with suppress(SystemExit):
                assert main(words) != 0
            said = "".join(capsys.readouterr())
            assert "secret" not in (said or "secret"), words
        known = location(url)
        assert isinstance(known, Url)
        assert "secret" not in f"{known} {known!r} {known / 'x'} {known.parent}"
        assert "secret" in known.full, "control: what requests are made with"
        assert known == location(str(known)), "a resumed job is that of the same base"
