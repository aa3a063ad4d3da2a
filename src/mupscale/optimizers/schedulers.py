"""Schedulers that carry over: torch's own, whose constants have the units of learning rates or none.

They multiply rates, or hold a rate for every group (a peak, a start), which is carried as the rate is. A cosine has one floor
for all groups; in the wide run it has one for each. On an optimizer that is stepped in units nothing changes, and any scheduler
that can be copied is carried. What else is refused has a replacement in the message.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer, swa_utils
from torch.optim import lr_scheduler as torch_schedulers

from ..errors import Fault, MupscaleError, raise_faults
from ..models.class_code import of_library
from ..models.clone import closed_over, named_globals
from .named import NamedGroup

_CARRIED = {
    "LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR",
    "PolynomialLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "SequentialLR", "ChainedScheduler",
    "ReduceLROnPlateau", "OneCycleLR", "CyclicLR", "SWALR",
}  # fmt: skip
RATES_OF_GROUPS = ("base_lrs", "_last_lr", "min_lrs", "max_lrs")
"""Attributes of schedulers with a learning rate for every group."""
_MOMENTA_OF_GROUPS = ("base_momentums", "max_momentums")
_REMEDY = (
    "use a LambdaLR that returns the ratio to the initial learning rate, or keep it and call "
    "mu.step_in_units_(optimizer, mu.Run(model)) before growing"
)
_NOT_FOLLOWED = "so it cannot follow groups whose rates scale differently"
_LEFT_OUT = "leave it out of the run, and build it again on the wide run's optimizer"
_ENDS = (type, ModuleType, BuiltinFunctionType, str, bytes, int, float, complex, type(None))
"""What is not followed on the way from a function to what it reads."""
_MOST_READ = 1000
"""Objects that are followed from one function; a global may hold a whole dataset."""


class _Floors:
    """A floor for every group, in place of torch's one `eta_min` for all."""

    eta_min: Any
    optimizer: Optimizer

    def get_lr(self) -> list[Any]:
        return self._by_group(super().get_lr)  # type: ignore[misc]

    def _get_closed_form_lr(self) -> list[Any]:
        return self._by_group(super()._get_closed_form_lr)  # type: ignore[misc]

    def _by_group(self, rates: Callable[[], list[Any]]) -> list[Any]:
        floors = self.eta_min
        found = []
        try:
            for index, floor in enumerate(_per_group(floors, len(self.optimizer.param_groups))):
                self.eta_min = floor
                found.append(rates()[index])
        finally:
            self.eta_min = floors
        return found


class CosineAnnealingLR(_Floors, torch_schedulers.CosineAnnealingLR):
    """torch's class of this name, with a list as `eta_min`: a floor for every group."""


class CosineAnnealingWarmRestarts(_Floors, torch_schedulers.CosineAnnealingWarmRestarts):
    """torch's class of this name, with a list as `eta_min`: a floor for every group."""


_COSINES = {own.__mro__[2]: own for own in (CosineAnnealingLR, CosineAnnealingWarmRestarts)}


def load_scheduler_(scheduler: Any, state: Mapping[str, Any]) -> Any:
    """Load the state of a grown run's scheduler, in place of `scheduler.load_state_dict(state)`.

    In a grown run a cosine whose `eta_min` is not 0 has a floor for every group, which torch's own class does not know. This also
    holds for cosines inside of a SequentialLR or a ChainedScheduler.

    Args:
        scheduler: The scheduler, built before the optimizer's state is loaded.
        state: The state dict that was saved.

    Returns:
        The same scheduler.

    >>> import torch
    >>> groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in (0.4, 0.2)]
    >>> optimizer = torch.optim.SGD(groups)
    >>> scheduler = torch_schedulers.CosineAnnealingLR(optimizer, 10)
    >>> scheduler = load_scheduler_(scheduler, {**scheduler.state_dict(), "eta_min": [0.04, 0.02]})
    >>> for _ in range(10): optimizer.step(); scheduler.step()
    >>> [round(group["lr"], 12) for group in optimizer.param_groups]
    [0.04, 0.02]
    """
    scheduler.load_state_dict(dict(state))
    pending = [scheduler]
    while pending:
        one = pending.pop()
        pending += getattr(one, "_schedulers", ())
        if type(one) in _COSINES and isinstance(one.eta_min, list):
            one.__class__ = _COSINES[type(one)]
    return scheduler


def _per_group(floors: Any, many: int) -> list[Any]:
    return floors if isinstance(floors, list) else [floors] * many


def driven_by(scheduler: Any) -> Optimizer:
    """The optimizer whose rates a scheduler sets."""
    owner: Optimizer = getattr(scheduler, "optimizer", None) or scheduler._schedulers[0].optimizer
    return owner


def refuse_absolute(schedulers: Sequence[Any]) -> list[Fault]:
    """A fault for every scheduler that cannot follow groups whose rates scale differently."""
    faults = []
    for scheduler in schedulers:
        name, module = type(scheduler).__name__, type(scheduler).__module__
        inner = refuse_absolute(getattr(scheduler, "_schedulers", ()))
        if module not in (torch_schedulers.__name__, swa_utils.__name__, __name__) or name not in _CARRIED:
            what = f"the units of what {module}.{name} holds are not known, {_NOT_FOLLOWED}"
            faults.append(Fault("schedule.unknown_scheduler", name, what, _REMEDY))
        elif name == "ReduceLROnPlateau" and scheduler.eps != 0:
            what = f"eps = {scheduler.eps} is an absolute learning rate, {_NOT_FOLLOWED}"
            remedy = "set scheduler.eps = 0.0, so that every reduction is made"
            faults.append(Fault("schedule.absolute_rate", name, what, remedy))
        elif inner:
            faults += [inner[0]._replace(where=name)]
        elif len(getattr(scheduler, "base_lrs", ())) not in (0, len(scheduler.optimizer.param_groups)):
            what = f"a group was added to its optimizer after it was made, {_NOT_FOLLOWED}"
            faults.append(Fault("schedule.group_added_later", name, what, _REMEDY))
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


def _read_by(
    value: Any, held: Mapping[int, str], seen: set[int], names: frozenset[str] = frozenset()
) -> str | None:
    """What of the run a function reads: in closures, defaults, arguments, globals, and the attributes and keys it names.

    `names` are those of the function that led here: an object that holds the model may be asked for a number alone.
    """
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
        names = _names_in(value.__code__)
        inside = [value.__defaults__, *(value.__kwdefaults__ or {}).values(), *closed_over(value)]
        inside += [] if of_library(value) else named_globals(value).values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = list(value)
    elif isinstance(value, dict):
        inside = [entry for key, entry in value.items() if not isinstance(key, str) or key in names]
    elif not of_library(value):
        call = vars(type(value)).get("__call__")
        names |= _names_in(call.__code__) if isinstance(call, FunctionType) else set()
        inside = [entry for name, entry in getattr(value, "__dict__", {}).items() if name in names]
        inside.append(call)
    return next((found for part in inside if (found := _read_by(part, held, seen, names)) is not None), None)


def _names_in(code: CodeType) -> frozenset[str]:
    """The attributes, globals and texts, which may be keys, that a function names."""
    inner = [_names_in(part) for part in code.co_consts if isinstance(part, CodeType)]
    texts = [part for part in code.co_consts if isinstance(part, str)]
    return frozenset(code.co_names).union(texts, *inner)


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
        remedy = "write LambdaLR(optimizer, lambda step: function(step))"
        fault = Fault("schedule.function_not_copyable", "LambdaLR", what, remedy)
        raise MupscaleError("this scheduler cannot be carried", [fault]) from error


def carry_scheduler(scheduler: Any, optimizer: Optimizer, groups: Sequence[NamedGroup]) -> Any:
    """The same scheduler at the same step, on the wide optimizer."""
    new = copy.copy(scheduler)
    per_group = len(scheduler.optimizer.param_groups)
    known: dict[int, Any] = {id(scheduler.optimizer): optimizer}
    for key, value in vars(scheduler).items():
        listed = isinstance(value, list) and len(value) == per_group
        if key == "optimizer":
            new.optimizer = optimizer
        elif key == "_schedulers":
            new._schedulers = [carry_scheduler(s, optimizer, groups) for s in value]
        elif key in RATES_OF_GROUPS and listed:
            setattr(new, key, [value[g.origin] * g.growth_factor for g in groups])
        elif key in _MOMENTA_OF_GROUPS and listed:
            setattr(new, key, [value[g.origin] for g in groups])
        elif key == "lr_lambdas" and listed:
            new.lr_lambdas = [_same_function(value[g.origin]) for g in groups]
        elif key == "eta_min" and type(scheduler) in {*_COSINES, *_COSINES.values()}:
            _set_floors_(new, [_per_group(value, per_group)[g.origin] * g.growth_factor for g in groups])
        else:
            setattr(new, key, _copied(scheduler, key, value, known))
    # torch counts steps only to warn about a first call out of order; this optimizer has been stepped. SWALR reads the count.
    if hasattr(new, "_step_count") and not isinstance(new, swa_utils.SWALR):
        new._step_count = max(new._step_count, 2)
    return new


def _set_floors_(cosine: Any, floors: list[Any]) -> None:
    """One floor for all groups, as torch has it, or one for each."""
    one = len(set(floors)) == 1
    plain = next(known for known in _COSINES if isinstance(cosine, known))
    cosine.__class__ = plain if one else _COSINES[plain]
    cosine.eta_min = floors[0] if one else floors


def _copied(scheduler: Any, key: str, value: Any, known: dict[int, Any]) -> Any:
    """What a scheduler holds besides rates, for the wide optimizer, which stands in `known` for the base's."""
    why, weights = None, [p for group in scheduler.optimizer.param_groups for p in group["params"]]
    try:
        made = copy.deepcopy(value, known)
    except Exception as error:  # an object of any class
        why = f"{key} cannot be copied: {error}"
    if why is None and any(id(p) in known for p in weights):
        why = f"{key} holds weights of the base"
    if why is not None:
        name = type(scheduler).__name__
        fault = Fault("schedule.unknown_scheduler", name, why, _LEFT_OUT)
        raise_faults("this scheduler cannot be carried", [fault])
    return made
