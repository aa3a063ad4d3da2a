"""The learning rate after growth: now, at the peak of a schedule, and after a schedule that has ended."""

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import mupscale as mu
from harness.draws import data, seeded
from harness.refusals import refusal
from mupscale.training.rates.after_growth import NEW_SCHEDULE

SILENT = mu.MupNoise(0.0)
STEPS = 10


def net(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 1))


def run_with(schedule: Any, steps: int, lr: float = 1e-2) -> mu.Run:
    model = seeded(net, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    run = mu.Run(model, optimizer, [] if schedule is None else schedule(optimizer), steps=3)
    train(run, steps)
    return run


def train(run: mu.Run, steps: int) -> None:
    for _ in range(steps):
        for optimizer in run.optimizers:
            optimizer.zero_grad()
        run.model(data(5, 3)).square().mean().backward()
        for part in (*run.optimizers, *run.schedulers):
            part.step()


def rate(run: mu.Run) -> float:
    return mu.diagnostics.reference_lr(run.optimizer)


FALLING: dict[str, Any] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda i: max(0.0, 1 - i / STEPS)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "linear": lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, STEPS),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, STEPS),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.5, 1.0, 4), lr_scheduler.CosineAnnealingLR(o, STEPS - 4)], [4]
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o, 1.0, 0.0, STEPS)]),
}


@pytest.mark.parametrize("kind", FALLING)
def test_lr_is_the_rate_now_and_peak_lr_the_rate_that_the_schedule_multiplies(kind: str):
    run = run_with(FALLING[kind], 6)
    share = run.optimizer.param_groups[0]["lr"] / 1e-2
    assert 0.2 < share < 0.8
    now = mu.upscale(run, lambda: net(8), SILENT, lr=3e-3)
    peak = mu.upscale(run, lambda: net(8), SILENT, peak_lr=3e-3 / share)
    assert rate(now) == pytest.approx(3e-3)
    fast = run_with(FALLING[kind], 6, lr=3e-3 / share)
    for _ in range(3):
        assert rate(peak) == pytest.approx(rate(now))
        assert rate(peak) == pytest.approx(fast.optimizer.param_groups[0]["lr"])
        for one in (now, peak, fast):
            train(one, 1)
    other = mu.upscale(run, lambda: net(8), SILENT, peak_lr=3e-3)
    assert rate(other) == pytest.approx(3e-3 * share), "control: the two words differ"
    assert other.provenance["peak_lr"] == 3e-3


@pytest.mark.parametrize("lr", [None, 1e-3])
@pytest.mark.parametrize("kind", FALLING)
def test_a_schedule_that_has_ended_at_zero_is_refused_with_lines_that_work(kind: str, lr: float | None):
    run, make, noise = run_with(FALLING[kind], STEPS), lambda: net(8), SILENT
    error = refusal(lambda: mu.upscale(run, make, noise, lr=lr), "schedule.ended_at_zero", where=NEW_SCHEDULE)
    assert error.faults[0].where == type(run.scheduler).__name__
    names: dict[str, Any] = {"run": run, "make": make, "noise": noise, "mu": mu}
    exec(NEW_SCHEDULE, names)
    wide = names["wide"]
    assert wide.steps == run.steps
    for i in range(25):
        assert rate(wide) == pytest.approx(5e-3 * min(1, i / 20)), "half of the base's 1e-2"
        train(wide, 1)
    early = run_with(FALLING[kind], STEPS - 3)
    assert rate(mu.upscale(early, make, noise)) > 0, "control: a schedule that runs"


CONSTANT: dict[str, Any] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda i: max(0.1, 1 - i / STEPS)),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [4, 8]),
    "linear": lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, STEPS),
}


@pytest.mark.parametrize("kind", CONSTANT)
def test_a_schedule_that_has_ended_above_zero_is_warned_of(kind: str):
    run = run_with(CONSTANT[kind], STEPS)
    with pytest.warns(UserWarning, match=r"mu\.rewarm_"):
        wide = mu.upscale(run, lambda: net(8), SILENT)
    assert rate(wide) == pytest.approx(run.optimizer.param_groups[0]["lr"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rate(mu.upscale(run, lambda: net(8), SILENT, lr=5e-3)) == pytest.approx(5e-3)
        mu.upscale(run_with(CONSTANT[kind], 3), lambda: net(8), SILENT)  # control: it has steps left


def test_a_schedule_that_is_constant_at_its_peak_is_no_end():
    warmed = run_with(lambda o: lr_scheduler.LambdaLR(o, lambda i: min(1.0, i / 4)), STEPS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rate(mu.upscale(warmed, lambda: net(8), SILENT)) == pytest.approx(1e-2)


def test_the_first_step_of_a_warm_up_takes_a_peak_and_no_rate_now():
    run = run_with(lambda o: lr_scheduler.LambdaLR(o, lambda i: min(1.0, i / 4)), 0)
    refusal(lambda: mu.upscale(run, lambda: net(8), SILENT, lr=5e-3), "rates.zero_now", where="peak_lr=0.005")
    wide = mu.upscale(run, lambda: net(8), SILENT, peak_lr=5e-3)
    train(wide, 4)
    assert rate(wide) == pytest.approx(5e-3)


def test_peak_lr_is_refused_without_a_schedule_and_beside_lr():
    plain = run_with(None, 1)
    refusal(lambda: mu.upscale(plain, lambda: net(8), SILENT, peak_lr=1e-3), "rates.no_schedule_with_peak")
    run = run_with(FALLING["lambda"], 3)
    both = lambda: mu.upscale(run, lambda: net(8), SILENT, lr=1e-3, peak_lr=1e-3)  # noqa: E731
    refusal(both, "rates.lr_and_peak")
    model = seeded(net, 4)
    first, rest = list(model.parameters())[:2], list(model.parameters())[2:]
    two = torch.optim.SGD(first, lr=0.1), torch.optim.SGD(rest, lr=0.1)
    half = mu.Run(model, two, lr_scheduler.ExponentialLR(two[0], 0.9))
    refusal(lambda: mu.upscale(half, lambda: net(8), SILENT, peak_lr=1e-3), "rates.no_schedule_with_peak")
    whole = mu.Run(model, two, [lr_scheduler.ExponentialLR(o, 0.9) for o in two])
    assert mu.upscale(whole, lambda: net(8), SILENT, peak_lr=1e-3).optimizers, "control: both are driven"


def test_a_rate_that_is_zero_up_to_rounding_counts_as_zero():
    run = run_with(lambda o: lr_scheduler.LambdaLR(o, lambda i: 1 - sum([1 / STEPS] * i)), STEPS)
    assert 0 < run.optimizer.param_groups[0]["lr"] < 1e-15, "the sum of ten tenths is not one"
    refusal(lambda: mu.upscale(run, lambda: net(8), SILENT), "schedule.ended_at_zero")
    wide = mu.upscale(dataclasses.replace(run, schedulers=()), lambda: net(8), SILENT, lr=1e-3)
    assert rate(wide) == pytest.approx(1e-3)
