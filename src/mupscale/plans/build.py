"""Build a model without paying for its weights.

Parameters go to the meta device the moment they are registered, so their initialisation costs nothing;
buffers are computed for real, because rotary tables and masks are the model's own work. The caller's
random state is left as it was.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


def _to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None or parameter.is_meta:
        return None
    with torch.no_grad():
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)


def build(make: Callable[[], nn.Module], seed: int | None = None) -> nn.Module:
    """The model that `make` returns, with every parameter on the meta device.

    >>> build(lambda: nn.Linear(10_000, 10_000)).weight.device
    device(type='meta')
    """
    handle = register_module_parameter_registration_hook(_to_meta)  # type: ignore[arg-type]
    try:
        with torch.random.fork_rng():
            if seed is not None:
                torch.manual_seed(seed)
            return make()
    finally:
        handle.remove()
