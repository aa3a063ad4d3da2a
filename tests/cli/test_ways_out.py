"""A refused growth says what can grow instead, after it was tried."""

from types import SimpleNamespace
from typing import Any

import pytest

from harness.refusals import refused
from mupscale.checkpoints import grow_directory
from mupscale.checkpoints.request import Request
from mupscale.errors import Fault, MupscaleError
from mupscale.families import process
from mupscale.families.config.goal import Goal
from mupscale.families.config.grown import check_growth

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
