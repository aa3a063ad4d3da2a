"""Copies of experts so far apart that nearly every token keeps its experts: what a plan that parts tokens is measured on.

As the vector that parts copies grows, fewer tokens lie between them. Without such tokens the loss is the base's, every tensor
that has no copies has the base's gradient, and the gradients of copies add up to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..models.names import named_tensors, unwrap
from ..plans.plan import Plan
from ..rules.noise_defaults import APART
from ..tensors.random_states import forked
from .kinds import SplitNoise
from .resolve import resolve_noise
from .resolved import NoisePlan

Call = Callable[[nn.Module], object]
_FAR = 1e5
"""How long the vector is here, in root mean squares of the router's rows. One token in about 100,000 lies between copies then, and
scores in float64 keep eleven digits."""
DRAWS = 4
"""How many vectors are tried while a token lies between copies: with 24,000 tokens, in all layers together, one in four has a token between copies."""


class _Recorded(TorchFunctionMode):
    """Keeps what `topk` chose among so many scores."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.found: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "topk" and args[0].shape[-1] == self.count:
            self.found.append(result[1].detach().reshape(-1, result[1].shape[-1]))
        return result


def chosen_experts(model: nn.Module, call: Call, experts: int) -> list[Tensor]:
    """The experts of every token, in every call that chooses among so many; a row for each token.

    Random numbers are the same in every call, so that dropout does not move a token.

    >>> router = nn.Linear(2, 3, bias=False)
    >>> _ = router.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]))
    >>> x = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    >>> [found.tolist() for found in chosen_experts(router, lambda model: model(x).topk(1), 3)]
    [[[0], [1]]]
    """
    with forked(model, seed=0), torch.no_grad(), _Recorded(experts) as recorded:
        call(model)
    found: list[Tensor] = recorded.found
    return found


def kept_experts(base: nn.Module, wide: nn.Module, call: Call, experts: int, copies: int) -> float | None:
    """The share of tokens that go to copies of the experts that they went to, over all calls; None where none was seen.

    Copies of expert e of the base are experts k·e to k·e + k-1.
    """
    before, after = chosen_experts(base, call, experts), chosen_experts(wide, call, experts * copies)
    if not before or [one.shape for one in before] != [one.shape for one in after]:
        return None
    pairs = zip(before, after, strict=True)
    same = [(a.sort().values == (b // copies).sort().values).all(-1) for a, b in pairs]
    return float(torch.cat(same).double().mean())


def far_apart(plan: Plan, base: nn.Module, seed: int = 0) -> NoisePlan | None:
    """The noise that parts copies of experts so far; None for a plan without them."""
    if not plan.parts_tokens:
        return None
    tensors = {name: tensor for name, _, tensor in named_tensors(unwrap(base))}
    found = resolve_noise(tensors, SplitNoise(), plan=plan, seed=seed)
    routers = {name: one for name, one in found.tensors.items() if one.apart is not None}
    further = {name: replace(one, std=_times(one.std)) for name, one in routers.items()}
    return replace(found, tensors=further)


def share_kept(plan: Plan, base: nn.Module, wide: nn.Module, call: Call) -> float | None:
    """The share of tokens that keep their experts in the wide model; None for a plan that parts no tokens."""
    axes = [entry.axes[entry.chosen] for entry in plan.tensors.values() if entry.chosen is not None]
    return kept_experts(base, wide, call, axes[0].base, int(axes[0].k)) if axes else None


def kept_tokens(plan: Plan, base: nn.Module, wide: nn.Module, call: Call) -> dict[str, float]:
    """The same as an entry of a record; empty where there is nothing to say."""
    kept = share_kept(plan, base, wide, call)
    return {} if kept is None else {"kept": kept}


def moved_tokens(plan: Plan, base: nn.Module, wide: nn.Module, call: Call) -> bool:
    """Whether a token may go to other experts in the wide model, so that other vectors may show what these do not.

    A router that chooses without `topk` shows no tokens, so one of them may.
    """
    if not plan.parts_tokens:
        return False
    kept = share_kept(plan, base, wide, call)
    return kept is None or kept < 1


def _times(std: object) -> float:
    assert isinstance(std, float), "a router has noise of one size"
    return std * _FAR / APART
