"""Every optimizer of torch that the library has a rule for: grown with noise and trained on, and certified."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn, optim

import mupscale as mu
from harness.devices.case import Group
from harness.devices.models import MakeOptimizer, adamw, deep_mlp, mlp, stepping, trained

case = Group("optimizers")
Device = torch.device
Parameters = Iterable[nn.Parameter]
SUMS = "the optimizer's kernels for several tensors and for one add in another order"
CAPTURABLE = (
    "capturable on the device, which the CPU does not have: corrections of the bias are float32 tensors there"
)
BOUNDS = {
    "NAdam": (1e-5, SUMS),
    "RAdam": (1e-5, SUMS),
    "ASGD": (1e-5, SUMS),
    "AdamW capturable": (1e-3, CAPTURABLE),
    "NAdam capturable": (1e-3, CAPTURABLE),
}
"""The optimizers whose results may differ by more than rounding, with the reason."""


def _capturable(kind: type[optim.Optimizer]) -> MakeOptimizer:
    def made(parameters: Parameters) -> optim.Optimizer:
        held = list(parameters)
        options: dict[str, Any] = {"lr": 1e-2, "capturable": held[0].device.type != "cpu"}
        return kind(held, **options)

    return made


def _made(kind: type[optim.Optimizer], **options: Any) -> MakeOptimizer:
    return lambda parameters: kind(parameters, **{"lr": 1e-2, **options})


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW single": _made(optim.AdamW, foreach=False),
    "AdamW foreach": _made(optim.AdamW, foreach=True),
    "AdamW fused": _made(optim.AdamW, fused=True),
    "AdamW capturable": _capturable(optim.AdamW),
    "AdamW amsgrad": _made(optim.AdamW, amsgrad=True),
    "SGD": _made(optim.SGD, momentum=0.9),
    "SGD fused": _made(optim.SGD, momentum=0.9, fused=True),
    "Adafactor": _made(optim.Adafactor, eps=(1e-30, 1e-3)),
    "NAdam": _made(optim.NAdam),
    "NAdam capturable": _capturable(optim.NAdam),
    "RAdam": _made(optim.RAdam),
    "RMSprop": _made(optim.RMSprop),
    "Adagrad": _made(optim.Adagrad),
    "Adagrad fused": _made(optim.Adagrad, fused=True),
    "Adadelta": _made(optim.Adadelta, lr=1.0),
    "Adamax": _made(optim.Adamax),
    "ASGD": _made(optim.ASGD),
    "Rprop": _made(optim.Rprop),
}
# NAdam counts a product besides its steps, on the CPU like them.
for label, make in OPTIMIZERS.items():
    bound, reason = BOUNDS.get(label, (1e-6, ""))

    @case(
        name=f"upscale {label}",
        bound=bound,
        differs=reason,
        on_cpu=("*.mu_product",),
        quick=label in ("AdamW fused", "Adafactor"),
    )
    def _(device: Device, make: MakeOptimizer = make) -> Any:
        base = trained(device, optimizer=make)
        grown = mu.upscale(base.run, lambda: mlp(32), mu.SignalNoise(0.05))
        return grown, base.steps(grown, 3)

    @case(name=f"verify {label}")
    def _(device: Device, make: MakeOptimizer = make) -> Any:
        base = trained(device, optimizer=make)
        return mu.verify(base.run, lambda: mlp(32), step=base.step, steps=4).holds


@case
def Muon_with_AdamW(device: Device) -> Any:  # noqa: N802 - the names of the optimizers
    torch.manual_seed(0)
    x, model = torch.randn(64, 8).to(device), deep_mlp(16).to(device)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    run = mu.Run(model, [optim.Muon(matrices, lr=1e-2), optim.AdamW(others, lr=1e-2)])
    step = stepping(lambda m: (m(x) - 1).square().mean())
    for i in range(3):
        step(run, i)
    grown = mu.upscale(run, lambda: deep_mlp(32), mu.SignalNoise(0.05))
    return grown, [step(grown, i) for i in range(2)]


@case
def step_stays_where_the_base_has_it(device: Device) -> Any:
    places = []
    for make in (OPTIMIZERS["AdamW single"], OPTIMIZERS["AdamW fused"], OPTIMIZERS["AdamW capturable"]):
        base = trained(device, optimizer=make).run
        grown = mu.grow(base, lambda: mlp(32))
        before, after = (
            {state["step"].device for state in run.optimizer.state.values()} for run in (base, grown)
        )
        places.append(before == after)
    return places


@case
def lr_as_a_tensor_on_the_device(device: Device) -> Any:
    def make(parameters: Parameters) -> optim.Optimizer:
        return optim.AdamW(parameters, lr=torch.tensor(1e-2, device=device), foreach=False)

    base = trained(device, optimizer=make)
    grown = mu.grow(base.run, lambda: mlp(32))
    mu.set_lr_(grown.optimizer, 2e-3)
    return grown, base.steps(grown)


@case(on_cpu=("*.lr",))
def lr_as_a_tensor_on_the_cpu(device: Device) -> Any:
    def make(parameters: Parameters) -> optim.Optimizer:
        return optim.AdamW(parameters, lr=torch.tensor(1e-2, device="cpu"), foreach=False)

    base = trained(device, optimizer=make)
    grown = mu.grow(base.run, lambda: mlp(32))
    return grown, base.steps(grown)


@case
def state_loaded_from_the_cpu(device: Device) -> Any:
    """`load_state_dict` of a checkpoint that was read with `map_location="cpu"`."""
    base = trained(device)
    on_cpu = torch.utils._pytree.tree_map(
        lambda v: v.cpu() if isinstance(v, torch.Tensor) else v, base.run.optimizer.state_dict()
    )
    optimizer = adamw(base.run.model.parameters())
    optimizer.load_state_dict(on_cpu)
    grown = mu.grow(mu.Run(base.run.model, optimizer), lambda: mlp(32))
    return grown, base.steps(grown, 1)


@case
def check_optimizer(device: Device) -> Any:
    return mu.rules.check_optimizer(lambda p: optim.AdamW(p, lr=1e-2)) < 1e-9
