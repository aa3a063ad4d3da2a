"""A third-party optimizer becomes exact by stating its units, in four lines at the end of this file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

import mupscale as mu


class Lion(Optimizer):
    """The sign of an interpolated momentum, with decoupled decay (Chen et al., arXiv 2302.06675)."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                average = state.setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.sub_(average.lerp(parameter.grad, 1 - beta1).sign(), alpha=lr)
                average.lerp_(parameter.grad, 1 - beta2)


mu.rules.register_optimizer(
    Lion,
    mu.rules.OptimizerRule(
        lr=mu.rules.W, decay=mu.rules.Decay.DECOUPLED, state={"exp_avg": mu.rules.G}, neutral={"betas"}
    ),
)
