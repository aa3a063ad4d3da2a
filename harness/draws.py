"""Seeded draws in float64: models that begin with the same weights in every run, and the data for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def seeded(make: Callable[..., nn.Module], *args: Any, seed: int = 0) -> Any:
    """A model whose weights depend on the seed alone."""
    torch.manual_seed(seed)
    return make(*args).double()


def data(*shape: int, seed: int = 1) -> Tensor:
    """Gaussian numbers that depend on the seed alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
