"""A run whose schedule has ended starts a new one, before or after growth; what ended schedules leave behind is dropped."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import mupscale as mu
from harness.refusals import refusal
from tests.training.test_schedules import EQUAL, KINDS, SILENT, net, run_of, trained

NEW = mu.GrowthSchedule(20, warmup=0.25, decay=0.5)
ENDS = mu.GrowthSchedule(6, warmup=0.0, decay=0.5)


def ended(kind: str) -> mu.Run:
    run = run_of(kind, ENDS)
    trained(run, 6)
    assert all(group["lr"] == 0 for o in run.optimizers for group in o.param_groups)
    return run


def wide_net() -> nn.Module:
    return net(8).double()


def rates(run: mu.Run) -> list[float]:
    """The rate of every group at the reference."""
    return [g["lr"] / g.get("lr_factor", 1.0) for o in run.optimizers for g in o.param_groups]


@pytest.mark.parametrize("kind", KINDS)
def test_before_or_after_growth_it_is_the_base_that_was_rewarmed(kind: str):
    peak = {"one group": 1e-2, "two groups": 0.05, "two optimizers": 0.02}[kind]
    base = mu.rewarm_(ended(kind), NEW, peak_lr=peak / 4)
    losses, multipliers = trained(base, 20)
    assert [m[0] for m in multipliers] == [NEW(i) for i in range(20)]
    before = mu.upscale(mu.rewarm_(ended(kind), NEW, peak_lr=peak / 4), wide_net, SILENT, step_cost=1.0)
    after = mu.rewarm_(mu.grow(ended(kind), wide_net, step_cost=1.0), NEW, peak_lr=peak / 4)
    for wide in (before, after):
        found, same = trained(wide, 20)
        assert same == multipliers
        assert found == pytest.approx(losses, rel=EQUAL)
    other = mu.rewarm_(mu.grow(ended(kind), wide_net, step_cost=1.0), NEW, peak_lr=peak)
    assert trained(other, 20)[0] != pytest.approx(losses, rel=1e3 * EQUAL), "control: another peak"


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_keeps_its_ended_schedule_stays_at_zero(kind: str):
    """Control."""
    wide = mu.grow(ended(kind), wide_net, step_cost=1.0)
    losses, multipliers = trained(wide, 8)
    assert len(set(losses)) == 1
    assert all(m == 0 for of in multipliers for m in of)
    for optimizer in wide.optimizers:
        mu.set_lr_(optimizer, 1e-2)
    for scheduler in wide.schedulers:
        scheduler.step()
    assert all(group["lr"] == 0 for o in wide.optimizers for group in o.param_groups), "it is overwritten"


def test_peaks_keep_their_ratios_and_default_to_half_of_the_earlier_ones():
    run = ended("two groups")
    mu.rewarm_(run, mu.GrowthSchedule(20, warmup=0.0))
    assert rates(run) == [0.025, 0.01]
    grown = mu.rewarm_(mu.grow(ended("two groups"), wide_net, step_cost=1.0), NEW)
    trained(grown, 5)
    assert set(rates(grown)) == {0.025, 0.01}, "half at the reference, whatever the width"
    mu.rewarm_(run, mu.GrowthSchedule(20, warmup=0.0), peak_lr=0.01)
    assert rates(run) == pytest.approx([0.01, 0.004])
    two = mu.rewarm_(ended("two optimizers"), mu.GrowthSchedule(20, warmup=0.0), peak_lr=0.01)
    assert rates(two) == pytest.approx([0.01, 0.005])
    wide = mu.grow(two, wide_net, step_cost=1.0)
    mu.rewarm_(wide, mu.GrowthSchedule(20, warmup=0.0), peak_lr=0.04)
    assert {round(rate, 12) for rate in rates(wide)} == {0.04, 0.02}
    assert len({g["lr"] for g in wide.optimizers[1].param_groups}) > 1, "the groups are in their own units"


def test_a_stale_initial_lr_gives_the_wrong_rate():
    """Control: torch starts a new schedule from the initial_lr of the ended one, whatever lr is."""
    run = ended("one group")
    group = run.optimizer.param_groups[0]
    group["lr"] = 2e-3
    lr_scheduler.LambdaLR(run.optimizer, mu.GrowthSchedule(20, warmup=0.0))
    assert group["lr"] == 1e-2
    mu.rewarm_(run, mu.GrowthSchedule(20, warmup=0.0), peak_lr=2e-3)
    assert group["lr"] == group["initial_lr"] == 2e-3


@pytest.mark.parametrize("tensor", [False, True])
def test_the_peak_of_one_cycle_is_its_max_lr(tensor: bool):
    model = net(4).double()
    rate: Any = torch.tensor(0.3) if tensor else 0.3
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    cycle = lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=4, cycle_momentum=False)
    run = mu.Run(model, optimizer, cycle)
    for _ in range(3):
        optimizer.step()
        cycle.step()
    new = mu.rewarm_(run, NEW)
    optimizer.step()
    for _ in range(5):
        new.scheduler.step()
    group = optimizer.param_groups[0]
    assert float(group["lr"]) == pytest.approx(0.25)
    assert isinstance(group["lr"], torch.Tensor) is tensor
    assert not {"max_lr", "min_lr"} & group.keys()
    assert mu.grow(new, wide_net, step_cost=1.0).scheduler.last_epoch == 5


def test_the_peak_of_other_schedulers_is_known_or_asked_for():
    model = net(4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cyclic = lr_scheduler.CyclicLR(optimizer, base_lr=0.1, max_lr=0.8, cycle_momentum=False)
    at_once = mu.GrowthSchedule(20, warmup=0.0)
    assert rates(mu.rewarm_(mu.Run(model, optimizer, cyclic), at_once)) == [0.4]
    assert rates(mu.rewarm_(mu.Run(model, torch.optim.SGD(model.parameters(), lr=0.1)), at_once)) == [0.05]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for loss in (1.0, 2.0):
        plateau.step(loss)
    run = mu.Run(model, optimizer, plateau)
    assert rates(run) == pytest.approx([0.01])
    refusal(lambda: mu.rewarm_(run, at_once), "rates.no_peak_known", where="SGD")
    assert rates(mu.rewarm_(run, at_once, peak_lr=0.05)) == pytest.approx([0.05])


def test_what_cannot_be_started_is_refused_with_lines_that_work():
    run = dataclasses.replace(ended("one group"), schedulers=())
    with pytest.warns(UserWarning, match="optimizer, scheduler"):
        wide = mu.grow(run, wide_net)
    refusal(lambda: mu.rewarm_(wide, NEW, peak_lr=1e-3), "rates.no_peak_known", where="AdamW")
    mu.set_lr_(wide.optimizer, 1e-3)
    assert set(rates(mu.rewarm_(wide, mu.GrowthSchedule(20, warmup=0.0)))) == {5e-4}
    refusal(lambda: mu.rewarm_(mu.Run(wide.model), NEW), "run.no_optimizers")
    refusal(lambda: mu.rewarm_(wide, 1000), "argument.wrong_type", where="mu.GrowthSchedule(1000)")  # type: ignore[arg-type]
    refusal(lambda: mu.rewarm_(wide, NEW, peak_lr=0.0), "argument.not_a_number", where="peak_lr")
    refusal(lambda: mu.rewarm_(wide.optimizer, NEW), "argument.wrong_type", where="run")  # type: ignore[arg-type]


def test_the_state_of_optimizers_can_be_emptied_but_not_where_it_holds_weights():
    run = ended("one group")
    assert run.optimizer.state
    kept = mu.rewarm_(run, NEW, peak_lr=1e-2)
    assert kept.optimizer.state
    again = mu.rewarm_(run, NEW, peak_lr=1e-2, empty_state=True)
    assert not again.optimizer.state
    trained(again, 20)
    model = net(4)
    averaging = mu.Run(model, torch.optim.ASGD(model.parameters(), lr=0.1))
    model(torch.ones(2, 3)).sum().backward()
    averaging.optimizer.step()
    refusal(lambda: mu.rewarm_(averaging, NEW, empty_state=True), "state.holds_weights", where="ASGD")
    assert averaging.optimizer.state
