"""The 32-bit classes of bitsandbytes and torchao, written from their published descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from .written import Group, Published, State, adam, count, decay, zeros


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
