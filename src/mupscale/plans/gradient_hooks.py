"""Hooks on the gradients of parameters, carried to the other end of a plan.

A hook (`register_hook`, `register_post_accumulate_grad_hook`) is any function of a gradient, so growing is exact only if it
commutes with growing: what it makes of r · dup(G) must be r · dup of what it makes of G. Scaling and logging do; masks of the
base's shape, clipping and optimizers that step in a hook do not. Hooks are tried with drawn gradients, on copies of what they
hold and with nothing printed, and refused where they do not commute. One that holds the base would continue to work on the base,
and is refused unless the factory makes it too.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Fault, raise_faults
from ..models.clone import Hook, Hooks, function_of, held_by, hooks_of, isolated, rebound, register_hooks_
from ..models.float64 import lifted_casts
from ..models.names import named_tensors
from ..rules.scale import ONE, Scale
from ..tensors.devices import has_float64
from ..tensors.differences import difference, relative
from ..tensors.expand import expand
from ..tensors.random_states import forked
from .direction import Direction
from .ends import identity_plan
from .plan import Plan
from .tensor_plan import TensorPlan

_SIZES = (1e-9, 1.0, 1e9)
"""Gradients so far apart lie on both sides of thresholds in a hook, such as those of a clamp."""
_TOLERANCE = 1e-9
"""Relative, in float64: what gradients may be apart in the gradient identity."""
_STEPS = "it takes the gradient away or changes the weight, as an optimizer that steps in it does"
_METHODS = "register_hook", "register_post_accumulate_grad_hook"
_Named = Mapping[str, tuple[Tensor, Hooks]]
"""Parameters by name, each with hooks of its own."""


def carry_hooks_(
    model: nn.Module, source: nn.Module, direction: Direction, made: Mapping[str, tuple[Tensor, Tensor]]
) -> None:
    """Register the hooks of the source's parameters on those of the filled model; raise where that is not exact.

    `made` has the tensors of the model by name: as they were built, with the hooks of the factory, and as they are now.
    """
    if has_hooks(source) or any(any(hooks_of(old)) for old, _ in made.values()):
        replaced = {id(old): new for old, new in made.values()}
        own: dict[str, tuple[Tensor, Hooks]] = {}
        for name, (old, new) in made.items():
            before, after = ([rebound(hook, replaced) for hook in kind] for kind in hooks_of(old))
            own[name] = new, (before, after)
        for parameter, hooks in _fitting(model, source, direction, own):
            register_hooks_(parameter, hooks)


def refuse_hooks(source: nn.Module, built: nn.Module, plan: Plan | None, *, sure: bool) -> None:
    """Raise for hooks that will not be carried to the model that was built, by this plan or, unless `sure`, one like it.

    Without a plan, what no plan carries is refused. Hooks of the factory are tried when the model is filled.
    """
    if has_hooks(built) or not has_hooks(source):
        return
    target, direction = (built, Direction(plan)) if plan else (source, Direction(identity_plan(source)))
    bare = {name: (t, ((), ())) for name, kind, t in named_tensors(target) if kind == "parameter"}
    _fitting(target, source, direction, bare, sure=sure)


def has_hooks(model: nn.Module) -> bool:
    """True if a parameter has a hook on its gradient."""
    return any(any(hooks_of(parameter)) for parameter in model.parameters())


def _fitting(
    model: nn.Module, source: nn.Module, direction: Direction, made: _Named, sure: bool = True
) -> list[tuple[Tensor, Hooks]]:
    """The parameters of the model, with the hooks that do to them what those of the source do; raises where none do."""
    tensors = {name: tensor for name, kind, tensor in named_tensors(source) if kind == "parameter"}
    mine, kept = _Mine(source), {id(part): part for side in (source, model) for part in _objects(side)}
    found: list[tuple[Tensor, Hooks]] = []
    faults: list[Fault] = []
    for name, (new, own) in made.items():
        planned, entry = direction.planned(name)
        starts = [tensors[n] for n in ((planned,) if direction.back else entry.sources) if n in tensors]
        theirs: Hooks = hooks_of(starts[0]) if starts else ((), ())
        if not any(own) and not any(any(hooks_of(start)) for start in starts):
            continue
        kinds = [one or other for one, other in zip(theirs, own, strict=True)]
        methods = " and ".join(f"{method}(…)" for method, kind in zip(_METHODS, kinds, strict=True) if kind)
        remedy = (
            "call remove() on its handle before growing, and register one that fits the new parameter afterwards: "
            f"run.model.get_parameter({name!r}).{methods}"
        )
        fault: Fault | None = Fault(
            "model.hook_holds_base",
            name,
            "its hook holds a part of the run that grows, the model or its optimizer, and would continue to work on it",
            remedy,
        )
        for hooks in _choices(theirs, own):
            if any(mine.reached(hook) for kind in hooks for hook in kind):
                continue
            sides = [(start, hooks_of(start)) for start in starts], [(new, hooks)]
            base, wide = sides[::-1] if direction.back else sides
            # Which axes are copied is seen from shapes; which unit a gradient has is not.
            why = None
            for unit in (entry.change.r, *(() if sure else (ONE,))) if starts else ():
                why = _not_exact(entry, unit, base, wide[0], kept, direction.back)
                if why is None:
                    break
            if why is None:
                fault = None
                found.append((new, hooks))
                break
            what = f"its hook does not do the same to the gradients of both widths: {why}"
            fault = Fault("model.hook_not_exact", name, what, remedy)
            if isinstance(why, _Untried):
                what = f"its hook cannot be tried with a drawn gradient, on copies of what it holds: {why}"
                fault = Fault("model.hook_cannot_be_tried", name, what, remedy)
        faults += [] if fault is None else [fault]
    raise_faults("a hook on gradients cannot be carried exactly", faults)
    return found


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
    function = function_of(hook)
    return getattr(function, "__code__", type(function))


_Side = tuple[Tensor, Hooks]
"""A parameter with the hooks that it has, or will have."""


class _Untried(str):
    """Why hooks were not compared: they raise where they are now, or hold what cannot be copied."""


def _not_exact(
    entry: TensorPlan, unit: Scale, base: Sequence[_Side], wide: _Side, kept: Mapping[int, Any], back: bool
) -> str | None:
    """Why hooks do not commute with growing, tried with gradients of several sizes; None where they do."""
    growing, making = replace(entry.gradient_making(), scale=unit), replace(entry.making(), fill=None)
    home = next(parameter.device for parameter, _ in (wide, *base) if not parameter.is_meta)
    place = home if has_float64(home) else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)

    def drawn(like: Tensor) -> Tensor:
        dtype = torch.complex128 if like.is_complex() else torch.float64
        return torch.randn(like.shape, generator=generator, dtype=dtype, device="cpu").to(place)

    at_base, at_wide = (str, _Untried)[:: 1 if back else -1]
    says: type[str] = _Untried
    try:
        # Copies of what the hooks hold, made apart: a counter in a hook that both models share counts for each.
        hooks = []
        for _, side in (*base, wide):
            memo = {**kept}  # hooks of one parameter may share what they hold
            hooks.append([[isolated(h, memo) for h in kind] for kind in side])
        with lifted_casts(), torch.no_grad(), _quiet():
            for size in _SIZES:
                weights = [drawn(parameter) for parameter, _ in base]
                gradients = [size * drawn(parameter) for parameter, _ in base]
                says = at_base
                after = [
                    _after(side[0], own, *pair)
                    for side, own, *pair in zip(base, hooks[:-1], weights, gradients, strict=True)
                ]
                says = at_wide
                goal = expand(making.source(weights), making), expand(growing.source(gradients), growing)
                found = _after(wide[0], hooks[-1], *goal)
                if found is None or any(gradient is None for gradient in after):
                    return _STEPS
                want = expand(growing.source(after), growing)  # type: ignore[arg-type]
                apart = difference(found, want)
                if not (error := relative(apart.gap, apart.size, size)) <= _TOLERANCE:
                    return f"what it makes of the wide one is {error:.1e} away from r · dup of what it makes of the base's"
    except Exception as error:
        return says(f"{type(error).__name__}: {error}")
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what is printed, logged and warned to itself."""
    disabled = logging.root.manager.disable
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()), warnings.catch_warnings(action="ignore"):
        logging.disable()
        try:
            yield
        finally:
            logging.disable(disabled)


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
        return any(
            id(value) in self.ids
            or (isinstance(value, Tensor) and value.untyped_storage().data_ptr() in self.memory)
            for value in held_by(hook)
        )
