"""Step hooks of a run carried to the other end of a plan: units and clipping, which are ours."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from ...errors import Fault, raise_faults
from ...plans.direction import Direction
from ...plans.ends import identity_plan
from ...plans.plan import Plan
from ...rules.optimizer_rule import OptimizerRule
from ...runs.run import Run
from ..units.clip import Clip, clip_before_step_
from ..units.stepping import step_in_units_, units_of


def carry_units_(
    run: Run,
    optimizers: list[Optimizer],
    model: nn.Module,
    direction: Direction,
    rules: Mapping[str, OptimizerRule] | None,
) -> None:
    """Step the new optimizers in units, from the reference from which the old ones are stepped in units."""
    for old, new in zip(run.optimizers, optimizers, strict=True):
        units = units_of(old)
        if units is None:
            continue
        if not direction.back:
            step_in_units_(new, units.then(direction.plan), model=model, rules=rules)
        elif units == run.since and run.earlier and run.plan == direction.plan:
            if (since := run.earlier[-1][1]) is not None:
                step_in_units_(new, since, model=model, rules=rules)
        elif units != direction.plan:
            what = "it is stepped in units from a reference that is not known from the narrow model"
            remedy = "call remove() on the handle of step_in_units_, and attach it again after narrowing"
            raise_faults(
                "this run cannot be narrowed",
                [Fault("optimizer.unknown_reference_units", type(old).__name__, what, remedy)],
            )


def carry_clips_(
    base: tuple[Optimizer, ...],
    wide: list[Optimizer],
    model: nn.Module,
    onward: Plan | None,
    undone: Plan | None,
) -> None:
    """Attach width-invariant clipping to the new optimizers as it was to the old ones."""
    twins = dict(zip(map(id, base), wide, strict=True))
    pairs = [(o._optimizer_step_pre_hooks, o._optimizer_step_post_hooks) for o in base]
    every = [hook for pair in pairs for hooks in pair for hook in hooks.values()]
    hooks = {id(hook): hook for hook in every if isinstance(hook, Clip)}
    for hook in hooks.values():
        several = [twins[id(o)] for o in hook.optimizers if id(o) in twins]
        if onward is not None:
            since = hook.plan.then(onward)
        elif hook.plan == undone:
            since = identity_plan(model)
        else:
            warnings.warn(
                "clip_before_step_ counts from another reference than this base and is not carried back",
                stacklevel=4,
            )
            continue
        clip_before_step_(
            several, since, model=model, max_norm=hook.max_norm, max_value=hook.max_value, p=hook.p
        )
        carried = list(several[0]._optimizer_step_pre_hooks.values())[-1]
        assert isinstance(carried, Clip)
        carried.in_turn = hook.in_turn
