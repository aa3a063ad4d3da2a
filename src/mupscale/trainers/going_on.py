"""What training a grown directory needs to continue: the plan since its reference, an optimizer, and a schedule.

Knows: where the plan is written, and when a saved schedule continues or a new one starts. Does not know: trainers; their
callbacks ask here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import nn
from torch.optim import Optimizer

from ..arguments import wrong_kind
from ..errors import Fault, raise_faults
from ..plans.plan import Plan
from ..rules.optimizer_rule import OptimizerRule
from ..runs.growth_record import plans_in, read_plans, read_record, record_in
from ..runs.provenance import Provenance
from ..runs.run import Run, since_of
from ..training.rates.rewarm import loaded, new_schedulers_, saved_schedules
from ..training.rates.schedules import GrowthSchedule, begin_stage_, wrong_step_cost
from ..training.units.groups import Chosen, param_groups
from .menu import named_optimizer
from .sentences import in_sentence_model

Grown = Plan | Run | Path | str
"""The plan from the reference to the model, or what holds it: a run, a grown directory, a grown checkpoint."""
_REWARM = "write rewarm=mu.GrowthSchedule(1000)"
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def read_provenance(wide: Grown) -> Provenance:
    """Read the history of growths of a run, of a grown directory, or of a checkpoint in which a trainer continues one.

    Args:
        wide: The run, the directory or the file.

    Returns:
        The history, oldest growth first; empty for a run that has not grown.

    Raises:
        MupscaleError: If the directory or file has no record of growth.

    >>> import mupscale as mu
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1))
    >>> run = mu.grow(make(4), lambda: make(8))
    >>> read_provenance(run) == run.provenance
    True
    """
    if isinstance(wide, Run):
        return wide.provenance
    if isinstance(wide, Plan):
        record: Mapping[str, Any] = dict.fromkeys(("plan", "since_reference"), wide.as_json())
    else:
        record = record_in(wide) if Path(wide).is_file() else read_record(wide)
    return Provenance.from_json(record)


def both_plans(since: Grown) -> tuple[Plan, Plan]:
    """The plan that made a model wide, and the plan that leads to it from the reference."""
    if isinstance(since, Plan):
        return since, since
    if isinstance(since, Run):
        counted = since_of(since, since.model)
        return since.plan or counted, counted
    return plans_in(since) if Path(since).is_file() else read_plans(since)


def schedule_settings(
    peak_lr: float | None, step_cost: float | None, rewarm: GrowthSchedule | None
) -> dict[str, Any]:
    """What a callback was given for the schedule, for `schedulers_for`; refused if it is not about one."""
    faults = [] if rewarm is None else wrong_kind("rewarm", rewarm, GrowthSchedule, _REWARM)
    if peak_lr is not None and rewarm is None:
        what = "it is the peak of a new schedule, and none is given"
        faults.append(
            Fault("schedule.peak_without_schedule", "peak_lr", what, f"{_REWARM} too, or leave it out")
        )
    raise_faults("the callback cannot use what it was given", faults)
    return {"peak_lr": peak_lr, "step_cost": step_cost, "rewarm": rewarm}


def schedulers_for(
    schedulers: Sequence[Any],
    optimizers: Sequence[Optimizer],
    states: Sequence[Mapping[str, Any]],
    *,
    peak_lr: float | None,
    step_cost: float | None,
    rewarm: GrowthSchedule | None,
) -> list[Any]:
    """The schedulers with which a trainer continues; `states` are their state dicts as a checkpoint has them.

    A `GrowthSchedule` in a state continues. `rewarm` starts if there is none, or if it has spent its budget, and a run
    that was stopped later continues with the `rewarm` of its checkpoint. `step_cost` begins a stage.
    """
    found = [saved_schedules(state) for state in states]
    running = [
        own[0]
        for own, state in zip(found, states, strict=True)
        if own and own[0].spent(state["last_epoch"]) < 1
    ]
    if rewarm is not None and not running:
        chosen: list[Any] = list(new_schedulers_(optimizers, rewarm, peak_lr))
    else:
        raise_faults("no new schedule can be started", _others(running, rewarm))
        parts = zip(schedulers, optimizers, states, found, strict=True)
        chosen = [loaded(of, state) if own else scheduler for scheduler, of, state, own in parts]
    if rewarm is None or step_cost is not None:
        raise_faults("this schedule cannot be continued", wrong_step_cost(chosen, step_cost))
    begin_stage_(chosen, step_cost)
    return chosen


def _others(running: list[GrowthSchedule], rewarm: GrowthSchedule | None) -> list[Fault]:
    """A fault if a checkpoint is in the middle of another schedule than the one that is to be started."""
    if rewarm is None:
        return []
    faults = []
    for schedule in running:
        # Growth at its first step or later has changed these two.
        if replace(schedule, step_cost=rewarm.step_cost, later=rewarm.later) != rewarm:
            what = f"it is {rewarm}, and the checkpoint is in the middle of {schedule}"
            faults.append(
                Fault(
                    "schedule.other_than_running",
                    "rewarm",
                    what,
                    "leave it out, and write step_cost= to continue that one",
                )
            )
    return faults


def optimizer_in_units(
    model: nn.Module,
    since: Grown,
    optimizer_class: type[AnyOptimizer] | str,
    *,
    parameters: Chosen = None,
    no_decay: tuple[str, ...] | list[str] = (),
    rules: Mapping[str, OptimizerRule] | None = None,
    **constants: Any,
) -> AnyOptimizer:
    """Build a fresh optimizer for a grown model: the constants you would give the base, in each tensor's units.

    For the state that a Trainer left in a grown directory, keep the stock optimizer and use the callback, or `step_in_units_`.

    Args:
        model: The model, or the `SentenceTransformer` of a grown directory.
        since: The directory that `mupscale upscale` wrote, the run, or the plan from the reference to `model`.
        optimizer_class: The class, or a name of the Trainer's `optim=`.
        parameters: Which parameters, for several optimizers: pairs of name and parameter, or a function of both that picks.
        no_decay: Patterns of names that get no weight decay.
        rules: Rows to use in place of the registry of optimizers, by full class name.
        **constants: lr, eps, weight_decay and others, written at the reference.

    Returns:
        The optimizer, an object of that class.

    Raises:
        MupscaleError: If the directory has no record of growth, and as for `param_groups`.

    >>> import torch, mupscale as mu
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 1))
    >>> optimizer = optimizer_in_units(make(256), mu.plans.plan_between(make, 64, 256), torch.optim.AdamW, lr=1e-2)
    >>> sorted({group["lr"] for group in optimizer.param_groups})
    [0.0025, 0.01]
    """
    if isinstance(optimizer_class, str):
        kind, own = named_optimizer(optimizer_class)
        constants, optimizer_class = {**own, **constants}, cast("type[AnyOptimizer]", kind)
    groups = param_groups(
        model,
        since if isinstance(since, Run) else in_sentence_model(both_plans(since)[1], model),
        optimizer_class,
        parameters=parameters,
        no_decay=no_decay,
        rules=rules,
        **constants,
    )
    grouped = groups[0].keys() if groups else ()
    required = {
        key for key, of in signature(optimizer_class.__init__).parameters.items() if of.default is of.empty
    }
    apart = {key: value for key, value in constants.items() if key not in grouped or key in required}
    return optimizer_class(groups, **apart)
