"""Checkpoints that do not spell tensors as the model does: converted names, experts apart, prefixes, leftovers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("planned_here")

import mupscale as mu  # noqa: E402
from mupscale.cli.main import main  # noqa: E402
from mupscale.families.record import Part  # noqa: E402
from mupscale.families.stored import stored_parts  # noqa: E402
from mupscale.runs.growth_record import read_plans  # noqa: E402

SMALL = dict(  # noqa: C408
    hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=97
)  # fmt: skip


def mixtral(**changes):
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **{**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, **changes}
    )
    config._experts_implementation = "eager"
    return transformers.MixtralForCausalLM(config)


def test_experts_that_are_stored_apart_are_found_by_saving_a_numbered_copy():
    shapes = {name: tuple(t.shape) for name, t in mixtral(num_local_experts=6).state_dict().items()}
    parts = stored_parts(mixtral(), shapes)
    part = parts["model.layers.1.block_sparse_moe.experts.5.w3.weight"]
    assert (part.tensor, part.cells, part.dropped) == (
        "model.layers.1.mlp.experts.gate_up_proj",
        ((5, 6), (1, 2), (0, 1)),
        (0,),
    )
    assert parts["model.layers.0.block_sparse_moe.gate.weight"].tensor == "model.layers.0.mlp.gate.weight"


@pytest.mark.parametrize("noise", [None, "t=0.2", "sigma=0.1"])
def test_a_mixture_of_experts_goes_through_the_stream_and_equals_the_live_path(tmp_path, noise):
    base, out = tmp_path / "base", tmp_path / "wide"
    model = mixtral()
    model.save_pretrained(base)
    verb = ["grow"] if noise is None else ["upscale", "--noise", noise]
    assert main([*verb, str(base), str(out), "-k", "2", "--quiet", "--threads", "1"]) == 0
    assert main(["check", str(out), "--base", str(base), "--levels", "bytes", "--quiet"]) == 0
    plan, _ = read_plans(out)
    config = transformers.MixtralConfig.from_pretrained(out)
    make = lambda: transformers.MixtralForCausalLM(config)  # noqa: E731
    schemes: dict[str | None, mu.MupNoise | mu.SignalNoise] = {
        None: mu.MupNoise(0.0),
        "t=0.2": mu.SignalNoise(0.2),
        "sigma=0.1": mu.MupNoise(0.1),
    }
    live = dict(mu.upscale(model, make, schemes[noise], plan=plan).model.named_parameters())
    loaded = dict(transformers.MixtralForCausalLM.from_pretrained(out).named_parameters())
    assert live.keys() == loaded.keys()
    assert all(torch.equal(live[name], loaded[name]) for name in live)


def nomic(**changes):
    torch.manual_seed(0)
    sizes = {n: v for n, v in SMALL.items() if n != "num_key_value_heads"}
    return transformers.NomicBertForMaskedLM(transformers.NomicBertConfig(**{**sizes, **changes}))


def test_queries_keys_and_values_that_are_stored_under_one_name_are_told_apart():
    shapes = {name: tuple(t.shape) for name, t in nomic(num_hidden_layers=3).state_dict().items()}
    part = stored_parts(nomic(), shapes)["nomic_bert.encoder.layers.2.attn.Wqkv.weight"]
    assert part.tensors == tuple(f"nomic_bert.layers.2.self_attn.{x}_proj.weight" for x in "qkv")
    assert Part.of_json(json.loads(json.dumps(part.as_json()))) == part


def test_fused_rows_grow_under_their_own_names_and_equal_the_live_path(tmp_path):
    base, out = tmp_path / "base", tmp_path / "wide"
    model = nomic()
    model.save_pretrained(base)
    options = ["-k", "2", "--noise", "t=0.2", "--quiet", "--shard-size", "50KB"]
    assert main(["upscale", str(base), str(out), *options]) == 0
    assert main(["check", str(out), "--base", str(base), "--levels", "bytes", "--quiet"]) == 0
    files = [load_file(file) for file in sorted(out.glob("*.safetensors"))]
    assert len(files) > 1
    fused = next(f[n] for f in files for n in f if n.endswith("layers.1.attn.Wqkv.weight"))
    plan, _ = read_plans(out)
    make = lambda: nomic(hidden_size=64, intermediate_size=80, num_attention_heads=8)  # noqa: E731
    live = dict(mu.upscale(model, make, mu.SignalNoise(0.2), plan=plan).model.named_parameters())
    loaded = dict(transformers.NomicBertForMaskedLM.from_pretrained(out).named_parameters())
    assert all(torch.equal(live[name], loaded[name]) for name in live)
    query, key, value = (live[f"nomic_bert.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    assert torch.equal(fused, torch.cat([query, key, value]))
    assert not torch.equal(fused, torch.cat([key, query, value])), "control"


def test_a_prefix_left_off_and_tables_of_older_versions_are_no_hindrance(tmp_path):
    base, out = tmp_path / "base", tmp_path / "wide"
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=97, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(base)
    stored = {n.removeprefix("transformer."): t for n, t in load_file(base / "model.safetensors").items()}
    stored["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    save_file(stored, base / "model.safetensors", metadata={"format": "pt"})
    assert (
        main(["upscale", str(base), str(out), "-k", "2", "--noise", "t=0.1", "--quiet", "--threads", "1"])
        == 0
    )
    assert "wte.weight" in load_file(out / "model.safetensors")
    wide = transformers.GPT2LMHeadModel.from_pretrained(out)
    assert wide.config.n_embd == 64
    assert json.loads((out / "config.json").read_text())["n_head"] == 8
