"""The tensors inside a model, and where they lie in memory."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from mupscale.models.names import named_tensors


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by the name a plan has for it, detached; tied tensors under each of their names."""
    return {name: tensor.detach() for name, _, tensor in named_tensors(model)}


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Where tensors lie: two that share memory have one address."""
    return {tensor.data_ptr() for tensor in tensors}
