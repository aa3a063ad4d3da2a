"""The script next to a grown directory runs as it is, and the noise that a batch chooses is recorded."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mupscale.cli.main import main

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("planned_here")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama that has learned to count."""
    folder = tmp_path_factory.mktemp("script") / "base"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config)
    ids = counting(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


def counting(rows: int, length: int) -> torch.Tensor:
    return (torch.arange(rows)[:, None] + torch.arange(length)) % 17


def test_automatic_noise_of_a_directory_is_recorded_checked_and_trained(base, tmp_path, capsys):
    wide = tmp_path / "wide"
    command = ["upscale", str(base), str(wide), "-k", "2", "--noise", "auto=0.005", "--threads", "1"]
    assert main(command) == 0
    said = capsys.readouterr()
    assert "choosing the noise by what it costs" in said.err
    assert "by text that the base writes: the loss goes from" in said.out
    assert "before noise (the base's)" in said.out
    about = json.loads((wide / "mupscale.json").read_text())
    noise, losses = about["noise"], about["losses"]
    assert losses["kind"] == "loss"
    assert losses["after"] > losses["before"]
    assert f"**{losses['after']:.4g} after** it" in (wide / "README.md").read_text()
    assert noise["kind"] == "SignalNoise"
    assert noise["auto"]["found"] == pytest.approx(0.005, rel=0.2)
    assert main(["check", str(wide), "--base", str(base), "--levels", "bytes"]) == 0
    capsys.readouterr()
    assert main(command) == 0
    assert "already complete" in capsys.readouterr().out

    data = tmp_path / "text.jsonl"
    data.write_text("\n".join(json.dumps({"input_ids": row.tolist()}) for row in counting(80, 16)))
    script = [
        sys.executable, str(wide / "train.py"), "--data", str(data), "--steps", "4", "--batch", "8",
        "--length", "16",
    ]  # fmt: skip
    done = subprocess.run(
        script, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    before, after = (
        float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines() if line.startswith("held-out loss")
    )
    assert after < before
    assert (wide / "trained" / "mupscale.json").is_file(), "its units: it can be grown again"
    assert (
        main(["upscale", str(wide / "trained"), str(tmp_path / "twice"), "-k", "2", "--noise", "t=0.01"]) == 0
    )


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder without a head. Its weights are large, so that tokens differ as they do in a trained one."""
    folder = tmp_path_factory.mktemp("encoder") / "bert"
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=17, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.BertModel(config)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("pooler")}
    model.save_pretrained(folder, state_dict=state)  # without its pooler, as many encoders are stored
    return folder


def test_a_batch_chooses_the_noise_too(tmp_path, base, capsys):
    batch = tmp_path / "batch.json"
    batch.write_text(json.dumps({"input_ids": counting(8, 12).tolist()}))
    command = [
        "upscale", str(base), str(tmp_path / "wide"), "-k", "2", "--noise", "auto", "--inputs", str(batch),
    ]  # fmt: skip
    assert main([*command, "--dtype", "bfloat16", "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert f"by {batch}: the loss goes from" in printed
    assert f"loss of {batch}:" in printed, "measured again, as it will be rounded"


def test_an_encoder_is_judged_by_its_outputs(tmp_path, bert, capsys):
    wide = tmp_path / "wide"
    assert main(["upscale", str(bert), str(wide), "-k", "2", "--noise", "auto", "--quiet"]) == 0
    assert "by random tokens: the cosines between outputs change by" in capsys.readouterr().out
    auto = json.loads((wide / "mupscale.json").read_text())["noise"]["auto"]
    assert auto["before"] == 0
    assert auto["found"] == pytest.approx(0.05, rel=0.11)
    assert "changes the cosines between outputs for random tokens by" in (wide / "README.md").read_text()
    assert not (wide / "train.py").exists(), "it has no loss to be trained by"

    assert main(["upscale", str(bert), str(tmp_path / "far"), "-k", "2", "--noise", "t=0.9", "--quiet"]) == 0
    assert "warning: noise changes the cosines between outputs" in capsys.readouterr().out, "control"


def test_a_masked_model_has_a_script_and_the_loss_of_labels(tmp_path, bert):
    from mupscale.families.measures import measure_for

    config = transformers.BertConfig.from_pretrained(bert)
    model = transformers.BertForMaskedLM(config)
    model.save_pretrained(tmp_path / "bert")
    batch = tmp_path / "batch.json"
    ids = counting(2, 8).tolist()
    batch.write_text(json.dumps({"input_ids": ids}))
    assert measure_for(model, batch).kind == "outputs"
    batch.write_text(json.dumps({"input_ids": ids, "labels": ids}))
    assert measure_for(model, batch).kind == "loss"
    command = ["upscale", str(tmp_path / "bert"), str(tmp_path / "wide"), "-k", "2", "--noise", "t=0.05"]
    assert main([*command, "--quiet"]) == 0
    assert "mask_token_id" in (tmp_path / "wide" / "train.py").read_text()


def test_a_classifier_of_images_is_measured_and_trained_by_one_file(tmp_path, capsys, monkeypatch):
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4,
        num_labels=3,
    )  # fmt: skip
    base, wide, images = tmp_path / "base", tmp_path / "wide", tmp_path / "images.safetensors"
    transformers.ViTForImageClassification(config).save_pretrained(base)
    labels = torch.arange(60) % 3
    pixels = torch.randn(60, 3, 8, 8) + labels.view(-1, 1, 1, 1)
    command = ["upscale", str(base), str(wide), "-k", "2", "--by", "copies", "--noise", "auto", "--quiet"]
    assert main(command) == 2, "control: without a batch nothing can be measured"
    refused = capsys.readouterr().err
    assert "[data.batch_needed]" in refused
    (line,) = re.findall(r"save_file\(.*?\.safetensors\"\)", refused)
    monkeypatch.chdir(tmp_path)
    eval(line, {"save_file": save_file, "images": pixels, "labels": labels})
    assert main([*command, "--inputs", str(images)]) == 0
    assert "the loss goes from" in capsys.readouterr().out
    script = [sys.executable, str(wide / "train.py"), "--data", str(images), "--steps", "6", "--lr", "3e-3"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    before, after = (
        float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines() if line.startswith("held-out loss")
    )
    assert after < before
    assert (wide / "trained" / "mupscale.json").is_file()
