"""Record the outputs of all modules, to find the first that does not consist of copies of the base's output.

Layouts are not known here: two outputs agree when the wide one's channels are, in some order, the base's
channels with equal numbers of copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .names import strip_wrappers

# Relative to the largest entry. It only guides the search, so it need not be tight: float64 rounds at 1e-16,
# and the rest is room for what sums and norms make of that.
_TOLERANCE = 1e-7


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

    handles = [module.register_forward_hook(note(path)) for path, module in model.named_modules()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def outputs_of(model: nn.Module, go: Callable[[], Any]) -> dict[str, Tensor]:
    """The first output of every module while `go` ran, by module name; "" is the model.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> list(outputs_of(model, lambda: model(torch.ones(1, 2))))
    ['0', '1', '']
    """
    with watched(model) as seen:
        go()
    found: dict[str, Tensor] = {}
    for call in seen:
        if call.value is not None:
            found.setdefault(strip_wrappers(f"{call.path}.").rstrip("."), call.value)
    return found


def _first(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output.detach().clone() if output.is_floating_point() else None
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        return next((found for part in output if (found := _first(part)) is not None), None)
    return None


def first_difference(base: Sequence[Seen], wide: Sequence[Seen], folds: set[float]) -> tuple[int, str]:
    """How many outputs agree before the first that does not, and the module of that one; "" if all submodules agree."""
    for i, (a, b) in enumerate(zip(base, wide, strict=False)):
        if a.path != b.path:
            return i, a.path
        if a.value is not None and b.value is not None and not are_copies(a.value, b.value, folds):
            return i, a.path
    return min(len(base), len(wide)), ""


def are_copies(base: Tensor, wide: Tensor, folds: set[float]) -> bool:
    """True when `wide` holds the channels of `base`, each equally often, times 1 or a fold; True if unclear.

    >>> x = torch.randn(5, 3)
    >>> are_copies(x, x[:, [2, 0, 1, 2, 1, 0]], set()), are_copies(x, x.repeat(1, 2) * 2, set())
    (True, False)
    """
    if base.dim() != wide.dim():
        return True
    growing = [d for d, (a, b) in enumerate(zip(base.shape, wide.shape, strict=True)) if a != b]
    fixed = [d for d in range(base.dim()) if d not in growing]
    x, y = (
        t.permute(*fixed, *growing).flatten(len(fixed)) if growing else t.unsqueeze(-1) for t in (base, wide)
    )
    n, m = x.shape[-1], y.shape[-1]
    if not n or m % n:
        return True
    x, y = x.reshape(-1, n).double(), y.reshape(-1, m).double()
    if growing:
        weights = torch.randn(len(x), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        finite = x.isfinite().all(1) & y.isfinite().all(1)
        x, y = ((weights[finite] @ t[finite]).sort().values for t in (x, y))
        x = x.repeat_interleave(m // n)
    size = x.abs().max() if x.numel() else x.new_zeros(())
    if not bool(size > 0):
        return bool((y == 0).all())
    return any(bool((y - x * f).abs().max() <= _TOLERANCE * size * f) for f in (1.0, *folds))
