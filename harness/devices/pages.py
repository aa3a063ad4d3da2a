"""What the first pages print, with the model and its batch on the device; tests/devices runs the pages themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import mupscale as mu
from harness.devices.case import Group
from harness.devices.models import deep_mlp, mlp, proved, stepping, trained
from mupscale.training.check.symmetry import noise_shares, symmetry

case = Group("pages")
Device = torch.device


@case(quick=True)
def readme(device: Device) -> Any:
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0)).to(device)
    model = mlp(64).to(device)

    def loss(model: nn.Module) -> Any:
        return (model(x) - x.sum(1, keepdim=True).tanh()).square().mean()

    run, step = mu.Run(model, torch.optim.AdamW(model.parameters(), lr=1e-3)), stepping(loss)
    for i in range(20):
        step(run, i)
    holds = mu.verify(run, lambda: mlp(256), step=step).holds
    grown = mu.upscale(run, lambda: mlp(256), loss=loss)
    return holds, proved(grown), [step(grown, i) for i in range(5)]


@case
def tutorial(device: Device) -> Any:
    def make(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 2))

    model = make(16).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    run = mu.Run(model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100))

    def step(run: mu.Run, i: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(32, 8, generator=generator).to(next(run.model.parameters()))
        return stepping(lambda m: (m(x) - x[:, :2]).square().mean())(run, i)

    for i in range(20):
        step(run, i)
    mu.verify(run, lambda: make(48), step=step).raise_if_broken()
    wide = mu.grow(run, lambda: make(48))
    torch.testing.assert_close(step(run, 20), step(wide, 20))
    noisy = mu.upscale(run, lambda: make(48), mu.SignalNoise(0.05), seed=0)
    return wide, mu.narrow(wide, lambda: make(16)), noisy


@case
def upscale_page(device: Device) -> Any:
    base = trained(device, deep_mlp, 32, steps=30)
    wide = mu.upscale(base.run, lambda: deep_mlp(128), mu.MupNoise(sigma=0.1), seed=0)
    shares = noise_shares(base.run, wide)
    base.steps(wide, 5)
    apart = symmetry(wide)
    sigmas = wide.provenance["noise"]["sigmas"]
    again = mu.upscale(base.run, lambda: deep_mlp(128), mu.MupNoise(sigmas), seed=1)
    return shares, apart, again


@case
def upscale_page_with_auto_noise(device: Device) -> Any:
    base = trained(device, deep_mlp, 32, steps=30)
    return proved(mu.upscale(base.run, lambda: deep_mlp(128), mu.AutoNoise(steps=400), loss=base.loss))
