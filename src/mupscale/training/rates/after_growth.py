"""The learning rate after growth: the rate now, the peak of a schedule, and schedules that have ended.

`lr` replaces the rate at which the run stands, `peak_lr` the rate that its schedule multiplies. Both are written at
the reference. A schedule that has ended at zero is refused, because it would hold every later rate at zero.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...errors import Fault, MupscaleError, raise_faults
from ...optimizers.rates import SAME, Rates, are_one
from ...optimizers.schedulers import driven_by
from ...runs.run import Run

_AHEAD = 100
"""Steps for which a LambdaLR is evaluated ahead. One that is constant for so long is taken to stay constant."""
_ZERO = 1e-9
"""The share of its start at which a rate counts as zero. 1 - 0.1 * 10 and its like end at 1e-16, by rounding."""
NEW_SCHEDULE = (
    "run = mu.rewarm_(run, mu.GrowthSchedule(1000)); wide = mu.upscale(run, make, noise, step_cost=1)"
)
"""How a run continues whose schedule has ended: with a new one, here over 1000 steps to half of the earlier peak."""


def new_rates(run: Run, lr: float | None, peak_lr: float | None) -> Callable[[Run], None]:
    """A function that sets the rates of the grown run; raises if `lr` or `peak_lr` has no single meaning for `run`."""
    every = rates_of(run)
    _refuse(run, every, lr, peak_lr)
    if peak_lr is not None:
        peak = _one((rates.at_reference(rates.peaks) for rates in every), "peak_lr")
        return lambda grown: _scale_all_(grown, peak_lr / peak)
    if lr is None:
        _warn_of_constant(run.schedulers)
        return lambda grown: None
    if not _all_at_zero(every):
        now = _one((rates.at_reference() for rates in every), "lr")
        return lambda grown: _scale_all_(grown, lr / now)
    _one((rates.at_reference(rates.of_groups("initial_lr")) for rates in every), "lr")
    return lambda grown: _set_all_(grown, lr)


def rates_of(run: Run) -> list[Rates]:
    """The learning rates of every optimizer of a run."""
    return [Rates(optimizer, run.schedulers) for optimizer in run.optimizers]


def _refuse(run: Run, every: Sequence[Rates], lr: float | None, peak_lr: float | None) -> None:
    """Raise if both rates are given, if the run has no schedule that has a peak, or if its rate is held at zero."""
    faults = []
    if lr is not None and peak_lr is not None:
        what = (
            "lr is the rate now and peak_lr the rate that the schedule multiplies: one follows from the other"
        )
        faults.append(Fault("rates.lr_and_peak", "lr and peak_lr", what, "leave one of them out"))
    driven = {id(driven_by(scheduler)) for scheduler in run.schedulers}
    if peak_lr is not None and not (run.optimizers and all(id(o) in driven for o in run.optimizers)):
        what = "it is the peak of a schedule, and an optimizer of this run has no scheduler"
        faults.append(
            Fault("rates.no_schedule_with_peak", "peak_lr", what, "write lr= instead: the rate now")
        )
    for scheduler in run.schedulers:
        if _at_zero(Rates(driven_by(scheduler))) and _has_run(scheduler):
            what = "its schedule has ended at zero, and it would keep the rate of the wide run at zero"
            faults.append(
                Fault("schedule.ended_at_zero", type(scheduler).__name__, what, f"write {NEW_SCHEDULE}")
            )
    if lr is not None and not faults and run.schedulers and _all_at_zero(every):
        what = "the rate is zero now and its schedule is going to raise it, so no factor turns it into lr"
        faults.append(Fault("rates.zero_now", "lr", what, f"write peak_lr={lr:g}"))
    raise_faults("these learning rates cannot be continued", faults)


def _warn_of_constant(schedulers: Iterable[Any]) -> None:
    for scheduler in schedulers:
        now, first = (Rates(driven_by(scheduler)).of_groups(key)[0] for key in ("lr", "initial_lr"))
        if _ZERO * first < now < first * (1 - SAME) and _is_constant(scheduler):
            warnings.warn(
                f"the schedule of {type(scheduler).__name__} has ended: the rate stays at {now / first:.3g} times its "
                f"start. To continue with another one, write {NEW_SCHEDULE}",
                stacklevel=4,
            )


def _has_run(scheduler: Any) -> bool:
    """Whether a schedule whose rate is zero has had other rates before. A warm-up that starts at zero has not."""
    inner = getattr(scheduler, "_schedulers", ())
    if inner:
        return any(map(_has_run, inner))
    if not hasattr(scheduler, "lr_lambdas"):
        return bool(scheduler.last_epoch > 0)
    return any(_multipliers(scheduler, 0, scheduler.last_epoch))


def _is_constant(scheduler: Any) -> bool:
    """Whether a scheduler will not change its rate any more, as far as can be seen."""
    inner, now = getattr(scheduler, "_schedulers", ()), getattr(scheduler, "last_epoch", 0)
    if inner and hasattr(scheduler, "_milestones"):  # SequentialLR
        return bool(now >= scheduler._milestones[-1]) and _is_constant(inner[-1])
    if inner:
        return all(map(_is_constant, inner))
    if hasattr(scheduler, "total_iters"):  # ConstantLR, LinearLR, PolynomialLR
        return bool(now >= scheduler.total_iters)
    if hasattr(scheduler, "milestones"):  # MultiStepLR
        return all(step <= now for step in scheduler.milestones)
    if hasattr(scheduler, "total_steps"):  # OneCycleLR: torch refuses to step beyond its end
        return bool(now >= scheduler.total_steps - 1)
    if hasattr(scheduler, "T_max"):  # CosineAnnealingLR: beyond its end torch lets it rise again
        return bool(now >= scheduler.T_max)
    if type(scheduler).__name__ == "LambdaLR":
        ahead = _multipliers(scheduler, now, now + _AHEAD)
        return bool(ahead) and len(set(ahead)) == 1
    return False


def _multipliers(scheduler: Any, first: int, last: int) -> list[float]:
    """What the functions of a LambdaLR give from step `first` up to `last`, the latter not included."""
    try:
        return [float(f(i)) for f in scheduler.lr_lambdas for i in range(first, last)]
    except Exception:  # the user's function, which may be a table that ends
        return []


def _one(rates: Iterable[list[float]], word: str) -> float:
    """The rate that all groups of all optimizers share; raises if there are several, or no optimizer."""
    found = sorted({rate for of in rates for rate in of})
    if found and are_one(found):
        return found[0]
    what = f"it replaces one learning rate, and the optimizers of this run have {found or 'none'}"
    remedy = f"write {word}=None, and use set_lr_ on each optimizer, or scale the groups yourself"
    raise MupscaleError(f"{word}= has no single meaning", [Fault("rates.no_single_rate", word, what, remedy)])


def _all_at_zero(every: Sequence[Rates]) -> bool:
    return bool(every) and all(map(_at_zero, every))


def _at_zero(rates: Rates) -> bool:
    starts = rates.of_groups("initial_lr")
    return all(now <= _ZERO * first for now, first in zip(rates.of_groups(), starts, strict=True))


def _set_all_(run: Run, lr: float) -> None:
    for rates in rates_of(run):
        rates.set_(lr)


def _scale_all_(run: Run, ratio: float) -> None:
    for rates in rates_of(run):
        rates.scale_(ratio)
