"""A base and a wide copy of a run side by side: how they are copied, and how a step is watched.

Shared by `verify.py`, which judges, and `diagnose.py`, which explains.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..arguments import shown
from ..errors import Fault, MupscaleError, raise_faults
from ..plans.fits import identity_plan
from ..plans.float64 import cast_
from ..plans.names import named_tensors, parameter_names, unwrap
from ..plans.plan import Plan
from ..plans.selftest import Identity
from ..rules.optimizers import OptimizerRule
from .clip import Clip
from .direction import Direction
from .run import Run
from .widen import carry

Step = Callable[[Run, int], Any]


@dataclass
class Trial:
    """A base and a wide copy side by side, and what has been seen of them."""

    base: Run
    wide: Run
    plan: Plan
    tolerance: float
    losses: list[tuple[float, float]] = field(default_factory=list)
    identity: Identity | None = None
    weights: dict[str, float] = field(default_factory=dict)
    moved: float = 0.0


def clone(run: Run, dtype: torch.dtype, rules: Mapping[str, OptimizerRule] | None = None) -> Run:
    """A copy of a run that shares nothing with it, in another dtype."""
    inner = unwrap(run.model)
    copied = carry(
        Run(inner, run.optimizers, run.schedulers, None, run.step),
        copy.deepcopy(inner),
        lambda: copy.deepcopy(inner),
        Direction(identity_plan(inner)),
        rules,
    )
    cast_(copied.model, dtype)
    for optimizer in copied.optimizers:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.is_floating_point() and key != "step":
                    state[key] = value.to(dtype)
    return Run(copied.model, copied.optimizers, copied.schedulers, None, run.step, run.plan, run.reference)


def refuse_hooks(run: Run) -> None:
    """Hooks cannot be copied with what they hold, and leaving them out would certify another training."""
    faults = []
    for optimizer in run.optimizers:
        hooks = [
            *optimizer._optimizer_step_pre_hooks.values(),
            *optimizer._optimizer_step_post_hooks.values(),
        ]
        if any(not isinstance(hook, Clip) for hook in hooks):
            faults.append(
                Fault(
                    type(optimizer).__name__,
                    "it has step hooks, which a copy does not",
                    "do their work in the step function",
                )
            )
    hooked = [n for n, k, t in named_tensors(run.model) if k == "parameter" and t._backward_hooks]
    faults += [
        Fault(name, "it has a gradient hook, which a copy does not", "remove it for the check")
        for name in hooked
    ]
    raise_faults("this run cannot be copied faithfully", faults)


def run_step(run: Run, step: Step, i: int) -> tuple[float, dict[str, Tensor | None]]:
    """One step of the caller's, under a fixed seed, and the gradients its optimizers were given."""
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
