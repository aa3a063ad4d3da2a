"""Sentence-transformers directories: their modules are carried at the new width, and sentences stay where they were."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import mupscale as mu

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("planned_here")

from harness.closeness import SINGLE, difference  # noqa: E402
from harness.refusals import refused  # noqa: E402
from mupscale.cli.main import main  # noqa: E402

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
SENTENCES = ["a b c", "x y z z y", "q"]
KINDS = {"1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}


def sentence_model(folder, kinds=KINDS, width="word_embedding_dimension"):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, vocab_size=len(WORDS),
        max_position_embeddings=16,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    told = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 16}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for idx, (path, kind) in enumerate(kinds.items(), 1):
        modules.append(
            {"idx": idx, "name": str(idx), "path": path, "type": f"sentence_transformers.models.{kind}"}
        )
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    settings = {width: 32, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    if "2_Dense" in kinds:
        (folder / "2_Dense").mkdir()
        dense = {"in_features": 32, "out_features": 12, "bias": True}
        more = {"activation_function": "torch.nn.modules.activation.Tanh"}
        (folder / "2_Dense" / "config.json").write_text(json.dumps({**dense, **more}))
        weights = {"linear.weight": torch.randn(12, 32), "linear.bias": torch.randn(12)}
        save_file(weights, folder / "2_Dense" / "model.safetensors")
    return folder


def widened(folder, out, *more):
    return main(["grow", str(folder), str(out), "-k", "2", "--quiet", "--threads", "1", *more])


def encoded(folder):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    return torch.tensor(
        sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(SENTENCES)
    )


def test_widths_inside_of_modules_grow_and_sentences_stay(tmp_path):
    base, out = sentence_model(tmp_path / "base"), tmp_path / "wide"
    assert widened(base, out) == 0
    assert json.loads((out / "1_Pooling" / "config.json").read_text())["word_embedding_dimension"] == 64
    told = json.loads((out / "2_Dense" / "config.json").read_text())
    assert (told["in_features"], told["out_features"]) == (64, 12)
    assert (out / "modules.json").read_bytes() == (base / "modules.json").read_bytes()
    assert main(["check", str(out), "--base", str(base), "--levels", "bytes", "--quiet"]) == 0
    assert main(["check", str(out), "--quiet"]) == 0
    old, new = (load_file(folder / "2_Dense" / "model.safetensors") for folder in (base, out))
    assert torch.equal(new["linear.bias"], old["linear.bias"])
    assert torch.allclose(new["linear.weight"].sum(1), old["linear.weight"].sum(1), atol=1e-5)
    assert difference(encoded(out), encoded(base)) < SINGLE
    dense = load_file(out / "2_Dense" / "model.safetensors")
    save_file({**dense, "linear.weight": dense["linear.weight"] * 2}, out / "2_Dense" / "model.safetensors")
    assert difference(encoded(out), encoded(base)) > 1e-3, "control: a weight that is not divided"
    assert main(["check", str(out), "--base", str(base), "--levels", "bytes", "--quiet"]) == 1, (
        "control: it is compared"
    )


class Transformer(nn.Module):
    """A stand-in for the first module of sentence-transformers, with its names."""

    def __init__(self, folder):
        super().__init__()
        self.model = transformers.BertModel.from_pretrained(folder)

    def forward(self, ids):
        return self.model(input_ids=ids).last_hidden_state.mean(1)


class Dense(nn.Module):
    def __init__(self, folder):
        super().__init__()
        weights = load_file(folder / "2_Dense" / "model.safetensors")
        self.linear = nn.Linear(*weights["linear.weight"].shape[::-1])
        self.linear.load_state_dict({name.removeprefix("linear."): t for name, t in weights.items()})

    def forward(self, sentences):
        return torch.tanh(self.linear(sentences))


class SentenceTransformer(nn.Sequential):
    """A stand-in, so that the test needs no further package: `checkpoint_owner.py` trains the real one."""

    __module__ = "sentence_transformers.sentence_transformer.model"


def trained(folder, optimizer_of):
    model = SentenceTransformer()
    for name, module in (("0", Transformer(folder)), ("1", nn.Identity()), ("2", Dense(folder))):
        model.add_module(name, module)
    model = model.double().eval()
    ids, goal = torch.arange(5, 29).view(4, 6), torch.linspace(-1, 1, 48, dtype=torch.float64).view(4, 12)
    optimizer, losses = optimizer_of(model), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = (model(ids) - goal).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


def test_a_sentence_model_trains_in_units_with_its_dense_layer(tmp_path):
    base, wide = sentence_model(tmp_path / "base"), tmp_path / "wide"
    assert widened(base, wide) == 0
    kind: Any = torch.optim.AdamW
    constants: Any = {"lr": 3e-3, "eps": 1e-6, "weight_decay": 0.1}
    plain = trained(base, lambda model: kind(model.parameters(), **constants))
    units = trained(wide, lambda model: mu.trainers.optimizer_in_units(model, wide, kind, **constants))
    assert difference(units, plain) < SINGLE
    control = trained(wide, lambda model: kind(model.parameters(), **constants))
    assert difference(control, plain) > 1e-3, "control: the base's settings for every tensor"


def test_a_module_whose_units_are_not_known_is_refused_by_name(tmp_path):
    base, wide = sentence_model(tmp_path / "base"), tmp_path / "wide"
    assert widened(base, wide) == 0
    model = SentenceTransformer(Transformer(wide), nn.LayerNorm(64))
    with refused("plan.unknown_tensor", where="1.weight"):
        mu.trainers.optimizer_in_units(model, wide, torch.optim.AdamW, lr=1e-3)
    known = SentenceTransformer(Transformer(wide), nn.Identity())
    assert mu.trainers.optimizer_in_units(known, wide, torch.optim.AdamW, lr=1e-3), "control"


@pytest.mark.parametrize("width", ["word_embedding_dimension", "embedding_dimension"])
def test_without_a_dense_layer_embeddings_are_copies(tmp_path, width):
    kinds = {"1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    base, out = sentence_model(tmp_path / "base", kinds, width), tmp_path / "wide"
    assert widened(base, out) == 0
    assert json.loads((out / "1_Pooling" / "config.json").read_text())[width] == 64
    old, new = encoded(base), encoded(out)
    assert new.shape[1] == 2 * old.shape[1]
    assert difference(new @ new.T, old @ old.T) < SINGLE, "cosines of normalised embeddings"


def test_a_module_of_an_unknown_kind_is_not_carried_and_neither_is_the_list(tmp_path, capsys):
    kinds = {"1_Pooling": "Pooling", "2_LSTM": "LSTM"}
    base, out = sentence_model(tmp_path / "base", kinds), tmp_path / "wide"
    (base / "2_LSTM").mkdir()
    (base / "2_LSTM" / "lstm_config.json").write_text("{}")
    assert widened(base, out) == 0
    said = capsys.readouterr().out
    assert "not carried: modules.json" in said
    assert "2_LSTM (LSTM)" in said
    assert "[family.unknown_module]" in said
    assert not (out / "modules.json").exists()
    assert not (out / "1_Pooling").exists()


def test_a_width_that_is_not_the_model_s_is_not_guessed(tmp_path, capsys):
    base = sentence_model(tmp_path / "base")
    (base / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 31}))
    assert widened(base, tmp_path / "wide") == 0
    said = capsys.readouterr().out
    assert "[config.module_width_differs]" in said
    assert "31" in said
    assert not (tmp_path / "wide" / "1_Pooling").exists()


@pytest.mark.parametrize(
    ("code", "path"),
    [*(("name_with_folders", path) for path in ("../elsewhere", "a/b", "..")), ("name_not_text", 3)],
)
def test_a_list_that_names_other_places_is_refused(tmp_path, capsys, code, path):
    base = sentence_model(tmp_path / "base", {"1_Pooling": "Pooling"})
    told = json.loads((base / "modules.json").read_text())
    (base / "modules.json").write_text(json.dumps([told[0], {**told[1], "path": path}]))
    assert widened(base, tmp_path / "wide") == 2
    said = capsys.readouterr().err
    assert "modules.json" in said
    assert f"[file.{code}]" in said


def test_a_link_inside_of_a_module_is_refused(tmp_path, capsys):
    base = sentence_model(tmp_path / "base")
    (tmp_path / "secret").write_text("{}")
    (base / "1_Pooling" / "more.json").symlink_to(tmp_path / "secret")
    assert widened(base, tmp_path / "wide") == 2
    assert "[directory.link_leads_outside]" in capsys.readouterr().err
