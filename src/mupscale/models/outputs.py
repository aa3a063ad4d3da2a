"""Record the first output of every module while a function runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..tensors.nested import tensors_in
from .names import module_paths


def outputs_of(model: nn.Module, go: Callable[[], Any]) -> dict[str, Tensor]:
    """The first floating output of every module while `go` ran, by module name, in the order in which they return; "" is the model.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> list(outputs_of(model, lambda: model(torch.ones(1, 2))))
    ['0', '1', '']
    """
    seen: dict[str, Tensor] = {}

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            value = next((t for t in tensors_in(output) if t.is_floating_point()), None)
            if value is not None and path not in seen:
                seen[path] = value.detach().clone()

        return hook

    handles = [module.register_forward_hook(note(path)) for path, module in module_paths(model)]
    try:
        go()
    finally:
        for handle in handles:
            handle.remove()
    return seen
