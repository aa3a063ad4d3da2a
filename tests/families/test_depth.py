"""Deeper stock models: the plan is exact on a small copy, configurations keep their lists, and what cannot sleep is refused."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("planned_here")

import mupscale as mu  # noqa: E402
from harness.refusals import refused  # noqa: E402
from harness.tiny_llama import SIZES as TINY  # noqa: E402
from harness.tiny_llama import TOKENS, cli, same_bits, saved  # noqa: E402
from mupscale.families.config.multipliers import To, parse_to  # noqa: E402
from mupscale.families.models import as_data, config_from  # noqa: E402
from mupscale.families.plan import family_plan  # noqa: E402
from mupscale.families.prove import prove  # noqa: E402
from mupscale.families.steps.depth import deepened, depth_of  # noqa: E402
from mupscale.families.types.rows import ROWS, Row  # noqa: E402

SIZES = {**TINY, "num_hidden_layers": 4}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "olmo2"])
def test_the_small_copy_continues_its_base(kind):
    family = prove(family_plan({"model_type": kind, **SIZES}, to="layers=6"), steps=3)
    assert family.new_blocks == (4, 5)
    assert family.evidence.worst_step == 0.0
    assert family.evidence.control > 1e-3
    assert family.wide_config["num_hidden_layers"] == 6


def test_depth_and_width_are_one_plan():
    family = prove(family_plan({"model_type": "llama", **SIZES}, 2, to="layers=5,after=0"), steps=3)
    assert 0 < family.evidence.worst_step < 1e-11
    assert family.plan["model.layers.1.mlp.up_proj.weight"].like == "model.layers.0.mlp.up_proj.weight"
    assert family.plan["model.layers.1.mlp.up_proj.weight"].wide_shape == (80, 64)


def test_a_norm_behind_a_branch_must_be_silenced(monkeypatch):
    """Control: without its row, waking a block of OLMo 2 changes the loss."""
    monkeypatch.setitem(ROWS, "olmo2", Row())
    with refused("depth.odd_waking_gradient"):
        family_plan({"model_type": "olmo2", **SIZES}, to="layers=5")
    monkeypatch.setitem(ROWS, "olmo2", Row(silenced={"*.post_attention_layernorm.weight": "zero"}))
    with refused("depth.waking_changes_loss"):
        family_plan({"model_type": "olmo2", **SIZES}, to="layers=5")


WITH_BIASES = {
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64},
    "gpt_neox": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "opt": {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 32},
}  # fmt: skip


@pytest.mark.parametrize("kind", WITH_BIASES)
def test_biases_of_writers_are_split(kind):
    family = prove(family_plan({"model_type": kind, **WITH_BIASES[kind], **TOKENS}, to="layers=4"), steps=3)
    assert 0 < family.evidence.worst_step < 1e-12
    shared = [name for name, entry in family.plan.tensors.items() if entry.spread == 5]
    assert len(shared) == 5, "the last bias of the base, and two of each new block"


def test_biases_of_writers_that_are_not_split_are_refused(monkeypatch):
    """Control: a bias writes into the stream by itself, so it trains while its block sleeps."""
    monkeypatch.setattr("mupscale.plans.new_blocks._split", lambda tensors, *_: dict(tensors))
    with refused("depth.new_part_awake", where="c_proj.bias"):
        family_plan({"model_type": "gpt2", **WITH_BIASES["gpt2"], **TOKENS}, to="layers=3")


def test_split_biases_in_files_continue_the_base(tmp_path):
    base = saved(tmp_path / "base", "GPT2", **WITH_BIASES["gpt2"], **TOKENS)
    assert cli("grow", tmp_path / "base", tmp_path / "deep", "--to layers=4 --quiet") == 0
    deep = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "deep").eval()
    blocks = deep.transformer.h
    assert torch.equal(blocks[2].attn.c_proj.bias, blocks[1].mlp.c_proj.bias)
    words = torch.randint(0, 97, (2, 9))
    with torch.no_grad():
        assert torch.allclose(deep(words).logits, base(words).logits, atol=1e-5)


REFUSED = {
    "bert": ("bert", {}, "depth.block_changes_output"),
    "opt, post-norm": ("opt", {"do_layer_norm_before": False}, "depth.block_changes_output"),
    "mixtral": ("mixtral", {"output_router_logits": True}, "depth.balance_loss_on"),
    "deepseek_v3": ("deepseek_v3", {"first_k_dense_replace": 2}, "depth.field_counts_layers"),
    "olmo_hybrid": ("olmo_hybrid", {}, "depth.odd_waking_gradient"),
}


@pytest.mark.parametrize(("kind", "fields", "code"), REFUSED.values(), ids=REFUSED)
def test_types_whose_blocks_cannot_sleep_are_refused(kind, fields, code):
    sizes = {k: v for k, v in SIZES.items() if kind not in ("bert", "opt") or "key_value" not in k}
    sizes |= WITH_BIASES.get(kind, {})
    with refused(code) as caught:
        family_plan({"model_type": kind, **sizes, **fields}, to=f"layers={sizes['num_hidden_layers'] + 1}")
    assert all("mupscale plan BASE -k 2" in fault.remedy for fault in caught.value.faults)


@pytest.mark.parametrize(
    ("kinds", "to", "want", "more"),
    [
        ("abab", To(5, (0,)), "aabab", {}),
        ("aba", To(5, (0, 1)), "aabba", {"sliding_window_pattern": 2}),
        ("abab", To(8), "abababab", {"sliding_window_pattern": 2}),
        ("aab", To(5), "aabaa", {}),
    ],
)
def test_lists_by_layer_take_the_entry_of_the_block_that_a_new_one_is_like(kinds, to, want, more):
    """Attention in every second block of a hybrid: a new block is of the kind of the block before it, or in stack order of the
    block that it repeats."""
    data = {"model_type": "x", "num_hidden_layers": len(kinds), "layer_types": list(kinds), **more}
    assert depth_of(data, to).edits[("layer_types",)] == list(want)


@pytest.mark.parametrize(
    "field",
    [{"first_k_dense_replace": 2}, {"decoder_sparse_step": 2}, {"max_window_layers": 2}, {"mlp_only_layers": [1]}],
    ids=lambda field: next(iter(field)),
)  # fmt: skip
def test_a_field_that_counts_layers_is_refused(field):
    with refused("depth.field_counts_layers", where=next(iter(field))):
        depth_of({"model_type": "x", "num_hidden_layers": 4, **field}, To(6))
    other = {"layer_norm_eps": 1e-6, "attn_layers": None}
    assert depth_of({"model_type": "x", "num_hidden_layers": 4, **other}, To(6)), "control"


def test_lists_as_long_as_the_layers_that_are_not_about_them_stay():
    """Two end tokens of a model with two layers. Control: an unknown list of that length is refused."""
    data = {"model_type": "x", "num_hidden_layers": 2, "eos_token_id": [1, 2], "architectures": ["A", "B"]}
    assert depth_of(data, To(4)).edits == {("num_hidden_layers",): 4}
    for field in ({"scales": [0.5, 0.7]}, {"moe_layers": [0, 1]}, {"hybrid_override_pattern": "M*"}):
        with refused("depth.field_counts_layers", where=next(iter(field))):
            depth_of({**data, **field}, To(4))


def test_a_class_that_makes_something_else_of_a_field_is_noticed(monkeypatch):
    """Control: the class as it is. The other one forgets what was set."""
    config = config_from({"model_type": "qwen2", **SIZES})
    depth = depth_of(as_data(config), To(5, (0,)))
    assert deepened(config, depth).num_hidden_layers == 5
    monkeypatch.setattr("mupscale.families.steps.depth.config_from", lambda _: config)
    with refused("config.class_changes_field", where="num_hidden_layers"):
        deepened(config, depth)


def test_deeper_and_exported_at_once_is_refused():
    with refused("goal.export_and_growth"):
        family_plan({"model_type": "llama", **SIZES}, 2, to="layers=5", export="granite")


def test_two_counts_of_layers_are_refused():
    with refused("depth.layers_not_counted_once", where="encoder_layers, decoder_layers"):
        depth_of({"model_type": "bart", "encoder_layers": 2, "decoder_layers": 2}, To(4))


@pytest.mark.parametrize(
    "text", ["layers", "layers=0", "width=96", "layers=8,layers=9", "after=1", "layers=8,after=a"]
)
def test_a_goal_that_cannot_be_read_is_refused(text):
    with refused("goal.to_not_readable", where=text):
        parse_to(text)


def test_settings_of_a_block_move_with_it():
    """Rotary embeddings are off in one block of this SmolLM3; live attributes follow the block, not its number."""
    fields = {**SIZES, "model_type": "smollm3", "no_rope_layers": [1, 1, 0, 1]}
    family = family_plan(fields, to="layers=5,after=0")
    stock = transformers.SmolLM3ForCausalLM
    torch.manual_seed(0)
    base = stock(transformers.SmolLM3Config(**{k: v for k, v in fields.items() if k != "model_type"}))
    base.model.layers[3].eval()
    deep: Any = mu.grow(
        base, lambda: stock(transformers.SmolLM3Config(**family.wide_config)), plan=family.plan
    ).model
    assert [block.self_attn.use_rope for block in deep.model.layers] == [1, 1, 1, 0, 1]
    assert [block.training for block in deep.model.layers] == [True, True, True, True, False]
    words = torch.randint(0, 97, (2, 9))
    with torch.no_grad():
        assert torch.equal(deep(words).logits, base(words).logits)


def test_a_sleeping_block_wakes_no_other(tmp_path, capsys):
    """Noise has the size of the block before; behind one that sleeps it would be zero."""
    saved(tmp_path / "base")
    assert cli("grow", tmp_path / "base", tmp_path / "deep", "--to layers=3,after=0 --quiet") == 0
    more = ("upscale", tmp_path / "deep", tmp_path / "more", "--noise t=0.1 --no-loss --quiet")
    assert cli(*more, "--to layers=4,after=1") != 0
    assert "[noise.wakes_nothing]" in capsys.readouterr().err
    assert cli(*more, "--to layers=4,after=0") == 0


def test_a_directory_grows_deeper_and_loads_in_the_stock_class(tmp_path):
    base, ends = saved(tmp_path / "base"), (tmp_path / "base", tmp_path / "deep")
    assert cli("grow", *ends, "--to layers=4 --quiet") == 0
    assert cli("check", ends[1], "--base", ends[0], "--levels", "bytes,layout,model") == 0
    deep = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "deep")
    words = torch.randint(0, 97, (2, 9))
    with torch.no_grad():
        assert torch.equal(deep(words).logits, base(words).logits)
    assert float(deep.model.layers[2].mlp.up_proj.weight.detach().abs().max()) == 0.0
    card = (tmp_path / "deep" / "README.md").read_text()
    assert "(`--to layers=4`)" in card
    assert "its new blocks are zero" in card
    about = json.loads((tmp_path / "deep" / "mupscale.json").read_text())
    assert any("model.layers.*.mlp.up_proj.weight" in group["tensors"] for group in about["factors"])


def test_noise_wakes_a_directory_without_a_jump_and_equals_the_live_bits(tmp_path):
    base, ends = saved(tmp_path / "base"), (tmp_path / "base", tmp_path / "deep")
    assert cli("upscale", *ends, "-k ffn=2 --to layers=3,after=0 --noise t=0.1 --no-loss --quiet") == 0
    family = family_plan(tmp_path / "base", "ffn=2", to="layers=3,after=0")
    make = lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**family.wide_config))  # noqa: E731
    live = mu.upscale(base, make, mu.SignalNoise(0.1), plan=family.plan).model
    stored = same_bits(tmp_path / "deep", live)
    assert float(stored["model.layers.1.self_attn.q_proj.weight"].abs().max()) > 0
    assert float(stored["model.layers.1.self_attn.o_proj.weight"].abs().max()) == 0


def test_a_stream_writes_the_copies_that_a_live_model_has(tmp_path):
    """In stack order and at once wider: the readers of the block that is repeated, and writers of zero."""
    base, ends = saved(tmp_path / "base"), (tmp_path / "base", tmp_path / "deep")
    assert cli("upscale", *ends, "--to layers=4 --noise t=0.1 --no-loss --quiet") == 0
    family = family_plan(tmp_path / "base", to="layers=4")
    make = lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**family.wide_config))  # noqa: E731
    stored = same_bits(tmp_path / "deep", mu.upscale(base, make, plan=family.plan).model)
    for leaf in ("self_attn.q_proj", "mlp.up_proj", "input_layernorm"):
        new, old = (stored[f"model.layers.{i}.{leaf}.weight"] for i in (3, 1))
        assert torch.equal(new, old), leaf
    assert float(stored["model.layers.3.mlp.down_proj.weight"].abs().max()) == 0.0
    words = torch.randint(0, 97, (2, 9))
    with torch.no_grad():
        deep = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "deep")
        assert torch.allclose(deep(words).logits, base(words).logits, atol=1e-6)


def test_auto_noise_of_a_deeper_model_costs_nothing(tmp_path, capsys):
    saved(tmp_path / "base")
    assert cli("upscale", tmp_path / "base", tmp_path / "deep", "--to layers=3 --noise auto --quiet") == 0
    assert "noise t=0.05" in capsys.readouterr().out


def test_names_that_are_not_the_models_are_refused(tmp_path):
    from safetensors.torch import save_file

    saved(tmp_path / "base")
    path = tmp_path / "base" / "model.safetensors"
    renamed = {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}
    save_file(renamed, path, {"format": "pt"})
    with refused("checkpoint.no_names_for_new"):
        family_plan(tmp_path / "base", to="layers=3")


def test_something_must_grow(tmp_path, capsys):
    saved(tmp_path / "base")
    assert cli("plan", tmp_path / "base") != 0
    assert "[goal.not_given]" in capsys.readouterr().err
