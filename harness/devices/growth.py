"""Widening, upscaling, narrowing and certificates: with a loss, with example inputs, with neither."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import mupscale as mu
from harness.devices.case import Group
from harness.devices.models import (
    DEEPER,
    Attention,
    Residual,
    Tied,
    Trained,
    cnn,
    deep_mlp,
    deeper_plan,
    mlp,
    padded_plan,
    proved,
    rms_mlp,
    trained,
    trained_on_images,
    trained_on_tokens,
)
from mupscale.training.check.symmetry import awake

case = Group("growth")
Device = torch.device


def wide() -> nn.Module:
    return mlp(32)


def as_large() -> None:
    """Proofs of models that are too large for float64 copies."""
    import mupscale.training.grow.prove as prove

    assert hasattr(prove, "FLOAT64_BYTES")
    prove.FLOAT64_BYTES = 0


@case
def infer_plan(device: Device) -> Any:
    return mu.infer_plan(trained(device).run.model, wide).hash


@case(quick=True)
def infer_plan_with_loss(device: Device) -> Any:
    base = trained(device)
    return mu.infer_plan(base.run.model, wide, loss=base.loss).hash


@case
def infer_plan_with_example_inputs(device: Device) -> Any:
    base = trained(device)
    return mu.infer_plan(base.run.model, wide, example_inputs=(base.x,)).hash


@case(quick=True)
def infer_plan_of_own_attention(device: Device) -> Any:
    base = trained_on_tokens(device)
    return mu.infer_plan(base.run.model, lambda: Attention(16), loss=base.loss).hash


@case
def plan_between_own_attention(device: Device) -> Any:
    base = trained_on_tokens(device)
    return mu.plans.plan_between(lambda n: Attention(n).to(device), 8, 16, loss=base.loss).hash


@case
def plan_between_without_loss(device: Device) -> Any:
    return mu.plans.plan_between(lambda n: mlp(n).to(device), 8, 16).hash


@case
def verify_step(device: Device) -> Any:
    base = trained(device)
    found = mu.verify(base.run, wide, step=base.step)
    return found.holds, found.worst < 1e-9


@case(quick=True)
def verify_loss(device: Device) -> Any:
    base = trained(device)
    return mu.verify(base.run, wide, loss=base.loss).holds


@case
def verify_example_inputs(device: Device) -> Any:
    base = trained(device)
    return mu.verify(base.run, wide, example_inputs=(base.x,)).holds


@case
def verify_own_attention(device: Device) -> Any:
    base = trained_on_tokens(device)
    return mu.verify(base.run, lambda: Attention(16), step=base.step).holds


@case
def verify_two_runs(device: Device) -> Any:
    base = trained(device)
    return mu.verify(base.run, mu.grow(base.run, wide), step=base.step).holds


@case(quick=True)
def verify_float32(device: Device) -> Any:
    base = trained(device)
    return mu.verify(base.run, wide, step=base.step, dtype=torch.float32).holds


@case
def verify_float32_with_loss(device: Device) -> Any:
    base = trained(device)
    return mu.verify(base.run, wide, loss=base.loss, dtype=torch.float32).holds


@case
def verify_batches(device: Device) -> Any:
    base = trained(device)

    def step(run: mu.Run, batch: Any) -> Any:
        value = (run.model(batch) - 1).square().mean()
        run.optimizer.zero_grad()
        value.backward()
        run.optimizer.step()
        return value

    batches = [base.x[:8] + i for i in range(10)]
    return mu.verify(base.run, wide, step=step, batches=batches).holds


@case
def verify_a_wrong_run(device: Device) -> Any:
    """Control: on both devices a run with one weight changed does not hold."""
    base = trained(device)
    wrong = mu.grow(base.run, wide)
    with torch.no_grad():
        next(iter(wrong.model.parameters()))[0, 0] += 0.1
    return mu.verify(base.run, wrong, step=base.step).holds


@case
def grow(device: Device) -> Any:
    base = trained(device)
    grown = mu.grow(base.run, wide)
    return grown, base.steps(grown, 3)


@case(quick=True)
def grow_with_loss(device: Device) -> Any:
    base = trained(device)
    grown = mu.grow(base.run, wide, loss=base.loss)
    return proved(grown), base.steps(grown, 3)


@case
def grow_with_example_inputs(device: Device) -> Any:
    base = trained(device)
    return proved(mu.grow(base.run, wide, example_inputs=(base.x,)))


@case
def grow_own_attention_with_loss(device: Device) -> Any:
    base = trained_on_tokens(device)
    return proved(mu.grow(base.run, lambda: Attention(16), loss=base.loss))


@case
def grow_own_attention_with_example_inputs(device: Device) -> Any:
    base = trained_on_tokens(device)
    return proved(mu.grow(base.run, lambda: Attention(16), example_inputs=(base.x,)))


@case
def grow_a_large_model_with_loss(device: Device) -> Any:
    as_large()
    base = trained(device)
    return proved(mu.grow(base.run, wide, loss=base.loss))


@case
def grow_by_a_plan_with_loss(device: Device) -> Any:
    base = trained(device)
    return proved(mu.grow(base.run, wide, plan=mu.plans.plan_between(mlp, 16, 32), loss=base.loss))


@case
def grow_by_a_plan_of_the_cpu(device: Device) -> Any:
    base = trained_on_tokens(device)
    ids = base.x.cpu()
    plan = mu.plans.plan_between(Attention, 8, 16, loss=lambda m: m(ids).square().mean())
    return proved(mu.grow(base.run, lambda: Attention(16), plan=plan))


@case
def grow_a_model_without_optimizer(device: Device) -> Any:
    return mu.grow(trained(device).run.model, wide).model


@case
def loss_that_makes_tensors_on_the_device(device: Device) -> Any:
    base = trained(device)

    def loss(model: nn.Module) -> Any:
        mask = torch.ones(64, 1, device=device)
        off = model(base.x.to(device)) - torch.zeros(1, device=device)
        return (off * mask).float().square().mean()

    return proved(mu.grow(base.run, wide, loss=loss))


@case
def loss_with_a_batch_in_a_closure_and_an_attribute(device: Device) -> Any:
    base = trained(device)

    class Data:
        x, y = base.x, base.x.sum(1, keepdim=True)

    return proved(mu.grow(base.run, wide, loss=lambda m: (m(Data.x) - Data.y).square().mean()))


@case
def loss_that_moves_its_batch_to_the_model(device: Device) -> Any:
    base = trained(device)
    rows = base.x.cpu()
    return proved(mu.grow(base.run, wide, loss=lambda m: m(rows.to(next(m.parameters()))).square().mean()))


@case(quick=True)
def upscale_with_loss(device: Device) -> Any:
    """The README's own line: new units, proved by the loss."""
    base = trained(device, steps=20)
    return proved(mu.upscale(base.run, lambda: mlp(64), loss=base.loss))


@case
def upscale_by_copies_with_loss(device: Device) -> Any:
    """The noise is found by the loss."""
    base = trained(device, steps=20)
    return proved(mu.upscale(base.run, lambda: mlp(64), by="copies", loss=base.loss))


@case
def upscale_with_auto_noise(device: Device) -> Any:
    base = trained(device, steps=20)
    return proved(mu.upscale(base.run, lambda: mlp(64), mu.AutoNoise(steps=400), loss=base.loss))


@case
def upscale_a_large_model_with_loss(device: Device) -> Any:
    as_large()
    base = trained(device, steps=20)
    return proved(mu.upscale(base.run, lambda: mlp(64), loss=base.loss))


@case
def upscale_a_large_model_made_on_the_device(device: Device) -> Any:
    as_large()
    base = trained(device, steps=20)

    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32, device=device), nn.GELU(), nn.Linear(32, 1, device=device))

    return proved(mu.upscale(base.run, made, mu.AutoNoise(untrained=2.0), loss=base.loss))


@case
def upscale_a_large_model_with_dropout(device: Device) -> Any:
    as_large()

    def make(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Dropout(0.0), nn.Linear(width, 1))

    base = trained(device, make, steps=20)
    return proved(mu.upscale(base.run, lambda: make(32), mu.SignalNoise(0.05), loss=base.loss))


NOISES = {
    "signal": mu.SignalNoise(0.05),
    "signal, vectors too": mu.SignalNoise(0.05, vectors=True),
    "mup": mu.MupNoise(0.1),
    "paired": mu.PairedNoise(0.1),
    "paired by t": mu.PairedNoise(t=0.05),
}
for label, noise in NOISES.items():

    @case(name=f"upscale with {label} noise", quick=label in ("signal, vectors too", "paired by t"))
    def _(device: Device, noise: Any = noise) -> Any:
        base = trained(device, deep_mlp)
        grown = mu.upscale(base.run, lambda: deep_mlp(32), noise, seed=0)
        return proved(grown), base.steps(grown, 3)


@case
def upscale_with_noise_and_loss(device: Device) -> Any:
    base = trained(device, steps=20)
    return proved(mu.upscale(base.run, lambda: mlp(64), mu.SignalNoise(0.05), loss=base.loss))


@case
def upscale_with_since_and_lr(device: Device) -> Any:
    base = trained(device, deep_mlp)
    run = mu.Run(base.run.model, base.run.optimizers, since=mu.plans.plan_between(deep_mlp, 64, 16))
    return mu.upscale(run, lambda: deep_mlp(32), mu.MupNoise(0.3), lr=1e-3)


@case
def add_noise(device: Device) -> Any:
    return mu.add_noise(mu.grow(trained(device).run, wide), mu.SignalNoise(0.05), seed=3)


@case(quick=True)
def narrow(device: Device) -> Any:
    base = trained(device)
    grown = mu.upscale(base.run, wide, mu.SignalNoise(0.05))
    base.steps(grown, 1)
    return mu.narrow(grown, lambda: mlp(16))


def _deeper(base: Trained, plan: mu.Plan) -> Any:
    grown = mu.upscale(base.run, lambda: Residual(3), mu.SignalNoise(0.05), plan=plan)
    return grown, base.steps(grown), awake(grown)


@case(quick=True)
def deeper(device: Device) -> Any:
    base = trained(device, Residual, 2)
    plan = mu.infer_plan(base.run.model, lambda: Residual(3), loss=base.loss, order=DEEPER)
    return plan.hash, _deeper(base, plan)


@case
def deeper_by_a_plan_of_the_cpu(device: Device) -> Any:
    base = trained(device, Residual, 2)
    return _deeper(base, deeper_plan(base.x))


@case
def deeper_without_noise(device: Device) -> Any:
    base = trained(device, Residual, 2)
    grown = mu.grow(base.run, lambda: Residual(3), plan=deeper_plan(base.x))
    return grown, base.steps(grown)


@case
def deeper_verified(device: Device) -> Any:
    base = trained(device, Residual, 2)
    plan = deeper_plan(base.x)
    return mu.verify(base.run, lambda: Residual(3), step=base.step, plan=plan, steps=3).holds


@case(quick=True)
def padded(device: Device) -> Any:
    base = trained(device, rms_mlp)
    plan = mu.infer_plan(base.run.model, lambda: rms_mlp(24), loss=base.loss, by="padded")
    return plan.hash


@case
def padded_by_a_plan_of_the_cpu(device: Device) -> Any:
    base = trained(device, rms_mlp)
    grown = mu.upscale(base.run, lambda: rms_mlp(24), mu.SignalNoise(0.05), plan=padded_plan(base.x))
    return grown, base.steps(grown), awake(grown)


@case(quick=True)
def tied(device: Device) -> Any:
    base = trained_on_tokens(device, Tied)
    grown = mu.upscale(base.run, lambda: Tied(16), mu.SignalNoise(0.05), loss=base.loss)
    return (
        proved(grown),
        base.steps(grown, 1),
        grown.model.get_parameter("read.weight") is grown.model.get_parameter("embed.weight"),
    )


@case
def tied_behind_a_plus_one_norm(device: Device) -> Any:
    base = trained_on_tokens(device, lambda n: Tied(n, plus_one=True))
    plan = mu.infer_plan(base.run.model, lambda: Tied(16, plus_one=True), loss=base.loss)
    return plan.hash, {name: str(tensor.change.s) for name, tensor in plan.tensors.items()}


@case
def convolutions_and_batch_norm(device: Device) -> Any:
    base = trained_on_images(device)
    grown = mu.grow(base.run, lambda: cnn(8))
    return grown, base.steps(grown)


@case
def convolutions_with_loss(device: Device) -> Any:
    base = trained_on_images(device)
    return proved(mu.upscale(base.run, lambda: cnn(8), mu.SignalNoise(0.05), loss=base.loss))


@case
def convolutions_verified(device: Device) -> Any:
    base = trained_on_images(device)
    return mu.verify(base.run, lambda: cnn(8), step=base.step, steps=3).holds
