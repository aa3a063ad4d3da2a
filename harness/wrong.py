"""The nearest wrong rules, for controls: plans with one role or power changed, registries with one row changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mupscale as mu
from mupscale.rules.optimizers import RULES


def mistaken(plan: mu.Plan, name: str) -> mu.Plan:
    """The plan with the first copied axis of one tensor taken for in instead of out, or the reverse."""
    entry = plan[name]
    dim = next(d for d, axis in enumerate(entry.axes) if axis.k > 1)
    axes = list(entry.axes)
    axes[dim] = replace(axes[dim], role="out" if axes[dim].role == "in" else "in")
    return plan.with_tensors({plan.planned(name): replace(entry, axes=tuple(axes))})


def other_power(plan: mu.Plan, name: str) -> mu.Plan:
    """The plan with the same weights and another power of the width in one tensor's gradient scale."""
    entry = plan[name]
    return plan.with_tensors({plan.planned(name): replace(entry, spread=entry.change.c)})


def without(optimizer: type, **changes: Any) -> dict[str, mu.rules.OptimizerRule]:
    """The registry with one row of torch.optim altered."""
    name = f"torch.optim.{optimizer.__name__}"
    return {**RULES, name: replace(RULES[name], **changes)}
