"""One row of `benchmarks/growth.py`: a stock model is trained, grown and woken, next to a control.

Each row is a stock model in float64 with the model's own casts lifted and Muon's iteration in float64: a few steps
before growing, twelve after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import mupscale as mu
from harness.exactness import precise_muon
from harness.program import Outcome
from harness.runs import step
from mupscale.families.config.goal import Way
from mupscale.families.copy.losses import another_batch, find_batch, growing_outputs, loss_on
from mupscale.families.models import config_from, factory, model_class
from mupscale.families.plan import family_plan
from mupscale.families.record import FamilyPlan
from mupscale.models.float64 import cast_, lifted_casts
from mupscale.plans.plan import Plan
from mupscale.plans.tensor_plan import TensorPlan
from mupscale.proofs.identity import Loss
from mupscale.tensors.differences import curve_gap, loss_gap
from mupscale.tensors.random_states import forked

NAMES = "worst control jump woken"
MOST, LEAST = {"worst": 1e-11, "jump": 1e-10}, {"control": 1e-3, "woken": 1.0}
BEFORE, AFTER = 3, 12
BARELY = mu.SignalNoise(1e-14)
"""Noise that parts copies by next to nothing, so that what is measured is the waking of zeros."""
SIZES = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TOKENS = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WITH_BIASES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, **TOKENS},
    "gpt_neox": {**SIZES, "num_key_value_heads": 4},
    "opt": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, **TOKENS},
}
"""Types whose blocks write biases into the stream."""
Make = Callable[[], nn.Module]
Optimizers = Callable[[str, nn.Module, set[str]], list[torch.optim.Optimizer]]
"""By name, for a model, with the names of weights without decay."""
Control = Callable[[FamilyPlan, mu.Run, Make], mu.Run]
"""Grow a run with one factor left out."""


@dataclass(frozen=True)
class Row:
    kind: str
    optimizer: str
    to: str
    k: str = "1"
    tied: bool = False

    def __str__(self) -> str:
        more = f"-k {self.k} " if self.k != "1" else ""
        to = f"--to {self.to}" if self.to else ""
        return f"{self.kind:16} {self.optimizer:6} {'tied' if self.tied else '':5} {more}{to}"


Figures = dict[str, float]
"""What is measured of a row.

worst    the largest relative error over losses, gradients and weights
control  how far the control's losses are from the base's
jump     the change of the loss when noise wakes what is new
woken    the smallest share of a tensor's new entries that have a gradient in one of the steps after the first
"""


def summed_up(
    rows: Iterable[Row],
    measure: Callable[[Row], Figures],
    names: str,
    most: Mapping[str, float],
    least: Mapping[str, float],
) -> Outcome:
    """Measure and print rows; a line with the worst of each figure over the rows that have it, and the bounds that fail."""
    found: list[Figures] = []
    for row in rows:
        found.append(measure(row))
        print(f"{row!s:96} {shown(found[-1])}", flush=True)
    figures = {n: (min if n in least else max)(m[n] for m in found if n in m) for n in names.split()}
    return Outcome(f"rows={len(found)} {shown(figures)}", outside(figures, most, least))


def shown(figures: Figures) -> str:
    """Figures as they are printed; those that are shares with two digits.

    >>> shown({"worst": 1e-12, "woken": 1.0})
    'worst=1.0e-12 woken=1.00'
    """
    return " ".join(f"{n}={v:{'.2f' if n in ('awake', 'woken') else '.1e'}}" for n, v in figures.items())


def outside(figures: Mapping[str, float], most: Mapping[str, float], least: Mapping[str, float]) -> list[str]:
    """The figures that are above their most or below their least, each as a sentence.

    >>> outside({"worst": 1e-3, "control": 0.5}, {"worst": 1e-11}, {"control": 1e-3})
    ['worst is 1.0e-03, expected at most 1e-11']
    """
    high = [
        f"{n} is {figures[n]:.1e}, expected at most {b:.0e}" for n, b in most.items() if not figures[n] <= b
    ]
    low = [
        f"{n} is {figures[n]:.1e}, expected at least {b:.0e}" for n, b in least.items() if not figures[n] >= b
    ]
    return high + low


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


def woken_share(entry: TensorPlan, gradient: Tensor, table: bool) -> float:
    """The share of a tensor's new entries that have a gradient; rows of a table that no batch has are left out."""
    new = torch.full(gradient.shape, entry.new)
    for dim, axis in enumerate(entry.axes):
        zeros = torch.tensor([axis.source(i) is None for i in range(axis.wide)])
        new = new | zeros.view([-1 if d == dim else 1 for d in range(gradient.dim())])
    if table:
        seen = gradient.flatten(1).abs().sum(1) > 0
        new, gradient = new[seen], gradient[seen]
    return float((gradient[new] != 0).double().mean()) if bool(new.any()) else 1.0


@dataclass(frozen=True)
class Trial:
    """A run after its first steps, and what a row makes of it."""

    run: mu.Run
    family: FamilyPlan
    make: Make
    batches: list[dict[str, Any]]
    losses: list[Loss]

    @property
    def plan(self) -> Plan:
        return self.family.plan

    def step(self, run: mu.Run, i: int, loss: Loss | None = None) -> float:
        """Take step `i` after growing, by its own loss or another; the loss before it."""
        value = (loss or self.losses[BEFORE + i])(run.model)
        step(run, value)
        return float(value.detach())

    def verify(self) -> mu.Certificate:
        return mu.verify(self.run, self.make, step=self.step, plan=self.plan, steps=AFTER)

    def left(self, run: mu.Run, base: Sequence[float]) -> float:
        """How far the losses of a control come from the base's."""
        return curve_gap(base, [self.step(run, i) for i in range(AFTER)])


def trial(
    row: Row, sizes: Mapping[str, Any], optimizers: Optimizers = optimizers, by: Way = "copies"
) -> Trial:
    """Plan the growth of a row, and train its base for the first steps; where casts are lifted."""
    family = family_plan({"model_type": row.kind, **sizes}, row.k, to=row.to or None, by=by)
    config, wide = config_from(family.base_config), config_from(family.wide_config)
    cls, wide_cls = model_class(config, family.architecture), model_class(wide, family.wide_architecture)
    with forked(seed=0):
        model = cast_(factory(cls)(config), torch.float64)
    bare = {n for n, t in family.plan.tensors.items() if t.shift and not t.fold.is_one}
    batch, which = find_batch(model, config)
    growing = growing_outputs(model, cast_(factory(wide_cls)(wide), torch.float64), batch)
    batches = [another_batch(model, config, which, seed) for seed in range(BEFORE + AFTER)]
    losses = [loss_on(batch, growing, family.new_words) for batch in batches]
    run = mu.Run(model, optimizers(row.optimizer, model, bare))
    made = Trial(run, family, lambda: factory(wide_cls)(wide), batches, losses)
    for i in range(-BEFORE, 0):
        made.step(run, i)
    return made


def measure(row: Row, sizes: Mapping[str, Any], control: Control) -> Figures:
    """Grow a trained model with zero noise, with the control, and awake."""
    with lifted_casts(), precise_muon():
        tried = trial(row, sizes)
        run, make, plan = tried.run, tried.make, tried.plan
        certificate = tried.verify()
        left = tried.left(control(tried.family, run, make), certificate.base_losses)
        awake = mu.upscale(run, make, BARELY, plan=plan)
        jump = loss_gap(certificate.base_losses[0], tried.step(awake, 0))
        # A unit of a ReLU has no gradient in a step in which every token turns it off: sizes are summed over steps.
        sizes_of = {name: torch.zeros_like(p) for name, p in awake.model.named_parameters()}
        for i in range(1, AFTER):
            tried.step(awake, i)
            for name, p in awake.model.named_parameters():
                sizes_of[name] += 0 if p.grad is None else p.grad.abs()
        tables = {f"{n}.weight" for n, m in awake.model.named_modules() if isinstance(m, nn.Embedding)}
        shares = [woken_share(plan[n], size, n in tables) for n, size in sizes_of.items()]
    return {"worst": certificate.worst, "control": left, "jump": jump, "woken": min(shares)}
