"""Stock model types grown from their configurations: widths, small copies, lifted plans, proofs, refusals."""

import json
import re
from fractions import Fraction

import pytest
import torch

import mupscale as mu
from harness.family_configs import EXACT, INEXACT
from harness.limited import limited
from harness.refusals import refusal, refused
from harness.tiny_llama import saved
from mupscale.errors import MupscaleError
from mupscale.families.config.goal import Goal
from mupscale.families.config.grown import grown
from mupscale.families.config.multipliers import parse_multipliers
from mupscale.families.config.nested import edits, growing_fields
from mupscale.families.copy.lift import Tensors, lift
from mupscale.families.types.rows import ROWS
from mupscale.families.types.symbols import evaluate, layout, power, symbols

pytest.importorskip("transformers")

from mupscale.families import models, process
from mupscale.families.copy.shrink import growth, shapes, shrunk
from mupscale.families.loaded import stored_losses
from mupscale.families.models import as_data, config_from, model_class, on_meta
from mupscale.families.plan import family_plan
from mupscale.families.process import plan_in_process
from mupscale.families.prove import prove
from mupscale.families.record import FamilyPlan

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
    "intermediate_size": 112, "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 300, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA_70B = {
    **LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97, "n_positions": 64}


@pytest.fixture(scope="module")
def tied() -> FamilyPlan:
    return family_plan({**LLAMA, "tie_word_embeddings": True}, 2)


# Widths


@pytest.mark.parametrize(
    ("code", "text"),
    [
        *(("not_a_multiplier", text) for text in ("", "0", "-2", "1.5", "two", "hidden", "hidden=", "99999")),
        ("unknown_width", "depth=2"),
        *(("width_given_twice", text) for text in ("hidden=2,hidden=3", "2,2")),
    ],
)
def test_multipliers_that_make_no_sense_are_refused(code, text):
    with refused(f"goal.{code}"):
        parse_multipliers(text)


def test_widths_multiply_their_fields_and_no_others():
    wide = as_data(grown(config_from(LLAMA), Goal.parse("hidden=2,heads=4,kv_heads=4,ffn=3")))
    assert (wide["hidden_size"], wide["num_attention_heads"], wide["intermediate_size"]) == (128, 32, 336)
    assert (wide["head_dim"], wide["num_hidden_layers"], wide["vocab_size"]) == (8, 5, 300)
    kept = as_data(grown(config_from(LLAMA), Goal.parse("2,kv_heads=1")))
    assert (kept["num_attention_heads"], kept["num_key_value_heads"]) == (16, 4)


def test_nested_configurations_grow_too():
    data = {"model_type": "x", "text_config": {"model_type": "llama", "hidden_size": 8}, "hidden_size": 4}
    assert edits(data, Goal({"every": 3})) == {("hidden_size",): 12, ("text_config", "hidden_size"): 24}


def test_heads_and_hidden_grow_together_where_the_head_size_is_their_ratio():
    with refused("goal.hidden_unlike_heads", where="hidden=2,heads=2"):
        family_plan(GPT2, "hidden=2")
    with refused("goal.width_not_in_config", where="kv_heads"):
        family_plan(GPT2, "2,kv_heads=3")


def test_texts_about_configurations():
    names = symbols({"hidden_size": 64, "num_attention_heads": 8, "num_kv_heads": 2, "flag": True})
    assert evaluate("flag and not other", names)
    assert layout("3*D", names, 2) == 24
    assert layout("H*D: G*D | 2*KV*D: D", names, 2) == (((2, 2), (32, 1)), ((4, 2), (8, 1)))
    assert power("k^-1/4", 16) == mu.rules.Scale.of(2) ** Fraction(-1)
    for text in ("__import__('os')", "f(1)", "a.b"):
        with refused("family.not_an_expression", where=text):
            evaluate(text, names)
    with refused("family.field_missing", where="missing*2"):
        evaluate("missing*2", names)


def test_every_text_of_the_registry_can_be_read():
    for kind, row in ROWS.items():
        for condition in row.refused:
            evaluate(condition, {})
        for fold in (*row.folds.values(), *row.config.values()):
            power(fold, 2)
        for axes in row.layouts.values():
            for text in axes.values():
                names = re.findall(r"[a-z_]{3,}|[A-Z]", text)  # fields, and sizes that a layer has for itself
                sizes = {n: 2 if "group" in n or "key_heads" in n else 8 for n in names}
                assert layout(text, sizes, 2), kind


# Small copies


@pytest.mark.parametrize("raw", [LLAMA_70B, GPT2, {"model_type": "bert"}], ids=lambda raw: raw["model_type"])
def test_a_small_copy_is_made_of_the_same_blocks(raw):
    config, goal = config_from(raw), Goal({"every": 2})
    cls = model_class(config)
    full = growth(shapes(config, cls), shapes(grown(config, goal), cls))
    small = shrunk(config, goal, cls, full)
    assert growth(shapes(small, cls), shapes(grown(small, goal), cls)) == full
    before, after = symbols(as_data(config)), symbols(as_data(small))
    assert (before["D"], before["G"]) == (after["D"], after["G"])
    assert sum(p.numel() for p in on_meta(small, cls).parameters()) < 2_000_000


def test_a_small_copy_keeps_every_kind_of_layer():
    raw = {
        **next(c for c in EXACT if c.name == "Gemma 3").fields,
        "model_type": "gemma3_text",
        "num_hidden_layers": 12,
    }
    config = config_from(raw)
    cls = model_class(config)
    goal = Goal({"every": 2})
    small = shrunk(config, goal, cls, growth(shapes(config, cls), shapes(grown(config, goal), cls)))
    assert (
        set(as_data(small)["layer_types"])
        == set(as_data(config)["layer_types"])
        == {"sliding_attention", "full_attention"}
    )
    assert as_data(small)["num_hidden_layers"] < 12


# Plans


def test_seventy_billion_parameters_are_planned_on_the_meta_device():
    family = family_plan(LLAMA_70B, 2)
    assert sum(torch.Size(t.base_shape).numel() for t in family.plan.tensors.values()) > 70e9
    assert str(family.plan["model.layers.79.self_attn.q_proj.weight"].axes[0]) == "out: 8x2 * 1024"
    assert str(family.plan["model.layers.41.self_attn.k_proj.weight"].axes[0]) == "out: 8x2 * 128"
    assert family.evidence.worst_gradient < 1e-10
    assert family.wide_config["hidden_size"] == 16384


def test_a_tied_readout_folds_its_factor_into_the_last_norm(tied):
    assert str(tied.plan["model.norm.weight"].change.s) == "1/2"
    assert str(tied.plan["model.embed_tokens.weight"].change.s) == "1"
    assert tied.plan.ties == {"lm_head.weight": "model.embed_tokens.weight"}


def test_a_tied_readout_that_is_named_first_still_takes_the_scale_of_the_embedding():
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 97,
    }
    family = family_plan({"model_type": "camembert", "architectures": ["CamembertForCausalLM"], **sizes}, 2)
    owner = family.plan.ties["roberta.embeddings.word_embeddings.weight"]
    assert owner == "lm_head.decoder.weight"
    assert str(family.plan[owner].change.s) == "1"
    assert str(family.plan["lm_head.layer_norm.weight"].change.s) == "1/2"


def test_a_copy_that_builds_and_does_not_run_is_made_larger():
    """CodeGen cuts its heads into four parts."""
    codegen = {
        "model_type": "codegen", "n_embd": 64, "n_layer": 3, "n_head": 8, "rotary_dim": 4, "vocab_size": 90,
        "n_positions": 32,
    }  # fmt: skip
    assert family_plan(codegen, 2).small_config["n_head"] % 4 == 0


def test_a_family_plan_survives_json(tied):
    again = FamilyPlan.from_json(tied.to_json())
    assert again == tied
    assert again.plan.hash == tied.plan.hash
    for text in ("", "{}", "[]", json.dumps({**tied.as_json(), "format": "other"})):
        with refused("plan.not_a_family_plan"):
            FamilyPlan.from_json(text)


def test_the_wide_configuration_says_what_the_base_left_out():
    """A head size that was hidden / heads in the base must be spelled out once they grow apart."""
    family = family_plan(LLAMA, "hidden=2,heads=4,kv_heads=4,ffn=1")
    assert family.wide_config["head_dim"] == 8
    wide = config_from(family.wide_config)
    found = Tensors.of(on_meta(wide, model_class(wide)))
    assert {n: found.shapes[n] for n in family.plan.tensors} == {
        n: t.wide_shape for n, t in family.plan.tensors.items()
    }


def test_optimizer_steps_prove_a_plan_and_expose_a_wrong_one(tied):
    proved = prove(tied, steps=3)
    assert proved.evidence.worst_step < 1e-10 < 1e-3 < proved.evidence.control
    wrong = FamilyPlan(**{**vars(tied), "plan": tied.plan.fold("model.layers.*.mlp.up_proj.weight", "1/2")})
    with refused("proof.run_deviates"):
        prove(wrong, steps=3)


def test_a_plan_is_not_lifted_where_it_does_not_fit(tied):
    cls = model_class(config_from(tied.base_config))
    other = {**tied.base_config, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    ends = [Tensors.of(on_meta(config_from(c), cls)) for c in (other, {**other, "hidden_size": 128})]
    with refused("family.only_small_axis_grows", where="self_attn.q_proj"):
        lift(tied.plan, ends[0], ends[1])


# Exports


@pytest.mark.parametrize("ties", [False, True])
def test_granite_shows_the_multiplier_in_its_configuration(ties):
    family = prove(family_plan({**LLAMA, "tie_word_embeddings": ties}, 2, export="granite"), steps=2)
    assert (family.wide_architecture, family.wide_config["logits_scaling"]) == ("GraniteForCausalLM", 2.0)
    assert family.evidence.worst_step < 1e-10


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (GPT2, "family.not_like_granite"),
        ({**LLAMA, "model_type": "mistral", "architectures": None, "sliding_window": 16}, "family.granite_has_no_window"),
        ({**LLAMA, "model_type": "qwen2", "architectures": None}, "family.granite_adds_bias"),
        ({**LLAMA, "model_type": "qwen3", "architectures": None}, "family.not_like_granite"),
    ],
)  # fmt: skip
def test_what_granite_cannot_hold_is_refused(raw, code):
    with refused(code):
        family_plan(raw, 2, export="granite")


def test_an_unknown_export_is_refused():
    with refused("option.unknown_export", where="onnx"):
        family_plan(LLAMA, 2, export="onnx")


# Refusals


@pytest.mark.parametrize("case", INEXACT, ids=lambda case: case.name)
def test_what_is_known_not_to_be_exact_is_refused(case):
    raw = {"model_type": case.model_type, "architectures": [case.architecture], **case.fields}
    with refused(case.reason):
        family_plan(raw, case.multipliers.format(k=2))


def test_losses_come_from_a_process_of_its_own(tmp_path):
    """Control: a directory that cannot be loaded is a refusal here as it is there, with its code."""
    saved(tmp_path / "base")
    found = stored_losses(tmp_path / "base", tmp_path / "base", None)
    assert found.before == found.after > 0
    (tmp_path / "base" / "config.json").write_text("{}")
    with refused("config.no_model_type"):
        stored_losses(tmp_path / "base", tmp_path / "base", None)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        pytest.param(
            "OLMo tied", "plan.tied_readout", marks=pytest.mark.nightly
        ),  # a search of most of a minute
        ("M2M-100, sinusoids", "family.lost_on_reload"),
    ],
)
def test_the_search_refuses_them_without_the_registry_too(name, code, monkeypatch):
    case = next(c for c in INEXACT if c.name == name)
    monkeypatch.setitem(ROWS, case.model_type, type(ROWS["gpt2"])())
    monkeypatch.setattr("mupscale.planning.search.search.TRIALS", 40)
    with refused(code):
        family_plan({"model_type": case.model_type, "architectures": [case.architecture], **case.fields}, 2)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        ({}, "config.no_model_type"),
        ({"model_type": "none", "auto_map": {"AutoModel": "code.Model"}}, "config.unknown_model_type"),
        ({"model_type": ["llama"]}, "config.no_model_type"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "checkpoint.quantised_weights"),
        ({**LLAMA, "architectures": ["os"]}, "family.unknown_class"),
        ({**LLAMA, "architectures": ["GPT2LMHeadModel"]}, "family.class_of_other_type"),
        ({**LLAMA, "hidden_size": "wide"}, "config.refused_by_transformers"),
    ],
)
def test_configurations_that_are_none_are_refused(raw, code):
    with refused(code):
        family_plan(raw, 2)


def test_a_directory_without_a_configuration_is_refused(tmp_path):
    with refused("config.not_readable", where=str(tmp_path)):
        family_plan(tmp_path, 2)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with refused("config.not_readable", where=str(tmp_path)):
        family_plan(tmp_path, 2)


def test_a_table_that_is_computed_again_when_a_model_loads_is_refused(monkeypatch):
    """Marian's sinusoids are frozen parameters that save_pretrained leaves out."""
    sides = {
        f"{side}_{key}": n
        for side in ("encoder", "decoder")
        for key, n in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 24))
    }
    raw = {"model_type": "marian", "d_model": 16, "vocab_size": 90, "pad_token_id": 0, **sides}
    with refused("family.table_computed_from_width"):
        family_plan(raw, 2)
    monkeypatch.delitem(ROWS, "marian")
    with refused("family.lost_on_reload"):
        family_plan(raw, 2)


# Another process


@pytest.mark.nightly
def test_another_process_gives_the_same_plan_or_the_same_refusal(tied, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tied.base_config))
    found = plan_in_process(tmp_path, "2", steps=2)
    assert found.plan == tied.plan
    assert found.evidence.steps == 2
    with refused("goal.hidden_unlike_heads"):
        plan_in_process(GPT2, "hidden=2")


def test_a_process_that_takes_too_long_is_stopped():
    with refused("plan.took_too_long"):
        plan_in_process(LLAMA, 2, timeout=0.2)


CASES = {case.name: case for case in EXACT}


# Name of a configuration -> a tensor of it, how its first axis grows, and its weight scale s at k = 2.
EXPECTED = {
    "GPT-NeoX": ("gpt_neox.layers.1.attention.query_key_value.weight", "out: 4x2 * 24", "1/2"),
    "BERT": ("bert.encoder.layer.0.attention.output.dense.weight", "out: 32x2", "1/2"),
    "Gemma 2": ("model.norm.weight", "out: 32x2", "2^(-1/2)"),
    "Phi-3 grouped": ("model.layers.1.self_attn.qkv_proj.weight", "out: 2x2 * 16 | 4x2 * 8", "1/2"),
    "GPT-OSS": ("model.layers.1.self_attn.sinks", "out: 2x2 * 2", "1"),
    "Mamba 2": ("backbone.layers.0.mixer.A_log", "out: 2x2 * 4", "1"),
    "T5 tied": ("decoder.final_layer_norm.weight", "out: 32x2", "2^(-1/2)"),
    "BLOOM": ("transformer.h.1.self_attention.query_key_value.weight", "out: 96x2", "2^(-5/4)"),
}


SLOW = ("Phi-3 grouped",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.nightly) if n in SLOW else n for n in EXPECTED]
)
def test_layouts_and_folds_that_shapes_do_not_show_are_found(name):
    case = CASES[name]
    family = family_plan(
        {"model_type": case.model_type, "architectures": [case.architecture], **case.fields}, 2
    )
    tensor, axis, s = EXPECTED[name]
    assert str(family.plan[tensor].axes[0]) == axis
    assert str(family.plan[tensor].change.s) == s
    assert family.evidence.worst_gradient < 1e-10


def test_fields_of_a_type_without_a_row_are_known_by_their_usual_names():
    found = growing_fields({"model_type": "new", "d_model": 8, "n_heads": 2, "d_ff": 32, "vocab_size": 9})
    assert found == {"hidden": ["d_model"], "heads": ["n_heads"], "ffn": ["d_ff"]}


@pytest.mark.parametrize("layers", [-1, 0, 10**6])
def test_a_number_of_layers_that_no_model_has_is_refused_before_planning(layers):
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4}
    refusal(
        lambda: models.config_from({"model_type": "llama", "num_hidden_layers": layers, **sizes}),
        "config.number_of_layers",
    )
    assert models.config_from({"model_type": "llama", "num_hidden_layers": 1, **sizes}).num_hidden_layers == 1


def test_planning_has_a_limit_of_memory(monkeypatch):
    monkeypatch.setattr(process, "MEMORY", 1 << 30)

    def ended(taken):
        def plan(*_, **__):
            bytearray(taken)
            raise MupscaleError("enough", code="test.enough")

        def asked():
            monkeypatch.setattr("mupscale.families.plan.family_plan", plan)
            try:
                process.answer(
                    dict.fromkeys(
                        ("config", "multipliers", "to", "by", "architecture", "export", "stored", "declared")
                    )
                )
            except MupscaleError as error:
                return error.code

        return limited(asked, 60, 4 << 30).value

    assert ended(2 << 30) == "plan.takes_too_much_memory"
    assert ended(1 << 20) == "test.enough"
