"""Calls that a newcomer gets wrong: each is refused with what to write, and what it says to write is accepted."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mupscale as mu
from harness.refusals import refusal
from mupscale import limits
from mupscale.arguments import wrong_function, wrong_kind, wrong_list, wrong_number, wrong_whole

AdamW = torch.optim.AdamW
Call = Callable[[], Any]


def mlp(n: int) -> Any:
    return nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2))


PLAN = mu.plan_between(mlp, 4, 8)
OTHER = mu.plan_between(lambda n: nn.Linear(n, n), 2, 4)
BASE, WIDE = mlp(4), mlp(8)
X = torch.ones(2, 3)
NOISE = mu.MupNoise(0.1)


def loss(model: Any) -> Any:
    return model(X).square().mean()


def step(run: mu.Run, i: int) -> Any:
    run.optimizers[0].zero_grad()
    value = loss(run.model)
    value.backward()
    run.optimizers[0].step()
    return value


def adamw(model: Any) -> Any:
    return AdamW(model.parameters(), lr=0.1)


def scheduled() -> mu.Run:
    optimizer = adamw(BASE)
    return mu.Run(BASE, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, mu.GrowthSchedule(1e18)))


def grouped() -> Any:
    return AdamW(mu.param_groups(WIDE, PLAN, AdamW, lr=0.1))


def upscale(noise: Any = NOISE, base: Any = BASE, **options: Any) -> Any:
    return mu.upscale(base, lambda: mlp(8), noise, **options)


def widen(run: Any = BASE, **options: Any) -> Any:
    return mu.widen(run, lambda: mlp(8), **options)


def verify(**options: Any) -> Any:
    model = mlp(4)
    return mu.verify(options.pop("run", mu.Run(model, adamw(model))), lambda: mlp(8), **options)


def infer(**options: Any) -> mu.Plan:
    return mu.plan_between(mlp, 4, 8, **options)


def sizes(**changes: Any) -> Any:
    return upscale(mu.MupNoise({"0.weight": 0.1, "2.weight": 0.1, **changes}))


def groups(**options: Any) -> Any:
    return mu.param_groups(WIDE, PLAN, options.pop("kind", AdamW), **{"lr": 0.1, **options})


def init(std: Any, **options: Any) -> Any:
    return mu.init_(mlp(8), PLAN, std=std, **options)


def clip(**options: Any) -> Any:
    return mu.clip_(adamw(WIDE), options.pop("plan", PLAN), model=WIDE, **options)


def coordinates(**changes: Any) -> Any:
    start = lambda width, seed: mu.Run(model := mlp(width), adamw(model))  # noqa: E731
    options = {
        "start": start,
        "step": step,
        "probe": loss,
        "widths": (4, 8),
        "steps": 1,
        "seeds": 1,
        **changes,
    }
    return mu.diagnostics.coordinate_check(**options)


def state() -> dict[str, Any]:
    return AdamW(BASE.named_parameters(), lr=0.1).state_dict()


def carried() -> dict[str, Any]:
    return mu.widen_optimizer_state_dict(state(), PLAN, AdamW)


def schedule(**changes: Any) -> limits.Schedule:
    return limits.Schedule(**{"steps": 3, "grow_at": 2, "rate": 0.1, **changes})


def example(noise: Any) -> Any:
    kets = limits.LinearKets(2)
    return limits.three_layer(kets, schedule(), x=1.0, sigma=1.0, noise=noise, slope=lambda y: y - 1)


def recursion(k: Any) -> Any:
    noise = dict.fromkeys("ABCD", 0.1)
    return limits.four_layer_recursion(schedule(), k=k, x=1.0, sigma=1.0, noise=noise, slope=lambda y: y - 1)


def network(sigma: Any) -> Any:
    options: dict[str, Any] = {"inputs": [[1.0]], "targets": [1.0], "noise": [0.1, 0.1], "activation": None}
    return limits.mlp(limits.LinearKets(2), schedule(), sigma=sigma, **options)


def product(other: Any) -> Any:
    kets = limits.LinearKets(2)
    return kets.matrix("W", "noise") @ (kets.vector("x", "noise") if other is None else other)


CALLS: dict[str, tuple[Call, Call, tuple[str, ...]]] = {
    # Rules.
    "an axis of 0 units": (
        lambda: mu.rules.Axis.between(0, 4, "in"),
        lambda: mu.rules.Axis.between(1, 4, "in"),
        ("0 units cannot grow to 4", "1 unit or more"),
    ),
    "a role that is none": (
        lambda: mu.rules.Axis.between(4, 8, "inn"),  # type: ignore[arg-type]
        lambda: mu.rules.Axis.between(4, 8, "in"),
        ("'inn'", '"in", "out" or None'),
    ),
    "no copies": (
        lambda: mu.rules.Axis.parse("in: 4x0"),
        lambda: mu.rules.Axis.parse("in: 4x2"),
        ("not an axis", "64x2"),
    ),
    "one over nothing": (
        lambda: mu.rules.Axis.parse("4x1/0"),
        lambda: mu.rules.Axis.parse("4x1/2"),
        ("not an axis",),
    ),
    "an axis without parts": (
        lambda: mu.rules.Axis.of(),
        lambda: mu.rules.Axis.fixed(4),
        ("no parts", "Axis.fixed"),
    ),
    "a factor in floats": (
        lambda: mu.rules.Axis.of((mu.rules.Factor(4, 2.0),)),  # type: ignore[arg-type]
        lambda: mu.rules.Axis.of((mu.rules.Factor(4, Fraction(2)),)),
        ("whole numbers for size and pad", "Fraction(2)"),
    ),
    "a size in place of factors": (
        lambda: mu.rules.Axis.of(4),  # type: ignore[arg-type]
        lambda: mu.rules.Axis.of((mu.rules.Factor(4),)),
        ("part of an axis is 4", "Axis.of((Factor(4),))"),
    ),
    "a scale of nothing": (
        lambda: mu.rules.Scale.of(None),  # type: ignore[arg-type]
        lambda: mu.rules.Scale.of("1/3"),
        ("None", '"1/3"'),
    ),
    "an optimizer's short name": (
        lambda: mu.rules.rule_for("AdamW"),
        lambda: mu.rules.rule_for("torch.optim.AdamW"),
        ("full name, 'torch.optim.AdamW'",),
    ),
    "an optimizer in place of its class": (
        lambda: mu.rules.rule_for(adamw(BASE)),
        lambda: mu.rules.rule_for(AdamW),
        ("an AdamW", "type(optimizer)"),
    ),
    "units as text": (
        lambda: mu.rules.OptimizerRule(lr="W", state={"momentum": "G"}, neutral="betas"),  # type: ignore[arg-type]
        lambda: mu.rules.OptimizerRule(lr=mu.rules.W, state={"momentum": mu.rules.G}, neutral=["betas"]),  # type: ignore[arg-type]
        ("3 faults", "write lr=W", "'momentum': G", "neutral=['betas']"),
    ),
    "a row that is none": (
        lambda: widen(mu.Run(BASE, adamw(BASE)), rules={"torch.optim.AdamW": 3}),
        lambda: widen(mu.Run(BASE, adamw(BASE)), rules={"torch.optim.AdamW": mu.rules.rule_for(AdamW)}),
        ("torch.optim.AdamW", "it is 3", "OptimizerRule("),
    ),
    # Plans.
    "a factory of two arguments": (
        lambda: mu.plan_between(nn.Linear, 4, 8),  # type: ignore[arg-type]
        lambda: mu.plan_between(lambda n: nn.Linear(n, n), 4, 8),
        ("it does not take (size)", "make=lambda size:"),
    ),
    "a model and a size": (
        lambda: mu.infer_plan(BASE, 8),  # type: ignore[arg-type]
        lambda: mu.infer_plan(BASE, WIDE),
        ("it is 8", "expected a module", "plan_between(make, 64, 256)"),
    ),
    "roles in a list": (
        lambda: infer(roles=["0.weight"]),
        lambda: infer(roles={"0.weight": "out"}),
        ("roles", "a list", 'roles={"<name>": "out"}'),
    ),
    "a layout from the end": (
        lambda: infer(layouts={"0.weight": {-1: 2}}),
        lambda: infer(layouts={"0.weight": {0: 2}, "2.weight": {1: 2}}),
        ("axis -1", "axes from 0 to 1", "count axes from 0"),
    ),
    "folds that are not exact": (
        lambda: infer(folds={"0.weight": 1 / 3, "2.weight": 0}),
        lambda: infer(folds={"0.weight": "1/3"}),
        ("2 faults", "'0.weight'", "'2.weight'", '"1/3"'),
    ),
    "plus_one in one text": (
        lambda: infer(plus_one="0.weight"),
        lambda: infer(plus_one=["0.weight"]),
        ("plus_one=['0.weight']",),
    ),
    "a loss that is none": (
        lambda: infer(loss=3),
        lambda: infer(loss=loss),
        ("it is 3", "function of (model)"),
    ),
    "a loss that is no number": (
        lambda: infer(loss=lambda model: loss(model) * math.nan),
        lambda: infer(loss=loss),
        ("is nan", "check the batch"),
    ),
    "a plan of a path": (
        lambda: mu.Plan.from_json("plan.json"),
        lambda: mu.Plan.from_json(PLAN.to_json()),
        ("not a plan", "to_json"),
    ),
    "the gradient identity, the wide first": (
        lambda: mu.plans.gradient_identity(WIDE, BASE, plan=PLAN, loss=loss),
        lambda: mu.plans.gradient_identity(BASE, WIDE, plan=PLAN, loss=loss),
        ("not the base model of the plan", "shape (8, 3)"),
    ),
    # Runs.
    "a state dict as a run": (
        lambda: widen(BASE.state_dict()),
        lambda: widen(BASE),
        ("model", "expected Module"),
    ),
    "a class as an optimizer": (
        lambda: mu.Run(BASE, AdamW),  # type: ignore[arg-type]
        lambda: mu.Run(BASE, adamw(BASE)),
        ("optimizers[0]", "the class AdamW", "expected Optimizer"),
    ),
    "a size in place of a factory": (
        lambda: mu.widen(BASE, 8),  # type: ignore[arg-type]
        lambda: mu.widen(BASE, lambda: mlp(8)),
        ("it is 8", "make=lambda: …"),
    ),
    "a factory that wants a size": (
        lambda: mu.widen(BASE, mlp),  # type: ignore[arg-type]
        lambda: mu.widen(BASE, lambda: mlp(8)),
        ("does not take ()", "make=lambda: …"),
    ),
    "a plan as text": (
        lambda: widen(plan=PLAN.to_json()),
        lambda: widen(plan=mu.Plan.from_json(PLAN.to_json())),
        ("expected Plan", "Plan.from_json(text)"),
    ),
    "a narrower wide model": (
        lambda: mu.widen(WIDE, lambda: mlp(4)),
        lambda: mu.widen(BASE, lambda: mlp(8)),
        ("shrinks from 8 to 4", "narrower model first"),
    ),
    "an average of floats": (
        lambda: widen(mu.Run(BASE, ema={"0.weight": 1.0})),  # type: ignore[dict-item]
        lambda: widen(mu.Run(BASE, ema=BASE.state_dict())),
        ("0.weight", "it is 1.0, expected Tensor"),
    ),
    "a reference to another model": (
        lambda: upscale(base=mu.Run(BASE, since=OTHER)),
        lambda: upscale(base=mu.Run(BASE, since=mu.plan_between(mlp, 2, 4))),
        ("since= ends at other shapes", "0.weight"),
    ),
    # Noise.
    "noise as a number": (lambda: upscale(0.1), upscale, ("noise", "it is 0.1", "MupNoise(0.1)")),
    "noise as a class": (lambda: upscale(mu.MupNoise), upscale, ("the class MupNoise", "MupNoise(0.1)")),
    "no number of noise": (lambda: upscale(mu.MupNoise(math.nan)), upscale, ("sigma", "it is nan", "finite")),
    "negative noise": (
        lambda: upscale(mu.SignalNoise(-0.2)),
        upscale,
        ("t", "it is -0.2", "SignalNoise(0.05)"),
    ),
    "noise larger than the weight": (
        lambda: upscale(mu.SignalNoise(1.5)),
        lambda: upscale(mu.SignalNoise(1.0)),
        ("t", "it is 1.5", "leaves nothing of the weight", "SignalNoise(0.05)", "up to 1"),
    ),
    "a loss as a number": (
        lambda: upscale(loss=0.1),
        lambda: upscale(loss=lambda model: 10 + model(torch.ones(1, 3)).sum()),
        ("loss", "it is 0.1", "(model)"),
    ),
    "noise for a tensor that is not there": (lambda: sizes(typo=0.1), sizes, ("typo", "leave it out")),
    "sizes in a list": (lambda: sizes(**{"0.weight": [0.1]}), sizes, ("0.weight", "a list", "a tuple")),
    "too few sizes": (
        lambda: sizes(**{"0.weight": (0.1,)}),
        lambda: sizes(**{"0.weight": (0.1,) * 8}),
        ("0.weight", "1 sizes for 8 matrices"),
    ),
    "a seed between seeds": (
        lambda: upscale(seed=1.5),
        lambda: upscale(seed=1),
        ("seed", "1.5", "whole number"),
    ),
    "a schedule over FLOPs that is not told what a wide step costs": (
        lambda: widen(scheduled()),
        lambda: widen(scheduled(), step_cost=6e12),
        ("step_cost", "what a step costs after growth", "step_cost=6e12"),
    ),
    "the shape of a decay under another name": (
        lambda: mu.GrowthSchedule(1000, shape="cos"),
        lambda: mu.GrowthSchedule(1000, shape="linear"),
        ("shape", "'cos'", "'cosine'", 'shape="linear"'),
    ),
    "warm-up and decay in steps": (
        lambda: mu.GrowthSchedule(1000, warmup=20, decay=300),
        lambda: mu.GrowthSchedule(1000, warmup=0.02, decay=0.3),
        ("expected at most 1", "warmup=0.02"),
    ),
    "steps in place of a schedule": (
        lambda: mu.rewarm_(scheduled(), 1000),  # type: ignore[arg-type]
        lambda: mu.rewarm_(scheduled(), mu.GrowthSchedule(1000)),
        ("schedule", "it is 1000", "mu.GrowthSchedule(1000)"),
    ),
    "a learning rate as text": (
        lambda: upscale(base=mu.Run(BASE, adamw(BASE)), lr="0.1"),
        lambda: upscale(base=mu.Run(BASE, adamw(BASE)), lr=0.1),
        ("lr", "'0.1'", "lr=1e-3"),
    ),
    "a recipe as a path": (lambda: upscale(None, recipe="recipe.json"), upscale, ("Recipe.read(path)",)),
    "a base without weights": (
        lambda: upscale(base=mu.plans.on_meta(lambda: mlp(4))),
        lambda: upscale(base=mlp(4)),
        ("0.weight", "meta device", "load its weights"),
    ),
    "several faults at once": (
        lambda: upscale("t=0.2", seed=None, lr=-1.0),
        lambda: upscale(mu.SignalNoise(0.2), seed=0),
        ("3 faults", "noise", "seed", "lr"),
    ),
    "norms that nobody measured": (
        lambda: mu.diagnostics.resolve_noise({}, mu.SignalNoise(0.2), plan=PLAN),
        lambda: mu.diagnostics.resolve_noise(dict(BASE.named_parameters()), mu.SignalNoise(0.2), plan=PLAN),
        ("0.weight", "2.weight", "dict(model.named_parameters())"),
    ),
    # Verifying.
    "a step without optimizers": (
        lambda: verify(run=mlp(4), step=step),
        lambda: verify(run=mlp(4), loss=loss),
        ("optimizers", "loss= in place of step="),
    ),
    "a loss in place of a step": (lambda: verify(step=loss), lambda: verify(step=step), ("(run, i)",)),
    "half a step, in words": (
        lambda: verify(step=step, steps=1.5, dtype="float64"),
        lambda: verify(step=step, steps=1, dtype=torch.float64),
        ("2 faults", "steps", "torch.float64"),
    ),
    "a step that returns a batch": (
        lambda: verify(step=lambda run, i: (step(run, i), X)[1]),
        lambda: verify(step=lambda run, i: (step(run, i), None)[1]),
        ("shape (2, 3)", "one number"),
    ),
    "an optimizer to be checked": (
        lambda: mu.rules.check_optimizer(adamw(BASE)),
        lambda: mu.rules.check_optimizer(lambda params: AdamW(params, lr=0.1)),
        ("an AdamW", "make=lambda params:"),
    ),
    "one width": (lambda: coordinates(widths=[4]), coordinates, ("widths", "two or more")),
    "a model in place of a run": (
        lambda: coordinates(start=lambda width, seed: mlp(width)),
        coordinates,
        ("start(width, seed)", "return Run("),
    ),
    "a report of models": (
        lambda: mu.diagnostics.noise_report(BASE, WIDE),
        lambda: mu.diagnostics.noise_report(mu.Run(BASE), upscale()),
        ("2 faults", "write Run(base)"),
    ),
    "the symmetry of a base": (
        lambda: mu.diagnostics.symmetry(BASE, plan=PLAN),
        lambda: mu.diagnostics.symmetry(WIDE, plan=PLAN),
        ("not the wide model",),
    ),
    # Training at any width.
    "an optimizer's name": (
        lambda: groups(kind="torch.optim.AdamW"),
        groups,
        ("class of optimizers", "AdamW"),
    ),
    "no learning rate": (lambda: groups(lr=None), groups, ("lr", "it is None", "lr=1e-3")),
    "decay as text": (lambda: groups(weight_decay="0.1"), groups, ("weight_decay", "'0.1'")),
    "no_decay in one text": (lambda: groups(no_decay="*.bias"), groups, ("no_decay=['*.bias']",)),
    "parameters without names": (
        lambda: groups(parameters=WIDE.parameters()),
        lambda: groups(parameters=WIDE.named_parameters()),
        ("model.named_parameters()",),
    ),
    "a rate as text": (
        lambda: mu.set_lr_(grouped(), "0.1"),  # type: ignore[arg-type]
        lambda: mu.set_lr_(grouped(), 0.1),
        ("lr", "'0.1'", "set_lr_(optimizer, 1e-3)"),
    ),
    "the rate of a model": (
        lambda: mu.diagnostics.reference_lr(WIDE),
        lambda: mu.diagnostics.reference_lr(grouped()),
        ("a Sequential, expected Optimizer",),
    ),
    "a size for all": (
        lambda: init(0.02),
        lambda: init({"*": 0.02}),
        ("it is 0.02", 'std={"*.weight": 0.02'),
    ),
    "a negative size": (
        lambda: init({"*": -1.0}),
        lambda: init({"*": 1.0}),
        ("std, *", "-1.0", "None to leave"),
    ),
    "a reference without weights": (
        lambda: init(mu.plans.on_meta(lambda: mlp(4))),
        lambda: init(mlp(4)),
        ("std, 0.weight", "meta device", "without on_meta"),
    ),
    "a seed in words": (
        lambda: init(mlp(4), seed="zero"),
        lambda: init(mlp(4), seed=0),
        ("'zero'", "seed=0"),
    ),
    "another model's plan": (
        lambda: clip(plan=OTHER, max_norm=1.0),
        lambda: clip(max_norm=1.0),
        ("0.weight", "not in the plan", "pass the run"),
    ),
    "a negative bound": (lambda: clip(max_norm=-1.0), lambda: clip(max_norm=math.inf), ("max_norm", "-1.0")),
    "a norm of power zero": (
        lambda: mu.diagnostics.grad_norm(WIDE, PLAN, p=0),
        lambda: mu.diagnostics.grad_norm(WIDE, PLAN, p=math.inf),
        ("p", "above 0", "math.inf"),
    ),
    "the norm of parameters": (
        lambda: mu.diagnostics.grad_norm(WIDE.parameters(), PLAN),
        lambda: mu.diagnostics.grad_norm(WIDE, PLAN),
        ("a generator, expected Module",),
    ),
    "a model in place of an optimizer": (
        lambda: mu.step_in_units_(WIDE, PLAN, model=adamw(WIDE)),
        lambda: mu.step_in_units_(adamw(WIDE), PLAN, model=WIDE),
        ("step_in_units_(optimizer, run)",),
    ),
    # State dicts.
    "a model in place of its state": (
        lambda: mu.widen_state_dict(BASE, PLAN),
        lambda: mu.widen_state_dict(BASE.state_dict(), PLAN),
        ("a Sequential", "model.state_dict()"),
    ),
    "state and plan in turn": (
        lambda: mu.widen_state_dict(PLAN, BASE.state_dict()),  # type: ignore[arg-type]
        lambda: mu.widen_state_dict(BASE.state_dict(), PLAN),
        ("an OrderedDict, expected Plan",),
    ),
    "an optimizer in place of its state": (
        lambda: mu.widen_optimizer_state_dict(adamw(BASE), PLAN, AdamW),
        lambda: mu.widen_optimizer_state_dict(state(), PLAN, AdamW),
        ("an AdamW", "optimizer.state_dict()"),
    ),
    "a state and a name": (
        lambda: mu.widen_optimizer_state_dict(state(), PLAN, "torch.optim.AdamW"),  # type: ignore[arg-type]
        lambda: mu.widen_optimizer_state_dict(state(), PLAN, AdamW),
        ("class of optimizers", "torch.optim.AdamW"),
    ),
    "groups of a state without names": (
        lambda: mu.trainers.groups_for(WIDE, adamw(WIDE).state_dict()),
        lambda: mu.trainers.groups_for(WIDE, carried()),
        ("no groups with names", "widen_optimizer_state_dict"),
    ),
    # Limits.
    "steps in floats": (lambda: schedule(steps=3.0), schedule, ("steps", "it is 3.0", "whole number")),
    "one noise for all layers": (
        lambda: example(0.5),
        lambda: example(dict.fromkeys("ABC", 0.5)),
        ("A, B, C",),
    ),
    "growth by nothing": (lambda: recursion(0), lambda: recursion(2), ("k", "it is 0", "1 or more")),
    "one sigma for all layers": (lambda: network(1.0), lambda: network([1.0, 1.0]), ("sigma=[1.0, 1.0]",)),
    "a number times a matrix": (
        lambda: product(3),
        lambda: product(None),
        ("3 was passed, expected a vector",),
    ),
    "a seed of samples": (
        lambda: limits.SampledKets(2, 64, seed=1.5),  # type: ignore[arg-type]
        lambda: limits.SampledKets(2, 64, seed=1),
        ("seed", "1.5"),
    ),
    "values in a list": (
        lambda: limits.FiniteWidth(2, 2, values={"x": [1.0, 2.0]}),  # type: ignore[dict-item]
        lambda: limits.FiniteWidth(2, 2, values={"x": torch.tensor([1.0, 2.0])}),
        ("x", "a list, expected Tensor"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_says_what_to_write_and_that_is_accepted(name):
    wrong, right, texts = CALLS[name]
    refusal(wrong, *texts)
    right()


def test_nothing_is_set_when_one_group_has_no_factor():
    optimizer = grouped()
    del optimizer.param_groups[-1]["lr_factor"]
    before = [group["lr"] for group in optimizer.param_groups]
    refusal(lambda: mu.set_lr_(optimizer, 0.2), "lr_factor", "param_groups")
    assert [group["lr"] for group in optimizer.param_groups] == before


def test_an_index_outside_an_axis_is_named():
    axis = mu.rules.Axis.parse("in: 2x2 | 1x2")
    for index in (-1, 6):
        with pytest.raises(IndexError, match=f"index {index} of an axis of 6"):
            axis.source(index)
    assert axis.source(5) == 2, "control"


def test_arguments_that_are_right_have_no_faults():
    assert not wrong_number("lr", np.float32(0.1), "")
    assert not wrong_whole("seed", np.int64(3))
    assert not wrong_function("make", dict)
    assert not wrong_function("make", nn.Linear(2, 2), "x")
    assert not wrong_list("names", ["a"])
    assert not wrong_kind("n", True, int, "")
    assert wrong_whole("seed", True), "control"
    assert wrong_number("lr", True, ""), "control"
