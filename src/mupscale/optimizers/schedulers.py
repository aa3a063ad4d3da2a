"""Schedulers carried to a wide optimizer: those that multiply learning rates, and no others.

A scheduler with an absolute learning rate (a floor, a peak) cannot be scaled from outside. It is refused, with a
replacement in the message.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedulers

from ..errors import Fault, MupscaleError
from .named import NamedGroup

_MULTIPLIES = {
    "LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR",
    "PolynomialLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "SequentialLR", "ChainedScheduler",
    "ReduceLROnPlateau",
}  # fmt: skip
_ABSOLUTE = {
    "OneCycleLR": "its max_lr and min_lr are absolute",
    "CyclicLR": "its base_lr and max_lr are absolute",
    "SWALR": "its swa_lr is absolute",
}
_REMEDY = "use a LambdaLR that returns the ratio to the initial learning rate"


def absolute(scheduler: Any) -> tuple[str, str] | None:
    """Why a scheduler does not just multiply learning rates, as a code and a reason, or None if it does."""
    name = type(scheduler).__name__
    if name in _ABSOLUTE:
        return "schedule.absolute_rate", _ABSOLUTE[name]
    known = type(scheduler).__module__ == torch_schedulers.__name__ and name in _MULTIPLIES
    if not known:
        what = f"{type(scheduler).__module__}.{name} is not a scheduler known to multiply learning rates"
        return "schedule.unknown_scheduler", what
    if name == "ReduceLROnPlateau" and scheduler.eps != 0:
        return "schedule.absolute_rate", f"eps = {scheduler.eps} is an absolute learning rate"
    if getattr(scheduler, "eta_min", 0) != 0:
        return "schedule.absolute_rate", f"eta_min = {scheduler.eta_min} is an absolute learning rate"
    inner = (absolute(s) for s in getattr(scheduler, "_schedulers", ()))
    if (reason := next((reason for reason in inner if reason), None)) is not None:
        return reason
    if len(getattr(scheduler, "base_lrs", ())) not in (0, len(scheduler.optimizer.param_groups)):
        return "schedule.group_added_later", "a group was added to its optimizer after it was made"
    return None


def refuse_absolute(schedulers: tuple[Any, ...]) -> list[Fault]:
    """A fault for every scheduler that does not just multiply learning rates."""
    faults = []
    what = "so it cannot follow groups whose rates scale differently"
    remedies = {"ReduceLROnPlateau": "set scheduler.eps = 0.0, so that every reduction is made"}
    for scheduler in schedulers:
        if (found := absolute(scheduler)) is not None:
            (code, reason), name = found, type(scheduler).__name__
            faults.append(Fault(code, name, f"{reason}, {what}", remedies.get(name, _REMEDY)))
    return faults


def _same_function(function: Any) -> Any:
    """The function of a LambdaLR for the wide run.

    Functions and bound methods are shared: what a trainer's method reads belongs to the trainer. An object that is
    called may keep a count of its own, so it is copied.
    """
    if isinstance(function, (FunctionType, MethodType, BuiltinFunctionType, partial)):
        return function
    try:
        return copy.deepcopy(function)
    except TypeError as error:
        what = f"{type(function).__name__}, the function of a LambdaLR, cannot be copied: {error}"
        raise MupscaleError(
            "this scheduler cannot be carried",
            [
                Fault(
                    "schedule.function_not_copyable",
                    "LambdaLR",
                    what,
                    "write LambdaLR(optimizer, lambda step: function(step))",
                )
            ],
        ) from error


def carry_scheduler(scheduler: Any, optimizer: Optimizer, groups: Sequence[NamedGroup]) -> Any:
    """The same scheduler at the same step, on the wide optimizer."""
    new = copy.copy(scheduler)
    per_group = len(scheduler.optimizer.param_groups)
    for key, value in vars(scheduler).items():
        if key == "optimizer":
            new.optimizer = optimizer
        elif key == "_schedulers":
            new._schedulers = [carry_scheduler(s, optimizer, groups) for s in value]
        elif key in ("base_lrs", "_last_lr", "min_lrs"):
            setattr(new, key, [value[g.origin] * g.lr_factor for g in groups])
        elif isinstance(value, list) and len(value) == per_group and key == "lr_lambdas":
            new.lr_lambdas = [_same_function(value[g.origin]) for g in groups]
        else:
            setattr(new, key, copy.deepcopy(value))
    # torch counts steps only to warn about a first call out of order; this optimizer has been stepped.
    if hasattr(new, "_step_count"):
        new._step_count = max(new._step_count, 2)
    return new
