"""Copies of experts so far apart that nearly every token keeps its experts: what a plan that parts tokens is measured on.

As the vector that parts copies grows, fewer tokens lie between them. Without such tokens the loss is the base's, every tensor
that has no copies has the base's gradient, and the gradients of copies add up to it.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ..models.chosen import Call, kept_experts
from ..models.names import named_tensors, unwrap
from ..plans.plan import Plan
from ..rules.noise_defaults import APART
from .kinds import SplitNoise
from .resolve import resolve_noise
from .resolved import NoisePlan

_FAR = 1e5
"""How long the vector is here, in root mean squares of the router's rows. One token in about 100,000 lies between copies then, and
scores in float64 keep eleven digits."""
DRAWS = 4
"""How many vectors are tried: with 24,000 tokens, in all layers together, one in four has a token between copies."""


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


def _times(std: object) -> float:
    assert isinstance(std, float), "a router has noise of one size"
    return std * _FAR / APART
