"""A schedule over a budget: its rates, its stages, and the same rates through growth as if growth had been known."""

import copy
import io
import json
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, LambdaLR, SequentialLR

import mupscale as mu
from harness.draws import data, seeded
from harness.refusals import refusal

Schedule = mu.GrowthSchedule
SILENT = mu.MupNoise(0.0)
EQUAL = 1e-9
PLAIN = Schedule(budget=60, step_cost=1.0, warmup=0.1, decay=0.4)
GROWTHS = ((20, 8, 2.0), (28, 16, 4.0))
"""The step, the width and the cost of one step of each growth."""
KNOWN = Schedule(60, warmup=0.1, decay=0.4, later=((20, 2.0), (28, 4.0)))
STEPS = sum(KNOWN.steps_of_stages)


def net(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 1))


def wider(n: int) -> Callable[[], nn.Module]:
    return lambda: net(n).double()


def loss(model: nn.Module) -> Any:
    return model(data(5, 3)).square().mean()


def one_group(model: nn.Module) -> list[Any]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)]


def two_groups(model: nn.Module) -> list[Any]:
    first, rest = list(model.parameters())[:2], list(model.parameters())[2:]
    groups: list[dict[str, Any]] = [{"params": first, "lr": 0.05}, {"params": rest}]
    return [torch.optim.SGD(groups, lr=0.02, momentum=0.9)]


def two_optimizers(model: nn.Module) -> list[Any]:
    matrix, rest = [model[2].weight], [p for n, p in model.named_parameters() if n != "2.weight"]  # type: ignore[index]
    return [torch.optim.Muon(matrix, lr=0.02), torch.optim.AdamW(rest, lr=1e-2)]


KINDS: dict[str, Callable[[nn.Module], list[Any]]] = {
    "one group": one_group,
    "two groups": two_groups,
    "two optimizers": two_optimizers,
}


def run_of(kind: str, function: Any) -> mu.Run:
    model = seeded(net, 4)
    optimizers = KINDS[kind](model)
    return mu.Run(model, optimizers, [LambdaLR(o, copy.deepcopy(function)) for o in optimizers])


def trained(run: mu.Run, steps: int) -> tuple[list[float], list[list[float]]]:
    """Losses, and the rate of each optimizer's first group at the reference."""
    losses, rates = [], []
    for _ in range(steps):
        for optimizer in run.optimizers:
            optimizer.zero_grad()
        value = loss(run.model)
        value.backward()
        losses.append(float(value.detach()))
        rates.append([s.lr_lambdas[0](s.last_epoch) for s in run.schedulers])
        for group, scheduler in (
            (o.param_groups[0], s) for o, s in zip(run.optimizers, run.schedulers, strict=True)
        ):
            assert group["lr"] == scheduler.base_lrs[0] * scheduler.lr_lambdas[0](scheduler.last_epoch)
        for part in (*run.optimizers, *run.schedulers):
            part.step()
    return losses, rates


def grown_twice(kind: str, function: Any, costs: bool = True) -> tuple[list[float], list[list[float]]]:
    run, at = run_of(kind, function), 0
    losses: list[float] = []
    rates: list[list[float]] = []
    for step, width, cost in GROWTHS:
        more = trained(run, step - at)
        losses, rates, at = losses + more[0], rates + more[1], step
        told: dict[str, Any] = {"step_cost": cost} if costs else {}
        run = mu.upscale(run, wider(width), SILENT, loss=loss, **told)
    more = trained(run, STEPS - at)
    return losses + more[0], rates + more[1]


@pytest.mark.parametrize("kind", KINDS)
def test_grown_twice_it_is_the_run_that_had_known_it(kind: str):
    losses, rates = trained(run_of(kind, KNOWN), STEPS)
    found, carried = grown_twice(kind, PLAIN)
    assert carried == rates, "to the last bit"
    assert found == pytest.approx(losses, rel=EQUAL)
    assert rates[-1][0] < 0.2 < rates[-3][0], "the rate falls to zero at the last step"


def test_a_schedule_over_steps_does_not_follow():
    """Controls: the rates of a schedule over steps, of one without stages, and of the other cost are others."""
    losses, rates = trained(run_of("one group", KNOWN), STEPS)

    def over_steps(step: int) -> float:
        return min(step / 6, 1.0, max(0.0, (60 - step) / 24))

    found, carried = grown_twice("one group", over_steps, costs=False)
    assert [rate for [rate] in carried] != pytest.approx([rate for [rate] in rates], rel=0.1)
    assert found != pytest.approx(losses, rel=1e3 * EQUAL)
    assert trained(run_of("one group", PLAIN), STEPS)[1] != rates
    other = Schedule(60, warmup=0.1, decay=0.4, later=((20, 2.0), (28, 4.1)))
    assert trained(run_of("one group", other), STEPS)[1] != rates


def test_stages_are_saved_with_the_scheduler():
    """A resumed run continues to the last bit; control: without its state it does not know the growth."""

    def saved(part: Any) -> Any:
        torch.save(part.state_dict(), file := io.BytesIO())
        file.seek(0)
        return torch.load(file, weights_only=True)

    run = run_of("two groups", PLAIN)
    trained(run, 20)
    wide = mu.grow(run, wider(8), step_cost=2.0)
    trained(wide, 3)
    kept = saved(wide.scheduler)
    groups = [{**g, "params": list(g["params"])} for g in copy.deepcopy(wide.optimizer).param_groups]
    ahead = trained(wide, 17)[1]
    assert len({rate for [rate] in ahead}) > 5
    for state, same in ((kept, True), ({**kept, "lr_lambdas": [None] * len(groups)}, False)):
        fresh = LambdaLR(torch.optim.SGD(groups, lr=1.0), copy.copy(PLAIN))
        fresh.load_state_dict(state)
        assert ([[fresh.lr_lambdas[0](fresh.last_epoch + i)] for i in range(17)] == ahead) is same
    assert pickle.loads(pickle.dumps(PLAIN)) == PLAIN
    written = LambdaLR(torch.optim.SGD(groups, lr=1.0), copy.copy(PLAIN))
    written.load_state_dict(json.loads(json.dumps(kept)))
    Schedule.grow_(written, 4.0)
    function: Any = written.lr_lambdas[0]
    assert [tuple(stage) for stage in function.stages] == [(0, 1.0), (20, 2.0), (23, 4.0)]


def test_a_planned_growth_is_begun_once():
    run = run_of("one group", KNOWN)
    trained(run, 20)
    refusal(lambda: mu.grow(run, wider(8), step_cost=2.0), "schedule.later_stage_begun", where="28")
    short = Schedule(60, warmup=0.1, decay=0.4, later=((20, 2.0),))
    run = run_of("one group", short)
    trained(run, 20)
    wide = mu.grow(run, wider(8), step_cost=2.0)
    assert wide.scheduler.lr_lambdas[0] == short
    assert short.grown(30, 2.0) == short, "a resumed run that gets its cost again"
    assert short.grown(20, 3.0).later == ((20, 3.0),), "two growths at one step: the last cost counts"
    assert PLAIN.grown(0, 2.0) == Schedule(60, 2.0, warmup=0.1, decay=0.4)


@pytest.mark.parametrize(("shape", "half"), [("linear", 0.5), ("cosine", 0.5), ("1-sqrt", 1 - 0.5**0.5)])
def test_the_decay_has_its_shape_and_ends_at_zero(shape: str, half: float):
    schedule = Schedule(200, 2.0, warmup=0.1, decay=0.5, shape=shape)
    assert [schedule(i) for i in (0, 5, 10, 49, 50)] == [0.0, 0.5, 1.0, 1.0, 1.0]
    assert schedule(75) == pytest.approx(half)
    assert schedule(100) == schedule(1000) == 0.0
    falls = [schedule(i) for i in range(50, 101)]
    assert falls == sorted(falls, reverse=True)
    assert schedule(99) > 0


def test_steps_spend_the_budget():
    for schedule in (
        Schedule(1.0, 0.1),
        Schedule(1e18, 3e12),
        KNOWN,
        Schedule(7, 0.3, later=((5, 0.7), (100, 2.0))),
        Schedule(0.7, 0.1, later=((4, 0.3),)),
    ):
        steps = sum(schedule.steps_of_stages)
        assert len(schedule.steps_of_stages) == len(schedule.stages)
        assert schedule.spent(steps) >= 1 - 1e-12
        assert schedule.spent(steps - 1) < 1 - 1e-12
        for share in (0.0, 0.25, 0.5):
            at = schedule.step_at(share)
            assert schedule.spent(at) >= share * (1 - 1e-9)
            assert at == 0 or schedule.spent(at - 1) < share
    assert Schedule(1.0, 0.1).steps_of_stages == (10,)
    assert Schedule(7, 0.3, later=((5, 0.7), (100, 2.0))).steps_of_stages == (5, 8, 0)


def test_growth_in_the_decay_is_warned_of():
    run = run_of("two groups", PLAIN)
    trained(run, 36)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mu.grow(run, wider(8), step_cost=2.0)  # control: the decay begins at 36
    trained(run, 1)
    with pytest.warns(UserWarning, match=r"62%.* 36\b") as caught:
        mu.grow(run, wider(8), step_cost=2.0)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=r"100%.* mu\.rewarm_"):
        PLAIN.grown(60, 2.0)


def test_schedulers_inside_others_are_told():
    model = seeded(net, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = LambdaLR(optimizer, Schedule(100))
    for outer in (
        ChainedScheduler([ConstantLR(optimizer, 0.5, 3), inner]),
        SequentialLR(optimizer, [ConstantLR(optimizer, 0.5, 3), inner], [3]),
    ):
        wide = mu.grow(mu.Run(model, optimizer, outer), wider(8), step_cost=4.0)
        assert wide.scheduler._schedulers[1].lr_lambdas[0].stages[-1][1] == 4.0
        assert inner.lr_lambdas[0] == Schedule(100), "the base's schedule stays"


def test_what_a_schedule_cannot_use_is_refused():
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"budget": 0}, "argument.not_a_number"),
        ({"budget": 10, "step_cost": -1.0}, "argument.not_a_number"),
        ({"budget": 10, "warmup": 0.8, "decay": 0.3}, "schedule.shares_above_one"),
        ({"budget": 10, "shape": "sqrt"}, "schedule.unknown_shape"),
        ({"budget": 10, "later": ((5, 1.0), (5, 2.0))}, "schedule.stages_not_increasing"),
        ({"budget": 10, "later": ((0, 2.0),)}, "schedule.stages_not_increasing"),
        ({"budget": 10, "decay": "0.3"}, "argument.not_a_number"),
    ]
    for arguments, code in wrong:
        refusal(partial(Schedule, **arguments), code, where=list(arguments)[-1])
    run = run_of("one group", PLAIN)
    for grow in (
        lambda **o: mu.grow(run, wider(8), **o),
        lambda **o: mu.upscale(run, wider(8), SILENT, **o),
    ):
        refusal(grow, "schedule.step_cost_missing", where="step_cost=6e12")
        refusal(partial(grow, step_cost="2"), "argument.not_a_number", where="step_cost")
        grow(step_cost=6e12)
    other = mu.Run(run.model, run.optimizers)
    refusal(lambda: mu.grow(other, wider(8), step_cost=2.0), "schedule.step_cost_unused")
    refusal(lambda: Schedule.grow_(ConstantLR(run.optimizer), 2.0), "schedule.step_cost_unused")
    assert Schedule(10, decay=0.0)(10**6) == 1.0


def test_verify_proves_a_run_with_a_schedule():
    run = run_of("one group", PLAIN)
    trained(run, 8)

    def step(one: mu.Run, i: int) -> Any:
        one.optimizer.zero_grad()
        value = one.model(data(5, 3, seed=i).to(next(one.model.parameters()).dtype)).square().mean()
        value.backward()
        one.optimizer.step()
        one.scheduler.step()
        return value

    mu.verify(run, wider(8), step=step).raise_if_broken()
