"""Independent copies of a run to measure on. A run whose copy would train differently is refused."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import Fault, raise_faults
from ..plans.copied import copied
from ..plans.direction import Direction
from ..plans.fits import identity_plan
from ..plans.float64 import cast_
from ..plans.names import named_tensors, unwrap
from ..rules.optimizers import OptimizerRule
from ..runs.run import Run
from .clip import Clip
from .stepping import InUnits, step_in_units_, units_of
from .widen import carry


def clone(run: Run, dtype: torch.dtype, rules: Mapping[str, OptimizerRule] | None = None) -> Run:
    """A copy of a run in another dtype that shares no memory with it, including `clip_` and `step_in_units_`."""
    inner = unwrap(run.model)
    with warnings.catch_warnings():
        # `carry` warns of step hooks that it leaves behind. `refuse_hooks` admits one kind, attached again below.
        warnings.filterwarnings("ignore", message=".* step hooks of the base's optimizers")
        twin = carry(
            Run(inner, run.optimizers, run.schedulers, ema=None, steps=run.steps),
            copied(inner),
            lambda: copied(inner),
            Direction(identity_plan(inner)),
            rules,
        )
    cast_(twin.model, dtype)
    for optimizer, original in zip(twin.optimizers, run.optimizers, strict=True):
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.is_floating_point() and key != "step":
                    state[key] = value.to(dtype)
        since = units_of(original)
        if since is not None:
            for group in optimizer.param_groups:
                group.pop("lr_factor", None)  # its settings are the reference's, without a factor
            step_in_units_(optimizer, since, model=twin.model, rules=rules)
    return Run(
        twin.model,
        twin.optimizers,
        twin.schedulers,
        ema=None,
        steps=run.steps,
        plan=run.plan,
        since=run.since,
    )


def refuse_hooks(run: Run, *, units: bool) -> None:
    """Raise if the run has hooks: they cannot be copied, and a copy without them would train differently.

    `units` says whether optimizers with `step_in_units_` are accepted: they can be copied, but not widened.
    """
    faults = []
    for optimizer in run.optimizers:
        hooks = [
            *optimizer._optimizer_step_pre_hooks.values(),
            *optimizer._optimizer_step_post_hooks.values(),
        ]
        owners = [getattr(hook, "__self__", hook) for hook in hooks]
        if any(not isinstance(o, Clip) and not (units and isinstance(o, InUnits)) for o in owners):
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
