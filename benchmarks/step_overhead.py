"""A step with μP's parameter groups costs what a bare step costs: GPT-2 small, AdamW, a group for each unit.

ratio    seconds of a step of AdamW over `mu.param_groups`, over those of AdamW with all parameters in one group:
         the same model, random gradients and moments, torch's defaults. CPU seconds on one thread, so that waiting
         for other processes does not count; the two take turns, each going first every other time, and each
         one's faster half counts, because whatever else a shared machine does can only add time.
groups   how many groups `mu.param_groups` makes of a model with Llama-8B's shapes on the meta device, with norms
         and the embedding free of decay. A rate for every tensor, without sharing, is the control: 291 groups.

    python benchmarks/step_overhead.py

The last line is `ratio=… groups=…`; the exit code is 1 when a bound fails.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mupscale as mu
from harness.gpt2 import GPT2, declared_plan

REFERENCE, WIDTH = 256, 768
WARM, REPEATS = 2, 16
RATIO, GROUPS = 1.03, 8
VOCABULARY, LAYERS, HEAD, GROUP = 128256, 32, 128, 4
NO_DECAY = ("*norm*", "embed.*")


class LlamaLayer(nn.Module):
    """The tensors of a layer; nothing here is run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, width // GROUP, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, width * 7 // 2, bias=False) for _ in range(2))
        self.down = nn.Linear(width * 7 // 2, width, bias=False)


class LlamaShape(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(LlamaLayer(width) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(width)
        self.readout = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError


def llama_groups() -> tuple[list[dict[str, Any]], int]:
    """The groups of an 8 B model under a reference of width 1024, and how many tensors it has."""
    query, key = GROUP * HEAD, HEAD
    layouts = {
        f"layers.*.{n}.weight": {d: b}
        for n, d, b in (("q", 0, query), ("k", 0, key), ("v", 0, key), ("o", 1, query))
    }
    with torch.device("meta"):
        base, wide = LlamaShape(1024), LlamaShape(4096)
    plan = mu.infer_plan(base, wide, layouts=layouts)
    groups = mu.param_groups(wide, plan, AdamW, no_decay=NO_DECAY, lr=3e-3, weight_decay=0.1)
    return groups, len(list(wide.parameters()))


def measure_steps() -> tuple[list[float], list[float], int]:
    """Seconds of every step with μP's groups and of every bare step, and the number of groups."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT2(WIDTH)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    groups = mu.param_groups(model, declared_plan(REFERENCE, WIDTH), AdamW, lr=1e-3, weight_decay=0.1)
    bare = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    grouped = AdamW(groups)
    grouped.state = bare.state  # the same memory: where it lies makes a tenth of difference by itself
    seconds: dict[AdamW, list[float]] = {grouped: [], bare: []}
    for turn in range(WARM + REPEATS):
        for optimizer in (grouped, bare) if turn % 2 else (bare, grouped):
            start = time.process_time()
            optimizer.step()
            seconds[optimizer].append(time.process_time() - start)
    return seconds[grouped][WARM:], seconds[bare][WARM:], len(groups)


def fast_half(seconds: list[float]) -> float:
    """The mean of the faster half: what a neighbour on the machine slows down is left out on both sides."""
    ordered = sorted(seconds)[: (len(seconds) + 1) // 2]
    return sum(ordered) / len(ordered)


def main() -> int:
    groups, tensors = llama_groups()
    for group in groups:
        rate, decay, names = group["lr"], group["weight_decay"], [name for name, _ in group["params"]]
        print(f"lr {rate:.2e}  decay {decay:.2e}  {len(names):4} tensors, first {names[0]}")
    print(f"Llama-8B: {len(groups)} groups for {tensors} tensors\n")
    grouped, bare, count = measure_steps()
    for label, taken in ((f"{count} groups", grouped), ("one group", bare)):
        ordered = sorted(taken)
        print(
            f"{label:10} best {ordered[0]:.4f} s, median {ordered[len(ordered) // 2]:.4f} s of {len(taken)} steps"
        )
    ratio = fast_half(grouped) / fast_half(bare)
    figures = (("ratio", ratio, RATIO), ("groups", len(groups), GROUPS))
    failed = [(name, value, bound) for name, value, bound in figures if not value <= bound]
    for name, value, bound in failed:
        print(f"FAILED: {name} = {value:.3f}, the bound is {bound:g}")
    print(f"\nratio={ratio:.3f} groups={len(groups)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
