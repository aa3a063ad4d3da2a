"""The schedule-free optimizers, written from their published description, with the settings and state of the originals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from .written import Group, Published, State, zeros


class ScheduleFree(Published):
    """Defazio et al., arXiv 2405.15682: z steps, x averages, and gradients are taken between them at y, the weights."""

    settings: ClassVar[Mapping[str, Any]] = {
        "r": 0.0,
        "k": 0,
        "warmup_steps": 0,
        "train_mode": True,
        "weight_sum": 0.0,
        "lr_max": -1.0,
        "scheduled_lr": 0.0,
        "weight_lr_power": 2.0,
        "weight_decay": 0.0,
    }

    def train(self) -> None:
        """Training needs nothing here; the originals start in eval mode."""

    def rate(self, group: Group) -> float:
        made: float = float(group["lr"]) * min(1.0, (group["k"] + 1) / max(1, group["warmup_steps"]))
        return made

    def begin(self, group: Group) -> None:
        lr = self.rate(group)
        group["scheduled_lr"], group["lr_max"] = lr, max(lr, group["lr_max"])
        weight = (group["k"] + 1) ** group["r"] * group["lr_max"] ** group["weight_lr_power"]
        group["weight_sum"] = group["weight_sum"] + weight
        group["k"] = group["k"] + 1
        self.share = weight / group["weight_sum"] if group["weight_sum"] else 0.0

    def direction(self, p: Tensor, g: Tensor, state: State, group: Group) -> Tensor:
        raise NotImplementedError

    def update(self, p: Tensor, g: Tensor, state: State, group: Group) -> None:
        z = state.setdefault("z", p.clone())
        beta, lr = group["betas"][0] if "betas" in group else group["momentum"], group["scheduled_lr"]
        step = self.direction(p, g, state, group)
        p.lerp_(z, self.share).sub_(step, alpha=lr * (1 - beta * (1 - self.share)))
        z.sub_(step, alpha=lr)


class SGDScheduleFree(ScheduleFree):
    settings: ClassVar[Mapping[str, Any]] = {**ScheduleFree.settings, "momentum": 0.9}

    def direction(self, p: Tensor, g: Tensor, state: State, group: Group) -> Tensor:
        return g.add(p, alpha=group["weight_decay"])


class AdamWScheduleFree(ScheduleFree):
    settings: ClassVar[Mapping[str, Any]] = {**ScheduleFree.settings, "betas": (0.9, 0.999), "eps": 1e-8}

    def direction(self, p: Tensor, g: Tensor, state: State, group: Group) -> Tensor:
        [second] = zeros(state, p, "exp_avg_sq")
        second.lerp_(g.square(), 1 - group["betas"][1])
        scale = (second / (1 - group["betas"][1] ** group["k"])).sqrt() + group["eps"]
        made: Tensor = (g / scale).add(p, alpha=group["weight_decay"])
        return made


class RAdamScheduleFree(AdamWScheduleFree):
    """Its rate is 0 until the variance of the second moment is bounded, and is multiplied by RAdam's correction after."""

    settings: ClassVar[Mapping[str, Any]] = {
        key: value for key, value in AdamWScheduleFree.settings.items() if key != "warmup_steps"
    } | {"silent_sgd_phase": True}

    def rate(self, group: Group) -> float:
        beta2, step = group["betas"][1], group["k"] + 1
        limit = 2 / (1 - beta2) - 1
        rho = limit - 2 * step * beta2**step / (1 - beta2**step)
        if rho <= 4:
            return 0.0 if group["silent_sgd_phase"] else float(group["lr"])
        top = (rho - 4) * (rho - 2) * limit
        made: float = float(group["lr"]) * (top / ((limit - 4) * (limit - 2) * rho)) ** 0.5
        return made
