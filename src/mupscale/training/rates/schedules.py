"""A learning rate schedule over a budget of FLOPs or tokens, which continues through growth.

Knows: what a step costs in each stage, and how the rate depends on the share of the budget that is spent. Does not
know: how a run grows; `grow` and `upscale` carry the scheduler and begin a stage.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from ...arguments import wrong_number, wrong_whole
from ...errors import Fault, raise_faults

SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "1-sqrt": lambda x: 1 - math.sqrt(x),
}
"""The rate in the decay, as a share of the peak; x goes from 0 to 1."""
_ROUNDING = 1e-12
"""A budget of 1 is spent by 10 steps of 0.1, although 1 / 0.1 may round to a little more than 10."""


@dataclass(frozen=True)
class GrowthSchedule:
    """The multiplier of the learning rate as a function of the budget spent: warm-up, stable phase, decay to zero.

    It is the function of a stock `LambdaLR`. The multiplier of a step depends on what was spent before it. The stages are part of
    the scheduler's state dict, and `upscale(..., step_cost=…)` begins one, so growth need not be known in advance.

    Args:
        budget: What the whole schedule spends, in FLOPs, tokens or steps.
        step_cost: What one step costs at first, in the same unit; left out, the budget is a number of steps.
        warmup: The share of the budget in which the rate rises.
        decay: The share of the budget, at its end, in which the rate falls to zero.
        shape: How it falls: "linear", "cosine" or "1-sqrt".
        later: The stages after the first: the first step of each, and what one step costs in it.

    Raises:
        MupscaleError: If the numbers make no schedule.

    >>> schedule = GrowthSchedule(budget=1000, step_cost=0.5, warmup=0.1, decay=0.5)
    >>> schedule(0), schedule(100), schedule(200), schedule(1500), schedule(2000)
    (0.0, 0.5, 1.0, 0.5, 0.0)
    >>> planned = schedule.grown(step=schedule.step_at(0.25), step_cost=2.0)
    >>> planned.steps_of_stages, planned.spent(700)
    ((500, 375), 0.65)
    """

    budget: float
    step_cost: float = 1.0
    warmup: float = 0.02
    decay: float = 0.3
    shape: str = "linear"
    later: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        faults = wrong_number("budget", self.budget, "write budget=1e18, for example", above=True)
        faults += [fault for _, cost in self.stages for fault in _wrong_cost(cost)]
        shares = [
            *wrong_number("warmup", self.warmup, "write warmup=0.02, a share of the budget"),
            *wrong_number("decay", self.decay, "write decay=0.3, a share of the budget"),
        ]
        if not shares and self.warmup + self.decay > 1 + _ROUNDING:
            what = f"together they are {self.warmup + self.decay:g} of the budget, expected at most 1"
            shares = [
                Fault(
                    "schedule.shares_above_one",
                    "warmup and decay",
                    what,
                    "write warmup=0.02, decay=0.3, for example",
                )
            ]
        faults += shares
        if self.shape not in SHAPES:
            what = f"it is {self.shape!r}, expected one of {', '.join(map(repr, SHAPES))}"
            faults.append(Fault("schedule.unknown_shape", "shape", what, 'write shape="linear"'))
        starts = [first for first, _ in self.stages]
        faults += [fault for first in starts for fault in wrong_whole("later", first, least=0)]
        if not faults and any(b <= a for a, b in pairwise(starts)):
            what = f"its stages begin at steps {starts[1:]}, expected an increasing list of steps after 0"
            faults.append(
                Fault(
                    "schedule.stages_not_increasing",
                    "later",
                    what,
                    "write later=((1000, 4.0),): first step and cost of one step",
                )
            )
        raise_faults("this is not a schedule", faults)

    def __call__(self, step: int) -> float:
        """The multiplier of the learning rate at a step.

        Args:
            step: The step, the first being 0.
        """
        share = self.spent(step)
        if share < self.warmup:
            return share / self.warmup
        if self.decay == 0 or share <= 1 - self.decay:
            return 1.0
        return SHAPES[self.shape]((share - (1 - self.decay)) / self.decay) if share < 1 else 0.0

    @property
    def stages(self) -> tuple[tuple[int, float], ...]:
        """The first step and the cost of one step of every stage."""
        return ((0, self.step_cost), *self.later)

    @property
    def steps_of_stages(self) -> tuple[int, ...]:
        """How many steps each stage has; their sum is the number of steps that spend the budget."""
        end = self.step_at(1.0)
        starts = [min(first, end) for first, _ in self.stages]
        return tuple(b - a for a, b in pairwise([*starts, end]))

    def spent(self, step: int) -> float:
        """The share of the budget that is spent before a step.

        Args:
            step: The step, the first being 0.
        """
        ends = [*(first for first, _ in self.later), math.inf]
        parts = (
            max(0.0, min(step, end) - first) * cost
            for (first, cost), end in zip(self.stages, ends, strict=True)
        )
        return sum(parts) / self.budget

    def step_at(self, share: float) -> int:
        """The first step before which this share of the budget is spent.

        Args:
            share: The share, from 0 to 1.
        """
        first, cost = next(
            (stage for stage in reversed(self.stages) if self.spent(stage[0]) <= share), self.stages[0]
        )
        steps = (share - self.spent(first)) * self.budget / cost
        return first + math.ceil(steps * (1 - _ROUNDING))

    def grown(self, step: int, step_cost: float) -> GrowthSchedule:
        """The schedule with a further stage; warns if it begins in the decay.

        Nothing changes if a step costs as much already, so a stage that was planned or saved is begun only once.

        Args:
            step: The step at which the stage begins.
            step_cost: What one step costs from there on, in the unit of the budget.
        """
        faults = [*wrong_whole("step", step, least=0), *_wrong_cost(step_cost)]
        last, cost = self.stages[-1]
        if not faults and step < last:
            what = f"growth at step {step}, but a later stage begins at step {last} already"
            faults.append(
                Fault(
                    "schedule.later_stage_begun",
                    "later",
                    what,
                    f"grow at step {last}, or leave that stage out of later=",
                )
            )
        raise_faults("this schedule cannot continue", faults)
        if step_cost == cost:
            return self
        share = self.spent(step)
        if self.decay and share > 1 - self.decay:
            early = f"grow before step {self.step_at(1 - self.decay)}"
            advice = "start a new schedule with mu.rewarm_" if share >= 1 else early
            warnings.warn(
                f"growth at step {step}, when {share:.0%} of the budget is spent, lies in the decay, which begins at "
                f"{1 - self.decay:.0%}: little is left to train what is new; {advice}",
                stacklevel=2,
            )
        if step == 0:
            return replace(self, step_cost=step_cost)
        kept = self.later[:-1] if step == last else self.later
        return replace(self, later=(*kept, (step, step_cost)))

    @staticmethod
    def grow_(scheduler: Any, step_cost: float) -> None:
        """Begin a stage at the step where a scheduler stands. `grow` and `upscale` do this for `step_cost=`.

        For other changes of the cost (another batch size, a run that was narrowed), and for loops that load state dicts.

        Args:
            scheduler: The scheduler of a `GrowthSchedule`, which is changed.
            step_cost: What one step costs from now on, in the unit of the budget.

        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> scheduler = LambdaLR(optimizer, GrowthSchedule(budget=100))
        >>> GrowthSchedule.grow_(scheduler, step_cost=4.0)
        >>> scheduler.lr_lambdas[0].steps_of_stages
        (25,)
        """
        raise_faults("no stage can be begun", wrong_step_cost([scheduler], step_cost))
        begin_stage_([scheduler], step_cost)


def begin_stage_(schedulers: Iterable[Any], step_cost: float | None) -> None:
    """Begin a stage in every `GrowthSchedule`, at the step where its scheduler stands; None begins none."""
    if step_cost is None:
        return
    for scheduler in _scheduled(schedulers):
        functions: list[Any] = scheduler.lr_lambdas
        step = max(0, scheduler.last_epoch)  # -1 in a SequentialLR before its turn
        kept: list[Any] = []
        for function in functions:
            if isinstance(function, GrowthSchedule) and function not in kept:
                kept.append(function)
        grown = [
            schedule.grown(step, step_cost) for schedule in kept
        ]  # equal ones once, so that they warn once
        scheduler.lr_lambdas = [grown[kept.index(f)] if f in kept else f for f in functions]


def wrong_step_cost(schedulers: Iterable[Any], step_cost: float | None) -> list[Fault]:
    """A fault if a `GrowthSchedule` does not learn what a step costs from now on, or if `step_cost=` is given without one."""
    found = any(True for _ in _scheduled(schedulers))
    if step_cost is None:
        what = "the run has a GrowthSchedule, and what a step costs after growth is not given"
        remedy = "write step_cost=6e12, for example: FLOPs of one wide step, or its tokens if the budget counts tokens"
        return [Fault("schedule.step_cost_missing", "step_cost", what, remedy)] if found else []
    if not found:
        what = "no scheduler has a GrowthSchedule, which is the only one that counts costs"
        remedy = "leave it out, or write LambdaLR(optimizer, mu.GrowthSchedule(budget=…, step_cost=…))"
        return [Fault("schedule.step_cost_unused", "step_cost", what, remedy)]
    return _wrong_cost(step_cost)


def _scheduled(schedulers: Iterable[Any]) -> Iterator[LambdaLR]:
    """The `LambdaLR`s that have a `GrowthSchedule`, also inside SequentialLR and ChainedScheduler."""
    for scheduler in schedulers:
        yield from _scheduled(getattr(scheduler, "_schedulers", ()))
        if any(isinstance(function, GrowthSchedule) for function in getattr(scheduler, "lr_lambdas", ())):
            yield scheduler


def _wrong_cost(step_cost: object) -> list[Fault]:
    return wrong_number("step_cost", step_cost, "write step_cost=6e12, for example", above=True)
