"""Muon as people's trainers have it, with another optimizer for the rest in one class, written from the descriptions.

The iterations run in the dtype of the gradient unless `ROUND_TO` says otherwise; the originals use bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from harness.written import Group, adam, adamw, count, decay, zeros

ROUND_TO: torch.dtype | None = None
"""The dtype of the iterations; None for that of the gradient."""
FLOOR = 1e-30
"""What the originals clamp norms at, where they write 1e-7 or 1e-6: lifted, because it has units."""
QUINTIC = ((3.4445, -4.7750, 2.0315),) * 5
# Odd polynomials that take singular values near 1 in three steps (Amsel et al., arXiv 2505.16932, describe how to find
# better ones). That they are the same at both widths is all that matters here.
POLAR = ((4.0, -6.0, 3.0), (3.0, -3.5, 1.5), (1.875, -1.25, 0.375))


def orthogonal(g: Tensor, steps: tuple[tuple[float, float, float], ...] = QUINTIC) -> Tensor:
    """Matrices in the last two dimensions with singular values near 1."""
    x = g if ROUND_TO is None else g.to(ROUND_TO)
    tall = g.shape[-2] > g.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + FLOOR)
    for a, b, c in steps:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    made: Tensor = (x.mT if tall else x).to(g.dtype)
    return made


class _Hybrid(Optimizer):
    """An optimizer that steps its groups one by one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.step_group(group)

    def step_group(self, group: Group) -> None:
        raise NotImplementedError


class MuonWithAuxAdam(_Hybrid):
    """Keller Jordan's: groups say `use_muon`, and must have exactly the settings of their kind."""

    def __init__(self, param_groups: list[Group]) -> None:
        for group in param_groups:
            kind = (
                {"lr": 0.02, "momentum": 0.95}
                if group["use_muon"]
                else {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10}
            )
            for key, value in {**kind, "weight_decay": 0.0}.items():
                group.setdefault(key, value)
            assert group.keys() == {"params", "use_muon", "weight_decay", *kind}
        super().__init__(param_groups, {})

    def step_group(self, group: Group) -> None:
        for p in group["params"]:
            if not group["use_muon"]:
                adamw(p, p.grad, self.state[p], group)
                continue
            [average] = zeros(self.state[p], p, "momentum_buffer")
            average.lerp_(p.grad, 1 - group["momentum"])
            g = p.grad.lerp(average, group["momentum"])
            flat = g.reshape(len(g), -1) if g.dim() == 4 else g
            up = orthogonal(flat) * max(1.0, g.shape[-2] / g.shape[-1]) ** 0.5
            decay(p, group)
            p.sub_(up.reshape(p.shape), alpha=group["lr"])


class MoonlightMuon(_Hybrid):
    """Moonlight's: one group for all tensors, and `use_muon` in the state of each; its decay is called `wd`."""

    def __init__(
        self,
        lr: float = 1e-3,
        wd: float = 0.1,
        muon_params: Any = (),
        momentum: float = 0.95,
        adamw_params: Any = (),
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
    ) -> None:
        matrices, others = list(muon_params), list(adamw_params)
        defaults = {
            "lr": lr,
            "wd": wd,
            "momentum": momentum,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
        }
        super().__init__([*matrices, *others], defaults)
        for p in [*matrices, *others]:
            self.state[p]["use_muon"] = any(p is matrix for matrix in matrices)

    def step_group(self, group: Group) -> None:
        for p in group["params"]:
            state, g = self.state[p], p.grad
            p.mul_(1 - group["lr"] * group["wd"])
            if state["use_muon"]:
                [momentum] = zeros(state, p, "momentum_buffer")
                momentum.mul_(group["momentum"]).add_(g)
                up = orthogonal(g.add(momentum, alpha=group["momentum"]))
                p.sub_(up, alpha=group["lr"] * 0.2 * max(p.shape) ** 0.5)
                continue
            first, second = zeros(state, p, "moment1", "moment2")
            named = {"betas": group["adamw_betas"], "eps": 0.0}
            step, (beta1, beta2) = count(state), group["adamw_betas"]
            adam(first, second, g, named, step)
            up = first / (second.sqrt() + group["adamw_eps"])
            p.sub_(up, alpha=group["lr"] * (1 - beta2**step) ** 0.5 / (1 - beta1**step))


class NanochatMuonAdamW(_Hybrid):
    """nanochat's: groups say `kind`; matrices of one group have one shape, and their state is stacked in the first.

    Rows are brought to equal norms, the update is made orthogonal and given the norm of an orthogonal matrix, its rows or
    columns (whichever are more) are divided by a running size, and decay acts where it agrees with the update.
    """

    def __init__(self, param_groups: list[Group]) -> None:
        super().__init__(param_groups, {})

    def step_group(self, group: Group) -> None:
        if group["kind"] == "adamw":
            for p in group["params"]:
                adamw(p, p.grad, self.state[p], group)
            return
        params, state = group["params"], self.state[group["params"][0]]
        g, p = torch.stack([p.grad for p in params]), torch.stack(params)
        over = -1 if p.shape[-2] >= p.shape[-1] else -2
        [average] = zeros(state, p, "momentum_buffer")
        second = state.setdefault("second_momentum_buffer", torch.zeros_like(p.mean(over, keepdim=True)))
        average.lerp_(g, 1 - group["momentum"])
        g = g.lerp(average, group["momentum"])
        g = g / g.norm(dim=-1, keepdim=True).clamp(min=FLOOR)
        g = orthogonal(g, POLAR[: group["ns_steps"]])
        g = g * (min(p.shape[-2:]) ** 0.5 / g.norm(dim=(-2, -1), keepdim=True).clamp(min=FLOOR))
        before = g.norm(dim=(-2, -1), keepdim=True)
        second.lerp_(g.square().mean(over, keepdim=True), 1 - group["beta2"])
        g = g * second.clamp(min=FLOOR).rsqrt()
        g = g * (before / g.norm(dim=(-2, -1), keepdim=True).clamp(min=FLOOR))
        lr = group["lr"] * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
        p = p - lr * (g + group["weight_decay"] * p * (g * p >= 0))
        for own, new in zip(params, p, strict=True):
            own.copy_(new)


class PerHeadMuon(_Hybrid):
    """Muon that makes the rows of each head orthogonal on their own; a group says how many heads it has."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.95, num_heads: int = 1) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "num_heads": num_heads})

    def step_group(self, group: Group) -> None:
        for p in group["params"]:
            [average] = zeros(self.state[p], p, "momentum_buffer")
            average.lerp_(p.grad, 1 - group["momentum"])
            heads = average.reshape(group["num_heads"], -1, p.shape[-1])
            p.sub_(orthogonal(heads).reshape(p.shape), alpha=group["lr"])


MUON_ROWS: dict[type[Optimizer], str] = {
    MuonWithAuxAdam: "keller_jordan_with_adam",
    MoonlightMuon: "moonlight",
    NanochatMuonAdamW: "nanochat",
}
"""A class here -> the version of Muon that it is."""
