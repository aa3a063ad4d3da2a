"""The tensors inside a model, an optimizer or nested state, and where they lie in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mupscale.plans.names import named_tensors


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by the name a plan has for it, detached; tied tensors under each of their names."""
    return {name: tensor.detach() for name, _, tensor in named_tensors(model)}


def tensors_in(thing: Any) -> Iterator[Tensor]:
    """Every tensor inside nested dicts, lists and tuples."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors_in(value)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from tensors_in(value)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every parameter of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Where tensors lie: two that share memory have one address."""
    return {tensor.data_ptr() for tensor in tensors}
