"""What a step does besides its arithmetic: plain clipping and random numbers.

Some of it has no effect in the steps that are measured and parts the runs later, so it is looked for as well.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..models.calls import callers, calling_module

_CLIPPING = "torch.nn.utils.clip_grad"
_BOUNDS = ("max_norm", "clip_value")
_RANDOM = {
    torch.rand_like, torch.randn_like, torch.rand, torch.randn, torch.bernoulli, torch.normal,
    torch.Tensor.bernoulli_, torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.bernoulli,
}  # fmt: skip


class observed(TorchFunctionMode):  # noqa: N801 - a context manager, used like a function
    """Inside this context, notes calls of torch's own clipping and the shapes of random tensors.

    >>> from torch import nn
    >>> layer = nn.Linear(2, 2)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> with observed() as seen:
    ...     norm = nn.utils.clip_grad_norm_(layer.parameters(), 100.0)
    >>> seen.clips, seen.draws
    ('clip_grad_norm_', [])
    """

    def __init__(self) -> None:
        super().__init__()
        self.clips: str | None = None
        """The clipping function of torch that was called with a finite bound, active or not."""
        self.draws: list[tuple[int, ...]] = []
        """The shapes of the random tensors that were drawn, in order."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.clips is None and calling_module() == _CLIPPING:
            self._clip()
        result = func(*args, **(kwargs or {}))
        if func in _RANDOM and isinstance(result, Tensor):
            self.draws.append(tuple(result.shape))
        return result

    def _clip(self) -> None:
        for frame in callers():
            bound = next((frame.f_locals[key] for key in _BOUNDS if key in frame.f_locals), inf)
            if frame.f_globals.get("__name__") == _CLIPPING and float(bound) < inf:
                self.clips = frame.f_code.co_name.lstrip("_")
