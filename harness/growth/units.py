"""New units in models of the zoo: rows of `benchmarks/growth.py` in which the new width is zero until it wakes.

Every model grows by a whole multiple, and those whose width is one number also by half of it. Asleep, a stream that LayerNorm
centres grows by copies; awake it is that of `upscale`, whose new channels carry the mean of the others. The control wakes every
zero instead of all but those that are read or written at a cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

import mupscale as mu
from harness.growth.rows import AFTER, BEFORE, Figures, outside, shown, woken_share
from harness.growth.width import uncut
from harness.program import Outcome
from harness.runs import step
from harness.zoo import ZOO
from harness.zoo.entry import Entry
from mupscale.plans.plan import Plan
from mupscale.plans.tensor_plan import TensorPlan
from mupscale.tensors.differences import loss_gap

NAMES = (
    "mlp_gelu", "house_mlp", "mlp_batchnorm", "siren", "actor_critic", "neural_ode_euler", "film", "swiglu_fused",
    "glu_module", "experts_routed", "instancenorm_affine", "batchnorm_cumulative", "unit_length", "heads_grow",
    "cosine_heads_grow", "relative_bias_heads_grow", "latent_attention", "einsum_heads_grow", "house_llama",
    "gpt_heads_grow", "gpt_tied_heads_grow", "vit_heads_grow", "house_lstm", "lstm_bidirectional", "lstm_cell", "house_resnet",
    "flatten", "matrix_factorisation", "hf_llama_tied_heads_grow", "nanogpt_heads_grow",
)  # fmt: skip
QUICK = ("mlp_gelu", "swiglu_fused", "heads_grow", "gpt_heads_grow", "house_lstm")
MOST = {"worst": 1e-11, "jump": 1e-10, "jump32": 1e-5}
LEAST = {"control": 1e-5, "woken": 1.0}
"""A control moves the loss a hundred thousand times as far as waking may."""


@dataclass(frozen=True)
class Row:
    entry: Entry
    wide: object

    def __str__(self) -> str:
        return f"{self.entry.name:28} {self.entry.base} -> {self.wide}"


def rows(quick: bool) -> Iterator[Row]:
    for name in QUICK if quick else NAMES:
        entry = ZOO[name]
        yield Row(entry, entry.wide)
        # Half as much again, where heads of 4 channels still fit.
        if (
            isinstance(entry.base, int)
            and not quick
            and entry.base % 8 == 0
            and "attention" not in name
            and "heads" not in name
        ):
            yield Row(entry, entry.base * 3 // 2)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def trained(entry: Entry) -> mu.Run:
    """A base after its first steps. A large eps keeps rounding out of gradients that are zero in exact arithmetic."""
    torch.manual_seed(0)
    model = entry.make(entry.base)
    parameters = [p for p in model.parameters() if p.requires_grad]
    run = mu.Run(model, torch.optim.AdamW(parameters, lr=3e-3, eps=1e-3, weight_decay=0.05))
    for i in range(BEFORE):
        step(run, entry.loss(run.model, i))
    return run


def measure(row: Row) -> Figures:
    """Grow a model of the zoo by new units asleep, awake, and by the control."""
    entry = row.entry

    def make() -> nn.Module:
        return entry.make(row.wide)

    def follow(run: mu.Run, i: int) -> torch.Tensor:
        value = entry.loss(run.model, BEFORE + i)
        step(run, value)
        return value.detach()

    with default_dtype(torch.float64):
        run = trained(entry)
        plan = mu.infer_plan(run.model, make, loss=entry.loss, by="units")
        if not any(tensor.padded for tensor in plan.tensors.values()):
            raise AssertionError(f"{entry.name} has no new units")
        certificate = mu.verify(run, make, step=follow, plan=plan, steps=AFTER)
        awake = mu.upscale(run, make, loss=entry.loss)
        chosen = awake.plan
        assert chosen is not None
        woken = mu.upscale(run, make, plan=uncut(chosen), prove=False)
        before = _loss(entry, run)
        jump, control = (loss_gap(before, _loss(entry, one)) for one in (awake, woken))
        share = _share(awake, chosen, entry)
    with default_dtype(torch.float32):
        single = trained(entry)
        wide = mu.upscale(single, make, plan=chosen)
        jump32 = loss_gap(_loss(entry, single), _loss(entry, wide))
    return {
        "worst": certificate.worst,
        "jump": jump,
        "jump32": jump32,
        "woken": share,
        "control": control,
    }


def _loss(entry: Entry, run: mu.Run) -> float:
    return float(entry.loss(run.model).detach())


def _share(run: mu.Run, plan: Plan, entry: Entry) -> float:
    """The smallest share of a tensor's new entries that have a gradient in the second step or one of those after it.

    A unit of a ReLU has none in a step in which every example turns it off, so sizes are summed over steps.
    """
    sizes = {name: torch.zeros_like(p) for name, p in run.model.named_parameters()}
    reached: set[str] = set()
    for i in range(AFTER):
        step(run, entry.loss(run.model, BEFORE + i))
        for name, p in run.model.named_parameters():
            if p.grad is not None and bool(p.grad.any()):
                sizes[name] += p.grad.abs() if name in reached else 0
                reached.add(name)
    tables = {f"{n}.weight" for n, m in run.model.named_modules() if isinstance(m, nn.Embedding)}
    # An expert that examples chose in one step only has not taken its second.
    padded = {name: size for name, size in sizes.items() if plan[name].padded and bool(size.any())}
    return min(
        woken_share(plan[name], size, name in tables) / max(_old_share(plan[name], size), 0.01)
        for name, size in padded.items()
    )


def _old_share(entry: TensorPlan, size: torch.Tensor) -> float:
    """The share of the base's entries that have a gradient: the forget gate of a first step has none, new or old."""
    for dim, axis in enumerate(entry.axes):
        old = [i for i in range(axis.wide) if axis.source(i) is not None]
        size = size.index_select(dim, torch.tensor(old))
    return float((size != 0).double().mean())


def report(quick: bool) -> Outcome:
    found: list[Figures] = []
    for row in rows(quick):
        found.append(measure(row))
        print(f"{row!s:60} {shown(found[-1])}", flush=True)
    bounds = {**MOST, **LEAST}
    figures = {n: (min if n in LEAST else max)(m[n] for m in found) for n in bounds}
    return Outcome(f"rows={len(found)} {shown(figures)}", outside(figures, MOST, LEAST))
