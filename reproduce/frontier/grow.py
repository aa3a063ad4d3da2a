"""Growth as the study compares it: by copies with five things that may happen to the state, by new units, and three other
methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Literal

import torch

import mupscale as mu
from mupscale.proofs.identity import Loss
from mupscale.training.recipe import TensorGrowth

from ..peers import Start, net2wider, shrink_pad, tiling
from ..setting import Setting
from .spec import Spec

Grow = Callable[[Setting, mu.Run, Spec, int, Loss], mu.Run]
"""Makes the wide run of a spec: from the wide setting, the base, the spec, the steps that follow and their loss."""
READERS: Mapping[str, Literal["random", "copied"]] = {"new_units": "random", "copied_readers": "copied"}
"""What new units read with, by method."""
PEERS = {"tiling": tiling, "net2wider": net2wider, "shrink_pad": shrink_pad}


def grow(setting: Setting, base: mu.Run, spec: Spec, steps: int, loss: Loss) -> mu.Run:
    """The wide run, at the peak rate of the spec. `steps` follow, and noise by rule is chosen by this loss."""
    assert spec.start is not None
    narrow, wide = spec.start.width, spec.width
    mu.set_lr_(base.optimizer, spec.lr)
    if spec.method in READERS:
        return _with_new_units(setting, base, spec, loss)
    plan = setting.plan(narrow, wide)
    if spec.method != "ours":
        return PEERS[spec.method](_start(setting, base, spec, plan))
    noise: mu.Noise | mu.AutoNoise = mu.AutoNoise(steps=steps) if spec.by_rule else mu.SignalNoise(spec.noise)
    by = loss if spec.by_rule else None
    run = mu.upscale(base, lambda: setting.build(wide), noise, loss=by, plan=plan, seed=spec.seed)
    if spec.state == "wrong_units":
        _lose_units_(run, plan)
    elif spec.state == "asymmetric":
        _keep_first_copies_(run, plan)
    elif spec.state != "carried":
        run.optimizer.state.clear()
    return run


def _with_new_units(setting: Setting, base: mu.Run, spec: Spec, loss: Loss) -> mu.Run:
    """The wide run in which what was there keeps its weights, rates and moments, and new units write nothing yet."""
    noise = mu.NewUnits(readers=READERS[spec.method])

    def make() -> torch.nn.Module:
        return setting.build(spec.width)

    assert spec.start is not None
    plan = None if spec.centred else _plan_of_units(setting, spec.start.width, spec.width)
    run = mu.upscale(base, make, noise, by="units", loss=loss, plan=plan, seed=spec.seed)
    if spec.state == "empty":
        run.optimizer.state.clear()
    if spec.one_rate:
        (rates,) = {(group["lr"], group["weight_decay"]) for group in base.optimizer.param_groups}
        for group in run.optimizer.param_groups:
            group["lr"], group["weight_decay"] = rates
    return run


@cache
def _plan_of_units(setting: Setting, narrow: int, wide: int) -> mu.Plan:
    """The plan between two widths, found once; `upscale` proves it on the base of every run."""
    return mu.plans.plan_between(
        setting.build, narrow, wide, loss=lambda model: setting.loss(model, 0, 0), by="units"
    )


def _lose_units_(run: mu.Run, plan: mu.Plan) -> None:
    """Copy moments as they are: the first moment is in units of gradients and the second of their squares."""
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            r, state = float(plan[name].change.r), run.optimizer.state[parameter]
            state["exp_avg"].div_(r)
            state["exp_avg_sq"].div_(r * r)


def _keep_first_copies_(run: mu.Run, plan: mu.Plan) -> None:
    """Empty the moments of every entry that is not the first copy of its source."""
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            state = run.optimizer.state[parameter]
            for dim, axis in enumerate(plan[name].axes):
                sources = [axis.source(i) for i in range(axis.wide)]
                later = torch.tensor([sources.index(source) < i for i, source in enumerate(sources)])
                for moment in ("exp_avg", "exp_avg_sq"):
                    state[moment].index_fill_(dim, later.nonzero().flatten(), 0.0)


def _start(setting: Setting, base: mu.Run, spec: Spec, plan: mu.Plan) -> Start:
    """What the other methods begin with. They look at the base and its rates; their recipe has no noise."""
    assert spec.start is not None
    narrow = spec.start.width
    recipe = mu.studies.Recipe(
        "torch.optim.AdamW",
        {"lr": spec.lr, "weight_decay": setting.constants["weight_decay"]},
        0.0,
        k=spec.width // narrow,
        tensors=TensorGrowth.all_of(plan, base.since),
        width=narrow,
        reference=setting.reference,
        base_lr=spec.lr,
    )
    return Start(setting, base, narrow, spec.width // narrow, spec.lr, recipe, spec.seed)
