"""A base and a wide run side by side: what was measured so far, and how a step is observed.

Shared by `compare.py`, which judges, and `diagnose.py`, which explains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..arguments import shown
from ..errors import MupscaleError
from ..plans.identity import Identity
from ..plans.names import parameter_names
from ..plans.plan import Plan
from ..runs.run import Run

Step = Callable[[Run, int], Any]


@dataclass
class Trial:
    """A base and a wide run side by side, and what was measured so far."""

    base: Run
    wide: Run
    plan: Plan
    tolerance: float
    losses: list[tuple[float, float]] = field(default_factory=list)
    identity: Identity | None = None
    weights: dict[str, float] = field(default_factory=dict)
    moved: float = 0.0


def run_step(run: Run, step: Step, i: int) -> tuple[float, dict[str, Tensor | None]]:
    """Call the caller's step function once under a fixed seed, and record the gradients that its optimizers got."""
    grads: dict[str, Tensor | None] = {}
    names = parameter_names(run.model)

    def capture(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                g = p.grad
                grads[names[id(p)]] = None if g is None else (g.to_dense() if g.is_sparse else g.clone())

    handles = [optimizer.register_step_pre_hook(capture) for optimizer in run.optimizers]
    try:
        with torch.random.fork_rng():
            torch.manual_seed(i)
            value = step(run, i)
    finally:
        for handle in handles:
            handle.remove()
    if not grads:
        raise MupscaleError(
            "the step function did not step an optimizer of the run it was given; call run.optimizers[0].step() in it"
        )
    return as_number(value), grads


def as_number(loss: Any) -> float:
    """A loss as a float; a step that returns none gives nan."""
    if loss is None:
        return float("nan")
    try:
        return float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
    except (TypeError, ValueError, RuntimeError):
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else shown(loss)
        raise MupscaleError(
            f"the step function returned {found}, expected the loss as one number; return loss, or nothing"
        ) from None
