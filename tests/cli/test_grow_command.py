"""`mupscale grow` and `upscale`: the memory that measuring asks for, and what is named as left behind."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("planned_here")

from mupscale.checkpoints import measured_cost  # noqa: E402
from mupscale.cli.main import main  # noqa: E402
from mupscale.errors import MupscaleError  # noqa: E402
from mupscale.families import loaded  # noqa: E402

GPT2: Any = {"n_embd": 16, "n_head": 2, "n_layer": 2, "vocab_size": 64, "n_positions": 16}
LLAMA: Any = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}


def gpt2(**changes: int) -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**GPT2, **changes}))


def llama(**changes: int) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, **changes}))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("base")
    llama().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("make", "layers"), [(gpt2, "n_layer"), (llama, "num_hidden_layers")])
def test_memory_is_that_of_the_wide_model(make, layers, tmp_path, monkeypatch):
    """For the batch one wide model in float32, for the choice of noise the base as well, which is no larger."""
    make().save_pretrained(tmp_path / "base")
    (tmp_path / "batch.json").write_text(json.dumps({"input_ids": [[1, 2, 3]]}))
    asked: list[float] = []

    def refuse_second(needed: float, what: str) -> None:
        asked.append(needed)
        if len(asked) == 2:
            raise MupscaleError(what)

    monkeypatch.setattr(loaded, "check_memory", refuse_second)
    monkeypatch.setattr(measured_cost, "check_memory", refuse_second)
    given = [str(tmp_path / "base"), str(tmp_path / "wide"), "--to", "layers=4", "--noise", "auto", "--quiet"]
    assert main(["upscale", *given, "--inputs", str(tmp_path / "batch.json")]) == 2
    wide = 4 * sum(parameter.numel() for parameter in make(**{layers: 4}).parameters())
    assert asked == [wide, 2 * wide]
    assert not (tmp_path / "wide").exists()


def left_behind(base: Path, out: Path, capsys: Any, *options: str) -> list[str]:
    """The files that are named as not carried."""
    capsys.readouterr()
    assert main(["grow", str(base), str(out), "-k", "ffn=2", "--quiet", *options]) == 0
    return re.findall(r"^not carried: ([^,]+),", capsys.readouterr().out, re.M)


def test_optimizer_state_is_named_as_left_behind_only_where_there_is_some(base, tmp_path, capsys):
    """Controls: a directory without files of a run, and one whose optimizer state is left out."""
    assert left_behind(base, tmp_path / "plain", capsys) == []
    run = tmp_path / "run"
    model = llama()
    model.save_pretrained(run)
    (run / "training_args.bin").write_bytes(b"args")
    assert left_behind(run, tmp_path / "args", capsys) == ["training_args.bin"]
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), run / "optimizer.pt")
    assert left_behind(run, tmp_path / "left", capsys, "--no-state") == ["optimizer.pt", "training_args.bin"]
    assert not (tmp_path / "left" / "optimizer.pt").exists()
