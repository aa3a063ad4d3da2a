"""`mupscale check` of results of one and several weight files: it holds on right ones, and on no other."""

import json
import shutil
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("planned_here")

from mupscale.checkpoints.base import Base  # noqa: E402
from mupscale.checkpoints.resume import job_again  # noqa: E402
from mupscale.cli.main import main  # noqa: E402
from mupscale.jobs import digests  # noqa: E402
from mupscale.jobs.finished import about_text, published, recorded  # noqa: E402
from mupscale.jobs.job_check import JOB  # noqa: E402
from mupscale.runs.growth_record import read_record  # noqa: E402

SHARDS = {1: "5GB", 2: "50kB", 5: "18kB"}
"""Number of weight files -> the size of a shard that gives so many."""
ABOUT, INDEX = "mupscale.json", "model.safetensors.index.json"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def base(request, tmp_path_factory) -> Path:
    """Twelve layers: sorted by name, layer 10 comes before layer 2, and lm_head before the rest."""
    folder: Path = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=12, num_attention_heads=2, vocab_size=64,
        tie_word_embeddings=request.param,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def results(planned_here, base, tmp_path_factory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("results")
    for count, size in SHARDS.items():
        out = str(folder / str(count))
        assert main(["grow", str(base), out, "-k", "ffn=2", "--shard-size", size, "--quiet"]) == 0
        assert len(weights(folder / str(count))) == count
    return {count: folder / str(count) for count in SHARDS}


def weights(result: Path) -> list[Path]:
    return sorted(result.glob("model*.safetensors"))


def changed(result: Path, copy: Path, name: str) -> Path:
    """A copy of a result, with another byte in the middle of one file."""
    shutil.copytree(result, copy)
    flip(copy / name)
    return copy


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def faults(base: Path | str, result: Path | str, capsys) -> list[str]:
    """The places that fail, as they are printed; none if the exit code is 0."""
    capsys.readouterr()
    code = main(["check", str(result), "--base", str(base), "--levels", "bytes", "--quiet"])
    found = [line.split(" [")[0].strip() for line in capsys.readouterr().out.splitlines() if line[0] == " "]
    assert code == (1 if found else 0)
    return found


@pytest.mark.parametrize("count", SHARDS)
def test_a_result_of_several_files_holds_and_one_with_another_byte_does_not(
    count, base, results, tmp_path, capsys
):
    assert faults(base, results[count], capsys) == []
    for file in weights(results[count]):
        found = faults(base, changed(results[count], tmp_path / file.name, file.name), capsys)
        assert len(found) == 1
        assert found[0].endswith(file.name)


def test_results_in_a_store_are_judged_like_those_of_a_disk(store, base, results, tmp_path, capsys):
    far = f"{base.name}-{results[1].parent.name}"
    store.put(base, f"models/{far}/base")
    for count, result in results.items():
        name = weights(result)[-1].name
        store.put(result, f"models/{far}/{count}")
        store.put(changed(result, tmp_path / str(count), name), f"models/{far}/{count}-changed")
        assert faults(f"s3://models/{far}/base", f"s3://models/{far}/{count}", capsys) == []
        found = faults(f"s3://models/{far}/base", f"s3://models/{far}/{count}-changed", capsys)
        assert len(found) == 1
        assert found[0].endswith(name)


@pytest.mark.parametrize("name", [INDEX, "config.json"])
def test_another_byte_beside_the_weights_is_reported_where_it_is(name, base, results, tmp_path, capsys):
    assert faults(base, changed(results[2], tmp_path / "copy", name), capsys) == [name]


def test_files_that_were_divided_otherwise_are_those_of_another_record(base, results, tmp_path, capsys):
    """Weights and their index of one division next to the record of another."""
    copy = tmp_path / "copy"
    shutil.copytree(results[5], copy)
    shutil.copy(results[2] / ABOUT, copy)
    found = faults(base, copy, capsys)
    assert {file.name for file in weights(results[2])} <= set(found)


@pytest.mark.parametrize("ends", [1 << 20, 64], ids=["seen at its ends", "seen when all is read"])
def test_a_base_that_changed_after_growing_is_named_and_not_its_result(
    ends, base, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(digests, "_END", ends)
    mine, out = tmp_path / "base", tmp_path / "out"
    shutil.copytree(base, mine)
    assert main(["grow", str(mine), str(out), "-k", "ffn=2", "--quiet"]) == 0
    assert faults(mine, out, capsys) == [], "control"
    flip(mine / "model.safetensors")
    assert faults(mine, out, capsys) == [str(mine / "model.safetensors")]
    main(["check", str(out), "--base", str(mine), "--levels", "bytes", "--json", str(tmp_path / "found")])
    found = json.loads((tmp_path / "found").read_text())["levels"][0]["faults"]
    assert [fault["code"] for fault in found] == ["job.other_base"]
    flip(out / "model.safetensors")
    assert faults(mine, out, capsys) == [str(mine / "model.safetensors"), "model.safetensors"]


def test_a_record_that_was_edited_is_not_what_a_base_is_judged_by(base, results, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(results[1], copy)
    text = (copy / ABOUT).read_text()
    digest = json.loads(text)["base"]["files"]["model.safetensors"]["digest"]
    (copy / ABOUT).write_text(text.replace(digest, digest[::-1], 1))
    assert faults(base, copy, capsys) == [ABOUT]


def unfinished(words: list[str], capsys) -> str:
    """The remedy of a check that finds no result yet."""
    found = Path(words[1]).parent / "found.json"
    assert main(["check", *words[1:], "--json", str(found)]) == 2
    (fault,) = json.loads(found.read_text())["refused"]["faults"]
    assert fault["code"] == "growth.unfinished"
    capsys.readouterr()
    return str(fault["remedy"])


@pytest.mark.parametrize(
    "words",
    ["grow -k ffn=2 --shard-size 18kB --dtype bfloat16 --no-state", "upscale -k ffn=2", "upscale -k ffn=2 --noise t=0.02 --seed 3"],
)  # fmt: skip
def test_a_growth_that_is_not_finished_is_said_with_the_command_that_goes_on(words, base, tmp_path, capsys):
    verb, *options = words.split()
    out = tmp_path / "out"
    given = [verb, str(base), str(out), *options, "--share", "0/2", "--quiet"]
    assert main(given) == 0
    assert not out.exists(), "control: half of it was written"
    command = unfinished(["check", str(out)], capsys).rpartition(": ")[2].split()
    assert unfinished(["check", str(out), "--base", str(base)], capsys).endswith(" ".join(command))
    assert main([*command[1:], "--quiet"]) == 0
    assert main(["check", str(out), "--quiet"]) == 0


@pytest.mark.parametrize("made", ["nothing", "an empty folder"])
def test_a_growth_that_has_no_job_yet_is_unfinished_too(made, base, tmp_path, capsys):
    out = tmp_path / "out"
    if made == "an empty folder":
        out.mkdir()
    assert main(["check", str(out)]) == 2
    assert "[growth.record_missing]" in capsys.readouterr().err, "control"
    (tmp_path / "out.partial").mkdir()
    assert unfinished(["check", str(out)], capsys)


def early(base: Path, result: Path, copy: Path) -> Path:
    """A result as 0.2.0 left it: the job in a file of its own, and a record that is sorted."""
    shutil.copytree(result, copy)
    job = job_again(Base(base), copy, read_record(copy))
    sums, output, _ = recorded(copy, job)
    text = about_text(job, sums, output, early=True)
    (copy / JOB).write_text(published(job))
    (copy / ABOUT).write_text(text)
    return copy


@pytest.mark.parametrize("count", SHARDS)
def test_a_result_of_0_2_0_still_checks_and_is_known_again(count, base, results, tmp_path, capsys):
    assert not (results[count] / JOB).exists(), "a result holds no job"
    old = early(base, results[count], tmp_path / "old")
    assert faults(base, old, capsys) == []
    assert main(["check", str(old), "--quiet"]) == 0
    again = ["-k", "ffn=2", "--shard-size", SHARDS[count], "--quiet"]
    assert main(["grow", str(base), str(old), *again]) == 0, "growing it again finds it there"
    flip(old / JOB)
    assert faults(base, old, capsys) == [JOB], "control"
    assert main(["check", str(old), "--quiet"]) == 1, "control"
    (old / JOB).unlink()
    assert main(["check", str(old), "--quiet"]) == 1, (
        "control: its record alone has no digests of small files"
    )


def test_a_record_alone_is_not_taken_for_the_result(base, results, tmp_path, capsys):
    """As a trainer leaves it: the record and configuration of a result next to other files."""
    again = ["-k", "ffn=2", "--shard-size", SHARDS[2], "--quiet"]
    assert main(["grow", str(base), str(results[2]), *again]) == 0, "control: with its files it is"
    for name in ("mupscale.json", "config.json"):
        (tmp_path / "other").mkdir(exist_ok=True)
        shutil.copy(results[2] / name, tmp_path / "other")
    assert main(["grow", str(base), str(tmp_path / "other"), *again]) == 2
    assert "[job.output_not_empty]" in capsys.readouterr().err


@pytest.mark.parametrize("base", [False], indirect=True, ids=["untied"])
def test_copies_of_a_result_by_new_units_are_refused_with_the_way_that_works(base, tmp_path, capsys):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    assert main(["upscale", str(base), first, "-k", "2", "--quiet"]) == 0
    assert main(["grow", first, second, "-k", "2", "--quiet"]) == 2
    refused = capsys.readouterr().err
    assert "[layout.not_aligned]" in refused
    assert "[growth.units_compose]" in refused
    assert main(["grow", first, second, "-k", "2", "--by", "units", "--quiet"]) == 0
