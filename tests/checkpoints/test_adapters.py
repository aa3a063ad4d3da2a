"""Adapters of PEFT: trained on a grown model, merged before growth, and refused where they lie alone."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mupscale as mu
from harness.refusals import refusal
from mupscale.cli.main import main
from mupscale.files.adapters import merge_command
from mupscale.files.directory import read_directory

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="adapters are tested with the real package: pip install peft")
pytestmark = [
    pytest.mark.usefixtures("planned_here"),
    pytest.mark.filterwarnings("ignore"),  # PEFT warns of configurations that it cannot look up on the Hub
]
K, HEADS, STEPS = 2, 2, 6


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "base"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, max_position_embeddings=32, initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).double().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def wide(base: Path) -> Path:
    out = base.parent / "wide"
    assert main(["grow", str(base), str(out), "-k", str(K), "--quiet"]) == 0
    return out


def adapted(folder: Path) -> Any:
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config).double()


def grow_(wide: Any, base: Any) -> None:
    """Give the wide model's adapters the values that compute the base's: A reads copies, B writes copies of heads."""
    own = dict(base.named_parameters())
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            if "lora_A" in name:
                parameter.copy_(own[name].repeat_interleave(K, dim=1) / K)
            elif "lora_B" in name:
                heads = own[name].view(HEADS, -1, own[name].shape[1])
                parameter.copy_(heads.repeat_interleave(K, dim=0).reshape(parameter.shape))


def losses(model: Any, rate_of_a: float) -> list[float]:
    ids = (torch.arange(8)[:, None] + torch.arange(12)) % 17
    inner = [p for n, p in model.named_parameters() if "lora_A" in n]
    outer = [p for n, p in model.named_parameters() if "lora_B" in n]
    groups: list[dict[str, Any]] = [{"params": inner, "lr": rate_of_a}, {"params": outer}]
    optimizer = torch.optim.AdamW(groups, lr=0.02, eps=1e-30, weight_decay=0.0)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def test_an_adapter_learns_as_at_the_base_when_the_rate_of_its_first_half_is_divided(base, wide):
    want = losses(adapted(base), 0.02)
    for rate, same in ((0.02 / K, True), (0.02, False)):  # the second is the control
        model = adapted(wide)
        grow_(model, adapted(base))
        gap = max(abs(a - b) for a, b in zip(want, losses(model, rate), strict=True))
        assert (gap < 1e-6) is same, (rate, gap)  # transformers computes the loss in float32
    assert want[-1] < want[0]


def test_adapters_have_no_units(wide):
    model = adapted(wide)
    error = refusal(
        lambda: mu.trainers.optimizer_in_units(model, wide, torch.optim.AdamW, lr=1e-3), "model.has_adapters"
    )
    assert len(error.faults) == 1
    merged = model.merge_and_unload().requires_grad_(True)  # PEFT has frozen them
    assert mu.trainers.optimizer_in_units(merged, wide, torch.optim.AdamW, lr=1e-3), (
        "and after the other remedy they have"
    )


def test_a_lone_adapter_is_refused_with_a_command_that_works(base, tmp_path):
    model = adapted(base)
    losses(model, 0.02)
    alone = tmp_path / "adapter"
    model.save_pretrained(alone)
    command = merge_command(alone, f"{alone}-merged")
    refusal(lambda: read_directory(alone), "directory.holds_an_adapter", where=shlex.join(command))
    done = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    merged = Path(f"{alone}-merged")
    assert main(["grow", str(merged), str(tmp_path / "wide"), "-k", "2", "--quiet"]) == 0
    ids = torch.arange(12)[None] % 17
    found = []
    for loaded in (
        model.eval(),
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.float64),
    ):
        with torch.no_grad():
            found.append(loaded(input_ids=ids).logits)
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=0)  # rotary tables are float32
