"""Learning rate schedules: carried, left out, absolute, in units."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedules

import mupscale as mu
from harness.loops.situation import *


def warmed_cosine(optimizer: Optimizer) -> Any:
    parts = [schedules.LinearLR(optimizer, 0.1, total_iters=6), schedules.CosineAnnealingLR(optimizer, 20)]
    return schedules.SequentialLR(optimizer, parts, milestones=[6])


MULTIPLIED: dict[str, Callable[[Optimizer], Any]] = {
    "schedule_lambda": lambda o: schedules.LambdaLR(o, lambda n: 1 / (1 + n)),
    "schedule_cosine_after_warmup": warmed_cosine,
    "schedule_steps_chained": lambda o: schedules.ChainedScheduler(
        [schedules.MultiStepLR(o, [3, 6], 0.3), schedules.ExponentialLR(o, 0.9)]
    ),
    "schedule_warm_restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
}
for name, schedule in MULTIPLIED.items():
    situation(Exact(), name=name)(lambda schedule=schedule: grown(trained(schedule=schedule)))  # type: ignore[misc]


@situation(Exact())
def schedule_of_the_validation_loss() -> Pair:
    def judged(run: mu.Run, number: int) -> Tensor:
        found = loss(run.model, number)
        run.optimizer.zero_grad()
        found.backward()  # type: ignore[no-untyped-call]
        run.optimizer.step()
        run.scheduler.step(float(found.detach()) + number)
        return found.detach()

    plateau = partial(schedules.ReduceLROnPlateau, patience=1, eps=0.0)
    return grown(trained(schedule=plateau, step=judged), step=judged)


@situation(Exact())
def schedule_of_a_growing_budget() -> Pair:
    """The wide step costs the same here, so both schedules are one."""

    def budget(optimizer: Optimizer) -> Any:
        return schedules.LambdaLR(optimizer, mu.GrowthSchedule(30, warmup=0.1))

    return grown(trained(schedule=budget), step_cost=1.0)


@situation(Warned(), "S9")
def schedule_not_given_to_the_run() -> Pair:
    """The groups have an initial_lr, so there is a scheduler; the loop steps the base's."""
    run = trained()
    scheduler = schedules.CosineAnnealingLR(run.optimizer, 12)

    def scheduled(half: mu.Run, number: int) -> Tensor:
        found = step(half, number)
        if half is run:
            scheduler.step()
        return found

    return grown(run, step=scheduled)


@situation(Refused("schedule.reads_base"), "S12")
def schedule_reads_the_optimizer_of_the_base() -> Pair:
    def halved(optimizer: Optimizer) -> Any:
        return schedules.LambdaLR(optimizer, lambda n: 0.5 if optimizer.param_groups[0]["lr"] > 6e-3 else 1.0)

    return grown(trained(schedule=halved))


@schedule_reads_the_optimizer_of_the_base.remedy
def _() -> Pair:
    return grown(trained(schedule=lambda o: schedules.LambdaLR(o, lambda n: 1.0 if n % 2 else 0.5)))


@situation(Exact())
def schedule_with_a_counter_of_its_own() -> Pair:
    """An object that is called, and counts."""

    class Decay:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, number: int) -> float:
            self.calls += 1
            return 0.95**self.calls

    return grown(trained(schedule=lambda o: schedules.LambdaLR(o, Decay())))


def one_cycle(optimizer: Optimizer) -> Any:
    return schedules.OneCycleLR(optimizer, 1e-2, total_steps=60)


def in_units(optimizer: Callable[[Any], Optimizer], schedule: Callable[[Optimizer], Any]) -> mu.Run:
    """A base that is stepped in units, so that its groups keep the constants of the base at every width."""
    torch.manual_seed(0)
    model = Net(BASE)
    found = optimizer(model)
    mu.step_in_units_(found, mu.Run(model))
    return after(mu.Run(model, found, schedule(found)))


@situation(Exact(), "W3")
def one_cycle_in_units() -> Pair:
    return grown(in_units(adamw, one_cycle))


@situation(Exact(), "W3")
def cosine_with_a_floor_in_units() -> Pair:
    return grown(in_units(adamw, lambda o: schedules.CosineAnnealingLR(o, 20, eta_min=1e-3)))


@situation(Exact(), "W3")
def cyclic_momentum_in_units() -> Pair:
    return grown(in_units(sgd, lambda o: schedules.CyclicLR(o, 1e-2, 0.1, step_size_up=4)))


@situation(Exact(), "W3")
def one_cycle_has_ended_and_is_left_out() -> Pair:
    """What OneCycleLR leaves in the groups has units too; the loop continues at a constant rate."""
    run = trained(schedule=one_cycle)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group.pop("initial_lr")
    return grown(mu.Run(run.model, run.optimizers))


@situation(Exact(), "W3")
def one_cycle_with_its_rates() -> Pair:
    return grown(trained(schedule=one_cycle))


@situation(Exact(), "W3")
def cosine_with_a_floor() -> Pair:
    return grown(trained(schedule=lambda o: schedules.CosineAnnealingLR(o, 20, eta_min=1e-3)))


@situation(Exact(), "W3")
def cyclic_rate_and_momentum() -> Pair:
    return grown(trained(optimizer=sgd, schedule=lambda o: schedules.CyclicLR(o, 1e-2, 0.1, step_size_up=4)))


@situation(Refused("schedule.unknown_scheduler", "LambdaLR"))
def schedule_of_ones_own_class() -> Pair:
    class InverseRoot(schedules.LRScheduler):
        def get_lr(self) -> list[float | Tensor]:
            return [rate / (1 + self.last_epoch) ** 0.5 for rate in self.base_lrs]

    return grown(trained(schedule=InverseRoot))


@schedule_of_ones_own_class.remedy
def _() -> Pair:
    return grown(trained(schedule=lambda o: schedules.LambdaLR(o, lambda n: (1 + n) ** -0.5)))


@situation(Exact())
def new_schedule_after_the_first_has_ended() -> Pair:
    run = trained(schedule=lambda o: schedules.LinearLR(o, 1.0, 0.1, total_iters=3))
    pair = grown(run)
    budget = mu.GrowthSchedule(20, warmup=0.1)
    return Pair(mu.rewarm_(pair.base, budget), mu.rewarm_(pair.wide, budget), step)


@situation(Exact())
def rate_set_by_hand_at_the_reference() -> Pair:
    """`set_lr_` writes one number for both widths; a loop of one's own schedule."""

    def by_hand(run: mu.Run, number: int) -> Tensor:
        rate = 1e-2 * 0.9**number
        if run.plan is None:
            run.optimizer.param_groups[0]["lr"] = rate
        else:
            mu.set_lr_(run.optimizer, rate)
        return step(run, number)

    return grown(trained(step=by_hand), step=by_hand)
