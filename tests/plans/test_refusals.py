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
from harness.refusals import refusal
from harness.runs import train
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


def widen(run: mu.Run) -> Any:
    return mu.widen(run, lambda: mlp(8))


# Optimizers


def test_lbfgs_is_refused():
    run = mu.Run(model := mlp(4), torch.optim.LBFGS(model.parameters()))
    refusal(
        lambda: widen(run), "torch.optim.LBFGS cannot be widened exactly", "inner product", "optimizers=[]"
    )


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_cannot_be_exact_is_refused_by_name_in_any_package(name):
    named = type(name, (torch.optim.AdamW,), {"__module__": "some.package"})
    refusal(lambda: widen(trained(named)), f"some.package.{name} cannot be widened exactly", REFUSED[name])
    assert mu.rules.rule_for(torch.optim.AdamW), "control: another name has a row"


def test_an_unknown_optimizer_is_refused():
    unknown = type("Mine", (torch.optim.Optimizer,), {"__module__": "mine"})
    model = mlp(4)
    run = mu.Run(model, unknown(model.parameters(), {"lr": 0.1}))
    refusal(
        lambda: widen(run),
        "no units are known",
        "mine.Mine",
        "mupscale.rules.register_optimizer(",
        "OptimizerRule(",
    )


def test_a_subclass_of_a_known_optimizer_is_refused_with_the_line_that_accepts_it():
    subclass = type("MyAdamW", (torch.optim.AdamW,), {"__module__": "mine"})
    run = trained(subclass)
    refusal(
        lambda: widen(run),
        "it derives from torch.optim.AdamW",
        "register_optimizer(MyAdamW, mupscale.rules.rule_for(AdamW))",
    )
    accepted = mu.widen(run, lambda: mlp(8), rules={"mine.MyAdamW": mu.rules.rule_for(torch.optim.AdamW)})
    assert isinstance(accepted.optimizers[0], subclass), "control: what the message says to write works"


def test_unknown_optimizer_state_is_refused():
    run = trained(torch.optim.AdamW)
    for state in run.optimizers[0].state.values():
        state["curvature"] = torch.zeros(4)
    error = refusal(lambda: widen(run), "'curvature'", "registry does not state", "in state=")
    assert len(error.faults) == 6, "one for every parameter"


def test_an_unknown_hyperparameter_is_refused():
    run = trained(torch.optim.SGD, lr=0.1)
    run.optimizers[0].defaults["warp"] = 1.0
    refusal(lambda: widen(run), "'warp' has no units", "in hyper= or neutral=")


def test_state_dicts_with_an_unknown_hyperparameter_are_refused_as_live_optimizers_are():
    run = trained(torch.optim.SGD, lr=0.1)
    state = run.optimizers[0].state_dict()
    state["param_groups"][0]["floor"] = 1e-3
    names = [name for name, _ in run.model.named_parameters()]
    plan = mu.plan_between(mlp, 4, 8)
    call = lambda: mu.widen_optimizer_state_dict(state, plan, torch.optim.SGD, names=names)  # noqa: E731
    refusal(call, "'floor' has no units", "in hyper= or neutral=")


def test_state_of_a_wrong_shape_is_refused():
    run = trained(torch.optim.SGD, lr=0.1, momentum=0.9)
    run.optimizers[0].state[run.model[0].bias]["momentum_buffer"] = torch.zeros(7)
    refusal(lambda: widen(run), "0.bias", "'momentum_buffer' has shape (7,), expected (4,)")


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_radam_in_its_first_steps_is_refused(steps):
    refusal(
        lambda: widen(trained(torch.optim.RAdam, steps)),
        f"RAdam is at step {steps}",
        f"train {5 - steps} more steps, then widen",
    )


def test_radam_after_its_first_steps_is_accepted():
    assert widen(trained(torch.optim.RAdam, 5)).optimizers[0].state


def test_radam_does_not_wait_for_a_frozen_parameter():
    model = seeded(mlp, 4)
    model[0].weight.requires_grad_(False)
    run = mu.Run(model, torch.optim.RAdam(model.parameters()))
    train(run, loss, 8)
    assert widen(run).optimizers[0].state


def test_radam_that_never_leaves_its_first_steps_is_not_a_crash():
    """With beta2 = 0.5, rho never exceeds 5: every update is of degree 1, and the row says degree 0."""
    refusal(lambda: widen(trained(torch.optim.RAdam, 8, betas=(0.9, 0.5))), "RAdam", "beta")


@pytest.mark.parametrize("eps1", [None, 1e-3])
def test_adafactor_with_an_eps1_that_may_bite_is_refused(eps1):
    run = trained(torch.optim.Adafactor, eps=(eps1, 1e-3))
    refusal(lambda: widen(run), f"eps[0] is {eps1}", "G and G^2 at once", "set eps=(1e-12, 0.001)")
    assert widen(trained(torch.optim.Adafactor, eps=(1e-12, 1e-3))).optimizers, "control"


def test_eps_zero_with_pads_is_refused():
    run = trained(torch.optim.AdamW, eps=0.0)
    plan = mu.plan_between(mlp, 4, 6, pad=True)
    refusal(
        lambda: mu.widen(run, lambda: mlp(6), plan=plan),
        "eps = 0 on a padded tensor",
        "give eps a positive value",
    )
    assert widen(run).optimizers, "control: copies alone do not mind"


@pytest.mark.parametrize("own", [0, 2])
def test_parameters_of_another_model_are_refused(own):
    model, other = mlp(4), mlp(4)
    mixed = [*list(model.parameters())[:own], *list(other.parameters())[own:]]
    run = mu.Run(model, torch.optim.SGD(mixed, lr=0.1))
    refusal(
        lambda: widen(run),
        f"{6 - own} of its 6 parameters do not belong",
        "build the optimizer from this model",
    )


def test_a_plus_one_gain_with_a_fold_and_decay_is_refused():
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4)))
    plan = mu.infer_plan(
        model, nn.Sequential(nn.Linear(3, 8), nn.RMSNorm(8)), plus_one=["1.weight"], folds={"1.weight": "1/2"}
    )
    make = lambda: nn.Sequential(nn.Linear(3, 8), nn.RMSNorm(8))  # noqa: E731
    decaying = mu.Run(model, torch.optim.AdamW(model.parameters(), weight_decay=0.1))
    refusal(
        lambda: mu.widen(decaying, make, plan=plan, unproved=True),
        "1.weight",
        "(1 + w) gain",
        "fold of 1/2",
        "weight_decay=0",
    )
    free = mu.Run(model, torch.optim.AdamW(model.parameters(), weight_decay=0.0))
    assert mu.widen(free, make, plan=plan, unproved=True).optimizers, "control"


# Schedulers


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 10, eta_min=1e-4), "eta_min = 0.0001 is an absolute"),
        (lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 10, eta_min=1e-4), "eta_min = 0.0001"),
        (lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10), "max_lr and min_lr are absolute"),
        (lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1), "base_lr and max_lr are absolute"),
        (lambda o: torch.optim.swa_utils.SWALR(o, 0.1), "swa_lr is absolute"),
        (
            lambda o: type("Mine", (lr_scheduler.LambdaLR,), {})(o, lambda t: 1.0),
            "not a scheduler known to multiply",
        ),
        (
            lambda o: lr_scheduler.SequentialLR(
                o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 9, 1e-4)], [3]
            ),
            "eta_min = 0.0001",
        ),
    ],
    ids=["cosine", "restarts", "onecycle", "cyclic", "swa", "unknown", "inside"],
)
def test_a_scheduler_with_an_absolute_rate_is_refused(make, reason):
    run = trained(torch.optim.SGD, lr=0.1, momentum=0.9)
    scheduled = mu.Run(run.model, run.optimizers, make(run.optimizers[0]))
    refusal(lambda: widen(scheduled), reason, "use a LambdaLR that returns the ratio")


def test_a_plateau_is_carried_with_its_floor_once_every_reduction_is_made():
    run = trained(torch.optim.SGD, lr=0.1, momentum=0.9)
    plateau = lr_scheduler.ReduceLROnPlateau(run.optimizers[0], patience=0, min_lr=0.03, factor=0.5)
    scheduled = mu.Run(run.model, run.optimizers, plateau)
    refusal(lambda: widen(scheduled), "eps = 1e-08 is an absolute", "set scheduler.eps = 0.0")
    plateau.eps = 0.0
    wide = widen(scheduled)
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
    error = refusal(lambda: widen(foreign), "StepLR", "drives an optimizer that is not part of the run")
    assert error.faults[0].remedy, "it says what to write"


# Plans and state dicts


def test_the_plan_of_another_model_lists_every_fault_at_once():
    plan = mu.plan_between(mlp, 4, 8)
    other = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 4))
    error = refusal(
        lambda: mu.widen(other, lambda: mlp(8), plan=plan),
        *("this is not the base model of the plan", "shape (5, 3), the plan's base end has (4, 3)"),
        *("3.weight", "no tensor of the plan has this name", "plan.rename", "4.weight", "it is missing"),
    )
    assert {f.where for f in error.faults} == {
        "0.weight",
        "0.bias",
        "2.weight",
        "3.weight",
        "3.bias",
        "4.weight",
        "4.bias",
    }


def test_what_is_not_a_plan_is_refused():
    plan = mu.plan_between(mlp, 4, 8)
    entry = json.loads(plan.to_json())
    entry["tensors"]["2.weight"]["s"] = "1/3"
    refusal(lambda: mu.Plan.from_json(json.dumps(entry)), "says s = 1/3", "axes and fold give s = 1/2")
    entry["format"] = "mupscale plan 9"
    refusal(
        lambda: mu.Plan.from_json(json.dumps(entry)),
        "format 'mupscale plan 9'",
        "expected 'mupscale plan 1'",
    )
    for text in ("{", "[]", "{}", '{"format": "mupscale plan 1"}'):
        refusal(partial(mu.Plan.from_json, text), "this is not a plan")


def test_names_that_collide_or_do_not_exist_are_refused():
    plan = mu.plan_between(mlp, 4, 8)
    refusal(lambda: plan.rename({"0.weight": "2.weight"}), "two tensors the same name", "2.weight")
    refusal(lambda: plan.fold("body.*", 2), "no tensor of the plan matches 'body.*'")
    refusal(lambda: plan.fold("0.bias", 1 / 3), "not an exact scale", '"1/3"')
    refusal(lambda: plan.explain("body"), "no tensor 'body'")


def test_state_dicts_without_names_are_refused():
    run, plan = trained(torch.optim.AdamW), mu.plan_between(mlp, 4, 8)
    state = run.optimizers[0].state_dict()
    call = mu.widen_optimizer_state_dict
    refusal(
        lambda: call(state, plan, torch.optim.AdamW), "keyed by position", "pass names=", "named_parameters()"
    )
    refusal(lambda: call(state, plan, torch.optim.AdamW, names=["0.weight"]), "1 names for 6 parameters")
    refusal(lambda: mu.widen_state_dict({"0.weight": torch.ones(4, 3)}, plan), "2.weight", "it is missing")


def test_narrowing_without_a_plan_is_refused():
    refusal(lambda: mu.narrow(mlp(8), lambda: mlp(4)), "the plan by which the run was widened", "pass plan=")


@pytest.mark.parametrize(
    ("name", "package"), [("tune", "optuna"), ("trainers.HuggingFaceCallback", "transformers")]
)
def test_a_missing_extra_is_named_with_its_remedy(name, package):
    code = f"import sys; sys.modules[{package!r}] = None; import mupscale; mupscale.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"mupscale.{name} needs {package}: pip install 'mupscale[" in done.stderr


def test_a_family_plan_without_transformers_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        mu.MupscaleError, match=r"family_plan needs transformers: pip install 'mupscale\[hf\]'"
    ):
        mu.plans.family_plan({"model_type": "llama"}, 2)
