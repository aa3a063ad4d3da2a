"""Build a model without allocating its weights.

Parameters move to the meta device as soon as they are registered, so their initialisation costs nothing. A move of the
model to a device (`.to`, `.cuda`) leaves them there and changes their dtype only; where they will be is decided by the
model that is carried. Buffers are computed, because no checkpoint holds rotary tables and masks. A factory that makes
something from the values of its parameters (a moving average, a mask, a hidden teacher) is called once more and builds
its model with weights, if memory allows. The caller's random state is not changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode

from ..arguments import shown, wrong_function
from ..errors import Fault, MupscaleError, raise_faults
from ..machine import free_memory
from ..tensors.random_states import forked
from ..text import size
from .clone import copied, held

Make = Callable[[], nn.Module] | nn.Module
"""A function without arguments that builds a model, or the model itself."""
_Known = dict[int, tuple[nn.Parameter, nn.Parameter]]
"""Parameters by their ids, each with the one on the meta device that took its place."""
_ERRORS = (RuntimeError, NotImplementedError, TypeError, ValueError)
_NO_VALUES = re.compile(r"\bmeta\b|data pointer", re.IGNORECASE)
"""What torch, or accelerate, raises when a value is asked for that a meta tensor has not, and what its message says then."""


def build(make: Make, seed: int | None = None) -> nn.Module:
    """Build a model without memory for its weights: every parameter is on the meta device unless something is made from its value.

    Args:
        make: A function without arguments that builds the model. A model in its place, or one that the function had built before,
            is copied.
        seed: The seed with which it is built; by default the state of the generators. Afterwards they are as before.

    Returns:
        The model.

    Raises:
        MupscaleError: If `make` is no such function, or it needs values of weights that do not fit into memory.

    >>> from mupscale.plans import on_meta
    >>> on_meta(lambda: nn.Linear(10_000, 10_000)).weight.device
    device(type='meta')
    """
    if isinstance(make, nn.Module):
        return copied(make)
    name = make.__name__ if isinstance(make, type) else "Model"
    remedy = f"write lambda: {name}(…), a function without arguments"
    raise_faults(
        "a model cannot be built",
        [f._replace(where="the factory", remedy=remedy) for f in wrong_function("make", make)],
    )
    known: _Known = {}
    try:
        with forked(seed=seed), _to_meta(known), _StaysOnMeta():
            model = _checked(make())
        values_missing = _lacks_values(model, known)
    except _ERRORS as error:
        if isinstance(error, MupscaleError) or not _NO_VALUES.search(str(error)):
            raise
        values_missing = True
    if values_missing:
        _refuse_little_memory(known)
        model = _with_values(make, seed)
    return copied(model) if any(not p.is_meta for p in model.parameters()) else model


on_meta = build
"""The public name, which says where the parameters are."""


class _StaysOnMeta(TorchFunctionMode):
    """Moves of a parameter without values change its dtype only."""

    def __init__(self) -> None:
        super().__init__()
        accelerator = torch.accelerator.current_accelerator()
        self.moves = {"to", "cpu", "cuda", "xpu"} | ({accelerator.type} if accelerator is not None else set())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        moved = args[0] if args and getattr(func, "__name__", "") in self.moves else None
        if not isinstance(moved, nn.Parameter) or not moved.is_meta:
            return func(*args, **kwargs)
        given = [g.dtype if isinstance(g, Tensor) else g for g in (*args[1:], *kwargs.values())]
        dtype = next((g for g in given if isinstance(g, torch.dtype)), moved.dtype)
        layout = next((g for g in given if isinstance(g, torch.memory_format)), torch.preserve_format)
        return moved.to(dtype=dtype, memory_format=layout)


@contextmanager
def _to_meta(known: _Known) -> Iterator[None]:
    """Parameters that are registered inside lose their values; those that lost them are noted in `known`."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or isinstance(parameter, UninitializedParameter):
            return None
        # The original is kept, so that its id stays its own and ties stay ties.
        if id(parameter) not in known:
            with torch.no_grad():
                empty = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            known[id(parameter)] = (parameter, empty)
        return known[id(parameter)][1]

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def _checked(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise MupscaleError(
            f"the factory returned {shown(model)}, expected a module; write lambda: Model(width)",
            code="factory.not_a_module",
        )
    if any(isinstance(p, UninitializedParameter) for p in model.parameters()):
        raise MupscaleError(
            "the model has lazy modules, whose sizes are not known; return a model that has seen a batch",
            code="model.has_lazy_modules",
        )
    return model


def _lacks_values(model: nn.Module, known: _Known) -> bool:
    """Whether something besides parameters has no values because parameters lost theirs.

    Raises for modules that torch does not know of and that would be trained: nothing can be said about them.
    """
    if not known:
        return False  # what is on the meta device, the factory put there
    parameters = {id(p) for p in model.parameters()}
    modules = {id(m) for m in model.modules()}
    others = list(held(model))
    hidden = [m for m in others if isinstance(m, nn.Module) and id(m) not in modules]
    lost = [p for m in hidden for p in m.parameters() if p.is_meta and id(p) not in parameters]
    if any(p.requires_grad for p in lost):
        names = ", ".join(sorted({type(m).__name__ for m in hidden}))
        what = (
            "in a plain list, tuple or dict: no optimizer trains their parameters, and no checkpoint has them"
        )
        remedy = "use nn.ModuleList or nn.ModuleDict, or freeze them with requires_grad_(False)"
        fault = Fault("factory.hidden_modules", names, what, remedy)
        raise_faults("this model has modules that torch does not see", [fault])
    tensors = [t for t in (*model.buffers(), *others) if isinstance(t, Tensor) and id(t) not in parameters]
    return bool(lost) or any(t.is_meta for t in tensors)


def _refuse_little_memory(known: _Known) -> None:
    """Raise unless the weights seen so far fit into free memory twice, as a copy is made of them."""
    needed = 2 * sum(p.numel() * p.element_size() for p, _ in known.values())
    if needed > (free := free_memory()):
        raise MupscaleError(
            f"the factory makes something from the values of its parameters, so it must build them, and {size(needed)} of "
            f"memory are needed, {size(free)} are free; free memory, or compute constants from sizes",
            code="factory.too_large_to_build",
        )


def _with_values(make: Callable[[], nn.Module], seed: int | None) -> nn.Module:
    try:
        with forked(seed=seed):
            return _checked(make())
    except _ERRORS as error:
        if isinstance(error, MupscaleError) or not _NO_VALUES.search(str(error)):
            raise
        raise MupscaleError(
            f"the factory reads values of parameters that it put on the meta device, where they have none: {error}; "
            "build without torch.device('meta'), or return a model that was built before",
            code="factory.reads_values",
        ) from error
