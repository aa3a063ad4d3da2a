"""Dense models that get experts: the run continues until they wake, in memory and in files, and what cannot sleep is refused."""

import json
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("planned_here")

import mupscale as mu  # noqa: E402
from harness.refusals import refused  # noqa: E402
from harness.tiny_llama import LLAMA, SIZES, TOKENS, cli, new, same_bits, saved  # noqa: E402
from mupscale.families.plan import family_plan  # noqa: E402
from mupscale.families.prove import prove  # noqa: E402
from mupscale.families.record import FamilyPlan  # noqa: E402
from mupscale.families.types import into  # noqa: E402
from mupscale.plans.more_experts import more_experts_plan  # noqa: E402
from mupscale.plans.plan import Plan  # noqa: E402

GOAL = "experts=8,top_k=2,expert_ffn=20"
GRANITE = {f"{of}_multiplier": m for of, m in (("embedding", 2.0), ("residual", 0.5), ("attention", 0.3))}
GRANITE["logits_scaling"] = 3.0
PAIRS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("granitemoeshared", {}, ""),
    "llama, tied": ("granitemoeshared", {"tie_word_embeddings": True}, ""),
    "llama, biases in attention": ("granitemoeshared", {"attention_bias": True}, ""),
    "mistral": ("granitemoeshared", {"sliding_window": None}, ""),
    "granite": ("granitemoeshared", GRANITE, ""),
    "llama into glm4_moe": ("glm4_moe", {}, ",into=glm4_moe"),
    "qwen3": ("dots1", {}, ""),
}
COPIES = {
    "llama": "experts=3,top_k=3,expert_ffn=40,into=mixtral",
    "qwen3": "experts=4,top_k=4,expert_ffn=40,into=qwen3_moe",
}


@pytest.mark.parametrize("case", PAIRS)
def test_the_small_copy_continues_its_base(case):
    kind, fields, more = PAIRS[case]
    data = {"model_type": case.partition(",")[0].partition(" ")[0], **SIZES, **fields}
    family = prove(family_plan(data, to=GOAL + more), steps=3)
    assert family.evidence.worst_step < 1e-14
    assert family.evidence.control > 1e-3
    assert family.wide_config["model_type"] == kind
    assert family.wide_config["architectures"] == [family.wide_architecture]
    assert FamilyPlan.from_json(family.to_json()) == family
    assert Plan.from_json(family.plan.to_json()) == family.plan
    new = [entry for entry in family.plan.tensors.values() if entry.new]
    assert len(new) == 3 * SIZES["num_hidden_layers"], "router, gates with ups, downs"
    assert family.wide_config.get("router_aux_loss_coef", 0.0) == 0.0
    assert not family.wide_config["output_router_logits"]


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize(("k", "more"), [("1", ""), ("hidden=2,heads=2,kv_heads=2", ",layers=3")])
def test_copies_that_every_token_goes_to_continue_the_base(kind, k, more):
    found = prove(family_plan({"model_type": kind, **SIZES}, k, to=COPIES[kind] + more), steps=3)
    assert 0 < found.evidence.worst_step < 1e-11
    assert found.evidence.control > 1e-3
    entry, experts = found.plan["model.layers.0.mlp.experts.gate_up_proj"], {"llama": 3, "qwen3": 4}[kind]
    assert (entry.stack, entry.source_shape, len(entry.sources)) == (0, (40, 32), 2)
    assert str(entry.axes[0]) == f"out: 1x{experts}"
    assert Plan.from_json(found.plan.to_json()) == found.plan
    assert found.plan["model.layers.0.mlp.gate.weight"].new


def test_copies_with_one_copy_too_few_in_their_units_are_noticed():
    """Control: c = 1 gives their gradients other units, and the identity fails."""
    found, base = family_plan(LLAMA, to=COPIES["llama"]), llama().double()
    wrong = found.plan.with_tensors(
        {
            name: replace(entry, spread=Fraction(1, entry.axes[0].wide))
            for name, entry in found.plan.tensors.items()
            if entry.stack is not None
        }
    )
    run = mu.Run(base, torch.optim.AdamW(base.parameters(), lr=1e-2, eps=1e-3))
    for plan, holds in ((found.plan, True), (wrong, False)):
        certificate = mu.verify(run, maker(found), step=step, plan=plan, steps=2)
        assert certificate.holds is holds


def test_layers_width_and_experts_are_one_plan():
    family = prove(
        family_plan(LLAMA, "hidden=2,heads=2,kv_heads=2", to=f"layers=3,after=0,{GOAL}"),
        steps=3,
    )
    assert 0 < family.evidence.worst_step < 1e-11
    assert family.new_blocks == (1,)
    plan = family.plan
    new = plan["model.layers.1.shared_mlp.input_linear.weight"]
    assert (new.like, new.wide_shape) == ("model.layers.0.mlp.gate_proj.weight", (80, 64))
    old = plan["model.layers.2.shared_mlp.input_linear.weight"]
    assert old.sources == ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight")
    assert plan["model.layers.2.block_sparse_moe.experts.down_proj"].wide_shape == (8, 64, 20)


def test_a_router_that_the_row_forgets_is_refused(monkeypatch):
    """Control: a row that is wrong is a refusal and never a wrong file."""
    right = into.TARGETS["granitemoeshared"]
    swapped = {**right.made, "shared_mlp.input_linear.weight": ("mlp.up_proj.weight", "mlp.gate_proj.weight")}
    wrong = into.Target(right.architecture, right.takes, right.fields, swapped, right.asleep)
    monkeypatch.setitem(into.TARGETS, "granitemoeshared", wrong)
    with refused("experts.loss_differs"):
        family_plan(LLAMA, to=GOAL)


def llama():
    return new(**SIZES)


def family():
    return family_plan(LLAMA, to=GOAL)


def maker(found):
    return lambda: getattr(transformers, found.wide_architecture)(
        getattr(transformers, found.wide_architecture.replace("ForCausalLM", "Config"))(
            **found.wide_config, experts_implementation="eager"
        )
    )


def step(run: mu.Run, i: int) -> float:
    words = torch.randint(3, 97, (4, 12), generator=torch.Generator().manual_seed(i))
    run.optimizers[0].zero_grad()
    loss = run.model(input_ids=words, labels=words).loss
    loss.backward()
    run.optimizers[0].step()
    return float(loss.detach())


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_live_run_goes_on_with_its_state(optimizer):
    base = llama().double()
    settings: dict[str, Any] = {"momentum": 0.9} if optimizer is torch.optim.SGD else {"eps": 1e-4}
    run = mu.Run(base, optimizer(base.parameters(), lr=1e-2, weight_decay=0.1, **settings))
    for i in range(3):
        step(run, i)
    certificate = mu.verify(
        run, maker(family()), step=lambda r, i: step(r, 3 + i), plan=family().plan, steps=4
    )
    certificate.raise_if_broken()
    assert certificate.worst < 1e-6, "transformers computes norms and rotations in float32"


def test_a_random_up_is_not_asleep():
    """Control: with down = 0 alone the first loss is the base's, and the training is another one."""
    base, found = llama().double(), family()
    run = mu.Run(base, torch.optim.AdamW(base.parameters(), lr=1e-2))
    wide = mu.grow(run, maker(found), plan=found.plan)
    loud = mu.grow(run, maker(found), plan=found.plan)
    with torch.no_grad():
        for name, parameter in loud.model.named_parameters():
            if found.plan[name].new and not found.plan[name].quiet:
                parameter.normal_(std=0.3)
    curves = [[step(r, i) for i in range(3)] for r in (run, wide, loud)]
    assert curves[1] == pytest.approx(curves[0], rel=1e-6)
    assert curves[2][0] == pytest.approx(curves[0][0], rel=1e-6)
    assert curves[2][2] != pytest.approx(curves[0][2], rel=1e-3)


@pytest.mark.parametrize(
    ("into", "code"),
    [("granitemoeshared", "optimizer.steps_joined_tensors"), ("glm4_moe", "optimizer.steps_stacked_experts")],
)
def test_muon_is_refused_for_feed_forward_weights(into, code):
    """It steps whole matrices: joined ones are stepped otherwise, and experts are stacks of them."""
    base, found = llama(), family_plan(LLAMA, to=f"{GOAL},into={into}")
    matrices = {n: p for n, p in base.named_parameters() if p.dim() == 2 and "layers" in n}
    with refused(code):
        mu.grow(mu.Run(base, torch.optim.Muon(matrices.values(), lr=1e-2)), maker(found), plan=found.plan)
    attention = [p for n, p in matrices.items() if "self_attn" in n]
    wide = mu.grow(mu.Run(base, torch.optim.Muon(attention, lr=1e-2)), maker(found), plan=found.plan)
    assert len(wide.optimizers[0].param_groups[0]["params"]) == len(attention), "control: attention alone"


def test_gate_and_up_in_different_groups_are_refused():
    base, found = llama(), family()
    gates = {id(p) for n, p in base.named_parameters() if "gate_proj" in n}
    groups = [[p for p in base.parameters() if (id(p) in gates) is own] for own in (True, False)]
    run = mu.Run(base, torch.optim.AdamW([{"params": of, "lr": 1e-3} for of in groups]))
    with refused("optimizer.joined_across_groups"):
        mu.grow(run, maker(found), plan=found.plan)


def test_numbers_of_joined_state_must_agree():
    base, found = llama(), family()
    run = mu.Run(base, torch.optim.AdamW(base.parameters(), lr=1e-3))
    step(run, 0)
    run.optimizers[0].state[base.model.layers[0].mlp.up_proj.weight]["step"].add_(1)
    with refused("state.cannot_be_joined", where="'step'"):
        mu.grow(run, maker(found), plan=found.plan)


REFUSED = {
    "a gate that trains": ("llama", {}, f"{GOAL},into=qwen2_moe", "experts.shared_expert_gated"),
    "no such class": ("llama", {}, f"{GOAL},into=nothing", "experts.unknown_class"),
    "another arithmetic": ("llama", {}, f"{GOAL},into=dots1", "experts.class_does_not_fit"),
    "a type without a class": ("gemma", {}, GOAL, "experts.no_class_known"),
    "one expert for a token": ("llama", {}, "experts=8,top_k=1,expert_ffn=20", "experts.router_never_learns"),
    "more than there are": ("llama", {}, "experts=2,top_k=3,expert_ffn=20", "experts.top_k_too_large"),
    "biases": ("llama", {"mlp_bias": True}, GOAL, "experts.class_without_bias"),
    "a window": ("mistral", {"sliding_window": 16}, GOAL, "experts.class_without_window"),
    "copies to choose from": ("llama", {}, "experts=4,top_k=2,expert_ffn=40,into=mixtral", "experts.copies_need_all"),
    "narrow copies": ("llama", {}, "experts=4,top_k=4,expert_ffn=20,into=mixtral", "experts.copies_of_other_width"),
    "no whole experts": ("llama", {}, "experts=8,top_k=2,expert_ffn=24,into=glm4_moe", "experts.ffn_not_a_divisor"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "fields", "goal", "code"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_exact_is_refused(kind, fields, goal, code):
    with refused(code):
        family_plan({"model_type": kind, **SIZES, **fields}, to=goal)


@pytest.mark.parametrize(("k", "to"), [("2", GOAL), ("ffn=2", GOAL), ("1", f"ffn=48,{GOAL}")])
def test_feed_forward_layers_do_not_grow_with_experts(k, to):
    with refused("experts.ffn_grows_too"):
        family_plan(LLAMA, k, to=to)


def test_one_expert_for_a_token_is_fine_where_its_weight_is_not_renormalised():
    found = family_plan({"model_type": "qwen3", **SIZES}, to="experts=8,top_k=1,expert_ffn=20")
    assert found.wide_config["num_experts_per_tok"] == 1


@pytest.mark.parametrize("text", ["experts=8,top_k=2", "into=glm4_moe", "experts=0,top_k=2,expert_ffn=8"])
def test_a_goal_that_is_not_whole_is_refused(text):
    with refused("goal.to_not_readable", where=text):
        family_plan(LLAMA, to=text)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", ""),
        pytest.param("llama", "--into glm4_moe", marks=pytest.mark.nightly),
        pytest.param("qwen3", "", marks=pytest.mark.nightly),
    ],
)
def test_a_directory_gets_experts_and_loads_in_the_stock_class(tmp_path, kind, more):
    base, ends = saved(tmp_path / "base", kind.capitalize()), (tmp_path / "base", tmp_path / "wide")
    assert cli("grow", *ends, f"--to {GOAL} {more} --quiet") == 0
    assert cli("check", ends[1], "--base", ends[0], "--levels", "bytes,layout,model") == 0
    wide, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "wide", output_loading_info=True
    )
    assert not any(told.values())
    words = torch.randint(0, 97, (2, 9))
    with torch.no_grad():
        assert torch.allclose(wide.eval()(words).logits, base(words).logits, atol=1e-5)
    about = json.loads((tmp_path / "wide" / "mupscale.json").read_text())
    assert about["config"]["model_type"] == wide.config.model_type != kind
    assert "its new experts are zero" in (tmp_path / "wide" / "README.md").read_text()
    again = ("grow", tmp_path / "wide", tmp_path / "wider", "-k hidden=2,heads=2,kv_heads=2 --quiet")
    assert cli(*again) == 0


def test_a_directory_of_copies_loads_in_the_stock_class_and_equals_the_live_bits(tmp_path):
    base, ends = saved(tmp_path / "base"), (tmp_path / "base", tmp_path / "wide")
    assert cli("upscale", *ends, f"--to {COPIES['llama']} --noise t=0.1 --no-loss --quiet") == 0
    assert cli("check", ends[1], "--base", ends[0]) == 0
    assert "new routers wake" in (tmp_path / "wide" / "README.md").read_text()
    found = family_plan(tmp_path / "base", to=COPIES["llama"])
    live: Any = mu.upscale(base, maker(found), mu.SignalNoise(0.1), plan=found.plan).model
    same_bits(tmp_path / "wide", live)
    wide, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "wide", output_loading_info=True
    )
    assert not any(told.values())
    one = wide.model.layers[0].mlp.experts.gate_up_proj.detach()
    dense = torch.cat(
        [base.model.layers[0].mlp.gate_proj.weight, base.model.layers[0].mlp.up_proj.weight]
    ).detach()
    shares = torch.linalg.matrix_norm(one - dense, 2) / torch.linalg.matrix_norm(dense, 2)
    assert shares.tolist() == pytest.approx([0.1] * 3, rel=0.3), (
        "noise of every copy is relative to the dense layer"
    )


def test_a_grown_base_gets_no_experts(tmp_path, capsys):
    saved(tmp_path / "base")
    assert cli("grow", tmp_path / "base", tmp_path / "wide", "-k 2 --quiet") == 0
    assert cli("grow", tmp_path / "wide", tmp_path / "more", f"--to {GOAL} --quiet") != 0
    assert "[experts.base_was_grown]" in capsys.readouterr().err


def test_noise_wakes_experts_without_a_jump_and_equals_the_live_bits(tmp_path):
    base, to = saved(tmp_path / "base"), f"layers=3,after=0,{GOAL}"
    assert (
        cli("upscale", tmp_path / "base", tmp_path / "wide", f"--to {to} --noise t=0.1 --no-loss --quiet")
        == 0
    )
    found = family_plan(tmp_path / "base", to=to)
    live: Any = mu.upscale(base, maker(found), mu.SignalNoise(0.1), plan=found.plan).model
    same_bits(tmp_path / "wide", live)
    words = torch.randint(3, 97, (2, 9))
    with torch.no_grad():
        assert torch.allclose(live(words).logits, base(words).logits, atol=1e-5)


def test_woken_experts_have_the_size_of_their_dense_layer_and_learn_from_the_second_step_on():
    """Every entry of every expert that saw a token has a gradient at the second step, and routers too."""
    base, found = llama().double(), family()
    run = mu.Run(base, torch.optim.AdamW(base.parameters(), lr=1e-2))
    wide = mu.upscale(run, maker(found), mu.SignalNoise(0.1), plan=found.plan)
    model: Any = wide.model
    block = model.model.layers[0]
    dense = torch.linalg.matrix_norm(block.shared_mlp.input_linear.weight.detach(), 2)
    norms = torch.linalg.matrix_norm(block.block_sparse_moe.experts.gate_up_proj.detach(), 2)
    ratios = (norms / dense).tolist()
    assert all(0.7 < ratio < 1.4 for ratio in ratios), ratios
    seen: dict[int, set[int]] = {}

    def note(layer):
        def hook(module, given, output):
            seen[layer] = set(output[2].flatten().tolist())

        return hook

    for i, layer in enumerate(model.model.layers):
        layer.block_sparse_moe.router.register_forward_hook(note(i))
    step(wide, 0)
    assert float(block.block_sparse_moe.experts.gate_up_proj.grad.abs().max()) == 0.0, "downs were zero"
    assert float(block.block_sparse_moe.experts.down_proj.grad.abs().max()) > 0
    step(wide, 1)
    for i, layer in enumerate(model.model.layers):
        mixed = layer.block_sparse_moe
        assert len(seen[i]) > 2
        for expert in seen[i]:
            for weight in (mixed.experts.gate_up_proj, mixed.experts.down_proj):
                assert bool((weight.grad[expert] != 0).all()), (i, expert)
        assert bool((mixed.router.weight.grad[sorted(seen[i])] != 0).all())


ROUTED: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "moe_intermediate_size": 24,
        "num_key_value_heads": 4,
    },
}


@pytest.mark.parametrize("kind", ["Mixtral", pytest.param("DeepseekV3", marks=pytest.mark.nightly)])
def test_files_get_twice_the_experts_and_each_token_goes_to_twice_as_many(kind, tmp_path):
    """Both types store experts one by one, and DeepSeek's stand in groups, which are copied whole."""
    base = saved(tmp_path / "base", kind, **ROUTED[kind])
    assert cli("upscale", tmp_path / "base", tmp_path / "wide", "-k experts=2 --quiet") == 0
    assert cli("check", tmp_path / "wide", "--base", tmp_path / "base") == 0
    wide = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide").eval()
    words = torch.arange(90).view(3, 30)
    with torch.no_grad():
        before, after = (model(input_ids=words, labels=words).loss for model in (base, wide))
    assert abs(float(before) - float(after)) < 2e-6
    for field in ("num_experts_per_tok", "n_group", "topk_group"):
        if field in ROUTED[kind]:
            assert getattr(wide.config, field) == 2 * ROUTED[kind][field]
    downs = dict(wide.named_parameters())["model.layers.1.mlp.experts.down_proj"]
    old = dict(base.named_parameters())["model.layers.1.mlp.experts.down_proj"]
    assert len(downs) == 2 * len(old)
    plan = family_plan(
        json.loads((tmp_path / "base" / "config.json").read_text()), "experts=2", by="units"
    ).plan
    axis = plan["model.layers.1.mlp.experts.down_proj"].axes[0]
    for expert in range(len(old)):
        one, other = (i for i in range(axis.wide) if axis.source(i) == expert)
        assert torch.equal(downs[one] + downs[other], 2 * old[expert]), (
            "each entry goes whole to one of the copies"
        )
        assert not torch.equal(downs[one], downs[other])


def test_a_mixture_that_stores_its_experts_one_by_one_grows_deeper(tmp_path):
    base = saved(tmp_path / "base", "Mixtral", **ROUTED["Mixtral"])
    goal = "-k experts=2 --layers 4 --after 0:1 --quiet"
    assert cli("upscale", tmp_path / "base", tmp_path / "wide", goal) == 0
    assert cli("check", tmp_path / "wide", "--base", tmp_path / "base") == 0
    wide = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide").eval()
    words = torch.arange(90).view(3, 30)
    with torch.no_grad():
        before, after = (model(input_ids=words, labels=words).loss for model in (base, wide))
    assert abs(float(before) - float(after)) < 2e-6
    assert all(bool(p.any()) for n, p in wide.named_parameters() if "gate_up_proj" in n), "readers woke"


def test_a_loss_of_balance_stays_as_large():
    data = {"model_type": "mixtral", **SIZES, **ROUTED["Mixtral"], "router_aux_loss_coef": 0.02}
    wide = family_plan(data, "experts=2").wide_config
    assert (wide["num_local_experts"], wide["num_experts_per_tok"]) == (8, 4)
    assert wide["router_aux_loss_coef"] == 0.01


def test_experts_are_multiplied_only_where_they_are_named():
    mixture = {"model_type": "mixtral", **SIZES, **ROUTED["Mixtral"]}
    assert family_plan(mixture, "ffn=2").wide_config["num_local_experts"] == 4
    with refused("goal.width_not_in_config"):
        family_plan({"model_type": "llama", **SIZES}, "experts=2")


@pytest.mark.parametrize(
    ("kind", "fields", "number"),
    [
        ("glm4_moe", {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}, 6),
        ("deepseek_v3", ROUTED["DeepseekV3"], 12),
    ],
)
def test_new_experts_sleep_below_their_bias(kind, fields, number):
    data = {"model_type": kind, **SIZES, "moe_intermediate_size": 24, **fields}
    family = prove(family_plan(data, to=f"experts={number}", by="units"), steps=3)
    assert (family.evidence.worst_step, family.evidence.jump) == (0.0, 0.0)
    assert family.evidence.steps == 3
    assert family.wide_config["n_routed_experts"] == number
    assert family.wide_config["num_experts_per_tok"] == fields["num_experts_per_tok"]
    assert Plan.from_json(family.plan.to_json()) == family.plan


@pytest.mark.parametrize("kind", ["mixtral", "olmoe"])
def test_copies_of_experts_share_the_tokens(kind):
    """Weights of Mixtral are divided by their sum, those of OLMoE are not."""
    count = "num_experts" if kind == "olmoe" else "num_local_experts"
    data = {"model_type": kind, **SIZES, count: 4, "num_experts_per_tok": 2}
    family = prove(family_plan(data, to="experts=8", by="units"), steps=3)
    seen = family.evidence
    assert seen.steps == 0, "training is not the base's"
    assert max(seen.worst_gradient, seen.worst_step) < 1e-9 < 1e-3 < seen.control
    assert seen.kept is not None
    assert seen.jump is not None
    assert seen.kept > 0.9 > 0.1 > seen.jump
    assert FamilyPlan.from_json(family.to_json()) == family


MIXTURE = {"model_type": "mixtral", **SIZES, **ROUTED["Mixtral"]}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    **SIZES,
    **ROUTED["DeepseekV3"],
    "n_routed_experts": 16,
    "n_group": 4,
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, **TOKENS}
REFUSED_MORE: dict[str, tuple[str, dict[str, Any], str, list[str]]] = {
    "llama": ("experts.base_is_dense", LLAMA, "experts=8", ["experts=8,top_k=2,expert_ffn=20"]),
    "qwen3": ("experts.base_is_dense", {**LLAMA, "model_type": "qwen3"}, "experts=8", ["experts=8,top_k=2,expert_ffn=20"]),
    "no class with experts": ("experts.base_is_dense", GPT2, "experts=8", []),
    "as many": ("goal.size_not_larger", MIXTURE, "experts=4", []),
    "4 to 6": ("experts.not_whole", MIXTURE, "experts=6", ["experts=8"]),
    "4 groups": ("experts.groups_not_whole", DEEPSEEK, "experts=18", ["experts=20"]),
    "masked scores": ("experts.more_change_the_loss", {**MIXTURE, "model_type": "phimoe"}, "experts=8", []),
    "masked scores, 4 to 6": ("experts.not_whole", {**MIXTURE, "model_type": "phimoe"}, "experts=6", []),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_MORE)
def test_what_has_no_more_experts_is_refused_and_what_is_offered_is_accepted(case):
    code, data, to, offered = REFUSED_MORE[case]
    with refused(code) as caught:
        family_plan(data, to=to, by="units")
    (fault,) = caught.value.faults
    assert re.findall(r"experts=\S*\d", fault.remedy) == offered
    for goal in offered:
        assert family_plan(data, to=goal, by="units").wide_config != data


BESIDE: dict[str, tuple[dict[str, Any], str, str, bool]] = {
    "shared experts": ({"model_type": "granitemoeshared", "shared_intermediate_size": 40}, "1", "experts=8", True),
    "a shared expert with a gate": (
        {"model_type": "qwen2_moe", "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
        "1", "experts=8", True,
    ),
    "every width by new units": ({}, "2", "experts=8", True),
    "new layers": ({}, "1", "experts=8,layers=3,after=0", True),
    "asleep, every width by new units": (DEEPSEEK, "2", "experts=20", False),
    "twice beside shared experts": ({"model_type": "granitemoeshared", "shared_intermediate_size": 40}, "experts=2", "", False),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("case", BESIDE)
def test_more_experts_beside_other_parts(case):
    fields, k, to, parted = BESIDE[case]
    base = fields if fields.keys() & {"num_experts", "n_routed_experts"} else {**MIXTURE, **fields}
    data = {**SIZES, "num_experts_per_tok": 2, **base}
    found = prove(family_plan(data, k, to=to or None, by="units"), steps=3)
    seen = found.evidence
    assert found.plan.parts_tokens is parted
    assert max(seen.worst_gradient, seen.worst_step) < 1e-9 < 1e-3 < seen.control
    assert seen.jump is not None
    assert seen.jump < (0.1 if parted else 1e-12)
    assert seen.kept is None or seen.kept > 0.9


def test_what_counts_on_the_number_of_experts_or_layers_is_refused():
    """Controls: without these fields the same growths are accepted by the tests around this one."""
    balanced = {**MIXTURE, "output_router_logits": True, "router_aux_loss_coef": 0.02}
    with refused("experts.more_change_the_loss"):
        family_plan(balanced, to="experts=8", by="units")
    with refused("depth.field_counts_layers"):
        family_plan({**DEEPSEEK, "first_k_dense_replace": 1}, to="experts=20,layers=3", by="units")
    capacity = {"model_type": "switch_transformers", "num_experts": 4, "expert_capacity": 8}
    with refused("experts.base_is_dense"):
        family_plan(capacity, to="experts=8", by="units")
    with refused("goal.width_not_in_config"):
        family_plan(capacity, "experts=2")


def test_the_balance_loss_of_twice_the_experts_is_that_of_the_base():
    """It is counted in this forward alone. Controls: an undivided coefficient; copies that share tokens have about the base's."""
    data = {**MIXTURE, "router_aux_loss_coef": 0.02}
    base, words = (
        new("Mixtral", **{k: v for k, v in data.items() if k != "model_type"}).eval(),
        torch.arange(90).view(3, 30),
    )

    def balance(model):
        with torch.no_grad():
            found = model(input_ids=words, output_router_logits=True).aux_loss
        return float(found), float(found * model.config.router_aux_loss_coef)

    found = {
        goal: balance(mu.upscale(base, maker(family), plan=family.plan).model.eval())
        for goal, family in (
            ("twice", family_plan(data, "experts=2", by="units")),
            ("more", family_plan(data, to="experts=8", by="units")),
        )
    }
    plain, counted = balance(base)
    assert found["twice"][1] == pytest.approx(counted, rel=1e-5)
    assert found["twice"][0] == pytest.approx(2 * plain, rel=1e-5)
    assert found["more"][1] == pytest.approx(counted, rel=0.2)


@pytest.mark.parametrize("kind", ["Mixtral", "DeepseekV3"])
def test_files_get_more_experts_and_each_token_goes_to_as_few(kind, tmp_path):
    """Both types store experts one by one; those of Mixtral part, those of DeepSeek sleep as copies."""
    base = saved(tmp_path / "base", kind, **ROUTED[kind])
    number = 2 * len(dict(base.named_parameters())["model.layers.1.mlp.experts.down_proj"])
    assert cli("upscale", tmp_path / "base", tmp_path / "wide", f"--experts {number} --quiet") == 0
    assert cli("check", tmp_path / "wide", "--base", tmp_path / "base") == 0
    wide = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide").eval()
    words = torch.arange(90).view(3, 30)
    with torch.no_grad():
        before, after = (model(input_ids=words, labels=words).loss for model in (base, wide))
    assert abs(float(before) - float(after)) < (2e-2 if kind == "Mixtral" else 2e-6)
    assert wide.config.num_experts_per_tok == base.config.num_experts_per_tok
    downs = dict(wide.named_parameters())["model.layers.1.mlp.experts.down_proj"]
    old = dict(base.named_parameters())["model.layers.1.mlp.experts.down_proj"]
    own = [next(i for i, one in enumerate(old) if torch.equal(one, down)) for down in downs]
    assert own == ([0, 0, 1, 1, 2, 2, 3, 3] if kind == "Mixtral" else [0, 1, 2, 3] * 2 + [4, 5, 6, 7] * 2)
    asleep = cli("grow", tmp_path / "base", tmp_path / "asleep", f"--experts {number} --quiet")
    assert asleep == (2 if kind == "Mixtral" else 0)
    if kind == "DeepseekV3":
        levels = "--levels bytes,layout,model"
        assert cli("check", tmp_path / "asleep", "--base", tmp_path / "base", levels) == 0


class Tokens(torch.nn.Module):
    """A mixture of one's own."""

    def __init__(self, experts):
        super().__init__()
        self.router = torch.nn.Linear(6, experts, bias=False)
        self.down = torch.nn.Parameter(torch.randn(experts, 3, 6))

    def forward(self, x):
        values, chosen = self.router(x).topk(2, -1)
        weights = torch.zeros(len(x), len(self.down), dtype=x.dtype).scatter(-1, chosen, values.softmax(-1))
        return torch.einsum("nd,ecd,ne->nc", x, self.down, weights)


def test_a_mixture_of_ones_own_gets_more_experts():
    torch.manual_seed(0)
    base, x = Tokens(4), torch.randn(200, 6)
    loss = lambda model: model(x.to(model.down)).square().mean()  # noqa: E731
    plan = more_experts_plan(base, Tokens(8), (4, 8))
    wide = mu.upscale(base, lambda: Tokens(8), plan=plan, loss=loss)
    assert 0.9 < wide.provenance["loss"]["kept"] <= 1
    assert wide.provenance["loss"]["after"] == pytest.approx(wide.provenance["loss"]["before"], rel=0.05)
    with refused("experts.equal_scores"):
        mu.grow(base, lambda: Tokens(8), plan=plan, loss=loss)
    run = mu.Run(base, torch.optim.SGD(base.parameters(), lr=0.1))
    with refused("proof.steps_with_parted_tokens"):
        mu.verify(run, lambda: Tokens(8), step=lambda run, i: loss(run.model), plan=plan)
    with torch.no_grad():
        base.router.weight.zero_()
    with refused("experts.router_is_zero"):
        mu.upscale(base, lambda: Tokens(8), plan=plan, prove=False)
