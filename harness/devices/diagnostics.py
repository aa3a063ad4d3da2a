"""Reports, norms, initialisation, parameter groups and files: what is called besides growth."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import nn

import mupscale as mu
from harness.devices.case import Group
from harness.devices.models import (
    Residual,
    Trained,
    deeper_plan,
    mlp,
    padded_plan,
    rms_mlp,
    stepping,
    trained,
)
from mupscale.proofs import identity
from mupscale.training.check import symmetry as check
from mupscale.training.units import clip

case = Group("diagnostics")
Device = torch.device


def _upscaled(base: Trained) -> mu.Run:
    return mu.upscale(base.run, lambda: mlp(32), mu.SignalNoise(0.05))


def _deeper(base: Trained, noise: mu.SignalNoise | mu.NewUnits | None = None) -> mu.Run:
    return mu.upscale(base.run, lambda: Residual(3), noise or mu.SignalNoise(0.05), plan=deeper_plan(base.x))


@case(quick=True)
def symmetry_and_awake(device: Device) -> Any:
    base = trained(device)
    grown = _upscaled(base)
    base.steps(grown, 1)
    return mu.diagnostics.growth_numbers(None, grown, tensors=True)


@case
def noise_shares(device: Device) -> Any:
    base = trained(device)
    grown = _upscaled(base)
    return check.noise_shares(base.run, grown)


@case(quick=True)
def noise_shares_of_a_deeper_model(device: Device) -> Any:
    """With random readers, which are copies of nothing."""
    base = trained(device, Residual, 2)
    return check.noise_shares(base.run, _deeper(base, mu.NewUnits("random")))


@case
def noise_shares_of_a_padded_model(device: Device) -> Any:
    base = trained(device, rms_mlp)
    grown = mu.upscale(base.run, lambda: rms_mlp(24), mu.SignalNoise(0.05), plan=padded_plan(base.x))
    return mu.diagnostics.growth_numbers(base.run, grown, tensors=True)


@case
def growth_numbers(device: Device) -> Any:
    base = trained(device)
    return mu.diagnostics.growth_numbers(base.run, _upscaled(base), loss=base.loss)


@case
def growth_numbers_of_a_deeper_model(device: Device) -> Any:
    base = trained(device, Residual, 2)
    return mu.diagnostics.growth_numbers(base.run, _deeper(base), loss=base.loss)


@case(quick=True)
def gradient_norms_and_clipping(device: Device) -> Any:
    base = trained(device)
    grown = _upscaled(base)
    grown.optimizer.zero_grad()
    base.loss(grown.model).backward()
    norms = [clip.grad_norm(grown.model, grown, p=p) for p in (2.0, 1.0, float("inf"))]
    clipped = mu.trainers.clip_grad_norm_(grown.model, grown, max_norm=0.01)
    return (
        norms,
        clipped,
        [p.grad for p in grown.model.parameters()],
        mu.diagnostics.reference_lr(grown.optimizer),
    )


@case
def gradient_norm_without_gradients(device: Device) -> Any:
    grown = mu.grow(trained(device).run.model, lambda: mlp(32))
    return clip.grad_norm(grown.model, grown)


@case
def resolve_noise(device: Device) -> Any:
    weights = dict(trained(device).run.model.state_dict())
    plan = mu.plans.plan_between(mlp, 16, 32)
    return str(mu.diagnostics.resolve_noise(weights, mu.SignalNoise(0.05), plan=plan).as_json())


@case
def coordinate_check(device: Device) -> Any:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).to(device)

    def start(width: int, seed: int) -> mu.Run:
        torch.manual_seed(seed)
        plan, model, reference = (
            mu.plans.plan_between(mlp, 16, width),
            mlp(width).to(device),
            mlp(16).to(device),
        )
        mu.init_weights_(model, plan, std=reference, seed=seed)
        optimizer = torch.optim.AdamW(mu.param_groups(model, plan, torch.optim.AdamW, lr=1e-2))
        mu.clip_before_step_(optimizer, plan, model=model, max_norm=1.0)
        return mu.Run(model, optimizer)

    step = stepping(lambda m: (m(x) - 1).square().mean())
    return str(
        mu.diagnostics.coordinate_check(
            start, step=step, probe=lambda m: m(x), widths=(16, 32, 64), steps=2, seeds=1
        )
    )


@case(asks_float64="the models are float64")
def gradient_identity(device: Device) -> Any:
    base = trained(device, dtype=torch.float64)
    plan = mu.plans.plan_between(mlp, 16, 32)
    grown = mu.grow(base.run, lambda: mlp(32), plan=plan)
    found = identity.gradient_identity(base.run.model, grown.model, loss=base.loss, plan=plan)
    return found.worst[1] < 1e-9


@case
def clip_by_norm(device: Device) -> Any:
    base = trained(device)
    mu.clip_before_step_(base.run.optimizer, base.run, max_norm=0.05)
    base.steps(base.run, 1)
    grown = mu.grow(base.run, lambda: mlp(32))
    return grown, base.steps(grown, 3)


@case
def clip_by_value_verified(device: Device) -> Any:
    base = trained(device)
    mu.clip_before_step_(base.run.optimizer, base.run, max_value=0.01)
    return mu.verify(base.run, lambda: mlp(32), step=base.step).holds


def _initialised(device: Device, std: Any) -> nn.Module:
    with torch.device("cpu"):
        plan = mu.plans.plan_between(mlp, 16, 64)
        torch.manual_seed(0)
        model = mlp(64).to(device)
    mu.init_weights_(model, plan, std=std, seed=1)
    return model


@case
def init_with_given_sizes(device: Device) -> Any:
    return _initialised(device, {"*": 0.1})


@case(quick=True)
def init_from_a_model_on_the_device(device: Device) -> Any:
    torch.manual_seed(0)
    return _initialised(device, mlp(16).to(device))


@case
def init_from_a_model_on_the_cpu(device: Device) -> Any:
    torch.manual_seed(0)
    return _initialised(device, mlp(16))


@case
def init_without_sizes_is_refused(device: Device) -> Any:
    try:
        return _initialised(device, None)
    except mu.MupscaleError as refusal:
        return [fault.code for fault in refusal.faults]


@case
def init_from_a_factory(device: Device) -> Any:
    return [bool(p.isfinite().all()) for p in _initialised(device, lambda: mlp(16).to(device)).parameters()]


@case
def param_groups(device: Device) -> Any:
    model = _initialised(device, {"*": 0.1})
    plan = mu.plans.plan_between(mlp, 16, 64)
    return mu.Run(model, torch.optim.AdamW(mu.param_groups(model, plan, torch.optim.AdamW, lr=1e-2)))


@case
def optimizer_in_units(device: Device) -> Any:
    base = trained(device)
    grown = mu.grow(base.run.model, lambda: mlp(32))
    optimizer = mu.trainers.optimizer_in_units(
        grown.model, grown, torch.optim.AdamW, lr=1e-3, weight_decay=0.1
    )
    mu.clip_before_step_(optimizer, grown, max_norm=1.0)
    run = mu.Run(grown.model, optimizer)
    return run, base.steps(run, 3)


@case
def step_in_units(device: Device) -> Any:
    base = trained(device)
    grown = mu.grow(base.run.model, lambda: mlp(32))
    optimizer = torch.optim.AdamW(grown.model.parameters(), lr=1e-2)
    handle = mu.step_in_units_(optimizer, grown)
    run = mu.Run(grown.model, optimizer)
    losses = base.steps(run, 3)
    handle.remove()
    return run, losses


@case
def growth_schedule_and_rewarm(device: Device) -> Any:
    base = trained(device)
    optimizer = base.run.optimizer
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, mu.GrowthSchedule(budget=100, step_cost=1))
    run = mu.Run(base.run.model, optimizer, schedule)
    base.steps(run, 5)
    grown = mu.upscale(run, lambda: mlp(32), mu.SignalNoise(0.05), step_cost=4)
    base.steps(grown, 5)
    rewarmed = mu.rewarm_(base.run, mu.GrowthSchedule(1000), peak_lr=1e-3)
    return grown, mu.upscale(rewarmed, lambda: mlp(32), mu.SignalNoise(0.05), step_cost=1)


@case(quick=True)
def state_dicts(device: Device) -> Any:
    run, plan = trained(device).run, mu.plans.plan_between(mlp, 16, 32)
    weights = mu.trainers.grow_state_dict(run.model.state_dict(), plan)
    names = [name for name, _ in run.model.named_parameters()]
    optimizer = mu.trainers.grow_optimizer_state_dict(
        run.optimizer.state_dict(), plan, torch.optim.AdamW, names=names
    )
    return weights, optimizer["state"]


@case
def saved_and_resumed(device: Device) -> Any:
    base = trained(device)
    grown = _upscaled(base)
    file = io.BytesIO()
    assert grown.since is not None
    held = {
        "model": grown.model.state_dict(),
        "optimizer": grown.optimizer.state_dict(),
        "since": grown.since.to_json(),
    }
    torch.save(held, file)
    file.seek(0)
    held = torch.load(file)
    model = mlp(32).to(device)
    model.load_state_dict(held["model"])
    optimizer = torch.optim.AdamW(mu.trainers.groups_for(model, held["optimizer"]))
    optimizer.load_state_dict(held["optimizer"])
    run = mu.Run(model, optimizer, since=mu.Plan.from_json(held["since"]))
    return run, base.steps(run)


@case
def recipe(device: Device) -> Any:
    from mupscale.training.recipe import TensorGrowth

    run, plan = trained(device).run, mu.plans.plan_between(mlp, 16, 32)
    group = run.optimizer.param_groups[0]
    constants = {"lr": 1e-2, **{key: group[key] for key in ("betas", "eps", "weight_decay", "amsgrad")}}
    found = mu.studies.Recipe(
        optimizer="torch.optim.AdamW", constants=constants, sigma=0.1, k=2, tensors=TensorGrowth.all_of(plan, None),
        width=16, reference=16, plan=plan.hash, steps=5, wide_steps=5, schedule=None,
    )  # fmt: skip
    return mu.upscale(run, lambda: mlp(32), recipe=found)
