"""Independent copies of a run to measure on. A run whose copy would train differently is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...errors import Fault, raise_faults
from ...models.clone import copied
from ...models.float64 import cast_, without_float64
from ...models.names import unwrap
from ...plans.direction import Direction
from ...plans.ends import identity_plan
from ...rules.optimizer_rule import OptimizerRule
from ...runs.provenance import Provenance
from ...runs.run import Run
from ..grow.carry import carry
from ..grow.left_behind import patched_methods, step_hooks


def clone(run: Run, dtype: torch.dtype, rules: Mapping[str, OptimizerRule] | None = None) -> Run:
    """A copy of a run in another dtype that shares no memory with it, including `clip_before_step_` and `step_in_units_`."""
    inner = unwrap(run.model)
    twin = carry(
        Run(inner, run.optimizers, run.schedulers, ema=None, steps=run.steps),
        copied(inner),
        lambda: copied(inner),
        Direction(identity_plan(inner)),
        rules,
        in_place=True,
    )
    # Asked of the run itself: inside `lifted_casts` its copy is on the CPU already.
    leaves = dtype == torch.float64 and without_float64(inner)
    if leaves:
        twin.model.cpu()
    cast_(twin.model, dtype)
    for optimizer in twin.optimizers:
        if leaves:
            _leave_device_(optimizer)
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.is_floating_point() and key != "step":
                    state[key] = value.to(dtype)
    return replace(twin, plan=run.plan, since=run.since, earlier=(), provenance=Provenance())


def _leave_device_(optimizer: Optimizer) -> None:
    """Move the state and the settings of an optimizer to the CPU, which has no graphs to be captured for."""
    for values in (*optimizer.param_groups, *optimizer.state.values()):
        values.update({key: value.cpu() for key, value in values.items() if isinstance(value, Tensor)})
    for group in optimizer.param_groups:
        group.update({key: False for key in group if key == "capturable"})


def refuse_hooks(run: Run) -> None:
    """Raise if optimizers have step hooks other than ours: they cannot be copied, and a copy without them trains differently."""
    faults = []
    for optimizer in run.optimizers:
        name = type(optimizer).__name__
        if step_hooks(optimizer):
            what = "it has step hooks, which a copy does not"
            faults.append(Fault("run.has_step_hooks", name, what, "do their work in the step function"))
        for method in patched_methods(optimizer):
            what = "it was replaced on this object, and a copy has that of its class"
            remedy = "do its work in the step function"
            faults.append(Fault("run.has_patched_methods", f"{name}.{method}", what, remedy))
    raise_faults("this run cannot be copied faithfully", faults)
