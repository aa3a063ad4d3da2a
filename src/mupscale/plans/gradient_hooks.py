"""Hooks on the gradients of parameters, carried to the other end of a plan.

A hook (`register_hook`, `register_post_accumulate_grad_hook`) is any function of a gradient, so growing is exact only if it
commutes with growing: what it makes of r · dup(G) must be r · dup of what it makes of G. Scaling and logging do; masks of the
base's shape, clipping and optimizers that step in a hook do not. Hooks are tried with drawn gradients, on copies of what they
hold, and refused where they do not commute. One that holds the base would go on to work on the base, and is refused unless
the factory makes it too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Fault, raise_faults
from ..models.clone import Hook, Hooks, hooks_of, isolated, named_globals, rebound, register_hooks_
from ..models.float64 import lifted_casts
from ..models.names import named_tensors
from ..tensors.devices import has_float64
from ..tensors.differences import difference, relative
from ..tensors.expand import expand
from ..tensors.random_states import forked
from .direction import Direction
from .tensor_plan import TensorPlan

_SIZES = (1e-9, 1.0, 1e9)
"""Gradients so far apart lie on both sides of thresholds in a hook, such as those of a clamp."""
_TOLERANCE = 1e-9
"""Relative, in float64: what gradients may be apart in the gradient identity."""
_STEPS = "it takes the gradient away or changes the weight, as an optimizer that steps in it does"


def carry_hooks_(
    model: nn.Module, source: nn.Module, direction: Direction, made: Mapping[str, tuple[Tensor, Tensor]]
) -> None:
    """Register the hooks of the source's parameters on those of the filled model; raise where that is not exact.

    `made` has the tensors of the model by name: as they were built, with the hooks of the factory, and as they are now.
    """
    tensors = {name: tensor for name, kind, tensor in named_tensors(source) if kind == "parameter"}
    if not any(any(hooks_of(t)) for t in (*tensors.values(), *(old for old, _ in made.values()))):
        return
    replaced = {id(old): new for old, new in made.values()}
    mine, kept = _Mine(source), {id(part): part for side in (source, model) for part in _objects(side)}
    faults: list[Fault] = []
    for name, (old, new) in made.items():
        planned, entry = direction.planned(name)
        starts = [tensors[n] for n in ((planned,) if direction.back else entry.sources) if n in tensors]
        if not any(any(hooks_of(tensor)) for tensor in (old, *starts)):
            continue
        own = [[rebound(hook, replaced) for hook in kind] for kind in hooks_of(old)]
        remedy = (
            "call remove() on its handle before growing, and register one that fits the new parameter afterwards: "
            f"run.model.get_parameter({name!r}).register_hook(…)"
        )
        fault: Fault | None = Fault(
            "model.hook_holds_base",
            name,
            "its hook holds a part of the run that grows, the model or its optimizer, and would go on to work on it",
            remedy,
        )
        for hooks in _choices(hooks_of(starts[0]) if starts else ((), ()), own):
            if any(mine.reached(hook) for kind in hooks for hook in kind):
                continue
            sides = [(start, hooks_of(start)) for start in starts], [(new, hooks)]
            base, wide = sides[::-1] if direction.back else sides
            why = _not_exact(entry, base, wide[0], kept) if starts else ""
            what = f"its hook does not do the same to the gradients of both widths: {why}"
            fault = Fault("model.hook_not_exact", name, what, remedy) if why else None
            if fault is None:
                register_hooks_(new, hooks)
                break
        faults += [] if fault is None else [fault]
    raise_faults("a hook on gradients cannot be carried exactly", faults)


def _choices(theirs: Hooks, own: Sequence[Sequence[Hook]]) -> Iterator[Hooks]:
    """The source's hooks, then those with the factory's of the same code in their place; what only the factory has stays."""
    found: tuple[list[Hook], list[Hook]] = ([], [])
    left = [list(hooks) for hooks in own]
    for hooks, others, several in zip(theirs, left, found, strict=True):
        for hook in hooks:
            same = next((other for other in others if _code(other) == _code(hook)), hook)
            others[:] = [other for other in others if other is not same]
            several.append(same)
    yield (*theirs[0], *left[0]), (*theirs[1], *left[1])
    yield (*found[0], *left[0]), (*found[1], *left[1])


def _code(hook: Any) -> Any:
    """What two hooks share that are made by one line of code."""
    function = _function(hook)
    return getattr(function, "__code__", type(function))


def _function(hook: Any) -> Any:
    """The function of a hook, without what is bound to it."""
    return _function(hook.func) if isinstance(hook, partial) else getattr(hook, "__func__", hook)


_Side = tuple[Tensor, Hooks]
"""A parameter with the hooks that it has, or will have."""


def _not_exact(entry: TensorPlan, base: Sequence[_Side], wide: _Side, kept: Mapping[int, Any]) -> str:
    """Why hooks do not commute with growing, tried with gradients of several sizes; empty where they do."""
    growing, making = entry.gradient_making(), replace(entry.making(), fill=None)
    place = wide[0].device if has_float64(wide[0].device) else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)

    def drawn(like: Tensor) -> Tensor:
        dtype = torch.complex128 if like.is_complex() else torch.float64
        return torch.randn(like.shape, generator=generator, dtype=dtype, device="cpu").to(place)

    try:
        # Copies of what the hooks hold, made apart: a counter in a hook that both models share counts for each.
        hooks = []
        for _, side in (*base, wide):
            memo = {**kept}  # hooks of one parameter may share what they hold
            hooks.append([[isolated(h, memo) for h in kind] for kind in side])
        with lifted_casts(), torch.no_grad():
            for size in _SIZES:
                weights = [drawn(parameter) for parameter, _ in base]
                gradients = [size * drawn(parameter) for parameter, _ in base]
                goal = expand(making.source(weights), making), expand(growing.source(gradients), growing)
                pairs = [*zip(weights, gradients, strict=True), goal]
                after = [
                    _after(side[0], own, *pair)
                    for side, own, pair in zip((*base, wide), hooks, pairs, strict=True)
                ]
                if any(gradient is None for gradient in after):
                    return _STEPS
                want = expand(growing.source(after[:-1]), growing)  # type: ignore[arg-type]
                apart = difference(after[-1], want)  # type: ignore[arg-type]
                if not (error := relative(apart.gap, apart.size, size)) <= _TOLERANCE:
                    return f"what it makes of the wide one is {error:.1e} away from r · dup of what it makes of the base's"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _after(like: Tensor, hooks: Sequence[Sequence[Hook]], weight: Tensor, gradient: Tensor) -> Tensor | None:
    """What hooks make of a gradient; None where they take it away, or change the weight."""
    parameter = nn.Parameter(weight.clone())
    parameter.__dict__.update(like.__dict__)
    with forked(seed=0):
        for hook in hooks[0]:
            given = gradient.clone()
            result = hook(given)
            gradient = given if result is None else result
        for hook in hooks[1]:
            parameter.grad = gradient.clone()
            hook(parameter)
            if parameter.grad is None or not torch.equal(parameter, weight):
                return None
            gradient = parameter.grad
    return gradient


def _objects(model: nn.Module) -> Iterator[Any]:
    yield from model.modules()
    yield from (tensor for _, _, tensor in named_tensors(model))


class _Mine:
    """The modules and tensors of a model, to be found in functions."""

    def __init__(self, model: nn.Module) -> None:
        self.ids = {id(part) for part in _objects(model)}
        tensors = (tensor for _, _, tensor in named_tensors(model))
        self.memory = {tensor.untyped_storage().data_ptr() for tensor in tensors} - {0}

    def reached(self, hook: Hook) -> bool:
        """True if a hook holds a part of the model, or something that holds one."""
        # Globals are followed in the file of the hook: functions of packages hold nothing of a run.
        start = hook if isinstance(hook, (FunctionType, MethodType, partial)) else type(hook).__call__
        world = getattr(_function(start), "__globals__", None)
        seen: set[int] = set()
        waiting: list[Any] = [hook, start]
        while waiting:
            value = waiting.pop()
            if id(value) in self.ids:
                return True
            if isinstance(value, Tensor):
                if value.untyped_storage().data_ptr() in self.memory:
                    return True
            elif id(value) not in seen:
                seen.add(id(value))
                waiting += _parts(value, world)
        return False


def _parts(value: Any, world: Any) -> Iterator[Any]:
    """What a function, a container or an object holds; of functions with the globals `world`, those that they name."""
    if isinstance(value, FunctionType):
        yield from (value.__defaults__, value.__kwdefaults__)
        yield from named_globals(value).values() if value.__globals__ is world else ()
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # a variable that was never set
                continue
    elif isinstance(value, (MethodType, BuiltinMethodType)):
        yield from (value.__self__, getattr(value, "__func__", None))
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, Mapping):
        yield from (*value.keys(), *value.values())
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from value
    elif not isinstance(value, (ModuleType, type)):
        yield from getattr(value, "__dict__", {}).values()
