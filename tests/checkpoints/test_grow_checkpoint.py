"""`mu.grow_checkpoint` writes what the command line writes, reports it as events, and reads what it needs once."""

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import mupscale as mu
from harness.refusals import refusal
from mupscale.checkpoints import base, events, shards
from mupscale.checkpoints.request import Request
from mupscale.cli.main import main
from mupscale.runs.growth_record import NAME

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("planned_here")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("door") / "base"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_writes_what_the_command_writes(tiny, tmp_path):
    seen: list[events.Event] = []
    options: dict[str, Any] = {
        "noise": mu.SignalNoise(0.05),
        "seed": 3,
        "dtype": torch.float32,
        "on": seen.append,
    }
    grown = mu.grow_checkpoint(tiny, tmp_path / "called" / "wide", 2, to="layers=2", **options)
    words = [
        "-k",
        "2",
        "--to",
        "layers=2",
        "--noise",
        "t=0.05",
        "--seed",
        "3",
        "--dtype",
        "float32",
        "--quiet",
    ]
    assert main(["upscale", str(tiny), str(tmp_path / "typed" / "wide"), *words]) == 0
    assert grown.outcome == "written"
    assert contents(tmp_path / "called" / "wide") == contents(tmp_path / "typed" / "wide")
    kinds = Counter(type(event) for event in seen)
    assert {events.Planned, events.Measured, events.RoundedAway, events.Writing} <= kinds.keys()
    last = [event for event in seen if isinstance(event, events.Writing)][-1]
    assert last.done == last.total
    again = mu.grow_checkpoint(tiny, tmp_path / "called" / "wide", 2, to="layers=2", **options)
    assert again.outcome == "already there"
    other = dict(options, seed=4)
    refusal(
        lambda: mu.grow_checkpoint(tiny, tmp_path / "called" / "wide", 2, to="layers=2", **other),
        "job.output_not_empty",
    )


def test_a_goal_that_is_spelled_differently_is_the_same_goal(tiny, tmp_path):
    """And one of another size is not."""
    out = tmp_path / "wide"
    mu.grow_checkpoint(tiny, out, to="hidden=32,layers=2,heads=4,kv_heads=2")
    assert (
        mu.grow_checkpoint(tiny, out, to="layers=2,heads=4,kv_heads=2,hidden=32").outcome == "already there"
    )
    refusal(lambda: mu.grow_checkpoint(tiny, out, to="layers=3"), "job.output_not_empty")


def test_every_part_of_the_base_is_read_once(tiny, tmp_path, monkeypatch):
    """A base that was grown itself has a record; the record of the result is another one."""
    mu.grow_checkpoint(tiny, tmp_path / "first", 2)
    read: Counter[str] = Counter()
    for module, name in (
        (base, "read_directory"),
        (base, "read_about"),
        (base, "stored_tensors"),
        (shards, "stored_tensors"),
    ):
        called = getattr(module, name)

        def counted(*given: Any, called: Any = called, name: str = name, **options: Any) -> Any:
            read[name] += 1
            return called(*given, **options)

        monkeypatch.setattr(module, name, counted)
    mu.grow_checkpoint(tmp_path / "first", tmp_path / "second", 2, noise=mu.SignalNoise(0.05))
    assert read == {"read_directory": 1, "read_about": 1, "stored_tensors": 1}
    assert len(mu.diagnostics.read_provenance(tmp_path / "second").growths) == 2


def test_nothing_is_written_in_a_dry_run(tiny, tmp_path):
    grown = mu.grow_checkpoint(tiny, tmp_path / "wide", 2, dry_run=True)
    assert grown.outcome == "dry run"
    assert grown.job is not None
    assert list(tmp_path.iterdir()) == []


def test_noise_that_a_directory_cannot_record_is_refused(tiny, tmp_path):
    out, sizes = tmp_path / "wide", mu.MupNoise({"lm_head.weight": 0.1})
    recipe = mu.studies.Recipe("torch.optim.AdamW", {"lr": 1e-3}, 0.1, k=2, tensors={})
    refusal(lambda: mu.grow_checkpoint(tiny, out, 2, noise=sizes), "noise.not_one_size")
    started = mu.AutoNoise(untrained=4.0)
    refusal(lambda: mu.grow_checkpoint(tiny, out, 2, noise=started), "noise.not_one_size")
    refusal(lambda: mu.grow_checkpoint(tiny, out, 2, noise=mu.SplitNoise()), "noise.not_one_size")  # type: ignore[arg-type]
    refusal(
        lambda: mu.grow_checkpoint(tiny, out, 2, noise=mu.SignalNoise(0.05), recipe=recipe),
        "recipe.with_other_settings",
    )
    assert not out.exists()


def test_a_record_of_version_0_2_is_read(tiny, tmp_path):
    """There the request is stored as text, in the order in which it was typed."""
    out = tmp_path / "wide"
    mu.grow_checkpoint(tiny, out, to="layers=2,hidden=32,heads=4,kv_heads=2")
    path = out / NAME
    record = json.loads(path.read_text())
    assert record["request"]["to"] == "layers=2,heads=4,hidden=32,kv_heads=2"
    record["request"]["to"] = "hidden=32,kv_heads=2,heads=4,layers=2"
    goal = Request.from_json(record["request"]).goal
    assert goal.to_text == "layers=2,heads=4,hidden=32,kv_heads=2"


def test_other_formats_grow_by_a_plan_and_directories_find_theirs(tiny, tmp_path):
    plan, out = mu.plans.plan_between(lambda n: torch.nn.Linear(n, n), 2, 4), tmp_path / "wide"
    saved = {f"model.{name}": tensor for name, tensor in torch.nn.Linear(2, 2).state_dict().items()}
    torch.save({"state_dict": saved, "optimizer_states": []}, tmp_path / "base.ckpt")
    (tmp_path / "distributed").mkdir()
    (tmp_path / "distributed" / ".metadata").touch()
    (tmp_path / "universal").mkdir()
    (tmp_path / "universal" / "latest_universal").write_text("step1")
    wrong: list[tuple[str, str, dict[str, Any]]] = [
        ("checkpoint.plan_is_found", str(tiny), {"plan": plan}),
        ("goal.not_given", str(tiny), {}),
        ("checkpoint.needs_plan", "base.ckpt", {}),
        ("checkpoint.plan_is_the_goal", "base.ckpt", {"plan": plan, "multipliers": 2}),
        ("checkpoint.not_for_format", "base.ckpt", {"plan": plan, "dry_run": True}),
        ("noise.needs_loss", "base.ckpt", {"plan": plan, "noise": mu.AutoNoise()}),
        ("noise.needs_loss", "universal", {"plan": plan, "noise": mu.AutoNoise()}),
        ("checkpoint.grows_while_loading", "distributed", {"plan": plan}),
    ]
    for code, name, given in wrong:
        error = refusal(partial(mu.grow_checkpoint, tmp_path / name, out, **given))
        assert error.codes == (code,)
        assert not out.exists()
    assert mu.grow_checkpoint(tmp_path / "base.ckpt", out, plan=plan).outcome == "written"
    assert torch.load(out)["state_dict"]["model.weight"].shape == (4, 4)
