"""The outputs of a model's modules, in the order in which they are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..plans.names import strip_wrappers


def outputs_of(model: nn.Module, go: Callable[[], Any]) -> dict[str, Tensor]:
    """What every module returned first while `go` ran: the first tensor of it, by module name, "" for the model.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> list(outputs_of(model, lambda: model(torch.ones(1, 2))))
    ['0', '1', '']
    """
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) and output else output
            if isinstance(value, Tensor) and value.is_floating_point() and name not in seen:
                seen[name] = value.detach().clone()

        return hook

    named = [(strip_wrappers(f"{name}.").rstrip("."), module) for name, module in model.named_modules()]
    handles = [module.register_forward_hook(keep(name)) for name, module in named]
    try:
        go()
    finally:
        for handle in handles:
            handle.remove()
    return seen
