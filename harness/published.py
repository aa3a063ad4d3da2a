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

from .low_bit import BnbAdamW as BnbAdamW
from .low_bit import BnbAdEMAMix as BnbAdEMAMix
from .low_bit import BnbLion as BnbLion
from .low_bit import BnbRMSprop as BnbRMSprop
from .low_bit import TorchaoAdamW as TorchaoAdamW
from .schedule_free import AdamWScheduleFree as AdamWScheduleFree
from .schedule_free import RAdamScheduleFree as RAdamScheduleFree
from .schedule_free import SGDScheduleFree as SGDScheduleFree
from .written import Group, Published, State, adam, adamw, count, decay, lion, zeros


class Lion(Published):
    """Chen et al., arXiv 2302.06675."""

    settings: ClassVar[Mapping[str, Any]] = {"betas": (0.9, 0.99), "weight_decay": 0.0}

    def update(self, p: Tensor, g: Tensor, state: State, group: Group) -> None:
        lion(p, g, zeros(state, p, "exp_avg")[0], group)


class _Counted(Published):
    """One count of steps for each group, and decay that is decoupled or not."""

    def begin(self, group: Group) -> None:
        group["step"] = group.get("step", 0) + 1

    @staticmethod
    def decayed(p: Tensor, g: Tensor, group: Group) -> Tensor:
        if not group["weight_decouple"]:
            return g.add(p, alpha=group["weight_decay"])
        decay(p, group)
        return g


class AdEMAMix(_Counted):
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

    def update(self, p: Tensor, g: Tensor, state: State, group: Group) -> None:
        fast, slow, second = zeros(state, p, "exp_avg", "exp_avg_slow", "exp_avg_sq")
        beta1, beta2, beta3 = group["betas"]
        g = self.decayed(p, g, group)
        fast.lerp_(g, 1 - beta1)
        slow.lerp_(g, 1 - beta3)
        second.lerp_(g.square(), 1 - beta2)
        step = group["step"]
        up = fast / (1 - beta1**step) + group["alpha"] * slow
        p.sub_(up / ((second / (1 - beta2**step)).sqrt() + group["eps"]), alpha=group["lr"])


class ADOPT(_Counted):
    """Taniguchi et al., arXiv 2411.02853: gradients are divided by the moment before them, and clipped."""

    settings: ClassVar[Mapping[str, Any]] = {
        "betas": (0.9, 0.9999),
        "eps": 1e-6,
        "weight_decay": 0.0,
        "weight_decouple": False,
        "fixed_decay": False,
    }

    def update(self, p: Tensor, g: Tensor, state: State, group: Group) -> None:
        average, second = zeros(state, p, "exp_avg", "exp_avg_sq")
        g = self.decayed(p, g, group)
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


class FusedAdam(Published):
    """AdamW of Transformer Engine. The original counts steps in its groups, and can go without bias correction."""

    settings: ClassVar[Mapping[str, Any]] = {
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
    }

    def update(self, p: Tensor, g: Tensor, state: State, group: Group) -> None:
        adamw(p, g, state, group)


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
    FusedAdam: "transformer_engine.pytorch.optimizers.FusedAdam",
    BnbAdamW: "bitsandbytes.optim.AdamW",
    BnbAdEMAMix: "bitsandbytes.optim.AdEMAMix",
    BnbLion: "bitsandbytes.optim.Lion",
    BnbRMSprop: "bitsandbytes.optim.RMSprop",
    TorchaoAdamW: "torchao.optim.AdamW8bit",
}
"""A class here -> the row of the registry that it has."""
