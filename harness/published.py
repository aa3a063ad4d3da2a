"""Optimizers of other packages, written from their published descriptions, with the settings and state of the originals.

They stand in for packages that are not installed, and compute in the dtype of their parameters, which some originals do
not. `ROWS` says which row of the registry each of them has.
"""

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


def adam(first: Tensor, second: Tensor, g: Tensor, group: Group, step: int) -> Tensor:
    """Adam's direction, with bias correction."""
    beta1, beta2 = group["betas"][:2]
    first.lerp_(g, 1 - beta1)
    second.lerp_(g.square(), 1 - beta2)
    made: Tensor = (first / (1 - beta1**step)) / ((second / (1 - beta2**step)).sqrt() + group["eps"])
    return made


class Lion(Published):
    """Chen et al., arXiv 2302.06675."""

    settings: ClassVar[Mapping[str, Any]] = {"betas": (0.9, 0.99), "weight_decay": 0.0}

    def update(self, p: Tensor, g: Tensor, state: State, group: Group) -> None:
        [average] = zeros(state, p, "exp_avg")
        decay(p, group)
        p.sub_(average.lerp(g, 1 - group["betas"][0]).sign(), alpha=group["lr"])
        average.lerp_(g, 1 - group["betas"][1])


class AdEMAMix(Published):
    """Pagliardini et al., arXiv 2409.03137: Adam with a second, slower average."""

    settings: ClassVar[Mapping[str, Any]] = {
        "betas": (0.9, 0.999, 0.9999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "weight_decouple": False,
        "fixed_decay": False,
        "alpha": 5.0,
        "t_alpha_beta3": None,
    }

    def begin(self, group: Group) -> None:
        group["step"] = group.get("step", 0) + 1

    def update(self, p: Tensor, g: Tensor, state: State, group: Group) -> None:
        fast, slow, second = zeros(state, p, "exp_avg", "exp_avg_slow", "exp_avg_sq")
        beta1, beta2, beta3 = group["betas"]
        if group["weight_decouple"]:
            decay(p, group)
        else:
            g = g.add(p, alpha=group["weight_decay"])
        fast.lerp_(g, 1 - beta1)
        slow.lerp_(g, 1 - beta3)
        second.lerp_(g.square(), 1 - beta2)
        step = group["step"]
        up = fast / (1 - beta1**step) + group["alpha"] * slow
        p.sub_(up / ((second / (1 - beta2**step)).sqrt() + group["eps"]), alpha=group["lr"])


class ADOPT(Published):
    """Taniguchi et al., arXiv 2411.02853: gradients are divided by the moment before them, and clipped."""

    settings: ClassVar[Mapping[str, Any]] = {
        "betas": (0.9, 0.9999),
        "eps": 1e-6,
        "weight_decay": 0.0,
        "weight_decouple": False,
        "fixed_decay": False,
    }

    def begin(self, group: Group) -> None:
        group["step"] = group.get("step", 0) + 1

    def update(self, p: Tensor, g: Tensor, state: State, group: Group) -> None:
        average, second = zeros(state, p, "exp_avg", "exp_avg_sq")
        if group["weight_decouple"]:
            decay(p, group)
        else:
            g = g.add(p, alpha=group["weight_decay"])
        if group["step"] > 1:
            bound = (group["step"] - 1) ** 0.25
            normed = (g / second.sqrt().clamp(min=group["eps"])).clamp(-bound, bound)
            average.lerp_(normed, 1 - group["betas"][0])
            p.sub_(average, alpha=group["lr"])
        second.lerp_(g.square(), 1 - group["betas"][1])


class StableAdamW(Published):
    """Wortsman et al., arXiv 2304.13013: AdamW whose rate falls where gradients outgrow their second moment."""

    settings: ClassVar[Mapping[str, Any]] = {
        "beta1": 0.9,
        "beta2": 0.99,
        "eps": 1e-6,
        "weight_decay": 1e-2,
        "decouple_lr": False,
        "max_lr": None,
        "kahan_sum": None,
        "triton": None,
        "gradient_release": False,
        "setup": False,
    }

    def begin(self, group: Group) -> None:
        if not group["setup"]:
            group["setup"], group["step"] = True, torch.tensor(0, dtype=torch.int32)
        group["step"].add_(1)

    def update(self, p: Tensor, g: Tensor, state: State, group: Group) -> None:
        first, second = zeros(state, p, "exp_avg", "exp_avg_sq")
        floor = state.setdefault("eps_sq", torch.tensor(group["eps"] ** 2, dtype=p.dtype))
        state.setdefault("kahan_comp", None)
        step = int(group["step"])
        beta1, beta2 = (1 - (1 - b) / (1 - b**step) for b in (group["beta1"], group["beta2"]))
        first.lerp_(g, 1 - beta1)
        second.lerp_(g.square(), 1 - beta2)
        rms = (g.square() / second.maximum(floor)).mean().sqrt()
        lr = group["lr"] / max(1.0, float(rms))
        share = lr / group["max_lr"] if group["decouple_lr"] else lr
        p.mul_(1 - share * group["weight_decay"])
        p.sub_(first / (second.sqrt() + group["eps"]), alpha=lr)


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


class CAME(Published):
    """Luo et al., arXiv 2307.02047: factored moments, and updates weighted by how far they agree with their average."""

    settings: ClassVar[Mapping[str, Any]] = {
        "eps": (1e-30, 1e-16),
        "clip_threshold": 1.0,
        "betas": (0.9, 0.999, 0.9999),
        "weight_decay": 0.0,
    }

    def update(self, p: Tensor, g: Tensor, state: State, group: Group) -> None:
        count(state)
        state["RMS"] = p.square().mean().sqrt()
        beta1, beta2, beta3 = group["betas"]
        up = g * self._inverse_root(g.square() + group["eps"][0], state, "exp_avg_sq", beta2)
        up /= (up.square().mean().sqrt() / group["clip_threshold"]).clamp(min=1.0)
        [average] = zeros(state, p, "exp_avg")
        average.lerp_(up, 1 - beta1)
        if p.dim() > 1:
            apart = (up - average).square() + group["eps"][1]
            up = average * self._inverse_root(apart, state, "exp_avg_res", beta3)
        else:
            up = average
        decay(p, group)
        p.sub_(up, alpha=group["lr"])

    @staticmethod
    def _inverse_root(square: Tensor, state: State, key: str, beta: float) -> Tensor:
        if square.dim() < 2:
            [second] = zeros(state, square, key)
            return second.lerp_(square, 1 - beta).rsqrt()
        rows = state.setdefault(f"{key}_row", torch.zeros_like(square[..., 0]))
        columns = state.setdefault(f"{key}_col", torch.zeros_like(square[..., 0, :]))
        rows.lerp_(square.mean(-1), 1 - beta)
        columns.lerp_(square.mean(-2), 1 - beta)
        share = (rows / rows.mean(-1, keepdim=True)).rsqrt()
        made: Tensor = share.unsqueeze(-1) * columns.unsqueeze(-2).rsqrt()
        return made


class AnyPrecisionAdamW(Published):
    """AdamW whose state has dtypes of its own, and whose additions are compensated for (Kahan)."""

    settings: ClassVar[Mapping[str, Any]] = {
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "use_kahan_summation": False,
        "momentum_dtype": None,
        "variance_dtype": None,
        "compensation_buffer_dtype": None,
    }

    def update(self, p: Tensor, g: Tensor, state: State, group: Group) -> None:
        first, second = zeros(state, p, "exp_avg", "exp_avg_sq")
        decay(p, group)
        up = -group["lr"] * adam(first, second, g, group, count(state))
        if not group["use_kahan_summation"]:
            p.add_(up)
            return
        [lost] = zeros(state, p, "compensation")
        lost.add_(up)
        before = p.clone()
        p.add_(lost)
        lost.add_(before - p)


class _Bitsandbytes(Published):
    """The names of bitsandbytes in 32 bits: state1 and state2."""

    settings: ClassVar[Mapping[str, Any]] = {
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "alpha": 0.0,
        "t_alpha": None,
        "t_beta3": None,
    }

    def __init__(
        self, params: Any, lr: float = 1e-3, optim_bits: int = 32, is_paged: bool = False, **settings: Any
    ) -> None:
        super().__init__(params, lr, **settings)
        self.optim_bits, self.is_paged = optim_bits, is_paged


class BnbAdamW(_Bitsandbytes):
    def update(self, p: Tensor, g: Tensor, state: State, group: Group) -> None:
        first, second = zeros(state, p, "state1", "state2")
        decay(p, group)
        p.sub_(adam(first, second, g, group, count(state)), alpha=group["lr"])


class BnbAdEMAMix(_Bitsandbytes):
    settings: ClassVar[Mapping[str, Any]] = {
        **_Bitsandbytes.settings,
        "betas": (0.9, 0.999, 0.9999),
        "alpha": 5.0,
    }

    def update(self, p: Tensor, g: Tensor, state: State, group: Group) -> None:
        both = state.setdefault("state1", torch.zeros((2, *p.shape), dtype=p.dtype))
        [second] = zeros(state, p, "state2")
        step, (beta1, beta2, beta3) = count(state), group["betas"]
        both[0].lerp_(g, 1 - beta1)
        both[1].lerp_(g, 1 - beta3)
        second.lerp_(g.square(), 1 - beta2)
        decay(p, group)
        up = both[0] / (1 - beta1**step) + group["alpha"] * both[1]
        p.sub_(up / ((second / (1 - beta2**step)).sqrt() + group["eps"]), alpha=group["lr"])


class BnbLion(_Bitsandbytes):
    settings: ClassVar[Mapping[str, Any]] = {"betas": (0.9, 0.99), "eps": 0.0, "weight_decay": 0.0}

    def update(self, p: Tensor, g: Tensor, state: State, group: Group) -> None:
        [average] = zeros(state, p, "state1")
        decay(p, group)
        p.sub_(average.lerp(g, 1 - group["betas"][0]).sign(), alpha=group["lr"])
        average.lerp_(g, 1 - group["betas"][1])


class BnbRMSprop(_Bitsandbytes):
    settings: ClassVar[Mapping[str, Any]] = {"betas": (0.99, 0), "eps": 1e-8, "weight_decay": 0.0}

    def update(self, p: Tensor, g: Tensor, state: State, group: Group) -> None:
        [second] = zeros(state, p, "state1")
        g = g.add(p, alpha=group["weight_decay"])
        second.lerp_(g.square(), 1 - group["betas"][0])
        p.sub_(g / (second.sqrt() + group["eps"]), alpha=group["lr"])


class TorchaoAdamW(Published):
    """torchao's AdamW where it does not quantise: tensors of fewer than 4096 entries."""

    settings: ClassVar[Mapping[str, Any]] = {
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-2,
        "amsgrad": False,
    }

    def __init__(self, params: Any, lr: float = 1e-3, **settings: Any) -> None:
        super().__init__(params, lr, **settings)
        for group in self.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float64)

    def update(self, p: Tensor, g: Tensor, state: State, group: Group) -> None:
        first, second = zeros(state, p, "exp_avg", "exp_avg_sq")
        p.mul_(1 - float(group["lr"]) * group["weight_decay"])
        p.sub_(adam(first, second, g, group, count(state)), alpha=float(group["lr"]))


ROWS: dict[type[Optimizer], str] = {
    Lion: "lion_pytorch.Lion",
    AdEMAMix: "pytorch_optimizer.AdEMAMix",
    ADOPT: "pytorch_optimizer.ADOPT",
    StableAdamW: "optimi.StableAdamW",
    SGDScheduleFree: "schedulefree.SGDScheduleFree",
    AdamWScheduleFree: "schedulefree.AdamWScheduleFree",
    RAdamScheduleFree: "schedulefree.RAdamScheduleFree",
    CAME: "came_pytorch.CAME",
    AnyPrecisionAdamW: "torchdistx.optimizers.AnyPrecisionAdamW",
    BnbAdamW: "bitsandbytes.optim.AdamW",
    BnbAdEMAMix: "bitsandbytes.optim.AdEMAMix",
    BnbLion: "bitsandbytes.optim.Lion",
    BnbRMSprop: "bitsandbytes.optim.RMSprop",
    TorchaoAdamW: "torchao.optim.AdamW8bit",
}
"""A class here -> the row of the registry that it has."""
