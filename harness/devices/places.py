"""Where tensors are: averages, buffers kept on the CPU, two devices, the current device, random states, the default device, dtypes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mupscale as mu
from harness import pretend_device
from harness.devices.case import Group
from harness.devices.models import (
    Split,
    TableOnCpu,
    Trained,
    adamw,
    dropout_mlp,
    mlp,
    proved,
    stepping,
    trained,
    trained_beside_a_table,
)
from mupscale.training.check.symmetry import noise_shares, symmetry

case = Group("places")
Device = torch.device


def wide() -> nn.Module:
    return mlp(32)


def _averaged(run: mu.Run, average: Any) -> mu.Run:
    grown = mu.upscale(mu.Run(run.model, run.optimizer, ema=average), wide, mu.SignalNoise(0.05))
    if isinstance(grown.ema, AveragedModel):
        grown.ema.update_parameters(grown.model)
    return grown


@case(on_cpu=("*.n_averaged",))  # torch counts averages on the CPU
def average_on_the_device(device: Device) -> Any:
    run = trained(device).run
    average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(run.model)
    average.update_parameters(run.model)
    return _averaged(run, average)


@case(on_cpu=("*.ema.*",))
def average_on_the_cpu(device: Device) -> Any:
    run = trained(device).run
    average = AveragedModel(run.model, device=torch.device("cpu"))
    average.update_parameters(run.model)
    return _averaged(run, average)


@case
def average_as_a_dict(device: Device) -> Any:
    run = trained(device).run
    held = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    return _averaged(run, {**held, "updates": torch.tensor(3, device=device)})


@case(on_cpu=("*.table",))
def table_on_the_cpu(device: Device) -> Any:
    base = trained_beside_a_table(device)
    grown = mu.grow(base.run, lambda: TableOnCpu(32), prove=False)
    return grown, base.steps(grown, 1)


@case(on_cpu=("*.table",), quick=True)
def table_on_the_cpu_with_loss(device: Device) -> Any:
    base = trained_beside_a_table(device)
    grown = mu.grow(base.run, lambda: TableOnCpu(32), loss=base.loss)
    return grown, base.steps(grown, 1)


@case
def table_on_the_cpu_verified(device: Device) -> Any:
    base = trained_beside_a_table(device)
    return mu.verify(base.run, lambda: TableOnCpu(32), step=base.step).holds


@case(quick=True)
def model_over_two_devices(device: Device) -> Any:
    places = ("cpu", "cpu") if device.type == "cpu" else ("pretend:0", "pretend:1")
    torch.manual_seed(0)
    model, x = Split(16), torch.randn(64, 8).to(places[0])
    model.first.to(places[0])
    model.hidden.to(places[1])
    model.last.to(places[1])
    run, step = mu.Run(model, adamw(model.parameters())), stepping(lambda m: m(x).square().mean())
    step(run, 0)
    holds = mu.verify(run, lambda: Split(32), step=step).holds
    grown = mu.upscale(run, lambda: Split(32), mu.SignalNoise(0.05), loss=lambda m: m(x).square().mean())
    step(grown, 1)
    weights = grown.model.state_dict()
    kept = {name: str(w.device) == places[not name.startswith("first")] for name, w in weights.items()}
    return holds, kept, {name: w.to(device) for name, w in weights.items()}


@case(device="pretend:1")
def second_device(device: Device) -> Any:
    base = trained(device)
    grown = mu.upscale(base.run, wide, mu.SignalNoise(0.05))
    return grown, base.steps(grown), mu.verify(base.run, wide, step=base.step).holds


@case(device="pretend:1", quick=True)
def second_device_with_loss(device: Device) -> Any:
    base = trained(device, steps=20)
    return proved(mu.upscale(base.run, wide, loss=base.loss))


@case(device="pretend:0")
def another_device_is_the_current_one(device: Device) -> Any:
    pretend_device.set_device(1)
    base = trained(device, steps=20)
    grown = mu.upscale(base.run, wide, loss=base.loss)
    return proved(grown), base.steps(grown)


@case(quick=True)
def random_states_are_kept(device: Device) -> Any:
    base = trained(device, dropout_mlp, steps=3)
    torch.manual_seed(5)
    before = [*pretend_device.rng_states(), torch.get_rng_state()]
    mu.verify(base.run, lambda: dropout_mlp(32), step=base.step, steps=2)
    grown = mu.upscale(base.run, lambda: dropout_mlp(32), mu.SignalNoise(0.05))
    noise_shares(base.run, grown)
    after = [*pretend_device.rng_states(), torch.get_rng_state()]
    return [torch.equal(a, b) for a, b in zip(before, after, strict=True)]


@case
def generator_in_the_model(device: Device) -> Any:
    class Drawing(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.net, self.draws = mlp(width), torch.Generator(device)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            value: torch.Tensor = self.net(x)
            return value

    base = trained(device, Drawing)
    return mu.grow(base.run, lambda: Drawing(32), example_inputs=(base.x,))


@case(asks_float64="the model is float64")
def float64_model(device: Device) -> Any:
    base = trained(device, dtype=torch.float64)
    grown = mu.grow(base.run, wide)
    return grown, base.steps(grown)


@case(asks_float64="the model is float64")
def float64_model_with_loss(device: Device) -> Any:
    base = trained(device, dtype=torch.float64, steps=20)
    return proved(mu.upscale(base.run, wide, loss=base.loss))


def _moved(device: Device, dtype: torch.dtype) -> Trained:
    """A run that was trained on the CPU, so that both devices grow the same: half precision rounds after every sum."""
    base = trained("cpu", dtype=dtype, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4), steps=15)
    state, model = base.run.optimizer.state_dict(), base.run.model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    optimizer.load_state_dict(state)
    x = base.x.to(device)

    def loss(model: nn.Module) -> Any:
        return (model(x) - x.sum(1, keepdim=True).tanh()).square().mean()

    return Trained(mu.Run(model, optimizer), loss, stepping(loss), x)


for dtype in (torch.bfloat16, torch.float16):
    label = str(dtype).removeprefix("torch.")

    @case(name=f"{label} run")
    def _(device: Device, dtype: torch.dtype = dtype) -> Any:
        run = _moved(device, dtype).run
        grown = [mu.upscale(run, wide, noise) for noise in (mu.SignalNoise(0.05), mu.PairedNoise(t=0.05))]
        return grown, mu.narrow(mu.grow(run, wide), lambda: mlp(16))

    @case(name=f"{label} run with loss", quick=dtype == torch.bfloat16)
    def _(device: Device, dtype: torch.dtype = dtype) -> Any:
        base = _moved(device, dtype)
        return proved(mu.upscale(base.run, wide, loss=base.loss))

    @case(name=f"{label} run verified")
    def _(device: Device, dtype: torch.dtype = dtype) -> Any:
        base = _moved(device, dtype)
        return mu.verify(base.run, wide, step=base.step).holds


@case(bound=1e-2, differs="autocast computes in bfloat16, whose rounding is 4e-3")
def autocast(device: Device) -> Any:
    base = trained(device)

    def loss(model: nn.Module) -> Any:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return (model(base.x) - 1).float().square().mean()

    step = stepping(loss)
    grown = mu.grow(base.run, wide)
    losses = [step(grown, i) for i in range(2)]
    return losses, mu.verify(base.run, wide, step=step, steps=2).holds


default = Group("default device")


@contextlib.contextmanager
def as_default(device: Device) -> Iterator[None]:
    """`torch.set_default_device`, on the CPU too, where it changes nothing."""
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@default
def grow(device: Device) -> Any:
    with as_default(device):
        base = trained(device)
        grown = mu.grow(base.run, wide)
        return grown, base.steps(grown, 1)


@default(quick=True)
def upscale_with_loss(device: Device) -> Any:
    with as_default(device):
        base = trained(device, steps=20)
        return proved(mu.upscale(base.run, wide, loss=base.loss))


@default
def infer_plan_with_loss(device: Device) -> Any:
    with as_default(device):
        base = trained(device)
        return mu.infer_plan(base.run.model, wide, loss=base.loss).hash


@default
def infer_plan_with_example_inputs(device: Device) -> Any:
    with as_default(device):
        base = trained(device)
        return mu.infer_plan(base.run.model, wide, example_inputs=(base.x,)).hash


@default
def verify(device: Device) -> Any:
    with as_default(device):
        base = trained(device)
        return mu.verify(base.run, wide, step=base.step).holds


@default(quick=True)
def upscale_with_signal_noise(device: Device) -> Any:
    with as_default(device):
        return mu.upscale(trained(device).run, wide, mu.SignalNoise(0.05))


@default
def upscale_with_paired_noise(device: Device) -> Any:
    with as_default(device):
        return mu.upscale(trained(device).run, wide, mu.PairedNoise(t=0.05))


@default
def init_from_a_model(device: Device) -> Any:
    with torch.device("cpu"):
        torch.manual_seed(0)
        reference, model = mlp(16).to(device), mlp(64).to(device)
    with as_default(device):
        mu.init_weights_(model, mu.plans.plan_between(mlp, 16, 64), std=reference, seed=1)
    return model


@default(on_cpu=("*",), quick=True)
def model_on_the_cpu(device: Device) -> Any:
    with as_default(device):
        base = trained("cpu", steps=20)
        return proved(mu.upscale(base.run, wide, loss=base.loss))


@default
def check_optimizer(device: Device) -> Any:
    with as_default(device):
        return mu.rules.check_optimizer(lambda p: torch.optim.AdamW(p, lr=1e-2)) < 1e-9


@default
def state_dicts(device: Device) -> Any:
    with as_default(device):
        run, plan = trained(device).run, mu.plans.plan_between(mlp, 16, 32)
        names = [name for name, _ in run.model.named_parameters()]
        state = run.optimizer.state_dict()
        optimizer = mu.trainers.grow_optimizer_state_dict(state, plan, torch.optim.AdamW, names=names)
        return mu.trainers.grow_state_dict(run.model.state_dict(), plan), optimizer["state"]


@default
def symmetry_and_noise_shares(device: Device) -> Any:
    with as_default(device):
        base = trained(device)
        grown = mu.upscale(base.run, wide, mu.MupNoise(0.1))
        return symmetry(grown), noise_shares(base.run, grown)


@default
def clip(device: Device) -> Any:
    with as_default(device):
        base = trained(device)
        mu.clip_before_step_(base.run.optimizer, base.run, max_norm=0.05)
        grown = mu.grow(base.run, wide)
        return grown, base.steps(grown, 1)
