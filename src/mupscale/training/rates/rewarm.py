"""A new schedule for a run whose schedule has ended: warm-up to a peak, and decay to zero.

Knows: what ended schedulers leave behind in the groups of an optimizer, and how a new one starts or a saved one continues.
Does not know: trainers; their callbacks ask here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ...arguments import wrong_kind, wrong_number
from ...errors import Fault, raise_faults
from ...optimizers.rates import Rates, set_rate_
from ...optimizers.schedulers import driven_by
from ...rules.optimizers import rule_for
from ...runs.run import Run
from .schedules import GrowthSchedule

_STALE = ("initial_lr", "max_lr", "min_lr")
"""What a schedule leaves in a group. torch starts a new schedule from `initial_lr` if it is there, whatever `lr` is."""
_SAVED = {field.name for field in fields(GrowthSchedule)}
_PEAK = 0.5
"""The new peak over the earlier one. After growth of finished runs half of the base's peak was the best rate, or within
0.8 % of the best, for MLPs and for text and at several widths, without a factor for the width."""


def rewarm_(
    run: Run, schedule: GrowthSchedule, *, peak_lr: float | None = None, empty_state: bool = False
) -> Run:
    """Start a new schedule on a run whose schedule has ended, before or after it is grown.

    Earlier schedulers are dropped, and so is the `initial_lr` that they left behind. The rates of the run's optimizers are set in
    place; they begin at zero where the schedule warms up, so call `scheduler.step()` of each new scheduler after every step, also in
    a loop that had none.

    Args:
        run: The run. Its optimizers are changed.
        schedule: The schedule to start.
        peak_lr: The new peak of the first group, written at the reference; the groups of all optimizers keep their ratio to
            it. By default half of the earlier schedule's peak, or of the present rate where there was no scheduler.
        empty_state: Whether optimizers also begin with no moments, as new ones do. After growth by new units this was the better
            start for an MLP. On text kept moments ended 0.003 to 0.004 nats lower with a quarter of the FLOPs, and level with as
            many again.

    Returns:
        The run with one new scheduler for each optimizer.

    Raises:
        MupscaleError: If the run has no optimizer, no peak is known, or `empty_state` would empty a state that holds copies of
            the weights.

    >>> import torch
    >>> model = torch.nn.Linear(4, 4)
    >>> optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.4}], lr=0.2)
    >>> scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=1)
    >>> optimizer.step(); scheduler.step()                                        # it has ended at zero
    >>> run = rewarm_(Run(model, optimizer, scheduler), GrowthSchedule(100, warmup=0.01))
    >>> optimizer.step(); run.scheduler.step()
    >>> [group["lr"] for group in optimizer.param_groups]
    [0.1, 0.2]
    """
    faults = wrong_kind("run", run, Run, "write rewarm_(mu.Run(model, optimizer), schedule)")
    raise_faults("no schedule can be started", faults)
    if empty_state:
        raise_faults("the state of an optimizer cannot be emptied", _holding_weights(run))
    new = new_schedulers_(run.optimizers, schedule, peak_lr, ended=run.schedulers)
    for optimizer in run.optimizers if empty_state else ():
        optimizer.state.clear()
    return replace(run, schedulers=tuple(new))


def _holding_weights(run: Run) -> list[Fault]:
    """A fault for every optimizer with copies of the weights in its state; raises for one whose state is not known."""
    faults = []
    for optimizer in run.optimizers:
        rows = rule_for(type(optimizer)).every_row
        copies = {key for row in rows for key, state in row.state.items() if state.copy}
        if held := sorted(copies & {key for state in optimizer.state.values() for key in state}):
            what = f"its state {held[0]!r} is a copy of the weights, which would be lost"
            where = type(optimizer).__name__
            faults.append(Fault("state.holds_weights", where, what, "leave out empty_state=True"))
    return faults


def new_schedulers_(
    optimizers: Sequence[Optimizer],
    schedule: GrowthSchedule,
    peak_lr: float | None,
    *,
    ended: Sequence[Any] = (),
) -> list[LambdaLR]:
    """A scheduler for every optimizer, at its first step; peaks keep their ratios. `ended` are the earlier schedulers."""
    remedy = "write mu.GrowthSchedule(1000), for example: a budget of 1000 steps"
    faults = wrong_kind("schedule", schedule, GrowthSchedule, remedy)
    if peak_lr is not None:
        faults += wrong_number("peak_lr", peak_lr, "write peak_lr=1e-3, for example", above=True)
    if not optimizers:
        what = "the run has none, so there is no rate to schedule"
        faults.append(Fault("run.no_optimizers", "optimizers", what, "write mu.Run(model, optimizer)"))
    every = [Rates(optimizer, ended) for optimizer in optimizers]
    faults += [fault for rates in every for fault in _unknown_peak(rates, peak_lr)]
    raise_faults("no schedule can be started", faults)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peaks = [peak for rates in every for peak in rates.peaks]
    factors = [factor for rates in every for factor in rates.factors]
    first = next(i for i, peak in enumerate(peaks) if peak)
    ratio = _PEAK if peak_lr is None else peak_lr * factors[first] / peaks[first]
    for group, peak in zip(groups, peaks, strict=True):
        for key in _STALE:
            group.pop(key, None)
        set_rate_(group, peak * ratio)
    return [LambdaLR(optimizer, copy.copy(schedule)) for optimizer in optimizers]


def _unknown_peak(rates: Rates, peak_lr: float | None) -> list[Fault]:
    """A fault if an optimizer does not say what its highest rate was, or which ratios its groups have."""
    where = type(rates.optimizer).__name__
    if not any(rates.peaks):
        what = "all its rates are zero and its groups do not remember a peak, so their ratios are not known"
        remedy = (
            "first write mu.set_lr_(optimizer, 1e-3) for it, with its peak, or keep its scheduler in the run"
        )
        return [Fault("rates.no_peak_known", where, what, remedy)]
    driven = any(driven_by(scheduler) is rates.optimizer for scheduler in rates.schedulers)
    started = all("initial_lr" in group for group in rates.optimizer.param_groups)
    if peak_lr is None and driven and not started:  # ReduceLROnPlateau
        what = "its scheduler does not remember the rate at which it began, so the peak is not known"
        return [Fault("rates.no_peak_known", where, what, "write peak_lr=1e-3, for example")]
    return []


def saved_schedules(state: Mapping[str, Any]) -> list[GrowthSchedule]:
    """The schedules in the state dict of a scheduler, one for each group; none if it has others."""
    held = state.get("lr_lambdas") or [None]
    if not all(isinstance(one, dict) and one.keys() >= _SAVED for one in held):
        return []
    return [GrowthSchedule(**{name: one[name] for name in _SAVED}) for one in held]


def state_of(scheduler: Any) -> dict[str, Any]:
    """The state of a LambdaLR with what its functions hold; empty for other schedulers.

    LambdaLR loads the attributes of a saved object into its own function, whatever that is, so a schedule is found in
    a scheduler that was made with another function.
    """
    if type(scheduler) is not LambdaLR:
        return {}
    return {
        **scheduler.state_dict(),
        "lr_lambdas": [dict(getattr(f, "__dict__", {})) for f in scheduler.lr_lambdas],
    }


def loaded(optimizer: Optimizer, state: Mapping[str, Any]) -> LambdaLR:
    """The scheduler that continues from a state dict in which there are schedules, at the rate it stands at."""
    scheduler = LambdaLR(optimizer, list(saved_schedules(state)))
    scheduler.load_state_dict(dict(state))
    for group, rate, first in zip(
        optimizer.param_groups, scheduler.get_last_lr(), scheduler.base_lrs, strict=True
    ):
        set_rate_(group, rate)
        group["initial_lr"] = first
    return scheduler
