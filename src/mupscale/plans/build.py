"""Build a model without allocating its weights.

Parameters move to the meta device as soon as they are registered, so their initialisation costs nothing. Buffers
are computed, because no checkpoint holds rotary tables and masks. The caller's random state is not changed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter

from ..arguments import shown, wrong_function
from ..errors import MupscaleError, raise_faults
from .copied import copied

Make = Callable[[], nn.Module] | nn.Module
"""A function without arguments that builds a model, or the model itself."""


def build(make: Make, seed: int | None = None) -> nn.Module:
    """The model that `make` returns, with every parameter on the meta device.

    A model in place of a factory, or one that the factory had built before, is copied.

    >>> from mupscale.plans import on_meta
    >>> on_meta(lambda: nn.Linear(10_000, 10_000)).weight.device
    device(type='meta')
    """
    if isinstance(make, nn.Module):
        return copied(make)
    raise_faults("a model cannot be built", wrong_function("make", make))
    known: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

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
        with torch.random.fork_rng():
            if seed is not None:
                torch.manual_seed(seed)
            model = make()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        if "meta" not in str(error):
            raise
        raise MupscaleError(
            f"the factory reads values of its parameters while it builds them, and they have none yet: {error}; "
            "compute constants from sizes, or return a model that was built before",
            code="factory.reads_values",
        ) from error
    finally:
        handle.remove()
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
    return copied(model) if any(not p.is_meta for p in model.parameters()) else model
