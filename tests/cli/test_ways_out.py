"""A refused growth says what can grow instead, after it was tried."""

from types import SimpleNamespace
from typing import Any

import pytest

from harness.refusals import refused
from mupscale.checkpoints.request import Request
from mupscale.cli import plan
from mupscale.errors import MupscaleError
from mupscale.families.goal import Goal
from mupscale.families.grown import check_growth

CHOSEN: Any = SimpleNamespace(architecture=None)
DIRECTORY: Any = SimpleNamespace(config={}, tensors={}, weights=(), path="base")
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


@pytest.mark.parametrize("exact", [True, False])
def test_the_feed_forward_layers_are_offered_only_if_they_were_tried(monkeypatch, exact, capsys):
    tried = []

    def planned(config: Any, multipliers: str, **_: Any) -> object:
        tried.append(multipliers)
        if multipliers == "3" or not exact:
            raise MupscaleError(
                "conv1d.weight goes from (160, 1, 4) to (288, 1, 4), not a whole number of copies"
            )
        return object()

    monkeypatch.setattr(plan, "plan_in_process", planned)
    monkeypatch.setattr(plan, "check_record", lambda directory: None)
    with pytest.raises(MupscaleError) as caught:
        plan.planned(DIRECTORY, CHOSEN, Request("3"))
    assert tried == ["3", "ffn=3"]
    assert ("goal.ffn_can_grow_alone" in caught.value.codes) is exact
    assert ("-k ffn=3" in str(caught.value)) is exact
    assert "-k ffn=3" in capsys.readouterr().err, "what takes long is told"


def test_what_is_asked_for_is_not_offered_and_a_missing_package_is_not_tried_again(monkeypatch):
    tried = []

    def planned(config: Any, multipliers: str, **_: Any) -> object:
        tried.append(multipliers)
        raise MupscaleError("no", code="extra.missing" if multipliers == "2" else "")

    monkeypatch.setattr(plan, "plan_in_process", planned)
    monkeypatch.setattr(plan, "check_record", lambda directory: None)
    for asked in ("2", "ffn=2"):
        with pytest.raises(MupscaleError):
            plan.planned(DIRECTORY, CHOSEN, Request(asked))
    assert tried == ["2", "ffn=2"]


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
