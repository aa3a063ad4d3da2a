"""Mixtures that get more experts, of which a token goes to as few as before: rows of `benchmarks/growth.py`.

Where a bias decides the choice, new experts sleep below it, and twelve steps are the base's. Elsewhere copies of experts part, which
no run of the base does. What holds then is measured with copies so far apart that no token lies between them; how far the loss
moves, and how many tokens keep their experts, is measured as `upscale` parts them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

import mupscale as mu
from harness.exactness import precise_muon
from harness.growth.experts import MIXTURES, optimizers, own_mixture
from harness.growth.rows import AFTER, MOST, SIZES, Figures, Make, Row, summed_up, trial
from harness.program import Outcome
from mupscale.models.float64 import lifted_casts
from mupscale.noise.apart import share_kept
from mupscale.plans.direction import Direction
from mupscale.plans.more_experts import more_experts_plan
from mupscale.plans.plan import Plan
from mupscale.plans.wide_model import fill_model_
from mupscale.tensors.differences import loss_gap

ASLEEP = ("glm4_moe", "deepseek_v3", "own biased")
APART = ("mixtral", "qwen3_moe", "olmoe", "granitemoe", "own softmax", "own renormalised")
NAMES = ("AdamW", "SGD", "Muon")
_PUBLISHED = 1e-3
"""How large the noise on scores is that Expert Upcycling parts copies with (arXiv 2604.19835)."""


def rows(quick: bool) -> list[Row]:
    """Twice and three times the experts, and where new ones sleep half as many more."""
    if quick:
        return [Row("glm4_moe", "AdamW", "experts=6"), Row("mixtral", "AdamW", "experts=8")]
    found = [
        Row(kind, name, f"experts={times * number // 2}")
        for kind in (*ASLEEP, *APART)
        for number in [MIXTURES.get(kind, {}).get("n_routed_experts", 4)]
        for times in ((3, 4) if kind in ASLEEP else (4, 6))
        for name in (NAMES if times == 4 else NAMES[:1])
    ]
    wider = [Row(kind, "AdamW", "experts=8", k="2") for kind in ("mixtral", "qwen3_moe", "glm4_moe")]
    tied = [Row(kind, "AdamW", "experts=8", tied=True) for kind in ("mixtral", "qwen3_moe")]
    return [*found, *wider, *tied]


def measure(row: Row) -> Figures:
    """The error of twelve steps where new experts sleep, and what copies that part do elsewhere."""
    with lifted_casts(), precise_muon():
        if row.kind.startswith("own "):
            number = int(row.to.partition("=")[2])
            run, make, step_at, loss = own_mixture(row, number, 2)
            plan = more_experts_plan(run.model, make(), (4, number))
        else:
            sizes = {
                **SIZES,
                "moe_intermediate_size": 24,
                **MIXTURES[row.kind],
                "tie_word_embeddings": row.tied,
            }
            tried = trial(row, sizes, optimizers, by="units")
            run, make, plan, step_at, loss = tried.run, tried.make, tried.plan, tried.step, tried.losses[0]
        if plan.parts_tokens:
            return parted(run, make, plan, loss)
        certificate = mu.verify(run, make, step=step_at, plan=plan, steps=AFTER)
        awake = mu.upscale(run, make, plan=plan, loss=loss)
        return {
            "worst": certificate.worst,
            "moved": loss_gap(certificate.base_losses[0], step_at(awake, 0)),
            "control": let_in(run, make, plan, loss),
        }


def let_in(run: mu.Run, make: Make, plan: Plan, loss: Callable[[nn.Module], Tensor]) -> float:
    """How far the loss moves when experts that are zero get no bias that keeps tokens away."""
    open_plan = plan.with_tensors({name: replace(entry, pad=0) for name, entry in plan.tensors.items()})
    wide = fill_model_(make(), run.model, Direction(open_plan))
    with torch.no_grad():
        return loss_gap(float(loss(run.model)), float(loss(wide)))


def parted(run: mu.Run, make: Make, plan: Plan, loss: Callable[[nn.Module], Tensor]) -> Figures:
    """`far` is the error with copies far apart; `jump` and `kept` are of the copies that `upscale` makes. `published` is the jump of
    copies whose scores get noise instead, `control` that of copies that nothing parts.
    """
    certificate = mu.verify(run, make, loss=loss, plan=plan)
    awake = mu.upscale(run, make, plan=plan, loss=loss)
    with torch.no_grad():
        before, after = float(loss(run.model)), float(loss(awake.model))
    equal = fill_model_(make(), run.model, Direction(plan))
    noisy = with_noise_(fill_model_(make(), run.model, Direction(plan)), plan)
    with torch.no_grad():
        jumps = [loss_gap(before, float(loss(model))) for model in (noisy, equal)]
    kept = share_kept(plan, run.model, awake.model, loss)
    return {
        "far": certificate.worst,
        "jump": loss_gap(before, after),
        "kept": 0.0 if kept is None else kept,
        "published": jumps[0],
        "control": jumps[1],
    }


@torch.no_grad()
def with_noise_(model: nn.Module, plan: Plan) -> nn.Module:
    """Routers with noise on every row, a thousandth as large as their weights."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if plan[name].chosen is not None and weight.dim() == 2 and not name.endswith("bias"):
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.add_(_PUBLISHED * weight.square().mean().sqrt() * noise)
    return model


def report(quick: bool) -> Outcome:
    most = {"worst": MOST["worst"], "far": 1e-9, "moved": MOST["jump"]}
    least = {"kept": 0.9, "published": 1e-5, "control": 1e-5}
    return summed_up(rows(quick), measure, "worst moved far jump kept published control", most, least)
