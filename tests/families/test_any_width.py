"""Stock models at any width: zeros follow the copies, folds follow the share that is filled, and waking changes no loss."""

import json
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("planned_here")

import mupscale as mu  # noqa: E402
from harness.refusals import refusal, refused  # noqa: E402
from harness.sharded_bases import save_directory, train  # noqa: E402
from harness.tiny_llama import LLAMA, SIZES, TOKENS, cli, new, same_bits, saved  # noqa: E402
from mupscale.checkpoints.state.trainer_state import trainer_order  # noqa: E402
from mupscale.families.config.early import ANY_SIZE, refuse_fraction, sizes_for  # noqa: E402
from mupscale.families.config.goal import Goal, small_goals  # noqa: E402
from mupscale.families.copy.lift import _axis as lift_axis  # noqa: E402
from mupscale.families.copy.small_search import search_small  # noqa: E402
from mupscale.families.models import config_from, model_class  # noqa: E402
from mupscale.families.plan import family_plan  # noqa: E402
from mupscale.families.prove import prove  # noqa: E402
from mupscale.families.record import FamilyPlan  # noqa: E402
from mupscale.families.steps.width import try_other_size  # noqa: E402
from mupscale.rules import Axis, Scale  # noqa: E402
from mupscale.runs.growth_record import read_plans  # noqa: E402

ALL = "hidden=48,heads=6,kv_heads=3,ffn=52"
ROOT = Fraction(1, 2)


def test_two_spellings_are_one_goal():
    goal = Goal.parse("ffn=2", "hidden=48,layers=4,after=0:1")
    assert Goal.of_json(goal.as_json()) == goal
    assert (goal.copies("hidden", 32), goal.pads("hidden", 32)) == (1, 16)
    assert (goal.copies("ffn", 40), goal.pads("ffn", 40)) == (2, 0)
    assert (goal.to.layers, goal.to.after) == (4, (0, 1))
    with refused("goal.width_in_both_options", where="hidden"):
        Goal.parse("hidden=2", "hidden=48")


@pytest.mark.parametrize(
    "kind", [ANY_SIZE[0], *(pytest.param(t, marks=pytest.mark.nightly) for t in ANY_SIZE[1:])]
)
@pytest.mark.parametrize("by", ["copies", "units"])
def test_the_sizes_that_a_refusal_of_one_and_a_half_prints_are_accepted(kind, by, tmp_path):
    """Control: a type whose config.json leaves the number of key heads to a default gets no such remedy."""
    config = {"model_type": kind, **SIZES}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused("goal.not_a_multiplier"):
        refuse_fraction(tmp_path, "1.5")
    sizes = sizes_for(tmp_path, "1.5")
    assert sizes is not None
    to = sizes.replace("kv-heads", "kv_heads").removeprefix("--").replace(" --", ",").replace(" ", "=")
    assert family_plan(config, to=to, by=by).plan.proved
    del config["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert sizes_for(tmp_path, "1.5") is None


def test_a_small_copy_has_zeros_where_the_model_has_them():
    full = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    small = {"hidden_size": 48, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    goal = Goal.parse(1, "hidden=5120,heads=40,kv_heads=10")
    for found in small_goals(goal, full, small, None):
        assert found.sizes["kv_heads"] == 3
        assert found.sizes["heads"] == 12
        assert 48 < found.sizes["hidden"] < 96
        assert found.sizes["hidden"] % 12 == 0
    assert len({found.sizes["hidden"] for found in small_goals(goal, full, small, None)}) == 2
    assert len(list(small_goals(Goal.parse(1, "hidden=8192"), full, small, None))) == 1


@pytest.mark.parametrize(
    ("kind", "to", "tied"),
    [
        ("llama", ALL, True),
        ("qwen3", "hidden=48", False),
        ("gemma", ALL, True),
        ("granite", "hidden=80,heads=10,kv_heads=5,ffn=92", True),
    ],
)
def test_the_small_copy_continues_its_base(kind, to, tied):
    raw = {"model_type": kind, **SIZES, "tie_word_embeddings": tied}
    family = prove(family_plan(raw, to=to), steps=3)
    assert family.evidence.worst_step < 1e-11 < 1e-3 < family.evidence.control
    assert FamilyPlan.from_json(family.to_json()) == family


def test_feed_forward_layers_and_whole_groups_of_heads_need_no_fold():
    family = family_plan({**LLAMA, "hidden_size": 48}, to="heads=6,kv_heads=3,ffn=52")
    assert not family.powers
    assert str(family.plan["model.layers.0.self_attn.q_proj.weight"].axes[0]) == "out: 32+16"
    assert str(family.plan["model.layers.1.mlp.down_proj.weight"].axes[1]) == "in: 40+12"
    assert all(entry.fold.is_one for entry in family.plan.tensors.values())


def test_deeper_and_wider_with_copies_and_zeros():
    family = prove(family_plan(LLAMA, "ffn=2", to="hidden=48,layers=3,after=0"), steps=3)
    assert family.evidence.worst_step < 1e-11
    assert family.plan["model.layers.1.mlp.up_proj.weight"].like == "model.layers.0.mlp.up_proj.weight"
    assert family.plan["model.layers.1.mlp.up_proj.weight"].wide_shape == (80, 48)


@pytest.fixture(scope="module")
def large() -> FamilyPlan:
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    return family_plan({**LLAMA, **sizes, "tie_word_embeddings": True}, to="hidden=5120")


def test_folds_are_those_of_the_full_size(large):
    filled = Scale.of("4/5")
    folds = {name: entry.fold for name, entry in large.plan.tensors.items()}
    assert folds["model.embed_tokens.weight"] == filled**-ROOT
    assert folds["model.layers.1.self_attn.o_proj.weight"] == filled**-ROOT
    assert folds["model.layers.0.input_layernorm.weight"] == filled**ROOT
    assert folds["model.norm.weight"] == filled
    assert folds["model.layers.0.mlp.up_proj.weight"].is_one


def test_every_share_of_zeros_has_the_same_powers(large):
    small = config_from(large.small_config)
    cls = model_class(small)
    found = [search_small(small, Goal.parse(1, f"hidden={n}"), cls) for n in (72, 80)]
    assert found[0].powers == found[1].powers
    assert {name.replace(".1.", ".0.") for name in found[0].powers} == {
        name.replace(".1.", ".0.") for name in large.powers
    }
    assert try_other_size(found[0], small, Goal.parse(1, "hidden=80"), cls) < 1e-9


def test_a_fold_that_is_right_at_one_size_only_is_found_out(large):
    small = config_from(large.small_config)
    cls = model_class(small)
    found = search_small(small, Goal.parse(1, "hidden=72"), cls)
    with refused("family.fold_depends_on_size"):
        try_other_size(replace(found, powers={}), small, Goal.parse(1, "hidden=80"), cls)


def test_a_directory_grows_by_zeros_and_loads_in_the_stock_class(tmp_path):
    base, ends = saved(tmp_path / "base"), (tmp_path / "base", tmp_path / "wide")
    assert cli("grow", *ends, "-k ffn=2 --to hidden=48,heads=6,kv_heads=3 --quiet") == 0
    assert cli("check", ends[1], "--base", ends[0], "--levels", "bytes,layout,model") == 0
    wide = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "wide")
    assert (wide.config.hidden_size, wide.config.intermediate_size, wide.config.head_dim) == (48, 80, 8)
    words = torch.randint(0, 97, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(wide(words).logits, base(words).logits, rtol=1e-4, atol=1e-5)
    assert float(wide.model.layers[0].self_attn.q_proj.weight.detach()[:, 32:].abs().max()) == 0.0
    card = (tmp_path / "wide" / "README.md").read_text()
    assert "its new units are zero" in card


def test_noise_wakes_zeros_without_a_jump_and_files_equal_the_live_bits(tmp_path, capsys):
    base, ends = saved(tmp_path / "base", tie_word_embeddings=True), (tmp_path / "base", tmp_path / "wide")
    assert cli("upscale", *ends, f"--to {ALL} --noise t=0.1 --no-loss --quiet") == 0
    assert "lost to rounding: at most 0.0%" in capsys.readouterr().out, "entries without noise lose none"
    family = family_plan(tmp_path / "base", to=ALL)
    make = lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**family.wide_config))  # noqa: E731
    live = mu.upscale(base, make, mu.SignalNoise(0.1), plan=family.plan).model
    stored = same_bits(tmp_path / "wide", live)
    words = torch.randint(0, 97, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(live(words).logits, base(words).logits, rtol=1e-4, atol=1e-5)
    query, out = (stored[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qo")
    assert float(query[32:].abs().min()) > 0, "new heads wake"
    assert float(query[:, 32:].abs().min()) > 0, "what reads the new channels wakes"
    assert float(out[32:].abs().max()) == 0, "the stream is cut where it is written"
    assert float(out[:, 32:].abs().max()) == 0, "heads are cut where they are read"
    gain = stored["model.layers.0.input_layernorm.weight"]
    torch.testing.assert_close(gain[32:], torch.full((16,), (2 / 3) ** 0.5))
    widened = mu.grow(base, make, plan=family.plan).model.state_dict()
    for name, entry in family.plan.tensors.items():
        if name in stored:
            image = tuple(slice(axis.base) for axis in entry.axes)
            assert torch.equal(stored[name][image], widened[name][image]), "what was trained stays"


def test_every_new_entry_has_a_gradient_from_the_second_step_on():
    family = family_plan(LLAMA, to=ALL)
    config, wide = config_from(family.base_config), config_from(family.wide_config)
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(config).double()
    run = mu.Run(base, torch.optim.AdamW(base.parameters(), lr=1e-3))
    words = torch.arange(97).repeat(2, 1)[:, :60]
    awake = mu.upscale(
        run, lambda: transformers.LlamaForCausalLM(wide).double(), mu.SignalNoise(0.1), plan=family.plan
    )
    for _ in range(2):
        awake.optimizer.zero_grad()
        awake.model(input_ids=words, labels=words).loss.backward()
        awake.optimizer.step()
    for name, parameter in awake.model.named_parameters():
        assert parameter.grad is not None
        # Word 0 pads, and what the last position writes is compared with nothing.
        grad = parameter.grad[1:59] if "embed" in name else parameter.grad
        for dim, axis in enumerate(family.plan[name].axes):
            if axis.padded:
                assert bool((grad.narrow(dim, axis.base, axis.wide - axis.base) != 0).all()), name


def jump_of(family: FamilyPlan) -> float:
    assert family.evidence.jump is not None
    return family.evidence.jump


REFUSED = {
    "hidden=48,heads=6": (
        {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 97},
        "axis.padding_changes_mean",
        ("LayerNorm", "64 (x2)"),
    ),
    "kv_heads=4": (LLAMA, "goal.kv_heads_outgrow_heads", "heads=8,kv_heads=4"),
    "heads=6": ({**LLAMA, "num_key_value_heads": 4}, "goal.heads_outgrow_kv_heads", "--to heads=8"),
    "hidden=64,heads=8": (
        {**LLAMA, "num_key_value_heads": 4},
        "goal.key_heads_left_behind",
        "heads=8,kv_heads=8",
    ),
    "head_dim=16": (LLAMA, "goal.head_size_grows", ("8", "16")),
    "hidden=16": (LLAMA, "goal.size_not_larger", ("32", "16")),
}


@pytest.mark.parametrize("to", REFUSED)
def test_what_zeros_cannot_do_is_refused_with_its_reason(to):
    config, code, where = REFUSED[to]
    refusal(lambda: family_plan(config, to=to), code, where=where)


def test_the_remedies_for_heads_hold():
    assert family_plan(LLAMA, to="heads=8,kv_heads=4").plan.proved
    heads = {**LLAMA, "num_key_value_heads": 4}
    assert family_plan(heads, to="heads=8").plan.proved
    assert family_plan(heads, to="hidden=64,heads=8,kv_heads=8").plan.proved
    assert family_plan({**heads, "hidden_size": 48}, to="heads=6,kv_heads=6").plan.proved


def test_a_goal_says_the_way_only_where_it_is_not_copies():
    copies, units = Goal.parse(2), Goal.parse(2, by="units")
    assert (units.copies("hidden", 32), units.pads("hidden", 32)) == (1, 32)
    assert (copies.copies("hidden", 32), copies.pads("hidden", 32)) == (2, 0)
    assert "by" not in copies.as_json(), "plans and results of 0.2.0 keep their text"
    assert Goal.of_json(units.as_json()) == units != copies
    with refused("argument.unknown_way"):
        Goal.parse(2, by="units of")  # type: ignore[arg-type]


FUSED = {**LLAMA, "model_type": "phi3", "hidden_size": 768, "num_attention_heads": 24, "num_key_value_heads": 6,
    "head_dim": 32, "intermediate_size": 2048, "original_max_position_embeddings": 64}  # fmt: skip


def test_fused_projections_are_lifted_with_the_zeros_of_each_part():
    family = prove(family_plan(FUSED, 2, by="units"), steps=3)
    block = "model.layers.1."
    assert str(family.plan[block + "self_attn.qkv_proj.weight"].axes[0]) == "out: 768+768 | 2 * 192+192"
    assert str(family.plan[block + "mlp.gate_up_proj.weight"].axes[0]) == "out: 2 * 2048+2048"
    assert family.small_config["hidden_size"] < 768
    assert family.plan[block + "mlp.down_proj.weight"].cut == (0, 1), "the stream is cut where it is written"
    assert family.evidence.worst_step < 1e-11 < 1e-3 < family.evidence.control
    assert jump_of(family) < 1e-10
    uncut = {name: replace(entry, cut=()) for name, entry in family.plan.tensors.items()}
    found = prove(replace(family, plan=family.plan.with_tensors(uncut)), steps=2)
    assert jump_of(found) > 1e-6, "without the cuts waking moves the loss"
    assert FamilyPlan.from_json(family.to_json()) == family


def test_parts_of_several_spaces_are_not_lifted_by_one_ratio():
    axis = Axis.parse("out: 48+48 | 44+44")
    with pytest.raises(mu.MupscaleError) as error:
        lift_axis(axis, 184, 368, None, {Fraction(4), Fraction(8)})
    assert error.value.code == "family.parts_of_several_spaces"
    assert str(lift_axis(axis, 184, 368, None, {Fraction(2)})) == "out: 96+96 | 88+88"


def test_a_stream_behind_layer_norm_grows_by_copies_in_a_plan_by_units():
    bert = {**SIZES, "model_type": "bert", "architectures": ["BertForMaskedLM"]}
    family = prove(family_plan(bert, 2, by="units"), steps=3)
    layer = "bert.encoder.layer.1."
    assert str(family.plan[layer + "intermediate.dense.weight"].axes[0]) == "out: 40+40"
    assert str(family.plan[layer + "intermediate.dense.weight"].axes[1]) == "in: 32x2"
    assert str(family.plan[layer + "attention.self.query.weight"].axes[0]) == "out: 32+32"
    assert family.evidence.worst_step < 1e-11
    assert jump_of(family) < 1e-10


ROUTERS = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
}  # fmt: skip


@pytest.mark.parametrize("model_type", ROUTERS)
def test_experts_and_routers_grow_by_units(model_type):
    """Which axis of a stack of matrices is summed over is read from the calls of the loss, so the first trial passes."""
    name, more = ROUTERS[model_type]
    config = {**LLAMA, "model_type": model_type, "architectures": [f"{name}ForCausalLM"], **more}
    family = prove(family_plan(config, 2, by="units"), steps=3)
    mixed = "model.layers.1.mlp."
    assert all(axis.padded for axis in family.plan[mixed + "experts.down_proj"].axes[1:])
    assert family.plan[mixed + "experts.gate_up_proj"].axes[1].padded
    assert family.plan[mixed + "gate.weight"].axes[1].padded
    assert family.evidence.worst_step < 1e-11
    assert jump_of(family) < 1e-10


def test_units_words_blocks_together():
    family = prove(family_plan(LLAMA, "2", to="layers=3,after=0,vocab=+7", by="units"), steps=3)
    assert family.plan["model.layers.1.mlp.up_proj.weight"].wide_shape == (80, 64)
    assert str(family.plan["model.layers.0.mlp.up_proj.weight"].axes[0]) == "out: 40+40"
    assert family.evidence.worst_step < 1e-11
    assert jump_of(family) < 1e-10


def loss_of(folder, words):
    model = transformers.LlamaForCausalLM.from_pretrained(folder).double()
    with torch.no_grad():
        return float(model(input_ids=words, labels=words).loss)


def test_upscale_keeps_the_loss_of_the_base(tmp_path, capsys):
    base, ends = tmp_path / "base", (tmp_path / "base", tmp_path / "wide")
    saved(base)
    assert cli("upscale", *ends, "-k 2 --noise random") == 0
    assert "the loss is the base's" in capsys.readouterr().out
    words = torch.randint(0, 97, (2, 30), generator=torch.Generator().manual_seed(0))
    before = loss_of(base, words)
    assert abs(loss_of(tmp_path / "wide", words) - before) < 1e-6 * before
    assert cli("check", ends[1], "--base", ends[0], "--levels layout --quiet") == 0
    stored = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "wide").state_dict()
    up, down = (stored[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("up", "down"))
    assert float(up[40:].abs().min()) > 0 == float(down[:, 40:].abs().max())
    assert "required=True" in (tmp_path / "wide" / "train.py").read_text(), "nothing tells the base's rate"
    assert "**Its loss is the base's**" in (tmp_path / "wide" / "README.md").read_text()
    assert cli("upscale", base, tmp_path / "noisy", "-k 2 --noise t=0.5 --no-loss --quiet") == 0
    assert abs(loss_of(tmp_path / "noisy", words) - before) > 1e-5 * before, "copies and noise move it"


def test_the_call_is_the_command_and_train_py_takes_half_of_the_base_rate(tmp_path):
    base = tmp_path / "base"
    saved(base)
    log = [{"learning_rate": 1e-4, "step": 1}, {"learning_rate": 4e-4, "step": 2}, {"loss": 3.0, "step": 3}]
    (base / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    assert cli("upscale", base, tmp_path / "wide", "-k 2 --noise random --quiet") == 0
    mu.grow_checkpoint(base, tmp_path / "same", 2, noise=mu.NewUnits("random"))
    wide, same = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("wide", "same"))
    assert wide == same
    assert "default=0.0002" in (tmp_path / "wide" / "train.py").read_text()
    mu.grow_checkpoint(base, tmp_path / "asleep", 2, by="units")
    asleep = load_file(tmp_path / "asleep" / "model.safetensors")
    assert float(asleep["model.layers.0.mlp.up_proj.weight"][40:].abs().max()) == 0


def test_a_stream_behind_layer_norm_gets_channels_that_carry_the_mean(tmp_path):
    """By `upscale`, which wakes it, and not by `grow`, which promises the base's training; the state is that of a live run."""
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, **TOKENS}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model, words = new("GPT2", **sizes, **drops), torch.randint(0, 97, (4, 16))
    loss = lambda model: model(words, labels=words).loss  # noqa: E731
    run = train("gpt2", model)
    save_directory(run, tmp_path / "base")
    ends = tmp_path / "base", tmp_path / "wide"
    assert cli("upscale", *ends, "--to hidden=48,heads=6 --quiet") == 0
    assert cli("check", ends[1], "--base", ends[0], "--levels", "bytes,layout") == 0
    plan, _ = read_plans(ends[1])
    config = transformers.GPT2Config.from_pretrained(ends[1])
    live = mu.upscale(run, lambda: transformers.GPT2LMHeadModel(config), mu.NewUnits(), plan=plan, loss=loss)
    stored = same_bits(ends[1], live.model)
    torch.testing.assert_close(loss(live.model), loss(model), rtol=1e-5, atol=0)
    table = stored["transformer.wte.weight"]
    assert plan["transformer.wte.weight"].mean == (1,)
    assert torch.equal(table[:, 32:], table[:, 32:33].expand(97, 16))
    kept = torch.load(ends[1] / "optimizer.pt", weights_only=True)["state"]
    order = [name for names in trainer_order(live.model, {}) for name in names]
    for number, name in enumerate(order):
        for key, value in live.optimizers[0].state[live.model.get_parameter(name)].items():
            assert torch.equal(kept[number][key], value), (name, key)
    moment = kept[order.index("transformer.wte.weight")]["exp_avg"]
    assert bool(moment[:, :32].any())
    assert not bool(moment[:, 32:].any())
    with refused("axis.padding_changes_mean"):
        family_plan(tmp_path / "base", to="hidden=48,heads=6", by="units")
