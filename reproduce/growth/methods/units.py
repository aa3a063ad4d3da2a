"""Growth by new units that write nothing yet: what was there keeps its weights and rates, and the loss does not change."""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch

import mupscale as mu

from ...setting import Setting
from ..settings.stock import Stock
from .by_family import grow_by_family
from .method import OURS, Growth, Method


def by_random_readers(growth: Growth) -> mu.Run:
    return _with_new_units(growth, "random")


def by_copied_readers(growth: Growth) -> mu.Run:
    """The library's default; for blocks, copies in stack order that write nothing."""
    return _with_new_units(growth, "copied")


def _with_new_units(growth: Growth, readers: Literal["random", "copied"]) -> mu.Run:
    if isinstance(growth.setting, Stock):
        return grow_by_family(growth)
    spec, setting, base = growth.spec, growth.setting, growth.base

    def make() -> torch.nn.Module:
        return setting.build(spec.width)

    plan = None if spec.centred else _plan_of_units(setting, growth.start.width, spec.width)
    noise = mu.NewUnits(readers=readers)
    run = mu.upscale(base, make, noise, by="units", loss=growth.loss, plan=plan, seed=spec.seed)
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


METHODS = (
    Method(
        "new_units",
        "new units, random readers",
        OURS,
        "width",
        by_random_readers,
        state="empty",
        rates=(0.5,),
    ),
    Method(
        "copied_readers",
        "new units, copied readers",
        f"{OURS}, its default",
        "width",
        by_copied_readers,
        state="empty",
        rates=(0.5,),
    ),
)
