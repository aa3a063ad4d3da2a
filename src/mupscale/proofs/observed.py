"""What a step does beside its arithmetic: plain clipping, random numbers, settings written into groups.

Some of it has no effect in the steps that are measured and parts the runs later, so it is looked for as well.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from itertools import pairwise
from math import inf
from types import CodeType, FunctionType, MethodType
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
_SETTINGS = ("lr", "weight_decay", "eps", "betas", "momentum")


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


def written_settings(step: Callable[..., Any]) -> tuple[str, ...]:
    """The settings that the code of a step writes by subscript, as in group["lr"] = 1e-3, also in branches not taken.

    >>> def step(run, i):
    ...     if i == 1000:
    ...         run.optimizer.param_groups[0]["lr"] = 1e-3
    >>> written_settings(step)
    ('lr',)
    """
    found: dict[str, None] = {}
    waiting, seen, home = [step], set(), getattr(step, "__module__", None)
    while waiting:
        value: Any = waiting.pop()
        if isinstance(value, MethodType):
            value = value.__func__
        if not isinstance(value, FunctionType) or value.__module__ != home or id(value) in seen:
            continue
        seen.add(id(value))
        found.update(dict.fromkeys(_written(value.__code__)))
        waiting += [cell.cell_contents for cell in value.__closure__ or () if _holds(cell)]
        waiting += [value.__globals__[n] for n in value.__code__.co_names if n in value.__globals__]
    return tuple(key for key in _SETTINGS if key in found)


def _holds(cell: Any) -> bool:
    try:
        return isinstance(cell.cell_contents, (FunctionType, MethodType))
    except ValueError:  # a variable that was never set
        return False


def _written(code: CodeType) -> list[str]:
    lines = list(dis.get_instructions(code))
    keys = [
        before.argval
        for before, line in pairwise(lines)
        if line.opname == "STORE_SUBSCR" and isinstance(before.argval, str)
    ]
    inner = [key for const in code.co_consts if isinstance(const, CodeType) for key in _written(const)]
    return [*keys, *inner]
