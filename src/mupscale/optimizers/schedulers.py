"""Schedulers carried to a wide optimizer: those that multiply learning rates, and no others.

A scheduler with an absolute learning rate (a floor, a peak) cannot be scaled from outside. It is refused, with a
replacement in the message.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dis import get_instructions
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedulers

from ..errors import Fault, MupscaleError
from ..plans.class_code import of_library
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
_ENDS = (type, ModuleType, BuiltinFunctionType, str, bytes, int, float, complex, type(None))
"""What is not followed on the way from a function to what it reads."""
_MOST_READ = 1000
"""Objects that are followed from one function; a global may hold a whole dataset."""
_REMEDY = "use a LambdaLR that returns the ratio to the initial learning rate"


def driven_by(scheduler: Any) -> Optimizer:
    """The optimizer whose rates a scheduler sets."""
    owner: Optimizer = getattr(scheduler, "optimizer", None) or scheduler._schedulers[0].optimizer
    return owner


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


def refuse_readers(
    schedulers: Sequence[Any], optimizers: Sequence[Optimizer], model: nn.Module
) -> list[Fault]:
    """A fault for every function of a LambdaLR that reads the optimizer, a module or a tensor of the run.

    The wide run's would share it, and go on reading the base's. What a method reads of its own object is not looked at:
    it belongs to a trainer.
    """
    held = {id(optimizer): "the optimizer" for optimizer in optimizers}
    held |= {id(module): "the model" for module in model.modules()}
    held |= {id(tensor): "a tensor of the model" for tensor in (*model.parameters(), *model.buffers())}
    for optimizer in optimizers:
        groups = (optimizer.param_groups, optimizer.state, *optimizer.param_groups)
        held |= {id(part): "the optimizer" for part in groups}
    faults = []
    for scheduler in schedulers:
        faults += refuse_readers(getattr(scheduler, "_schedulers", ()), optimizers, model)
        found = {_read_by(function, held, set()): None for function in getattr(scheduler, "lr_lambdas", ())}
        for what in filter(None, found):
            remedy = (
                "write it as a function of the step alone, or leave this scheduler out of the run and build it "
                "again with the wide run's optimizer"
            )
            what = f"its function reads {what} of the base, and the wide run would share it"
            faults.append(Fault("schedule.reads_base", type(scheduler).__name__, what, remedy))
    return faults


def _read_by(value: Any, held: Mapping[int, str], seen: set[int]) -> str | None:
    """What of the run a function holds or names: in closures, defaults, arguments, globals, attributes."""
    if id(value) in held:
        return held[id(value)]
    if id(value) in seen or isinstance(value, _ENDS) or len(seen) > _MOST_READ:
        return None
    seen.add(id(value))
    inside: list[Any] = []
    if isinstance(value, MethodType):
        inside = [value.__func__]
    elif isinstance(value, partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, FunctionType):
        inside = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        inside += [content for cell in value.__closure__ or () for content in _contents(cell)]
        if not of_library(value):
            loads = (s.argval for s in get_instructions(value) if s.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
            inside += [value.__globals__[name] for name in loads if name in value.__globals__]
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = list(value)
    elif isinstance(value, dict):
        inside = list(value.values())
    elif not of_library(value):
        inside = [*getattr(value, "__dict__", {}).values(), vars(type(value)).get("__call__")]
    return next((found for part in inside if (found := _read_by(part, held, seen)) is not None), None)


def _contents(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # it is not filled yet
        return []


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
