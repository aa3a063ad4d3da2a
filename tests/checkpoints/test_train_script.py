"""The script beside a grown directory runs as it is, and the noise that a batch chooses is recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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
    command = [
        "upscale",
        str(base),
        str(wide),
        "-k",
        "2",
        "--noise",
        "auto=0.005",
        "--quiet",
        "--workers",
        "1",
    ]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "choosing the noise by the loss of text that the base writes" in printed
    assert "before noise (the base's)" in printed
    noise = json.loads((wide / "mupscale.json").read_text())["noise"]
    assert noise["kind"] == "SignalNoise"
    assert noise["auto"]["found"] == pytest.approx(0.005, rel=0.2)
    assert main(["check", str(base), str(wide), "--bytes"]) == 0
    capsys.readouterr()
    assert main(command) == 0
    assert "already complete" in capsys.readouterr().out

    data = tmp_path / "text.jsonl"
    data.write_text("\n".join(json.dumps({"input_ids": row.tolist()}) for row in counting(80, 16)))
    script = [
        sys.executable,
        str(wide / "train.py"),
        "--data",
        str(data),
        "--steps",
        "4",
        "--batch",
        "8",
        "--length",
        "16",
    ]
    done = subprocess.run(
        script, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    before, after = (
        float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines() if line.startswith("held-out loss")
    )
    assert after < before
    assert (wide / "trained" / "config.json").is_file()


def test_a_batch_chooses_the_noise_too_and_an_encoder_needs_one(tmp_path, base, capsys):
    batch = tmp_path / "batch.json"
    batch.write_text(json.dumps({"input_ids": counting(8, 12).tolist()}))
    wide = tmp_path / "wide"
    assert (
        main(
            ["upscale", str(base), str(wide), "-k", "2", "--noise", "auto", "--batch", str(batch), "--quiet"]
        )
        == 0
    )
    assert str(batch) in capsys.readouterr().out
    config = transformers.BertConfig(
        vocab_size=17, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    assert main(["upscale", str(tmp_path / "bert"), str(tmp_path / "no"), "-k", "2", "--noise", "auto"]) == 2
    assert "--batch FILE" in capsys.readouterr().err
    grown = [
        "upscale",
        str(tmp_path / "bert"),
        str(tmp_path / "yes"),
        "-k",
        "2",
        "--noise",
        "t=0.05",
        "--quiet",
    ]
    assert main(grown) == 0
    assert "loss not measured: BertForMaskedLM does not write text" in capsys.readouterr().out
    assert "mask_token_id" in (tmp_path / "yes" / "train.py").read_text()
