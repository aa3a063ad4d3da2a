"""Models that get experts: rows of `benchmarks/growth.py`.

Dense models get routed experts that sleep next to the dense layer, or become copies that every token goes to. Mixtures get
twice or three times the experts, of which each token goes to twice or three times as many.

Each row is a stock model in float64 with the model's own casts lifted: a few steps before growing, twelve after, in the
class with experts. Two controls stand next to it. `silent` has random routers, gates and ups, and downs of zero: its first
loss is the base's, and its training is not. `loud` has random downs too, so that its first loss is another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import mupscale as mu
from harness.exactness import precise_muon
from harness.growth.rows import AFTER, BARELY, BEFORE, MOST, SIZES, Figures, Make, Row, summed_up, trial
from harness.program import Outcome
from harness.runs import step
from mupscale.models.float64 import lifted_casts
from mupscale.plans.plan import Plan
from mupscale.tensors.differences import curve_gap, loss_gap

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
        with_constants_of_(plain, tried.run)
        return {"worst": certificate.worst, "c1": tried.left(plain, certificate.base_losses)}


MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "deepseek_v3": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}  # fmt: skip
"""Types whose routers are alike in few things: softmax before or after the choice, renormalised or not, sigmoids with a bias for
the choice, groups."""
OWN = ("softmax", "renormalised", "sigmoid")


class Mixture(nn.Module):
    """A mixture of one's own: how scores are made is its kind."""

    def __init__(self, kind: str, experts: int, top_k: int, width: int = 12) -> None:
        super().__init__()
        self.kind, self.top_k = kind, top_k
        self.embed, self.readout = nn.Linear(6, width), nn.Linear(width, 3)
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(0.3 * torch.randn(experts, 10, width))
        self.down = nn.Parameter(0.3 * torch.randn(experts, width, 10))
        self.bias: Tensor | None
        self.register_buffer("bias", 0.1 * torch.randn(experts) if kind == "biased" else None)

    def forward(self, x: Tensor) -> Tensor:
        stream: Tensor = self.embed(x)
        logits: Tensor = self.router(stream)
        scores = logits.sigmoid() if self.kind in ("sigmoid", "biased") else logits.softmax(-1)
        chosen = (scores if self.bias is None else scores + self.bias).topk(self.top_k, -1).indices
        values = scores.gather(-1, chosen)
        if self.kind in ("renormalised", "biased"):
            values = values / values.sum(-1, keepdim=True)
        weights = torch.zeros_like(scores).scatter(-1, chosen, values)
        hidden = nn.functional.gelu(torch.einsum("nd,efd->nef", stream, self.up))
        out: Tensor = self.readout(stream + torch.einsum("nef,edf,ne->nd", hidden, self.down, weights))
        return out


def multiplied_rows(quick: bool) -> list[Row]:
    """Stock mixtures, alone and together with every width, and mixtures of one's own."""
    names = ("AdamW", "SGD", "Muon")
    found = [Row(kind, name, "", "experts=2") for kind in MIXTURES for name in names]
    found += [Row(kind, "AdamW", "", k) for kind in MIXTURES for k in ("experts=3", "2,experts=2")]
    found += [Row(kind, "AdamW", "", "experts=2", tied=True) for kind in list(MIXTURES)[:3]]
    found += [Row(f"own {kind}", name, "", "experts=2") for kind in OWN for name in names]
    return found[:1] if quick else found


class Own(NamedTuple):
    """A mixture of one's own after its first steps, how the wide one is built, a step of both, and their loss."""

    run: mu.Run
    make: Make
    step: Callable[[mu.Run, int], float]
    loss: Callable[[nn.Module], Tensor]


def own_mixture(row: Row, experts: int, top_k: int) -> Own:
    """A mixture with 4 experts, of which a token goes to 2, that grows to one with so many."""
    kind = row.kind.removeprefix("own ")
    torch.manual_seed(0)
    model, batches = Mixture(kind, 4, 2).double(), torch.randn(BEFORE + AFTER, 64, 6, dtype=torch.float64)
    matrices = [p for p in model.parameters() if row.optimizer == "Muon" and p.dim() == 2]
    rest = [p for p in model.parameters() if not any(p is m for m in matrices)]
    muon = [torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1)] if matrices else []
    adamw = torch.optim.AdamW(rest, lr=3e-3, eps=1e-3, weight_decay=0.1)
    sgd = torch.optim.SGD(rest, lr=1e-2, momentum=0.9, weight_decay=0.1)
    run = mu.Run(model, [sgd] if row.optimizer == "SGD" else [*muon, adamw])

    def loss(model: nn.Module, i: int = 0) -> Tensor:
        outputs: Tensor = model(batches[i].to(next(model.parameters())))
        return (outputs - batches[i, :, :3].sin()).square().mean()

    def step_at(run: mu.Run, i: int) -> float:
        value = loss(run.model, BEFORE + i)
        step(run, value)
        return float(value.detach())

    def make() -> nn.Module:
        return Mixture(kind, experts, top_k)

    for i in range(-BEFORE, 0):
        step_at(run, i)
    return Own(run, make, step_at, loss)


def measure_multiplied(row: Row) -> Figures:
    """The worst error of twice the experts, the jump when copies are split, how far they part, and two controls.

    `c1` keeps the constants of the base's optimizer, as `measure_copies` does. `kept` is the jump where each token goes to as
    many experts as before, which are copies of half as many.
    """
    with lifted_casts(), precise_muon():
        if row.kind.startswith("own "):
            run, make, step_at, loss = own_mixture(row, 8, 4)
            plan = mu.infer_plan(run.model, make, loss=loss, by="units")
        else:
            sizes = {
                **SIZES,
                "moe_intermediate_size": 24,
                **MIXTURES[row.kind],
                "tie_word_embeddings": row.tied,
            }
            tried = trial(row, sizes, optimizers, by="units")
            run, make, plan, step_at = tried.run, tried.make, tried.plan, tried.step
        certificate = mu.verify(run, make, step=step_at, plan=plan, steps=AFTER)
        base = certificate.base_losses
        plain, kept, awake = (
            mu.grow(run, make, plan=plan),
            mu.grow(run, make, plan=plan),
            mu.upscale(run, make, plan=plan),
        )
        with_constants_of_(plain, run)
        left = curve_gap(base, [step_at(plain, i) for i in range(AFTER)])
        for module in kept.model.modules():
            if isinstance(found := getattr(module, "top_k", None), int):
                vars(module)["top_k"] = found // int(row.k[-1])
        moved = loss_gap(base[0], step_at(kept, 0))
        jump = loss_gap(base[0], step_at(awake, 0))
        for i in range(1, AFTER):
            step_at(awake, i)
    return {
        "worst": certificate.worst,
        "c1": left,
        "kept": moved,
        "jump": jump,
        "parted": parted(awake, plan),
    }


def parted(run: mu.Run, plan: Plan) -> float:
    """How far the rows of routers that are copies lie apart, relative to their length: the smallest."""
    gaps = []
    for name, weight in run.model.named_parameters():
        axes = plan[name].axes
        if len(axes) == 2 and axes[0].k > 1 and name.endswith(("gate.weight", "router.weight")):
            rows = [[i for i in range(axes[0].wide) if axes[0].source(i) == j] for j in range(axes[0].base)]
            own = weight.detach()
            gaps += [float((own[a] - own[b]).norm() / own[a].norm()) for a, b, *_ in rows]
    return min(gaps)


def with_constants_of_(run: mu.Run, base: mu.Run) -> None:
    """Give a run the constants of the base's optimizers instead of its own."""
    for own, others in zip(base.optimizers, run.optimizers, strict=True):
        for group in others.param_groups:
            group |= {key: value for key, value in own.param_groups[0].items() if key != "params"}


def report_multiplied(quick: bool) -> Outcome:
    least = {"c1": 1e-6, "kept": 1e-4, "parted": 1e-3}
    return summed_up(multiplied_rows(quick), measure_multiplied, "worst c1 kept jump parted", MOST, least)


def report_copies(quick: bool) -> Outcome:
    return summed_up(copied_rows(quick), measure_copies, "worst c1", {"worst": MOST["worst"]}, {"c1": 1e-6})


def report(quick: bool) -> Outcome:
    least = {"silent": 1e-3, "loud": 1e-3, "woken": 1.0}
    return summed_up(rows(quick), measure, "worst silent loud jump woken", MOST, least)
