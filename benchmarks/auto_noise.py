"""Automatic noise on four trained models: passes of the batch, and the rise that was found over the one asked.

    python benchmarks/auto_noise.py

An MLP on Cover Type and a small Llama-like GPT on textbook bytes are trained here for some hundred steps; a ResNet on
CIFAR-10 and a Llama are trained checkpoints, and the Llama is grown by the command line. The control is a fixed size,
t = 0.2, which costs a different share in each. The last line is `models=4 passes=… worst=… control=…`: the most forward
passes of a batch, the largest |found / asked - 1|, and the largest over the smallest share that the fixed size costs.
The exit code is 1 above 12 passes or 0.2. Needs the data under $MUPSCALE_DATA or ../shared/data, else it is 2.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import mupscale as mu
from benchmarks.covertype import load
from benchmarks.real_models import ResNet, images
from harness.data import DATA
from harness.program import Outcome, UsageError, run
from mupscale.noise.auto import AutoNoise
from mupscale.noise.where import exempt_of
from mupscale.training.grow.auto_noise import choose_noise
from mupscale.training.grow.loss_rise import measured

RISES = (0.02, 0.05, 0.1)
MOST_PASSES, CLOSE, FIXED = 12, 0.2, 0.2
BYTES, LENGTH = 256, 64


@dataclass
class Case:
    """A trained base, how to build it k times as wide, and the loss of a batch."""

    name: str
    base: nn.Module
    make: Callable[[int], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    proof: Callable[[nn.Module], Tensor] | None = None
    """The loss of a smaller batch, by which the plan is proved."""


def trained(model: nn.Module, draw: Callable[[int], Tensor], steps: int, lr: float) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        optimizer.zero_grad()
        draw(step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


def mlp() -> Case:
    rows, targets = load()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    x, y = rows[order].float(), targets[order]
    held, labels = x[:2000], y[:2000]
    x, y = x[2000:], y[2000:]

    def make(k: int) -> nn.Module:
        sizes = [54, 32 * k, 32 * k, 7]
        linears = [nn.Linear(a, b) for a, b in pairwise(sizes)]
        return nn.Sequential(linears[0], nn.ReLU(), linears[1], nn.ReLU(), linears[2])

    model = make(1)

    def draw(step: int) -> Tensor:
        rows = torch.arange(256 * step, 256 * step + 256) % len(x)
        return F.cross_entropy(model(x[rows]), y[rows])

    trained(model, draw, 600, 3e-3)
    return Case("MLP", model, make, lambda m: F.cross_entropy(m(held), labels))


def gpt() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    with lzma.open(DATA / "text" / "openstax.jsonl.xz", "rt", encoding="utf-8") as file:
        text = "".join(json.loads(next(file))["text"] for _ in range(40))
    tokens = torch.tensor(list(text.encode())[: 400 * 16 * LENGTH])

    def make(k: int) -> Any:
        stock: Any = LlamaForCausalLM
        config: Any = LlamaConfig
        return stock(
            config(
                vocab_size=BYTES, hidden_size=48 * k, intermediate_size=128 * k, num_hidden_layers=2,
                num_attention_heads=4 * k, num_key_value_heads=4 * k, max_position_embeddings=LENGTH,
                attn_implementation="eager",
            )
        )  # fmt: skip

    model = make(1)

    def batch(step: int) -> Tensor:
        start = step * 16 * LENGTH % (len(tokens) - 16 * LENGTH)
        return tokens[start : start + 16 * LENGTH].view(16, LENGTH)

    def of(batch: Tensor, model: Any) -> Tensor:
        found: Tensor = model(input_ids=batch, labels=batch).loss
        return found

    trained(model, lambda step: of(batch(step), model), 300, 3e-3)
    return Case("GPT", model.eval(), make, lambda m: of(batch(399), m))


def resnet() -> Case:
    base = ResNet(3)
    base.load_state_dict(load_file(DATA / "models" / "resnet_cifar10" / "resnet20.safetensors"))
    x, y = images("test", 250)

    def of(count: int, model: nn.Module) -> Tensor:
        return F.cross_entropy(model(x[:count]), y[:count])

    return Case("ResNet-20", base, lambda k: ResNet(3, k), partial(of, 250), partial(of, 8))


def live(case: Case) -> Iterator[tuple[float, float, int]]:
    """(asked, found, passes) of every rise, and last the share that the fixed size costs."""
    passes = 0

    def loss(model: nn.Module) -> Tensor:
        nonlocal passes
        passes += 1
        return case.loss(model)

    plan = mu.plans.plan_between(case.make, 1, 2, loss=case.proof or case.loss)
    exempt = exempt_of(case.base, plan, "base")
    for rise in RISES:
        passes = 0
        torch.manual_seed(0)
        choice = choose_noise(
            case.base, lambda: case.make(2), AutoNoise(rise), loss, plan=plan, exempt=exempt
        )
        print(
            f"{case.name:10} asked {rise:<5} found {choice.found:.4f}  passes {passes:2}  {choice}",
            flush=True,
        )
        yield rise, choice.found, passes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the jump is what is measured
        wide = mu.upscale(case.base, lambda: case.make(2), mu.SignalNoise(FIXED), plan=plan)
    share = (measured(case.loss, wide.model) - choice.before) / (choice.untrained - choice.before)
    print(f"{case.name:10} t = {FIXED} costs {share:.2f} of what was learned", flush=True)
    yield 0.0, share, 0


def by_command() -> Iterator[tuple[float, float, int]]:
    """The same of the trained Llama, grown by the command line; the record holds what was tried."""
    grow = [sys.executable, "-m", "mupscale", "upscale", str(DATA / "models" / "tiny_llama")]
    with tempfile.TemporaryDirectory() as folder:
        for rise in (0.05, 0.1):
            out = Path(folder) / f"wide{rise}"
            command = [*grow, str(out), "-k", "2", "--noise", f"auto={rise}", "--quiet"]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            auto = json.loads((out / "mupscale.json").read_text())["noise"]["auto"]
            print(f"tiny_llama asked {rise:<5} found {auto['found']:.4f}  passes {len(auto['tried']) + 2:2}")
            print(
                "  " + next(line for line in done.stdout.splitlines() if line.startswith("loss of")),
                flush=True,
            )
            yield rise, auto["found"], len(auto["tried"]) + 2
        out = Path(folder) / "fixed"
        command = [*grow, str(out), "-k", "2", "--noise", f"t={FIXED}", "--quiet"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        line = next(line for line in done.stdout.splitlines() if line.startswith("loss of"))
        before, after = (float(word) for word in re.findall(r"\d+\.\d+", line))
        share = (after - before) / (auto["untrained"] - before)
        print(f"tiny_llama t = {FIXED} costs {share:.2f} of what was learned", flush=True)
        yield 0.0, share, 0


def measure(_: argparse.Namespace) -> Outcome:
    if not DATA.is_dir():
        raise UsageError(f"needs the data in {DATA}; set MUPSCALE_DATA")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    found = [row for make in (mlp, gpt, resnet) for row in live(make())] + list(by_command())
    chosen = [row for row in found if row[0]]
    worst = max(abs(share / asked - 1) for asked, share, _ in chosen)
    fixed = [share for asked, share, _ in found if not asked]
    passes = max(row[2] for row in chosen)
    bounds = {
        f"{passes} passes of a batch, allowed {MOST_PASSES}": passes <= MOST_PASSES,
        f"a rise is off by {worst:.3f}, allowed {CLOSE}": worst <= CLOSE,
    }
    line = f"models=4 passes={passes} worst={worst:.3f} control={max(fixed) / min(fixed):.1f}"
    return Outcome(line, [text for text, holds in bounds.items() if not holds])


if __name__ == "__main__":
    sys.exit(run(measure, doc=__doc__))
