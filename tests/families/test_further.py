"""Copies that are divided on trial: a second size shows whether a field that nobody knows decides a block."""

import pytest

pytest.importorskip("transformers")

from harness.refusals import refused
from mupscale.errors import MupscaleError
from mupscale.families import plan as planning
from mupscale.families.copy import further as trials
from mupscale.families.copy import shrink
from mupscale.families.copy.further import further
from mupscale.families.plan import family_plan

LATENT = {
    "model_type": "deepseek_v2", "vocab_size": 131, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "max_position_embeddings": 40, "n_group": None, "topk_group": None, "topk_method": "greedy", "n_shared_experts": 1,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 512, "max_position_embeddings": 40,
}  # fmt: skip
ROWS = "model.layers.0.self_attn.o_proj.weight"


def limited(monkeypatch, most):
    monkeypatch.setattr(shrink, "LARGEST", most)
    monkeypatch.setattr(shrink, "ENOUGH", most)


def layout(family):
    """How the rows that attention writes are copied."""
    return str(family.plan[ROWS].axes[1])


def test_a_rank_that_no_block_depends_on_is_divided(monkeypatch):
    raw = {**LATENT, "kv_lora_rank": 2048, "v_head_dim": 8}
    whole = family_plan(raw, 2)
    assert whole.small_config["kv_lora_rank"] == 2048
    limited(monkeypatch, 250_000)
    less = family_plan(raw, 2)
    assert less.small_config["kv_lora_rank"] == 128
    assert less.plan == whole.plan


def test_a_second_size_shows_that_a_field_decides_a_block(monkeypatch):
    """As if the table of fields did not know `head_dim`: a copy with smaller heads has a plan with smaller blocks."""
    whole = layout(family_plan(LLAMA, 2))
    monkeypatch.setattr(trials, "_KEPT", tuple(kept for kept in trials._KEPT if kept != "head_dim"))
    limited(monkeypatch, 200_000)
    with refused("family.small_copy_too_large") as caught:
        family_plan(LLAMA, 2)
    cause = caught.value.__cause__
    assert isinstance(cause, MupscaleError)
    assert cause.codes == ("family.block_depends_on_size",)
    # Without the second size the plan of the copy would be lifted with its own block.
    monkeypatch.setattr(planning, "_tried_further", lambda *_: [])
    assert (layout(family_plan(LLAMA, 2)), whole) == ("in: 64x2 * 32", "in: 4x2 * 512")


def test_fields_of_one_size_are_divided_together():
    """Half of a model that reads two fields builds only where both are the same."""
    same = lambda trial: trial["a"] == trial["b"]  # noqa: E731
    found, second = further(
        {"a": 64, "b": 64, "num_heads": 64}, same, lambda trial: trial["a"] + trial["b"], 0
    )
    assert found == {"a": 8, "b": 8, "num_heads": 64}
    assert second == {"a": 16, "b": 16, "num_heads": 64}


def test_heads_words_and_names_are_kept():
    data = {"num_heads": 64, "vocab_size": 64, "name": "x", "flag": True, "eos_token_id": 64, "few": 7}
    assert further(data, lambda trial: True, lambda trial: 1000, 0) == (data, None)
