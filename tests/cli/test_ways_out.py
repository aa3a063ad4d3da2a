"""A refused growth says what can grow instead, after it was tried."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.family_configs import EXACT
from harness.popular_types import POPULAR
from harness.refusals import refused
from mupscale.checkpoints import grow_directory
from mupscale.checkpoints.request import Request
from mupscale.cli.main import main
from mupscale.errors import Fault, MupscaleError
from mupscale.families import process
from mupscale.families.config.checks import check_growth
from mupscale.families.config.early import refuse_goal
from mupscale.families.config.goal import Goal

BASE: Any = SimpleNamespace(directory=SimpleNamespace(config={}, tensors={}), about=None)
HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "head_dim": 8,
    "intermediate_size": 40,
}
FALCON = {
    "model_type": "falcon", "multi_query": True, "new_decoder_architecture": False, "hidden_size": 32,
    "num_attention_heads": 4, "ffn_hidden_size": 128,
}  # fmt: skip


def test_a_refused_growth_is_planned_once(monkeypatch):
    """What grows instead is searched where the plan was, and comes with the refusal."""
    tried, found = [], [Fault("-k", "its feed-forward layers can grow alone", "write -k ffn=3")]

    def planned(config: Any, multipliers: str, **_: Any) -> object:
        tried.append(multipliers)
        raise MupscaleError("refused", found)

    monkeypatch.setattr(grow_directory, "plan_in_process", planned)
    with pytest.raises(MupscaleError) as caught:
        grow_directory.plan_growth(BASE, Request(Goal.parse(3)), None)
    assert tried == ["3"]
    assert list(caught.value.faults) == found


@pytest.mark.parametrize(
    ("asked", "tried"),
    [("2", "ffn=2"), ("hidden=2,heads=4", "ffn=4"), ({"every": 3}, "ffn=3"), ("ffn=2", None), ("text=2", None), ("1", None)],
)  # fmt: skip
def test_the_feed_forward_layers_are_offered_where_more_was_asked_for(monkeypatch, asked, tried):
    """Control: what was asked for is not offered again, nor what is not exact."""
    calls: list[str] = []
    monkeypatch.setattr(
        "mupscale.families.plan.family_plan", lambda multipliers, **__: calls.append(multipliers)
    )
    monkeypatch.setattr("mupscale.families.prove.prove", lambda *_: None)
    request = {
        "config": {}, "multipliers": asked, "to": None, "by": "copies", "export": None, "architecture": None,
        "stored": None, "steps": 1,
    }  # fmt: skip
    assert [fault.remedy.endswith(f" {tried}") for fault in process._nearest(request)] == [True] * len(calls)
    assert calls == [tried] * (tried is not None)

    def inexact(*_: Any) -> None:
        raise MupscaleError("no", code="proof.missing")

    monkeypatch.setattr("mupscale.families.prove.prove", inexact)
    assert process._nearest(request) == []


def test_key_heads_do_not_grow_without_query_heads():
    llama = {"model_type": "llama", **HEADS}
    with refused("goal.kv_heads_outgrow_heads", where="heads=2,kv_heads=2"):
        check_growth(llama, Goal.parse("kv_heads=2"))
    check_growth(llama, Goal.parse("heads=2,kv_heads=2"))
    check_growth(llama, Goal.parse("heads=2"))


def test_one_key_head_refuses_heads_and_not_the_feed_forward_layers():
    check_growth(FALCON, Goal.parse("ffn=2"))
    with refused("family.fused_rows_copied_unequally"):
        check_growth(FALCON, Goal.parse("2"))


PAIRED = {
    "model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 32, "head_dim": 8,
    "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 97, "max_position_embeddings": 64,
}  # fmt: skip
EARLY = {
    "--hidden 64 --heads 8": ("goal.key_heads_left_behind", "--heads 8 --kv-heads 8"),
    "--to hidden=64,heads=8": ("goal.key_heads_left_behind", "--to heads=8,kv_heads=8"),
    "-k hidden=2,heads=2,kv_heads=1": ("goal.key_heads_left_behind", "-k heads=2,kv_heads=2"),
    "--heads 6": ("goal.heads_outgrow_kv_heads", "--heads 6 --kv-heads 6, or --heads 8"),
    "--to heads=6": ("goal.heads_outgrow_kv_heads", "--to heads=6,kv_heads=6, or --to heads=8"),
    "--kv-heads 8": ("goal.kv_heads_outgrow_heads", "--heads 8 --kv-heads 8"),
    "--kv-heads 8 -k heads=3": ("goal.kv_heads_not_a_divisor", ""),
    "--hidden 16": ("goal.size_not_larger", ""),
    "--vocab 97": ("goal.size_not_larger", ""),
    "--layers 2": ("depth.not_deeper", ""),
}
"""What is typed -> the code of the refusal, and what its remedy spells in the way in which it was typed."""
WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None
from mupscale.cli.main import main
for line in json.loads(sys.argv[1]):
    assert main(line) == 2, line
"""


@pytest.fixture
def paired(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(PAIRED))
    return tmp_path


def test_what_the_configuration_refuses_is_said_without_torch_and_as_it_was_typed(paired):
    found = paired / "found"
    found.mkdir()
    files = {typed: str(found / f"{i}.json") for i, typed in enumerate(EARLY)}
    lines = [["plan", str(paired), *shlex.split(typed), "--json", file] for typed, file in files.items()]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(lines)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for typed, (code, remedy) in EARLY.items():
        (fault,) = json.loads(Path(files[typed]).read_text())["refused"]["faults"]
        assert fault["code"] == code, typed
        assert remedy in fault["remedy"], typed


@pytest.mark.parametrize(
    "typed", ["-k 2", "-k heads=2", "--heads 6 --kv-heads 6", "--heads 8", "--hidden 64 --heads 8 --kv-heads 8", "--vocab 98"]
)  # fmt: skip
def test_what_can_grow_is_not_refused_early(typed, paired, monkeypatch):
    """The planner is asked; remedies of the refusals above are among them."""
    monkeypatch.setattr("mupscale.cli.plan.run", lambda *_: 7)
    assert main(["plan", str(paired), *shlex.split(typed)]) == 7


@pytest.mark.parametrize(
    "cases",
    [EXACT, pytest.param(POPULAR, marks=pytest.mark.nightly)],
    ids=["types of the tests", "popular types"],
)
def test_no_type_is_refused_early_that_is_not_refused_with_its_defaults(cases, tmp_path):
    """Fields of a configuration are left out one by one; controls: some are refused early, and some later alone."""
    pytest.importorskip("transformers")
    from mupscale.families.models import as_data, config_from

    early = late = 0
    for case in {case.model_type: case for case in cases}.values():
        whole = {"model_type": case.model_type, **case.fields}
        for left_out in (None, *(name for name in whole if "head" in name)):
            raw = {name: value for name, value in whole.items() if name != left_out}
            (tmp_path / "config.json").write_text(json.dumps(raw))
            try:
                data = as_data(config_from(raw))
            except MupscaleError:
                continue  # a class that has no such default
            for text in ("heads=6", "kv_heads=3", "hidden=8", "hidden=512,heads=32", "heads=12,kv_heads=5"):
                goal = Goal.parse(1, text)
                now, later = _codes(refuse_goal, tmp_path, goal), _codes(check_growth, data, goal)
                assert not now or later, (case.model_type, left_out, text, now)
                early, late = early + bool(now), late + bool(later)
    assert 0 < early < late


def _codes(check: Any, *given: Any) -> tuple[str, ...]:
    try:
        check(*given)
    except MupscaleError as error:
        return error.codes
    return ()
