"""Factories of wide models as people write them; every grown run is where its base is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import mupscale as mu
from harness.devices.case import Group
from harness.devices.models import TOKENS, Attention, mlp, trained, trained_on_tokens

case = Group("factories")
Device = torch.device


@case(quick=True)
def ends_in_to_device(device: Device) -> Any:
    return mu.grow(trained(device).run, lambda: mlp(32).to(device))


@case
def ends_in_to_device_with_loss(device: Device) -> Any:
    base = trained(device)
    return mu.grow(base.run, lambda: mlp(32).to(device), loss=base.loss)


@case
def ends_in_to_dtype(device: Device) -> Any:
    return mu.grow(trained(device).run, lambda: mlp(32).to(torch.float32))


@case
def ends_in_to_device_and_dtype(device: Device) -> Any:
    base = trained(device, dtype=torch.bfloat16, steps=0)
    return mu.grow(base.run.model, lambda: mlp(32).to(device, torch.bfloat16)).model


@case
def ends_in_cpu(device: Device) -> Any:
    return mu.grow(trained(device).run, lambda: mlp(32).cpu())


@case
def own_attention_to_device(device: Device) -> Any:
    base = trained_on_tokens(device)
    return mu.grow(base.run, lambda: Attention(16).to(device), loss=base.loss)


@case
def layers_moved_one_by_one(device: Device) -> Any:
    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32).to(device), nn.GELU(), nn.Linear(32, 1).to(device))

    return mu.grow(trained(device).run, made)


@case
def under_torch_device(device: Device) -> Any:
    def made() -> nn.Module:
        with torch.device(device):
            return mlp(32)

    return mu.grow(trained(device).run, made)


@case
def with_the_keyword_device(device: Device) -> Any:
    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32, device=device), nn.GELU(), nn.Linear(32, 1, device=device))

    return mu.grow(trained(device).run, made)


@case
def module_on_the_device(device: Device) -> Any:
    return mu.grow(trained(device).run, mlp(32).to(device))


@case
def module_on_the_cpu(device: Device) -> Any:
    return mu.grow(trained(device).run, mlp(32))


@case
def module_on_the_device_with_loss(device: Device) -> Any:
    base = trained(device)
    return mu.grow(base.run, mlp(32).to(device), loss=base.loss)


class Averaged(nn.Module):
    """Buffers made from parameters, as in `LitEma`, and a mask made from one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 1)
        self.register_buffer("average", self.first.weight.detach().clone())
        self.register_buffer("mask", torch.ones_like(self.first.bias))

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.last(torch.tanh(self.first(x)) * self.get_buffer("mask"))
        return value


@case
def buffers_made_from_parameters(device: Device) -> Any:
    base = trained(device, Averaged)
    return mu.grow(base.run, lambda: Averaged(32).to(device), loss=base.loss)


def pruned(width: int) -> nn.Module:
    model = mlp(width)
    assert isinstance(model, nn.Sequential)
    prune.identity(model[0], "weight")
    return model


@case
def pruned_layers(device: Device) -> Any:
    base = trained(device, pruned, steps=2)
    return mu.grow(base.run, lambda: pruned(32).to(device), loss=base.loss)


class Embedded(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.read = nn.Embedding(TOKENS, width, padding_idx=0), nn.Linear(width, 3)

    def forward(self, ids: Tensor) -> Tensor:
        value: Tensor = self.read(self.embed(ids))
        return value


@case
def embedding_with_a_padding_row(device: Device) -> Any:
    with torch.device("cpu"):
        plan = mu.plans.plan_between(Embedded, 8, 16, example_inputs=(torch.arange(TOKENS)[None],))
        model = Embedded(16).to(device)
    mu.init_weights_(model, plan, std={"*": 0.1}, seed=1)
    return model
