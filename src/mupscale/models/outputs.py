"""Record the first output of every module while a function runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .names import module_paths


@dataclass(frozen=True)
class Seen:
    """One call of a module: its path and its first floating output."""

    path: str
    value: Tensor | None


@contextmanager
def watched(model: nn.Module) -> Iterator[list[Seen]]:
    """The outputs of every module, in the order in which they return."""
    seen: list[Seen] = []

    def note(path: str) -> Any:
        return lambda module, args, output: seen.append(Seen(path, _first(output)))

    handles = [module.register_forward_hook(note(path)) for path, module in module_paths(model)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def outputs_of(model: nn.Module, go: Callable[[], Any]) -> dict[str, Tensor]:
    """The first output of every module while `go` ran, by module name; "" is the model.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> list(outputs_of(model, lambda: model(torch.ones(1, 2))))
    ['0', '1', '']
    """
    with watched(model) as seen:
        go()
    found: dict[str, Tensor] = {}
    for call in seen:
        if call.value is not None:
            found.setdefault(call.path, call.value)
    return found


def _first(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output.detach().clone() if output.is_floating_point() else None
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        return next((found for part in output if (found := _first(part)) is not None), None)
    return None
