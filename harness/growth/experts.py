"""Dense stock models that get experts: rows of `benchmarks/growth.py` in which routed experts sleep beside the dense layer.

Each row is a stock model in float64 with the model's own casts lifted: a few steps before growing, twelve after, in the
class with experts. Two controls stand beside it. `silent` has random routers, gates and ups, and downs of zero: its first
loss is the base's, and its training is not. `loud` has random downs too, so that its first loss is another one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

import mupscale as mu
from harness.exactness import precise_muon
from harness.growth.rows import BARELY, SIZES, Row, outside, trial
from harness.program import Outcome
from mupscale.plans.float64 import lifted_casts
from mupscale.plans.plan import Plan
from mupscale.tensors.differences import loss_gap

WORST, SILENT, LOUD, C1, JUMP, WOKEN = 1e-11, 1e-3, 1e-3, 1e-6, 1e-10, 1.0
DENSE = {**SIZES, "sliding_window": None}
FEW, MANY = "experts=4,top_k=2,expert_ffn=20", "experts=9,top_k=3,expert_ffn=8"
WIDE = "experts=3,top_k=3,expert_ffn=40"
JOINT = "layers=3,after=0," + FEW
ROUTED = ("router.weight", "mlp.gate.weight", "experts.gate_up_proj", "experts.down_proj")
COPIES = "hidden=2,heads=2,kv_heads=2"


@dataclass(frozen=True)
class Measured:
    worst: float
    silent: float
    loud: float
    jump: float
    woken: float
    """The smallest share of the entries of an expert that saw a token which have a gradient in the second step."""

    def __str__(self) -> str:
        return (
            f"worst={self.worst:.1e} silent={self.silent:.1e} loud={self.loud:.1e} jump={self.jump:.1e} "
            f"woken={self.woken:.2f}"
        )


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


def measure(row: Row) -> Measured:
    with lifted_casts(), precise_muon():
        tried = trial(row, {**DENSE, "tie_word_embeddings": row.tied}, optimizers)
        run, make, plan = tried.run, tried.make, tried.plan
        certificate = tried.verify()
        base = certificate.base_losses
        silent = randomise_(mu.widen(run, make, plan=plan), plan, downs=False)
        left = tried.left(silent, base)
        loud = randomise_(mu.widen(run, make, plan=plan), plan, downs=True)
        other = loss_gap(base[0], tried.step(loud, 0))
        awake = mu.upscale(run, make, BARELY, plan=plan)
        jump = loss_gap(base[0], tried.step(awake, 0))
        tried.step(awake, 1)
        woken = woken_share(awake.model, plan)
    return Measured(certificate.worst, left, other, jump, woken)


def measure_copies(row: Row) -> tuple[float, float]:
    """The worst error of copies that every token goes to, and how far they leave the base with c = 1.

    With c = 1 they have their wide weights and state, and the constants that the base's optimizer has.
    """
    with lifted_casts():
        tried = trial(row, {**DENSE, "tie_word_embeddings": row.tied}, optimizers)
        certificate = tried.verify()
        plain = mu.widen(tried.run, tried.make, plan=tried.plan)
        for own, others in zip(tried.run.optimizers, plain.optimizers, strict=True):
            for group in others.param_groups:
                group |= {key: value for key, value in own.param_groups[0].items() if key != "params"}
        return certificate.worst, tried.left(plain, certificate.base_losses)


def report_copies(quick: bool) -> Outcome:
    """Print every row of copies; a line that sums them up, and the bounds that fail."""
    found = []
    for row in copied_rows(quick):
        worst, plain = measure_copies(row)
        found.append((worst, plain))
        print(f"{row!s:96} {worst:8.1e}  c = 1 {plain:8.1e}", flush=True)
    worst, plain = max(w for w, _ in found), min(p for _, p in found)
    failed = outside({"worst": worst, "c1": plain}, {"worst": WORST}, {"c1": C1})
    return Outcome(f"rows={len(found)} worst={worst:.1e} c1={plain:.1e}", failed)


def report(quick: bool) -> Outcome:
    """Print every row; a line that sums them up, and the bounds that fail."""
    found: list[Measured] = []
    for row in rows(quick):
        m = measure(row)
        found.append(m)
        print(f"{row!s:96} {m}", flush=True)
    worst = Measured(
        max(m.worst for m in found),
        min(m.silent for m in found),
        min(m.loud for m in found),
        max(m.jump for m in found),
        min(m.woken for m in found),
    )
    most, least = {"worst": WORST, "jump": JUMP}, {"silent": SILENT, "loud": LOUD, "woken": WOKEN}
    return Outcome(f"rows={len(found)} {worst}", outside(asdict(worst), most, least))
