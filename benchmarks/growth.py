"""Deeper and wider stock models: a grown run is its base's until noise wakes what is new, and waking changes no loss.

    python benchmarks/growth.py            every type, tied and untied, AdamW, SGD and Muon, new blocks in three places
    python benchmarks/growth.py --quick    a few of them

Each row is a stock model in float64 with the model's own casts lifted and Muon's iteration in float64: a few steps before
growing, eight after. The control is the same growth with the new blocks' readers copied from their neighbours and their
writers zero, as block expansion does it: outputs are the base's, and training leaves it. Rows with a width grow deeper and
wider in one plan.

Rows of widths at any size are in `growth_width.py`, and those of dense models that get experts in `growth_experts.py`; their
figures come first, as `width: rows=R worst=W …` and `experts: rows=R worst=W …`.

The last line is `rows=R worst=W depth=D biases=B control=C jump=J woken=S`: the largest relative error over losses,
gradients and weights of all rows, that of the rows that only grow deeper, that of those among them whose biases are
split, the least deviation of a control, the largest change of a loss on waking, and the smallest share of new tensors
that have a gradient in the second step. The exit code is 1 when a bound fails.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

import mupscale as mu
from benchmarks import growth_experts, growth_width
from benchmarks.exactness import precise_muon
from mupscale.families.losses import another_batch, find_batch, growing_outputs, loss_on
from mupscale.families.models import config_from, factory, model_class
from mupscale.families.plan import family_plan
from mupscale.plans.float64 import cast_, lifted_casts
from mupscale.plans.plan import Plan
from mupscale.tensors.differences import curve_gap, loss_gap

WORST, DEPTH, BIASES, CONTROL, JUMP, WOKEN = 1e-11, 0.0, 1e-12, 1e-3, 1e-10, 1.0
BEFORE, AFTER = 3, 8
SIZES = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TYPES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "granite", "smollm3", "phi3", "olmo2",
)  # fmt: skip
TOKENS = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WITH_BIASES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, **TOKENS},
    "gpt_neox": {**SIZES, "num_key_value_heads": 4},
    "opt": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, **TOKENS},
}
"""Types whose blocks write biases into the stream."""
PLACES = ("layers=3,after=0", "layers=3,after=1", "layers=4")


@dataclass(frozen=True)
class Row:
    kind: str
    optimizer: str
    to: str
    k: str = "1"
    tied: bool = False

    def __str__(self) -> str:
        return (
            f"{self.kind:12} {self.optimizer:6} {'tied' if self.tied else '':5} -k {self.k:6} --to {self.to}"
        )


@dataclass(frozen=True)
class Measured:
    worst: float
    control: float
    jump: float
    woken: float


def rows(quick: bool) -> list[Row]:
    if quick:
        return [
            Row("llama", "AdamW", PLACES[2]),
            Row("olmo2", "SGD", PLACES[0]),
            Row("gemma2", "Muon", PLACES[0], "2"),
            Row("gpt2", "AdamW", PLACES[2]),
        ]
    deep = [Row(kind, "AdamW", to) for kind in TYPES for to in PLACES]
    tied = [Row(kind, "AdamW", PLACES[0], tied=True) for kind in ("llama", "qwen3", "gemma", "granite")]
    other = [
        Row(kind, optimizer, PLACES[2])
        for kind in ("llama", "gemma2", "olmo2")
        for optimizer in ("SGD", "Muon")
    ]
    both = [
        Row(kind, "AdamW", PLACES[0], k)
        for kind in ("llama", "qwen3", "granite", "olmo2")
        for k in ("2", "ffn=3")
    ]
    both += [replace(row, tied=True, optimizer="Muon") for row in both[:2]]
    biased = [Row(kind, "AdamW", to) for kind in WITH_BIASES for to in (PLACES[0], PLACES[2])]
    biased += [Row("gpt2", "SGD", "layers=5,after=0:0:1"), Row("gpt2", "AdamW", PLACES[0], "2")]
    return [*biased, *deep, *tied, *other, *both]


def optimizers(name: str, model: nn.Module, bare: set[str]) -> list[torch.optim.Optimizer]:
    """AdamW and SGD for all weights, or Muon for the matrices of blocks; `bare` are weights without decay."""
    named = list(model.named_parameters())
    decayed, others = ([p for n, p in named if (n in bare) == left] for left in (False, True))
    groups: list[dict[str, Any]] = [
        {"params": decayed},
        *([{"params": others, "weight_decay": 0.0}] if others else []),
    ]
    if name == "SGD":
        return [torch.optim.SGD(groups, lr=1e-2, momentum=0.9, weight_decay=0.1)]
    if name == "AdamW":
        return [torch.optim.AdamW(groups, lr=3e-3, eps=1e-3, weight_decay=0.1)]
    matrices = [p for n, p in named if p.dim() == 2 and ".layers." in n]
    rest = [p for p in decayed if not any(p is m for m in matrices)]
    return [
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1),
        torch.optim.AdamW([{"params": rest}, *groups[1:]], lr=3e-3, eps=1e-3, weight_decay=0.1),
    ]


def copied(plan: Plan) -> Plan:
    """The plan with new blocks whose readers are copies: the control."""
    readers = {n: t for n, t in plan.tensors.items() if t.new and not t.quiet and t.like is not None}
    return plan.with_tensors({n: replace(t, sources=(str(t.like),), like=None) for n, t in readers.items()})


def measure(row: Row) -> Measured:
    sizes = WITH_BIASES.get(row.kind, {**SIZES, "tie_word_embeddings": row.tied})
    raw = {"model_type": row.kind, **sizes}
    family = family_plan(raw, row.k, to=row.to)
    config, wide = config_from(family.base_config), config_from(family.wide_config)
    cls = model_class(config, family.architecture)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = cast_(factory(cls)(config), torch.float64)
    bare = {n for n, t in family.plan.tensors.items() if t.shift and not t.fold.is_one}
    with lifted_casts(), precise_muon():
        batch, which = find_batch(model, config)
        growing = growing_outputs(model, cast_(factory(cls)(wide), torch.float64), batch)
        batches = [another_batch(model, config, which, seed) for seed in range(BEFORE + AFTER)]
        losses = [loss_on(batch, growing) for batch in batches]
        run = mu.Run(model, optimizers(row.optimizer, model, bare))

        def step(run: mu.Run, i: int) -> float:
            for optimizer in run.optimizers:
                optimizer.zero_grad()
            loss = losses[i](run.model)
            loss.backward()  # type: ignore[no-untyped-call]
            for optimizer in run.optimizers:
                optimizer.step()
            return float(loss.detach())

        def make() -> nn.Module:
            made: nn.Module = factory(cls)(wide)
            return made

        for i in range(BEFORE):
            step(run, i)
        certificate = mu.verify(
            run, make, step=lambda r, i: step(r, BEFORE + i), plan=family.plan, steps=AFTER
        )
        other = mu.widen(run, make, plan=copied(family.plan), unproved=True)
        control = curve_gap(certificate.base_losses, [step(other, BEFORE + i) for i in range(AFTER)])
        # Copies are parted by next to nothing, so that what is measured is the waking of new blocks.
        woken = mu.upscale(run, make, mu.SignalNoise(1e-14), plan=family.plan)
        before = certificate.base_losses[0]
        jump = loss_gap(before, step(woken, BEFORE))
        step(woken, BEFORE + 1)
        new = [n for n, t in family.plan.tensors.items() if t.new]
        grads = {n: p.grad for n, p in woken.model.named_parameters()}
        awake = [n for n in new if (g := grads[n]) is not None and float(g.abs().max()) > 0]
    return Measured(certificate.worst, control, jump, len(awake) / len(new))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a few rows")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    wider, wide_holds = growth_width.report(quick, optimizers)
    print(f"\nwidth: {wider}\n", flush=True)
    mixed, experts_hold = growth_experts.report(quick)
    print(f"\nexperts: {mixed}\n", flush=True)
    found: dict[Row, Measured] = {}
    for row in rows(quick):
        found[row] = measure(row)
        m = found[row]
        print(
            f"{row!s:60} {m.worst:8.1e}  control {m.control:8.1e}  jump {m.jump:8.1e}  woken {m.woken:.2f}",
            flush=True,
        )
    worst = max(m.worst for m in found.values())
    deep = {row: m.worst for row, m in found.items() if row.k == "1"}
    depth = max(error for row, error in deep.items() if row.kind not in WITH_BIASES)
    biases = max(error for row, error in deep.items() if row.kind in WITH_BIASES)
    control = min(m.control for m in found.values())
    jump, woken = max(m.jump for m in found.values()), min(m.woken for m in found.values())
    good = worst <= WORST and depth <= DEPTH and biases <= BIASES
    good = good and control >= CONTROL and jump <= JUMP and woken >= WOKEN
    print(
        f"\nrows={len(found)} worst={worst:.1e} depth={depth:.1e} biases={biases:.1e} control={control:.1e} "
        f"jump={jump:.1e} woken={woken:.2f}"
    )
    return 0 if good and wide_holds and experts_hold else 1


if __name__ == "__main__":
    sys.exit(main())
