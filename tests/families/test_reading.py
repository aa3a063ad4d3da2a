"""Stored names are read as `from_pretrained` reads them: its own report of the same directory is the oracle."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("planned_here")

from harness.closeness import SINGLE, difference  # noqa: E402
from mupscale.cli.main import main  # noqa: E402
from mupscale.families.models import config_from, model_class, on_meta, read_config  # noqa: E402
from mupscale.families.reading import reading_of  # noqa: E402

BERT: dict[str, Any] = dict(  # noqa: C408
    hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, vocab_size=97, max_position_embeddings=32
)  # fmt: skip
LLAMA: dict[str, Any] = dict(  # noqa: C408
    hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=97
)  # fmt: skip
Named = dict[str, torch.Tensor]


def old_bert(stored: Named) -> Named:
    """As the first BERT is stored: gains and biases of norms by other names, heads that this class does not have."""
    spelled = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for name, t in stored.items()
    }
    extra = {"cls.seq_relationship.weight": (2, 32), "bert.pooler.dense.weight": (32, 32)}
    return {**spelled, **{name: torch.ones(shape) for name, shape in extra.items()}}


def old_roberta(stored: Named) -> Named:
    more = {"roberta.pooler.dense.weight": torch.ones(32, 32), "roberta.pooler.dense.bias": torch.ones(32)}
    return {**stored, **more, "roberta.embeddings.position_ids": torch.arange(32)[None]}


def old_llama(stored: Named) -> Named:
    return {**stored, **{f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}}


def without(*parts: str):
    return lambda stored: {n: t for n, t in stored.items() if not any(part in n for part in parts)}


# Name -> class that is saved, class that config.json names, how the file is changed, what the command says.
CASES: dict[str, tuple[str, str, Any, str]] = {
    "old BERT": ("BertForMaskedLM", "BertForMaskedLM", old_bert, "left out: bert.pooler.dense.weight, cls.seq_relationship.weight because"),
    "old RoBERTa": ("RobertaForMaskedLM", "RobertaForMaskedLM", old_roberta, "roberta.embeddings.position_ids because the model computes it"),
    "old Llama": ("LlamaForCausalLM", "LlamaForCausalLM", old_llama, "left out: model.layers.*.self_attn.rotary_emb.inv_freq because"),
    "value head": ("LlamaForCausalLM", "LlamaForCausalLM", lambda s: {**s, "value_head.weight": torch.ones(1, 32)}, "left out: value_head.weight because"),
    "body of a masked model": ("BertForMaskedLM", "BertModel", lambda s: s, "not there: pooler.dense."),
    "no pooler": ("BertModel", "BertModel", without("pooler"), "not there: pooler.dense."),
    "no head": ("BertForMaskedLM", "BertForSequenceClassification", lambda s: s, "not there: bert.pooler.dense.bias"),
    "body alone": ("LlamaModel", "LlamaForCausalLM", lambda s: s, "not there: lm_head.weight"),
}  # fmt: skip


def saved(folder, case):
    before, after, change, _ = case
    torch.manual_seed(0)
    cls = getattr(transformers, before)
    model = cls(cls.config_class(**(LLAMA if "Llama" in before else BERT)))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(folder)
    stored = change(load_file(folder / "model.safetensors"))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**told, "architectures": [after]}))
    return list(stored)


def loaded(folder, name):
    return getattr(transformers, name).from_pretrained(folder, output_loading_info=True)


@pytest.mark.parametrize("case", CASES)
def test_names_are_read_as_from_pretrained_reads_them(tmp_path, case):
    stored = saved(tmp_path, CASES[case])
    config = config_from(read_config(tmp_path))
    model = on_meta(config, model_class(config))
    found = reading_of(model, stored, {})
    _, said = loaded(tmp_path, CASES[case][1])
    assert set(found.absent) == set(said["missing_keys"])
    silent = {n for n, why in found.left_out.items() if "computes it" in why}
    assert {n.partition(".")[2] or n for n in found.left_out.keys() - silent} == {
        n.partition(".")[2] or n for n in said["unexpected_keys"]
    }, "transformers reports some names without their prefix"


@torch.no_grad()
def outputs(folder, name):
    """What the class computes, without parts that it makes at random."""
    model, said = loaded(folder, name)
    found = model.eval().base_model(input_ids=torch.arange(20)[None] + 2, output_hidden_states=True)
    first = getattr(model.eval()(input_ids=torch.arange(20)[None] + 2), "logits", None)
    return found.last_hidden_state, None if said["missing_keys"] else first


@pytest.mark.parametrize("case", ["old BERT", "old Llama", "no head", "body alone"])
def test_such_a_directory_grows_and_loads(tmp_path, capsys, case):
    base, out = tmp_path / "base", tmp_path / "wide"
    saved(base, CASES[case])
    _, name, _, told = CASES[case]
    assert main(["plan", str(base), "-k", "2"]) == 0
    assert told in capsys.readouterr().out
    assert main(["grow", str(base), str(out), "-k", "2", "--threads", "1"]) == 0
    assert told in capsys.readouterr().out
    (want, logits), (found, wide_logits) = outputs(base, name), outputs(out, name)
    assert (
        difference(found, torch.cat([want, want], -1)) < SINGLE
        or difference(found, want.repeat_interleave(2, -1)) < SINGLE
    )
    if logits is not None:
        assert difference(wide_logits, logits) < SINGLE
    _, said = loaded(out, name)
    assert said["missing_keys"] == loaded(base, name)[1]["missing_keys"]
    assert not said["unexpected_keys"], "what was left out is not written"
    assert main(["check", str(out), "--base", str(base), "--quiet"]) == 0


def test_noise_passes_over_a_head_that_is_not_there(tmp_path):
    base, out = tmp_path / "base", tmp_path / "wide"
    saved(base, CASES["body alone"])
    assert main(["upscale", str(base), str(out), "-k", "2", "--noise", "t=0.1"]) == 0
    sizes = json.loads((out / "mupscale.json").read_text())["noise"]["sigmas"]
    assert "model.embed_tokens.weight" in sizes
    assert "lm_head.weight" not in sizes


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (without("layers.1.mlp.up_proj"), "model.layers.1.mlp.up_proj.weight [checkpoint.tensor_missing]"),
        (without("model.norm"), "model.norm.weight [checkpoint.tensor_missing]"),
        (lambda s: {**s, "model.norm.weight": torch.ones(31)}, "model.norm.weight [checkpoint.shape_differs]"),
        (lambda s: {f"module.{n}": t for n, t in s.items()}, "[checkpoint.tensor_missing]"),
    ],
    ids=["a weight is missing", "a norm is missing", "a shape is wrong", "a foreign prefix"],
)  # fmt: skip
def test_what_upscale_will_refuse_plan_refuses(tmp_path, capsys, change, where):
    """Control: only heads and poolers of which nothing is stored may be missing."""
    saved(tmp_path, ("LlamaForCausalLM", "LlamaForCausalLM", change, ""))
    assert main(["plan", str(tmp_path), "-k", "2"]) == 2
    assert where in capsys.readouterr().err


def test_half_a_head_is_a_fault(tmp_path, capsys):
    saved(tmp_path, ("BertForMaskedLM", "BertForMaskedLM", without("transform.dense"), ""))
    assert main(["plan", str(tmp_path), "-k", "2"]) == 2
    assert "cls.predictions.transform.dense.weight [checkpoint.tensor_missing]" in capsys.readouterr().err


@pytest.mark.parametrize("index", [False, True], ids=["config alone", "with an index"])
def test_a_plan_needs_the_configuration_alone(tmp_path, capsys, index):
    saved(tmp_path, CASES["value head"])
    (tmp_path / "model.safetensors").unlink()
    if index:
        where = {"model.norm.weight": "model-00001-of-00002.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert main(["plan", str(tmp_path), "-k", "2"]) == 0
    said = capsys.readouterr().out
    assert "made from config.json alone" in said
    assert "80.8 kB" in said, "its size at the dtype that config.json names"
    assert main(["grow", str(tmp_path), str(tmp_path.parent / "w"), "-k", "2"]) == 2


def test_weights_that_upscale_refuses_are_refused_by_plan(tmp_path, capsys):
    """Control: a directory with pickled weights is not a bare configuration."""
    saved(tmp_path, CASES["value head"])
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert main(["plan", str(tmp_path), "-k", "2"]) == 2
    assert "[checkpoint.pickled_weights]" in capsys.readouterr().err
