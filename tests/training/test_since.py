"""`since` is the plan from the reference to a model; a run in its place cannot be the wrong one."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import mupscale as mu
from harness.draws import seeded
from harness.refusals import refusal
from mupscale.runs.run import since_of
from mupscale.training.units.clip import grad_norm


def net(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 2))


def grown_twice() -> mu.Run:
    base = seeded(net, 4)
    run = mu.Run(base, torch.optim.AdamW(base.parameters(), lr=1.0))
    return mu.grow(mu.grow(run, lambda: net(8)), lambda: net(16))


def rates(model: nn.Module, since: mu.Plan | mu.Run) -> dict[str, float]:
    groups = mu.param_groups(model, since, torch.optim.AdamW, lr=1.0)
    return {name: group["lr"] for group in groups for name, _ in group["params"]}


def test_a_run_gives_the_plan_since_its_reference_after_two_growths():
    """Shapes cannot tell the plan of the last growth from the plan since the reference, and a run can."""
    run = grown_twice()
    assert run.plan is not None
    assert run.since is not None
    assert run.since == mu.plans.plan_between(net, 4, 16)
    assert rates(run.model, run) == rates(run.model, run.since)
    assert rates(run.model, run)["2.weight"] == 0.25
    for groups in (
        mu.param_groups(run, torch.optim.AdamW, lr=1.0),
        mu.param_groups(run.model, run, torch.optim.AdamW, lr=1.0),
    ):
        assert groups == mu.param_groups(run.model, run.since, torch.optim.AdamW, lr=1.0)
    # Control: the plan of the last growth fits the same shapes, and would give another rate.
    assert rates(run.model, dataclasses.replace(run.plan, later=False))["2.weight"] == 0.5


@pytest.mark.parametrize(
    "act",
    [
        lambda run, since: mu.init_weights_(run.model, since, std=net(4)),
        lambda run, since: mu.param_groups(run.model, since, torch.optim.AdamW),
        lambda run, since: mu.trainers.optimizer_in_units(run.model, since, torch.optim.AdamW),
        lambda run, since: grad_norm(run.model, since),
        lambda run, since: mu.trainers.clip_grad_norm_(run.model, since, max_norm=1.0),
        lambda run, since: mu.clip_before_step_(run.optimizers, since, model=run.model, max_norm=1.0),
        lambda run, since: mu.step_in_units_(
            torch.optim.AdamW(run.model.parameters()), since, model=run.model
        ),
    ],
)
def test_every_function_that_takes_since_takes_a_run_of_the_same_model_only(act: Any):
    run = grown_twice()
    act(run, run)
    act(grown_twice(), mu.plans.plan_between(net, 4, 16))
    refusal(lambda: act(run, mu.Run(net(16))), "run.other_model")
    refusal(lambda: act(run, run.plan), "plan.of_later_growth", where="run.since")
    act(grown_twice(), run.since)


def test_the_plan_of_a_first_growth_is_the_one_since_the_reference():
    run = mu.grow(net(4), lambda: net(8))
    assert rates(run.model, run.plan) == rates(run.model, run)  # type: ignore[arg-type]
    again = mu.Plan.from_json(grown_twice().plan.to_json())  # type: ignore[union-attr]
    assert not again.later, "a stored plan does not know which run was grown by it"


def test_a_plan_needs_the_model_and_a_run_holds_it():
    run = grown_twice()
    assert run.since is not None
    optimizer = torch.optim.AdamW(run.model.parameters())
    refusal(lambda: mu.clip_before_step_(run.optimizers, run.since, max_norm=1.0), "run.model_missing", where="clip_before_step_")  # type: ignore[arg-type]  # fmt: skip
    refusal(lambda: mu.step_in_units_(optimizer, run.since), "run.model_missing", where="step_in_units_")  # type: ignore[arg-type]
    refusal(lambda: mu.param_groups(run.model, 4, torch.optim.AdamW), "argument.wrong_type", where="since")  # type: ignore[arg-type]
    refusal(lambda: mu.param_groups(run.model, torch.optim.AdamW), "argument.wrong_type", where="since")
    refusal(lambda: mu.param_groups(run.model, run), "optimizer.not_a_class")
    mu.clip_before_step_(run.optimizers, run, max_norm=1.0)
    mu.step_in_units_(optimizer, run)


def test_a_run_that_is_its_own_reference_changes_nothing():
    model = net(4)
    assert mu.Run(model).since is None
    assert all(str(entry.change.s) == "1" for entry in since_of(mu.Run(model), model).tensors.values())


def test_one_optimizer_and_one_scheduler_have_names_of_their_own():
    model = net(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    run = mu.Run(model, optimizer, scheduler, steps=3)
    assert (run.optimizer, run.scheduler, run.steps) == (optimizer, scheduler, 3)
    refusal(lambda: mu.Run(model).optimizer, "run.not_exactly_one", where="run.optimizers[i]")
    refusal(
        lambda: mu.Run(model, [optimizer, optimizer]).optimizer,
        "run.not_exactly_one",
        where="run.optimizers[i]",
    )
    refusal(lambda: mu.Run(model).scheduler, "run.not_exactly_one", where="run.schedulers[i]")


class Tied(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, n), nn.Linear(n, 5, bias=False)
        self.head.weight = self.embed.weight


def test_a_plan_knows_the_names_that_it_lists():
    plan = mu.infer_plan(Tied(4), Tied(8), declared=mu.Declared(folds={"embed.weight": 1}))
    assert set(plan.names) == {"embed.weight", "head.weight"}
    assert list(plan.tensors) == ["embed.weight"]
    assert all(name in plan and plan[name] is plan["embed.weight"] for name in plan.names)
    assert "stranger" not in plan
    with pytest.raises(TypeError):
        list(plan)  # type: ignore[call-overload]


def test_narrowing_goes_back_to_the_reference_of_the_middle_model():
    run = mu.Run(seeded(net, 4), since=mu.plans.plan_between(net, 2, 4))
    middle = mu.grow(run, lambda: net(8))
    wide = mu.grow(middle, lambda: net(16))
    once = mu.narrow(wide, lambda: net(8))
    assert (once.since, once.plan) == (middle.since, middle.plan)
    assert once.since is not None
    twice = mu.narrow(once, lambda: net(4))
    assert (twice.since, twice.plan) == (run.since, None)
    noise = mu.MupNoise(0.3)
    stds = [mu.upscale(r, lambda: net(64), noise).provenance["noise"] for r in (middle, once)]
    assert stds[0] == stds[1]
    grown = [mu.upscale(r, lambda: net(64), noise).model for r in (middle, once)]
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in grown), strict=True))
    lost = mu.Run(once.model)
    other = mu.upscale(lost, lambda: net(64), noise).model
    weights = [model.get_parameter("2.weight") for model in (other, grown[0])]
    assert not torch.equal(*weights), "control: without the reference"


def test_a_reference_that_is_lost_by_narrowing_is_warned_of():
    plan, early = mu.plans.plan_between(net, 4, 8), mu.plans.plan_between(net, 2, 4)
    run = mu.Run(seeded(net, 8), since=early.then(plan))
    with pytest.warns(UserWarning, match="no reference"):
        back = mu.narrow(run, lambda: net(4), plan=plan)
    assert back.since is None
    assert dataclasses.replace(back, since=early).since == early
