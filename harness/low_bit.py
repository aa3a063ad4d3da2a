"""The classes of bitsandbytes, in 32 and 8 bits, and of torchao, written from their published descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from .written import Group, Published, State, adamw, count, decay, lion, zeros

BLOCK, SMALLEST = 256, 4096
"""Of bitsandbytes in 8 bits: how many neighbours share a scale, and the entries from which a tensor is quantised."""


def dynamic_map(signed: bool) -> Tensor:
    """Dettmers et al., arXiv 2110.02861: seven decades, each with twice the numbers of the one below it."""
    found = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        means = (10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2).tolist()
        found += means + [-mean for mean in means if signed]
    return torch.tensor(sorted(found))


def quantise(values: Tensor, table: Tensor, stack: int = 0) -> tuple[Tensor, Tensor]:
    """Codes and one scale per block; a stack of tensors is quantised one by one."""
    if stack:
        both = [quantise(part, table) for part in values]
        return torch.stack([codes for codes, _ in both]), torch.stack([scales for _, scales in both])
    flat = torch.cat([values.reshape(-1).float(), torch.zeros(-values.numel() % BLOCK)]).reshape(-1, BLOCK)
    scales = flat.abs().amax(1)
    units = flat / scales.clamp(min=1e-38).unsqueeze(1)
    codes = (units.unsqueeze(-1) - table).abs().argmin(-1).to(torch.uint8)
    return codes.reshape(-1)[: values.numel()].reshape(values.shape), scales


def dequantise(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    rows = scales.reshape(-1, scales.shape[-1]).repeat_interleave(BLOCK, 1)[
        :, : codes.numel() // scales[..., 0].numel()
    ]
    return table[codes.long()] * rows.reshape(codes.shape)


class _Bitsandbytes(Published):
    """The names of bitsandbytes: state1 and state2, and in 8 bits a scale per block and a table for each."""

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

    def update(self, p: Tensor, g: Tensor, state: State, group: Group) -> None:
        # Which of the two is decided when the state is made; later steps keep to what they find.
        small = p.numel() < SMALLEST if "state1" not in state else "absmax1" not in state
        if self.optim_bits != 8 or small:
            return self.update_in_32_bits(p, g, state, group)
        opened = {key: value for key, value in state.items() if key == "step"}
        for i in (i for i in "12" if f"state{i}" in state):
            opened[f"state{i}"] = dequantise(*(state[f"{part}{i}"] for part in ("state", "absmax", "qmap")))
        self.update_in_32_bits(p, g, opened, group)
        for key, value in opened.items():
            if key == "step":
                state[key] = value
                continue
            table = state.setdefault(f"qmap{key[-1]}", dynamic_map(signed=key == "state1"))
            state[key], state[f"absmax{key[-1]}"] = quantise(value, table, value.dim() - p.dim())
        return None

    def update_in_32_bits(self, p: Tensor, g: Tensor, state: State, group: Group) -> None:
        raise NotImplementedError


class BnbAdamW(_Bitsandbytes):
    def update_in_32_bits(self, p: Tensor, g: Tensor, state: State, group: Group) -> None:
        adamw(p, g, state, group, "state1", "state2")


class BnbAdEMAMix(_Bitsandbytes):
    settings: ClassVar[Mapping[str, Any]] = {
        **_Bitsandbytes.settings,
        "betas": (0.9, 0.999, 0.9999),
        "alpha": 5.0,
    }

    def update_in_32_bits(self, p: Tensor, g: Tensor, state: State, group: Group) -> None:
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

    def update_in_32_bits(self, p: Tensor, g: Tensor, state: State, group: Group) -> None:
        lion(p, g, zeros(state, p, "state1")[0], group)


class BnbRMSprop(_Bitsandbytes):
    settings: ClassVar[Mapping[str, Any]] = {"betas": (0.99, 0), "eps": 1e-8, "weight_decay": 0.0}

    def update_in_32_bits(self, p: Tensor, g: Tensor, state: State, group: Group) -> None:
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
        adamw(p, g, state, {**group, "lr": float(group["lr"])})
