"""What optimizers that are written from their published descriptions share: one tensor at a time, and Adam's direction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

Group = dict[str, Any]
State = dict[str, Any]


class Published(Optimizer):
    """An optimizer that updates one tensor at a time."""

    settings: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, params: Any, lr: float = 1e-3, **settings: Any) -> None:
        unknown = settings.keys() - self.settings.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no setting {', '.join(sorted(unknown))}")
        super().__init__(params, {"lr": lr, **self.settings, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.begin(group)
            for p in (p for p in group["params"] if p.grad is not None):
                self.update(p, p.grad, self.state[p], group)

    def begin(self, group: Group) -> None:
        """What is done once for a group before its tensors."""

    def update(self, p: Tensor, g: Tensor, state: State, group: Group) -> None:
        raise NotImplementedError


def zeros(state: State, p: Tensor, *keys: str) -> list[Tensor]:
    return [state.setdefault(key, torch.zeros_like(p)) for key in keys]


def count(state: State) -> int:
    state["step"] = state.get("step", 0) + 1
    return int(state["step"])


def decay(p: Tensor, group: Group) -> None:
    p.mul_(1 - group["lr"] * group["weight_decay"])


def lion(p: Tensor, g: Tensor, average: Tensor, group: Group) -> None:
    """A step of Lion, Chen et al., arXiv 2302.06675."""
    decay(p, group)
    p.sub_(average.lerp(g, 1 - group["betas"][0]).sign(), alpha=group["lr"])
    average.lerp_(g, 1 - group["betas"][1])


def adamw(p: Tensor, g: Tensor, state: State, group: Group, *keys: str) -> None:
    """A step of AdamW, with its moments under these keys, exp_avg and exp_avg_sq if there are none."""
    first, second = zeros(state, p, *keys or ("exp_avg", "exp_avg_sq"))
    decay(p, group)
    p.sub_(adam(first, second, g, group, count(state)), alpha=group["lr"])


def adam(first: Tensor, second: Tensor, g: Tensor, group: Group, step: int) -> Tensor:
    """Adam's direction, with bias correction."""
    beta1, beta2 = group["betas"][:2]
    first.lerp_(g, 1 - beta1)
    second.lerp_(g.square(), 1 - beta2)
    made: Tensor = (first / (1 - beta1**step)) / ((second / (1 - beta2**step)).sqrt() + group["eps"])
    return made
