"""Dense stock models that get experts: rows of `benchmarks/growth.py` in which routed experts sleep next to the dense layer.

Each row is a stock model in float64 with the model's own casts lifted: a few steps before growing, twelve after, in the
class with experts. Two controls stand next to it. `silent` has random routers, gates and ups, and downs of zero: its first
loss is the base's, and its training is not. `loud` has random downs too, so that its first loss is another one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import mupscale as mu
from harness.exactness import precise_muon
from harness.growth.rows import BARELY, MOST, SIZES, Figures, Row, summed_up, trial
from harness.program import Outcome
from mupscale.models.float64 import lifted_casts
from mupscale.plans.plan import Plan
from mupscale.tensors.differences import loss_gap

DENSE = {**SIZES, "sliding_window": None}
FEW, MANY = "experts=4,top_k=2,expert_ffn=20", "experts=9,top_k=3,expert_ffn=8"
WIDE = "experts=3,top_k=3,expert_ffn=40"
JOINT = "layers=3,after=0," + FEW
ROUTED = ("router.weight", "mlp.gate.weight", "experts.gate_up_proj", "experts.down_proj")
COPIES = "hidden=2,heads=2,kv_heads=2"


def rows(quick: bool) -> list[Row]:
    if quick:
        return [Row("llama", "AdamW", JOINT, tied=True, k=COPIES)]
    found = [
        Row(kind, "AdamW", to)
        for kind in ("llama", "mistral", "granite", "qwen3")
        for to in (FEW, MANY, WIDE)
    ]
    found += [Row("llama", "AdamW", f"{to},into=glm4_moe") for to in (FEW, MANY, WIDE)]
    found += [Row(kind, name, FEW) for kind in ("llama", "qwen3") for name in ("SGD", "Muon")]
    found += [Row(kind, "AdamW", FEW, tied=True) for kind in ("llama", "granite", "qwen3")]
    found += [Row("llama", name, JOINT, COPIES, tied) for name in ("AdamW", "SGD") for tied in (False, True)]
    return [
        *found,
        Row("qwen3", "AdamW", JOINT, k=COPIES),
        Row("llama", "AdamW", f"{JOINT},into=glm4_moe", k=COPIES),
    ]


def copied_rows(quick: bool) -> list[Row]:
    """Dense models as copies that every token goes to."""
    kinds = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
    found = [
        Row(kind, name, f"experts={e},top_k={e},expert_ffn=40,into={into}", tied=tied)
        for kind, into in kinds.items()
        for name, e, tied in (("AdamW", 3, False), ("SGD", 2, True))
    ]
    return found[:1] if quick else found


def optimizers(name: str, model: nn.Module, _: set[str]) -> list[torch.optim.Optimizer]:
    """One of AdamW and SGD for all weights, or Muon for the matrices of attention and AdamW for the rest."""
    named = list(model.named_parameters())
    if name == "SGD":
        return [torch.optim.SGD([p for _, p in named], lr=1e-2, momentum=0.9, weight_decay=0.1)]
    attention = [p for n, p in named if name == "Muon" and p.dim() == 2 and ".self_attn." in n]
    rest = [p for _, p in named if not any(p is other for other in attention)]
    adamw = torch.optim.AdamW(rest, lr=3e-3, eps=1e-3, weight_decay=0.1)
    return [torch.optim.Muon(attention, lr=1e-2, weight_decay=0.1), adamw] if attention else [adamw]


@torch.no_grad()
def randomise_(run: mu.Run, plan: Plan, downs: bool) -> mu.Run:
    """Random values in new tensors of experts, in those that write too or not."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in run.model.named_parameters():
        if name.endswith(ROUTED) and (downs or not plan[name].quiet):
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.copy_(0.3 * noise)
    return run


def woken_share(model: nn.Module, plan: Plan) -> float:
    """The smallest share of entries with a gradient, over the experts that saw a token and the other new tensors."""
    shares = []
    for name, parameter in model.named_parameters():
        if not plan[name].new:
            continue
        assert parameter.grad is not None
        gradient: Tensor = parameter.grad
        # A token that an expert saw leaves it a gradient somewhere; all of its entries must have one then.
        parts = (
            gradient
            if plan[name].stack == 0
            else gradient[gradient.flatten(1).any(1)]
            if gradient.dim() > 1
            else [gradient]
        )
        seen = [part for part in parts if bool(part.any())]
        shares += [float((part != 0).double().mean()) for part in seen] or [0.0]
    return min(shares)


def measure(row: Row) -> Figures:
    """`woken` is over the entries of experts that saw a token, in the second step."""
    with lifted_casts(), precise_muon():
        tried = trial(row, {**DENSE, "tie_word_embeddings": row.tied}, optimizers)
        run, make, plan = tried.run, tried.make, tried.plan
        certificate = tried.verify()
        base = certificate.base_losses
        silent = randomise_(mu.grow(run, make, plan=plan), plan, downs=False)
        left = tried.left(silent, base)
        loud = randomise_(mu.grow(run, make, plan=plan), plan, downs=True)
        other = loss_gap(base[0], tried.step(loud, 0))
        awake = mu.upscale(run, make, BARELY, plan=plan)
        jump = loss_gap(base[0], tried.step(awake, 0))
        tried.step(awake, 1)
        woken = woken_share(awake.model, plan)
    return {"worst": certificate.worst, "silent": left, "loud": other, "jump": jump, "woken": woken}


def measure_copies(row: Row) -> Figures:
    """The worst error of copies that every token goes to, and how far they leave the base with c = 1.

    With c = 1 they have their wide weights and state, and the constants that the base's optimizer has.
    """
    with lifted_casts():
        tried = trial(row, {**DENSE, "tie_word_embeddings": row.tied}, optimizers)
        certificate = tried.verify()
        plain = mu.grow(tried.run, tried.make, plan=tried.plan)
        for own, others in zip(tried.run.optimizers, plain.optimizers, strict=True):
            for group in others.param_groups:
                group |= {key: value for key, value in own.param_groups[0].items() if key != "params"}
        return {"worst": certificate.worst, "c1": tried.left(plain, certificate.base_losses)}


def report_copies(quick: bool) -> Outcome:
    return summed_up(copied_rows(quick), measure_copies, "worst c1", {"worst": MOST["worst"]}, {"c1": 1e-6})


def report(quick: bool) -> Outcome:
    least = {"silent": 1e-3, "loud": 1e-3, "woken": 1.0}
    return summed_up(rows(quick), measure, "worst silent loud jump woken", MOST, least)
