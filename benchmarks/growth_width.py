"""Wider stock models at any size: rows of `growth.py` in which zeros follow the copies.

Each row is a stock model in float64 with the model's own casts lifted and Muon's iteration in float64: a few steps before
growing, twelve after. Where a norm averages over zeros, the control leaves out what the writers and gains absorb for
that; where none does, the control wakes every zero instead of all but those at a cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import mupscale as mu
from benchmarks.exactness import precise_muon
from mupscale.families.losses import another_batch, find_batch, growing_outputs, loss_on
from mupscale.families.models import config_from, factory, model_class
from mupscale.families.plan import family_plan
from mupscale.families.record import FamilyPlan
from mupscale.plans.float64 import cast_, lifted_casts
from mupscale.plans.plan import Plan, TensorPlan
from mupscale.rules.scale import Scale
from mupscale.tensors.differences import curve_gap, loss_gap

WORST, CONTROL, JUMP, WOKEN = 1e-11, 1e-3, 1e-10, 1.0
BEFORE, AFTER = 3, 12
SIZES = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TYPES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "granite", "smollm3")
HIDDEN, ALL, TWICE = (
    "hidden=48",
    "hidden=48,heads=6,kv_heads=3,ffn=52",
    "hidden=80,heads=10,kv_heads=5,ffn=92",
)
FFN, DEEPER = "ffn=52", "layers=3,after=0,hidden=48"
Optimizers = Callable[[str, nn.Module, set[str]], list[torch.optim.Optimizer]]


@dataclass(frozen=True)
class Row:
    kind: str
    optimizer: str
    to: str
    tied: bool = False
    k: str = "1"

    def __str__(self) -> str:
        more = f"-k {self.k} " if self.k != "1" else ""
        return f"{self.kind:8} {self.optimizer:6} {'tied' if self.tied else '':5} {more}--to {self.to}"


@dataclass(frozen=True)
class Measured:
    worst: float
    control: float
    jump: float
    woken: float
    """The smallest share of a tensor's new entries that have a gradient in the second step."""


def rows(quick: bool) -> list[Row]:
    if quick:
        return [Row("llama", "AdamW", ALL, tied=True)]
    found = [Row(kind, "AdamW", to, tied) for kind in TYPES for to in (HIDDEN, ALL) for tied in (False, True)]
    found += [Row("phi3", "AdamW", HIDDEN, tied) for tied in (False, True)]
    found += [Row(kind, name, ALL) for kind in ("llama", "qwen3", "gemma") for name in ("SGD", "Muon")]
    found += [Row(kind, "AdamW", TWICE, tied) for kind in ("llama", "gemma") for tied in (False, True)]
    found += [Row(kind, "AdamW", FFN) for kind in ("llama", "gemma")]
    found += [Row("llama", "Muon", TWICE, True), Row("llama", "AdamW", DEEPER, True, "ffn=2")]
    return found


def unscaled(family: FamilyPlan) -> Plan:
    """The plan without what its tensors absorb because norms average over zeros."""
    changes = {}
    for name, powers in family.powers.items():
        entry = family.plan[name]
        fold = entry.fold
        for dim, power in powers.items():
            fold = fold / Scale.of(entry.axes[dim].filled) ** power
        changes[name] = replace(entry, fold=fold)
    return family.plan.with_tensors(changes)


def uncut(plan: Plan) -> Plan:
    """The plan in which every zero wakes."""
    return plan.with_tensors({name: replace(entry, cut=()) for name, entry in plan.tensors.items()})


def woken_share(entry: TensorPlan, gradient: Tensor, table: bool) -> float:
    """The share of a tensor's new entries that have a gradient; rows of words that no batch has are left out."""
    new = torch.full(gradient.shape, entry.new)
    for dim, axis in enumerate(entry.axes):
        zeros = torch.tensor([axis.source(i) is None for i in range(axis.wide)])
        new = new | zeros.view([-1 if d == dim else 1 for d in range(gradient.dim())])
    if table:
        seen = gradient.flatten(1).abs().sum(1) > 0
        new, gradient = new[seen], gradient[seen]
    return float((gradient[new] != 0).double().mean()) if bool(new.any()) else 1.0


def measure(row: Row, optimizers: Optimizers) -> Measured:
    raw = {"model_type": row.kind, **SIZES, "tie_word_embeddings": row.tied}
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
        losses = [
            loss_on(another_batch(model, config, which, seed), growing) for seed in range(BEFORE + AFTER)
        ]
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
        # Copies are parted by next to nothing, so that what is measured is the waking of zeros.
        noise = mu.SignalNoise(1e-14)
        if family.powers:
            other = mu.widen(run, make, plan=unscaled(family), unproved=True)
        else:
            other = mu.upscale(run, make, noise, plan=uncut(family.plan), unproved=True)
        control = curve_gap(certificate.base_losses, [step(other, BEFORE + i) for i in range(AFTER)])
        awake = mu.upscale(run, make, noise, plan=family.plan)
        jump = loss_gap(certificate.base_losses[0], step(awake, BEFORE))
        step(awake, BEFORE + 1)
        tables = {f"{n}.weight" for n, m in awake.model.named_modules() if isinstance(m, nn.Embedding)}
        shares = [
            woken_share(family.plan[n], p.grad, n in tables)
            for n, p in awake.model.named_parameters()
            if p.grad is not None
        ]
    return Measured(certificate.worst, control, jump, min(shares))


def report(quick: bool, optimizers: Optimizers) -> tuple[str, bool]:
    """Print every row; a line that sums them up, and whether all bounds hold."""
    found: list[Measured] = []
    for row in rows(quick):
        m = measure(row, optimizers)
        found.append(m)
        print(
            f"{row!s:70} {m.worst:8.1e}  control {m.control:8.1e}  jump {m.jump:8.1e}  woken {m.woken:.2f}",
            flush=True,
        )
    worst, control = max(m.worst for m in found), min(m.control for m in found)
    jump, woken = max(m.jump for m in found), min(m.woken for m in found)
    good = worst <= WORST and control >= CONTROL and jump <= JUMP and woken >= WOKEN
    line = f"rows={len(found)} worst={worst:.1e} control={control:.1e} jump={jump:.1e} woken={woken:.2f}"
    return line, good
