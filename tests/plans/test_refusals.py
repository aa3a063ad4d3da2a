"""Optimizers, schedulers, plans and state dicts: what is refused, where, and what to write instead."""

import json
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import mupscale as mu
from harness.draws import data, seeded
from harness.refusals import refusal, refused
from harness.runs import train
from mupscale.rules.optimizers import rule_for
from mupscale.rules.refused import REFUSED


def mlp(n: int) -> Any:
    return nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 2))


def loss(model: Any) -> Any:
    return (model(data(6, 3)) - data(6, 2)).square().mean()


def trained(kind: Any, steps: int = 2, **settings: Any) -> Any:
    model = seeded(mlp, 4)
    run = mu.Run(model, kind(model.parameters(), **settings))
    train(run, loss, steps)
    return run


def grow(run: mu.Run) -> Any:
    return mu.grow(run, lambda: mlp(8))


# Optimizers


def test_lbfgs_is_refused():
    run = mu.Run(model := mlp(4), torch.optim.LBFGS(model.parameters()))
    refusal(lambda: grow(run), "optimizer.not_widened_exactly", where=["torch.optim.LBFGS", "optimizers=[]"])


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_cannot_be_exact_is_refused_by_name_in_any_package(name):
    named = type(name, (torch.optim.AdamW,), {"__module__": "some.package"})
    refusal(
        lambda: grow(trained(named)),
        "optimizer.not_widened_exactly",
        where=[f"some.package.{name}", REFUSED[name]],
    )
    assert rule_for(torch.optim.AdamW), "control: another name has a row"


def test_an_unknown_optimizer_is_refused():
    unknown = type("Mine", (torch.optim.Optimizer,), {"__module__": "mine"})
    model = mlp(4)
    run = mu.Run(model, unknown(model.parameters(), {"lr": 0.1}))
    refusal(lambda: grow(run), "optimizer.unknown_class", where="mine.Mine")


def test_a_subclass_of_a_known_optimizer_is_refused_with_the_line_that_accepts_it():
    subclass = type("MyAdamW", (torch.optim.AdamW,), {"__module__": "mine"})
    run = trained(subclass)
    refusal(lambda: grow(run), "optimizer.unknown_class", where=["mine.MyAdamW", "torch.optim.AdamW"])
    accepted = mu.grow(run, lambda: mlp(8), rules={"mine.MyAdamW": rule_for(torch.optim.AdamW)})
    assert isinstance(accepted.optimizers[0], subclass), "control: what the message says to write works"


def test_unknown_optimizer_state_is_refused():
    run = trained(torch.optim.AdamW)
    for state in run.optimizers[0].state.values():
        state["curvature"] = torch.zeros(4)
    error = refusal(lambda: grow(run), "state.unknown_key", where="'curvature'")
    assert len(error.faults) == 6, "one for every parameter"
    names = [name for name, _ in run.model.named_parameters()]
    state, plan = run.optimizers[0].state_dict(), mu.plans.plan_between(mlp, 4, 8)
    call = lambda: mu.trainers.grow_optimizer_state_dict(state, plan, torch.optim.AdamW, names=names)  # noqa: E731
    refusal(call, "state.unknown_key", where="'curvature'")
    for kept in run.optimizers[0].state.values():
        del kept["curvature"]
    assert grow(run).optimizers[0].state, "control: known state is carried"


def test_an_unknown_hyperparameter_is_refused():
    run = trained(torch.optim.SGD, lr=0.1)
    run.optimizers[0].defaults["warp"] = 1.0
    refusal(lambda: grow(run), "optimizer.unknown_setting", where="'warp'")


def test_state_dicts_with_an_unknown_hyperparameter_are_refused_as_live_optimizers_are():
    run = trained(torch.optim.SGD, lr=0.1)
    state = run.optimizers[0].state_dict()
    state["param_groups"][0]["floor"] = 1e-3
    names = [name for name, _ in run.model.named_parameters()]
    plan = mu.plans.plan_between(mlp, 4, 8)
    call = lambda: mu.trainers.grow_optimizer_state_dict(state, plan, torch.optim.SGD, names=names)  # noqa: E731
    refusal(call, "optimizer.unknown_setting", where="'floor'")


def test_state_of_a_wrong_shape_is_refused():
    run = trained(torch.optim.SGD, lr=0.1, momentum=0.9)
    run.optimizers[0].state[run.model[0].bias]["momentum_buffer"] = torch.zeros(7)
    refusal(lambda: grow(run), "state.other_shape", where=["0.bias", "'momentum_buffer'", "(7,)", "(4,)"])


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_radam_in_its_first_steps_is_refused(steps):
    refusal(
        lambda: grow(trained(torch.optim.RAdam, steps)),
        "optimizer.refused_by_row",
        where=["RAdam", f"step {steps}", f"{5 - steps} more"],
    )


def test_radam_after_its_first_steps_is_accepted():
    assert grow(trained(torch.optim.RAdam, 5)).optimizers[0].state


def test_radam_does_not_wait_for_a_frozen_parameter():
    model = seeded(mlp, 4)
    model[0].weight.requires_grad_(False)
    run = mu.Run(model, torch.optim.RAdam(model.parameters()))
    train(run, loss, 8)
    assert grow(run).optimizers[0].state


def test_radam_that_never_leaves_its_first_steps_is_not_a_crash():
    """With beta2 = 0.5, rho never exceeds 5: every update is of degree 1, and the row says degree 0."""
    refusal(
        lambda: grow(trained(torch.optim.RAdam, 8, betas=(0.9, 0.5))),
        "optimizer.refused_by_row",
        where="beta",
    )


@pytest.mark.parametrize("eps1", [None, 1e-3])
def test_adafactor_with_an_eps1_that_may_bite_is_refused(eps1):
    run = trained(torch.optim.Adafactor, eps=(eps1, 1e-3))
    refusal(lambda: grow(run), "optimizer.refused_by_row", where=["eps[0]", str(eps1), "eps=(1e-12, 0.001)"])
    assert grow(trained(torch.optim.Adafactor, eps=(1e-12, 1e-3))).optimizers, "control"


def test_eps_zero_with_pads_is_refused():
    run = trained(torch.optim.AdamW, eps=0.0)
    plan = mu.plans.plan_between(mlp, 4, 6, by="padded")
    refusal(lambda: mu.grow(run, lambda: mlp(6), plan=plan), "optimizer.divides_zero_by_zero")
    assert grow(run).optimizers, "control: copies alone do not mind"


@pytest.mark.parametrize("own", [0, 2])
def test_parameters_of_another_model_are_refused(own):
    model, other = mlp(4), mlp(4)
    mixed = [*list(model.parameters())[:own], *list(other.parameters())[own:]]
    run = mu.Run(model, torch.optim.SGD(mixed, lr=0.1))
    refusal(lambda: grow(run), "optimizer.foreign_parameters", where=["SGD, group 0", str(6 - own)])


def test_a_plus_one_gain_with_a_fold_and_decay_is_refused():
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4)))
    plan = mu.infer_plan(
        model,
        nn.Sequential(nn.Linear(3, 8), nn.RMSNorm(8)),
        declared=mu.Declared(plus_one=["1.weight"], folds={"1.weight": "1/2"}),
    )
    make = lambda: nn.Sequential(nn.Linear(3, 8), nn.RMSNorm(8))  # noqa: E731
    decaying = mu.Run(model, torch.optim.AdamW(model.parameters(), weight_decay=0.1))
    refusal(
        lambda: mu.grow(decaying, make, plan=plan, prove=False),
        "optimizer.decay_of_folded_gain",
        where="1.weight",
    )
    free = mu.Run(model, torch.optim.AdamW(model.parameters(), weight_decay=0.0))
    assert mu.grow(free, make, plan=plan, prove=False).optimizers, "control"


# Schedulers


def test_an_unknown_scheduler_is_refused():
    run = trained(torch.optim.SGD, lr=0.1, momentum=0.9)
    mine = type("Mine", (lr_scheduler.LambdaLR,), {})(run.optimizers[0], lambda t: 1.0)
    scheduled = mu.Run(run.model, run.optimizers, mine)
    refusal(lambda: grow(scheduled), "schedule.unknown_scheduler", where="Mine")


def test_a_plateau_is_carried_with_its_floor_once_every_reduction_is_made():
    run = trained(torch.optim.SGD, lr=0.1, momentum=0.9)
    plateau = lr_scheduler.ReduceLROnPlateau(run.optimizers[0], patience=0, min_lr=0.03, factor=0.5)
    scheduled = mu.Run(run.model, run.optimizers, plateau)
    refusal(lambda: grow(scheduled), "schedule.absolute_rate", where=["ReduceLROnPlateau", "eps = 1e-08"])
    plateau.eps = 0.0
    wide = grow(scheduled)
    before = [group["lr"] for group in wide.optimizers[0].param_groups]
    for _ in range(5):
        plateau.step(1.0)
        wide.schedulers[0].step(1.0)
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.03), "control: it reached its floor"
    after = [group["lr"] for group in wide.optimizers[0].param_groups]
    assert after == pytest.approx([0.3 * lr for lr in before])


def test_the_scheduler_of_a_foreign_optimizer_is_refused():
    run, other = trained(torch.optim.SGD, lr=0.1), trained(torch.optim.SGD, lr=0.1)
    foreign = mu.Run(run.model, run.optimizers, lr_scheduler.StepLR(other.optimizers[0], 3))
    error = refusal(lambda: grow(foreign), "schedule.foreign_optimizer", where="StepLR")
    assert error.faults[0].remedy, "it says what to write"


# Plans and state dicts


def test_the_plan_of_another_model_lists_every_fault_at_once():
    plan = mu.plans.plan_between(mlp, 4, 8)
    other = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 4))
    error = refusal(lambda: mu.grow(other, lambda: mlp(8), plan=plan), where=["(5, 3)", "(4, 3)"])
    assert {(f.where, f.code) for f in error.faults} == {
        ("0.weight", "plan.other_shape"),
        ("0.bias", "plan.other_shape"),
        ("2.weight", "plan.other_shape"),
        ("3.weight", "plan.unknown_tensor"),
        ("3.bias", "plan.unknown_tensor"),
        ("4.weight", "plan.missing_tensor"),
        ("4.bias", "plan.missing_tensor"),
    }


def test_what_is_not_a_plan_is_refused():
    plan = mu.plans.plan_between(mlp, 4, 8)
    entry = json.loads(plan.to_json())
    entry["tensors"]["2.weight"]["s"] = "1/3"
    refusal(
        lambda: mu.Plan.from_json(json.dumps(entry)),
        "plan.contradicts_itself",
        where=["2.weight", "s = 1/3", "s = 1/2"],
    )
    entry["format"] = "mupscale plan 9"
    refusal(lambda: mu.Plan.from_json(json.dumps(entry)), "plan.wrong_format", where="'mupscale plan 9'")
    refusal(lambda: mu.Plan.from_json("{"), "json.not_json")
    for text in ("[]", "{}", '{"format": "mupscale plan 1"}'):
        refusal(partial(mu.Plan.from_json, text), "plan.malformed_record")


def test_names_that_collide_or_do_not_exist_are_refused():
    plan = mu.plans.plan_between(mlp, 4, 8)
    refusal(lambda: plan.rename({"0.weight": "2.weight"}), "plan.name_taken_twice", where="2.weight")
    refusal(lambda: plan.fold("body.*", 2), "argument.pattern_matches_nothing", where="'body.*'")
    refusal(lambda: plan.fold("0.bias", 1 / 3), "scale.inexact_float", where='"1/3"')
    assert plan.fold("0.bias", "1/3")
    refusal(lambda: plan.explain("body"), "plan.no_such_name", where="'body'")


def test_state_dicts_without_names_are_refused():
    run, plan = trained(torch.optim.AdamW), mu.plans.plan_between(mlp, 4, 8)
    state = run.optimizers[0].state_dict()
    call = mu.trainers.grow_optimizer_state_dict
    refusal(lambda: call(state, plan, torch.optim.AdamW), "state.no_names")
    refusal(
        lambda: call(state, plan, torch.optim.AdamW, names=["0.weight"]),
        "state.other_number_of_names",
        where=["1", "6"],
    )
    refusal(
        lambda: mu.trainers.grow_state_dict({"0.weight": torch.ones(4, 3)}, plan),
        "plan.missing_tensor",
        where="2.weight",
    )


def test_narrowing_without_a_plan_is_refused():
    refusal(lambda: mu.narrow(mlp(8), lambda: mlp(4)), "plan.not_given")


@pytest.mark.parametrize(
    ("name", "package"), [("tune", "optuna"), ("trainers.HuggingFaceCallback", "transformers")]
)
def test_a_missing_extra_is_named_with_its_remedy(name, package):
    code = f"import sys; sys.modules[{package!r}] = None; import mupscale; mupscale.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    for word in ("[extra.missing]", f"mupscale.{name}", package, "pip install 'mupscale["):
        assert word in done.stderr


def test_a_family_plan_without_transformers_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with refused("extra.missing", where=["transformers", "pip install 'mupscale[hf]'"]):
        mu.plans.family_plan({"model_type": "llama"}, 2)
