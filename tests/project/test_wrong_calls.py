"""Calls and command lines that a newcomer gets wrong: each is refused by its code, and the right form is accepted."""

import json
import math
import re
import shlex
import textwrap
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import mupscale as mu
from harness.imports import without_torch
from harness.refusals import refusal
from mupscale.arguments import wrong_function, wrong_kind, wrong_list, wrong_number, wrong_whole
from mupscale.cli.main import main
from mupscale.proofs.identity import gradient_identity
from mupscale.rules.optimizers import rule_for
from mupscale.training.check.symmetry import noise_shares, symmetry
from mupscale.training.units.clip import grad_norm

AdamW = torch.optim.AdamW
Call = Callable[[], Any]


def mlp(n: int) -> Any:
    return nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2))


PLAN = mu.plans.plan_between(mlp, 4, 8)
OTHER = mu.plans.plan_between(lambda n: nn.Linear(n, n), 2, 4)
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


def grow(run: Any = BASE, **options: Any) -> Any:
    return mu.grow(run, lambda: mlp(8), **options)


def verify(**options: Any) -> Any:
    model = mlp(4)
    return mu.verify(options.pop("run", mu.Run(model, adamw(model))), lambda: mlp(8), **options)


def infer(**options: Any) -> mu.Plan:
    return mu.plans.plan_between(mlp, 4, 8, **options)


def sizes(**changes: Any) -> Any:
    return upscale(mu.MupNoise({"0.weight": 0.1, "2.weight": 0.1, **changes}))


def groups(**options: Any) -> Any:
    return mu.param_groups(WIDE, PLAN, options.pop("kind", AdamW), **{"lr": 0.1, **options})


def init(std: Any, **options: Any) -> Any:
    return mu.init_weights_(mlp(8), PLAN, std=std, **options)


def clip(**options: Any) -> Any:
    return mu.clip_before_step_(adamw(WIDE), options.pop("plan", PLAN), model=WIDE, **options)


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
    return mu.trainers.grow_optimizer_state_dict(state(), PLAN, AdamW)


# fmt: off
CALLS: dict[str, tuple[Call, Call, str]] = {
    # Rules.
    "an axis of 0 units": (lambda: mu.rules.Axis.between(0, 4, "in"),
        lambda: mu.rules.Axis.between(1, 4, "in"), "axis.no_units_to_grow"),
    "a role that is none": (lambda: mu.rules.Axis.between(4, 8, "inn"),  # type: ignore[arg-type]
        lambda: mu.rules.Axis.between(4, 8, "in"), "axis.unknown_role"),
    "no copies": (lambda: mu.rules.Axis.parse("in: 4x0"),
        lambda: mu.rules.Axis.parse("in: 4x2"), "axis.not_an_axis"),
    "one over nothing": (lambda: mu.rules.Axis.parse("4x1/0"),
        lambda: mu.rules.Axis.parse("4x1/2"), "axis.not_an_axis"),
    "an axis without parts": (lambda: mu.rules.Axis.of(), lambda: mu.rules.Axis.fixed(4), "axis.no_parts"),
    "a factor in floats": (lambda: mu.rules.Axis.of((mu.rules.Factor(4, 2.0),)),  # type: ignore[arg-type]
        lambda: mu.rules.Axis.of((mu.rules.Factor(4, Fraction(2)),)), "axis.factor_out_of_range"),
    "a size in place of factors": (lambda: mu.rules.Axis.of(4),  # type: ignore[arg-type]
        lambda: mu.rules.Axis.of((mu.rules.Factor(4),)), "axis.not_a_factor"),
    "a scale of nothing": (lambda: mu.rules.Scale.of(None),  # type: ignore[arg-type]
        lambda: mu.rules.Scale.of("1/3"), "scale.not_a_positive_number"),
    "an optimizer's short name": (lambda: rule_for("AdamW"),
        lambda: rule_for("torch.optim.AdamW"), "optimizer.unknown_class"),
    "an optimizer in place of its class": (lambda: rule_for(adamw(BASE)),
        lambda: rule_for(AdamW), "optimizer.not_a_class"),
    "units as text": (
        lambda: mu.rules.OptimizerRule(lr="W", state={"momentum": "G"}, neutral="betas"),  # type: ignore[arg-type]
        lambda: mu.rules.OptimizerRule(lr=mu.rules.W, state={"momentum": mu.rules.G}, neutral=["betas"]),  # type: ignore[arg-type]
        "argument.wrong_type argument.not_a_list"),
    "a row that is none": (
        lambda: grow(mu.Run(BASE, adamw(BASE)), rules={"torch.optim.AdamW": 3}),
        lambda: grow(mu.Run(BASE, adamw(BASE)), rules={"torch.optim.AdamW": rule_for(AdamW)}),
        "argument.wrong_type"),
    # Plans.
    "a factory of two arguments": (lambda: mu.plans.plan_between(nn.Linear, 4, 8),  # type: ignore[arg-type]
        lambda: mu.plans.plan_between(lambda n: nn.Linear(n, n), 4, 8), "argument.wrong_signature"),
    "a model and a size": (lambda: mu.infer_plan(BASE, 8),  # type: ignore[arg-type]
        lambda: mu.infer_plan(BASE, WIDE), "argument.not_a_model"),
    "more experts and a loss": (lambda: mu.infer_plan(BASE, BASE, loss=loss, experts=(4, 8)),
        lambda: mu.infer_plan(BASE, BASE, experts=(4, 8)), "experts.planned_alone"),
    "more experts as one number": (lambda: mu.infer_plan(BASE, BASE, experts=8),  # type: ignore[arg-type]
        lambda: mu.infer_plan(BASE, BASE, experts=[4, 8]), "argument.not_two_numbers"),
    "fewer experts": (lambda: mu.infer_plan(BASE, BASE, experts=(8, 4)),
        lambda: mu.infer_plan(BASE, BASE, experts=(4, 8)), "argument.not_two_numbers"),
    "no groups of experts": (lambda: mu.infer_plan(BASE, BASE, experts=(4, 8), groups=0),
        lambda: mu.infer_plan(BASE, BASE, experts=(4, 8), groups=2), "argument.not_whole"),
    "groups without experts": (lambda: mu.infer_plan(BASE, WIDE, groups=2),
        lambda: mu.infer_plan(BASE, WIDE), "argument.groups_without_experts"),
    "roles in a list": (lambda: infer(declared=mu.Declared(roles=["0.weight"])),  # type: ignore[arg-type]
        lambda: infer(declared=mu.Declared(roles={"0.weight": "out"})), "argument.wrong_type"),
    "a layout from the end": (lambda: infer(declared=mu.Declared(layouts={"0.weight": {-1: 2}})),
        lambda: infer(declared=mu.Declared(layouts={"0.weight": {0: 2}, "2.weight": {1: 2}})), "axis.out_of_range"),
    "folds that are not exact": (lambda: infer(declared=mu.Declared(folds={"0.weight": 1 / 3, "2.weight": 0})),
        lambda: infer(declared=mu.Declared(folds={"0.weight": "1/3"})), "scale.inexact_float scale.not_a_positive_number"),
    "plus_one in one text": (lambda: infer(declared=mu.Declared(plus_one="0.weight")),
        lambda: infer(declared=mu.Declared(plus_one=["0.weight"])), "argument.not_a_list"),
    "a loss that is none": (lambda: infer(loss=3), lambda: infer(loss=loss), "argument.not_a_function"),
    "a loss that is no number": (lambda: infer(loss=lambda model: loss(model) * math.nan),
        lambda: infer(loss=loss), "search.loss_not_finite"),
    "a plan of a path": (lambda: mu.Plan.from_json("plan.json"),
        lambda: mu.Plan.from_json(PLAN.to_json()), "json.not_json"),
    "the gradient identity, the wide first": (
        lambda: gradient_identity(WIDE, BASE, plan=PLAN, loss=loss),
        lambda: gradient_identity(BASE, WIDE, plan=PLAN, loss=loss), "plan.other_shape"),
    # Runs.
    "a state dict as a run": (lambda: grow(BASE.state_dict()), lambda: grow(BASE), "argument.wrong_type"),
    "a class as an optimizer": (lambda: mu.Run(BASE, AdamW),  # type: ignore[arg-type]
        lambda: mu.Run(BASE, adamw(BASE)), "argument.wrong_type"),
    "a size in place of a factory": (lambda: mu.grow(BASE, 8),  # type: ignore[arg-type]
        lambda: mu.grow(BASE, lambda: mlp(8)), "argument.not_a_function"),
    "a factory that wants a size": (lambda: mu.grow(BASE, mlp),  # type: ignore[arg-type]
        lambda: mu.grow(BASE, lambda: mlp(8)), "argument.wrong_signature"),
    "a plan as text": (lambda: grow(plan=PLAN.to_json()),
        lambda: grow(plan=mu.Plan.from_json(PLAN.to_json())), "argument.wrong_type"),
    "a narrower wide model": (lambda: mu.grow(WIDE, lambda: mlp(4)),
        lambda: mu.grow(BASE, lambda: mlp(8)), "axis.shrinks_by_copies"),
    "an average of floats": (lambda: grow(mu.Run(BASE, ema={"0.weight": 1.0})),  # type: ignore[dict-item]
        lambda: grow(mu.Run(BASE, ema=BASE.state_dict())), "argument.wrong_type"),
    "a reference to another model": (
        lambda: upscale(base=mu.Run(BASE, since=OTHER)),
        lambda: upscale(base=mu.Run(BASE, since=mu.plans.plan_between(mlp, 2, 4))),
        "plan.unknown_tensor plan.missing_tensor"),
    # Noise.
    "noise as a number": (lambda: upscale(0.1), upscale, "argument.wrong_type"),
    "noise as a class": (lambda: upscale(mu.MupNoise), upscale, "argument.wrong_type"),
    "no number of noise": (lambda: upscale(mu.MupNoise(math.nan)), upscale, "argument.not_a_number"),
    "negative noise": (lambda: upscale(mu.SignalNoise(-0.2)), upscale, "argument.not_a_number"),
    "noise larger than the weight": (lambda: upscale(mu.SignalNoise(1.5)),
        lambda: upscale(mu.SignalNoise(1.0)), "noise.above_norm"),
    "a loss as a number": (lambda: upscale(loss=0.1),
        lambda: upscale(loss=lambda model: 10 + model(torch.ones(1, 3)).sum()), "argument.not_a_function"),
    "noise for a tensor that is not there": (lambda: sizes(typo=0.1), sizes, "noise.unknown_tensor"),
    "sizes in a list": (lambda: sizes(**{"0.weight": [0.1]}), sizes, "argument.not_a_number"),
    "too few sizes": (lambda: sizes(**{"0.weight": (0.1,)}),
        lambda: sizes(**{"0.weight": (0.1,) * 8}), "noise.other_number_of_sizes"),
    "a seed between seeds": (lambda: upscale(seed=1.5), lambda: upscale(seed=1), "argument.not_whole"),
    "a schedule over FLOPs without the cost of a wide step": (lambda: grow(scheduled()),
        lambda: grow(scheduled(), step_cost=6e12), "schedule.step_cost_missing"),
    "the shape of a decay under another name": (lambda: mu.GrowthSchedule(1000, shape="cos"),
        lambda: mu.GrowthSchedule(1000, shape="linear"), "schedule.unknown_shape"),
    "warm-up and decay in steps": (lambda: mu.GrowthSchedule(1000, warmup=20, decay=300),
        lambda: mu.GrowthSchedule(1000, warmup=0.02, decay=0.3), "schedule.shares_above_one"),
    "steps in place of a schedule": (lambda: mu.rewarm_(scheduled(), 1000),  # type: ignore[arg-type]
        lambda: mu.rewarm_(scheduled(), mu.GrowthSchedule(1000)), "argument.wrong_type"),
    "a learning rate as text": (lambda: upscale(base=mu.Run(BASE, adamw(BASE)), lr="0.1"),
        lambda: upscale(base=mu.Run(BASE, adamw(BASE)), lr=0.1), "argument.not_a_number"),
    "a recipe as a path": (lambda: upscale(None, recipe="recipe.json"), upscale, "argument.wrong_type"),
    "a base without weights": (lambda: upscale(base=mu.plans.on_meta(lambda: mlp(4))),
        lambda: upscale(base=mlp(4)), "model.on_meta_device"),
    "several faults at once": (
        lambda: upscale("t=0.2", seed=None, lr=-1.0),
        lambda: upscale(mu.SignalNoise(0.2), seed=0),
        "argument.not_whole argument.wrong_type argument.not_a_number"),
    "norms that nobody measured": (
        lambda: mu.diagnostics.resolve_noise({}, mu.SignalNoise(0.2), plan=PLAN),
        lambda: mu.diagnostics.resolve_noise(dict(BASE.named_parameters()), mu.SignalNoise(0.2), plan=PLAN),
        "noise.norm_missing"),
    # Verifying.
    "a step without optimizers": (lambda: verify(run=mlp(4), step=step),
        lambda: verify(run=mlp(4), loss=loss), "run.no_optimizers"),
    "a loss in place of a step": (lambda: verify(step=loss),
        lambda: verify(step=step), "argument.wrong_signature"),
    "half a step, in words": (lambda: verify(step=step, steps=1.5, dtype="float64"),
        lambda: verify(step=step, steps=1, dtype=torch.float64), "argument.not_whole argument.wrong_type"),
    "a step that returns a batch": (lambda: verify(step=lambda run, i: (step(run, i), X)[1]),
        lambda: verify(step=lambda run, i: (step(run, i), None)[1]), "proof.step_returns_no_number"),
    "an optimizer to be checked": (lambda: mu.rules.check_optimizer(adamw(BASE)),
        lambda: mu.rules.check_optimizer(lambda params: AdamW(params, lr=0.1)), "argument.not_a_function"),
    "one width": (lambda: coordinates(widths=[4]), coordinates, "argument.too_few_widths"),
    "a model in place of a run": (lambda: coordinates(start=lambda width, seed: mlp(width)),
        coordinates, "argument.wrong_type"),
    "a report of models": (lambda: noise_shares(BASE, WIDE),
        lambda: noise_shares(mu.Run(BASE), upscale()), "argument.wrong_type"),
    "the symmetry of a base": (lambda: symmetry(BASE, plan=PLAN),
        lambda: symmetry(WIDE, plan=PLAN), "plan.other_shape"),
    # Training at any width.
    "an optimizer's name": (lambda: groups(kind="torch.optim.AdamW"), groups, "optimizer.not_a_class"),
    "no learning rate": (lambda: groups(lr=None), groups, "argument.not_a_number"),
    "decay as text": (lambda: groups(weight_decay="0.1"), groups, "argument.not_a_number"),
    "no_decay in one text": (lambda: groups(no_decay="*.bias"), groups, "argument.not_a_list"),
    "parameters without names": (lambda: groups(parameters=WIDE.parameters()),
        lambda: groups(parameters=WIDE.named_parameters()), "argument.not_named_pairs"),
    "a rate as text": (lambda: mu.set_lr_(grouped(), "0.1"),  # type: ignore[arg-type]
        lambda: mu.set_lr_(grouped(), 0.1), "argument.not_a_number"),
    "the rate of a model": (lambda: mu.diagnostics.reference_lr(WIDE),
        lambda: mu.diagnostics.reference_lr(grouped()), "argument.wrong_type"),
    "a size for all": (lambda: init(0.02), lambda: init({"*": 0.02}), "argument.wrong_type"),
    "a negative size": (lambda: init({"*": -1.0}), lambda: init({"*": 1.0}), "argument.not_a_number"),
    "a reference without weights": (lambda: init(mu.plans.on_meta(lambda: mlp(4))),
        lambda: init(mlp(4)), "model.on_meta_device"),
    "a seed in words": (lambda: init(mlp(4), seed="zero"),
        lambda: init(mlp(4), seed=0), "argument.not_whole"),
    "another model's plan": (lambda: clip(plan=OTHER, max_norm=1.0),
        lambda: clip(max_norm=1.0), "plan.unknown_tensor"),
    "a negative bound": (lambda: clip(max_norm=-1.0),
        lambda: clip(max_norm=math.inf), "argument.not_a_number"),
    "a norm of power zero": (lambda: grad_norm(WIDE, PLAN, p=0),
        lambda: grad_norm(WIDE, PLAN, p=math.inf), "argument.not_a_number"),
    "the norm of parameters": (lambda: grad_norm(WIDE.parameters(), PLAN),
        lambda: grad_norm(WIDE, PLAN), "argument.wrong_type"),
    "a model in place of an optimizer": (lambda: mu.step_in_units_(WIDE, PLAN, model=adamw(WIDE)),
        lambda: mu.step_in_units_(adamw(WIDE), PLAN, model=WIDE), "argument.wrong_type"),
    # State dicts.
    "a model in place of its state": (lambda: mu.trainers.grow_state_dict(BASE, PLAN),
        lambda: mu.trainers.grow_state_dict(BASE.state_dict(), PLAN), "argument.wrong_type"),
    "state and plan in turn": (lambda: mu.trainers.grow_state_dict(PLAN, BASE.state_dict()),  # type: ignore[arg-type]
        lambda: mu.trainers.grow_state_dict(BASE.state_dict(), PLAN), "argument.wrong_type"),
    "an optimizer in place of its state": (lambda: mu.trainers.grow_optimizer_state_dict(adamw(BASE), PLAN, AdamW),
        lambda: mu.trainers.grow_optimizer_state_dict(state(), PLAN, AdamW), "argument.wrong_type"),
    "a state and a name": (
        lambda: mu.trainers.grow_optimizer_state_dict(state(), PLAN, "torch.optim.AdamW"),  # type: ignore[arg-type]
        lambda: mu.trainers.grow_optimizer_state_dict(state(), PLAN, AdamW), "optimizer.not_a_class"),
    "the state of another model": (lambda: mu.trainers.grow_optimizer_state_dict(state(), OTHER, AdamW),
        lambda: mu.trainers.grow_optimizer_state_dict(state(), PLAN, AdamW), "state.unknown_name"),
    "groups of a state without names": (lambda: mu.trainers.groups_for(WIDE, adamw(WIDE).state_dict()),
        lambda: mu.trainers.groups_for(WIDE, carried()), "state.no_names"),
}
# fmt: on


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_refused_and_the_right_one_accepted(name):
    wrong, right, codes = CALLS[name]
    refusal(wrong, *codes.split())
    right()


def test_nothing_is_set_when_one_group_has_no_factor():
    optimizer = grouped()
    del optimizer.param_groups[-1]["lr_factor"]
    before = [group["lr"] for group in optimizer.param_groups]
    refusal(lambda: mu.set_lr_(optimizer, 0.2), "rates.no_factor", where="lr_factor")
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


BUILD = "from torch import nn\ndef build(width): return nn.Linear(2, width)\n"
TRAIN = "def train(run, steps, report):\n"
GROW = "upscale base wide -k 2"
TUNE = "--width 8 -k 2 --steps 4 --folder study"
COST = "-k 2 --proxy 4 --steps 5"
LIGHT = {
    "plann": "usage",
    "--versoin": "usage",
    "plan base -k 2 --tesnors": "usage",
    f"{GROW} --nosie t=1": "usage",
    "plan base -k 0": "goal.not_a_multiplier",
    "plan base -k 1.5": "goal.not_a_multiplier",
    "plan base -k two": "goal.not_a_multiplier",
    "plan base -k hiden=2": "goal.unknown_width",
    "plan base -k 2,2": "goal.width_given_twice",
    "plan base -k 2 --json empty": "option.not_a_file_name",
    f"{GROW} --by copies": "noise.not_given",
    f"{GROW} --by zeros": "usage",
    f"{GROW} --train-steps 9": "option.steps_need_auto",
    f"{GROW} --noise t=-1": "noise.not_a_size",
    f"{GROW} --noise t=1.5": "noise.above_norm",
    f"{GROW} --noise much": "noise.not_a_size",
    f"{GROW} --noise t=1 --train-steps 9": "option.steps_need_auto",
    f"{GROW} --noise auto --train-steps 0": "option.below_one",
    f"{GROW} --noise t=1 --threads 0": "option.below_one",
    f"{GROW} --noise t=1 --share 2/2": "option.not_a_share",
    f"{GROW} --noise t=1 --dtype int8": "option.unknown_dtype",
    f"{GROW} --noise t=1 --shard-size big": "usage",
    "cost": "option.not_given",
    "cost sound.py -k 2": "option.not_given",
    "cost sound.py -k 2 --width 8 --steps 5 --trials 3": "option.not_given",
    "cost sound.py -k 1 --width 8 --proxy 4 --steps 5": "option.below_least",
    "cost --budget 9": "option.not_given",
    "cost -k 2 --params 8 --spent 0 --budget 9": "option.not_given",
    "cost base --params 8 --budget 9 --wide-params 9": "option.said_elsewhere",
    "cost base -k 2 --budget 9 --wide-params 9": "option.said_elsewhere",
    "cost base -k 1 --budget 9": "option.below_least",
    "cost base -k 2 --budget 9 --steps 9": "option.other_question",
    "cost base -k 2 --spent 9": "option.other_question",
    "cost --params 8 --spent 0 --budget nan --wide-params 9": "option.not_a_positive_number",
    "advise base --budget 9": "usage",
    f"tune sound.py {TUNE} --lrs=-1": "study.not_positive_numbers",
    "tune sound.py --width 0 -k 1 --steps 0": "argument.not_whole",
    "plan base": "goal.not_given",
    "plan base -k 1": "goal.nothing_grows",
    "plan base --layers many": "goal.to_not_readable",
    "plan base --layers 2": "depth.not_deeper",
    "plan model.gguf -k 2": "directory.is_gguf",
    "plan base --layers 8 --to layers=8": "goal.to_not_readable",
    "check base wide": "usage",
    "check wide --levels bits": "usage",
    "check wide --levels bytes": "option.level_needs_base",
    f"{GROW} --workers 2": "usage",
    "plan base -k 2 --json none/plan.json": "option.not_a_file_name",
    f"{GROW} --noise t=0.1 --recipe r.json": "recipe.with_other_settings",
    "grow base wide -k 2 --dtype int8": "option.unknown_dtype",
    "grow base wide -k 2 --shard-size 5XB": "usage",
    "grow base wide -k 2 --share 3/2": "option.not_a_share",
    "grow base wide -k 2 --threads 0": "option.below_one",
    "tune proxy.py --width 8 -k 1 --steps 4": "argument.not_whole",
    "tune proxy.py --width 8 -k 2 --steps 4 --scheme u": "usage",
    "tune proxy.py --width 8 -k 2 --steps 4 --noises 0.1,2": "study.noise_above_scheme",
    "cost base -k 2": "option.not_given",
    "cost base --budget 9": "option.not_given",
    "demo --steps 0": "option.below_one",
    "doctor --disk none": "option.not_a_folder",
}
"""Command lines that are refused before torch is imported, and the codes of what is wrong."""
COMMANDS = LIGHT | {
    "plan nowhere -k 2": "directory.does_not_exist",
    "plan file -k 2": "directory.is_a_file",
    "plan empty -k 2": "directory.no_weights directory.no_config",
    "plan untyped -k 2": "config.no_model_type",
    "plan cut -k 2": "file.cut_short",
    f"{GROW} --noise t=1 --inputs nowhere": "data.not_a_batch",
    f"{GROW} --recipe nowhere": "file.does_not_exist",
    "grow base file -k 2": "job.output_not_empty",
    "grow base file/place -k 2": "directory.is_a_file",
    "check empty --base base": "growth.record_missing",
    f"cost sound.py {COST} --width 8": "argument.not_a_function",
    f"cost nowhere {COST} --batch 2 --context 8": "config.not_readable",
    "cost base --budget 9 --wide-params 9": "option.not_given",
    "cost --params 8 --spent 0 --budget 9 --wide-params 8": "advice.not_wider_than_base",
    "cost nowhere --budget 9 --wide-params 9": "directory.does_not_exist",
    f"tune nowhere.py {TUNE}": "proxy.no_such_file",
    f"tune broken.py {TUNE}": "proxy.file_failed",
    f"tune raising.py {TUNE}": "proxy.file_failed",
    f"tune bare.py {TUNE}": "argument.not_a_function",
    f"tune hungry.py {TUNE}": "argument.wrong_signature",
    f"tune forgetful.py {TUNE}1": "argument.wrong_type",
    f"tune silent.py {TUNE}2": "proxy.loop_ended_early",
    f"tune failing.py {TUNE}3": "proxy.file_failed",
    f"tune sound.py {TUNE} --beat 0": "argument.not_a_number",
    f"tune sound.py {TUNE} --folder file": "directory.is_a_file",
    f"tune sound.py {TUNE} --storage file": "store.not_a_journal",
    f"tune sound.py {TUNE} --storage empty": "store.journal_is_a_folder",
    f"tune sound.py {TUNE} --storage postgresql://me:secret@host:port/x": "store.address_unreadable",
    "report empty": "study.no_journal",
    "report foreign": "store.not_a_journal",
    "report empty --storage typo": "study.no_journal",
    "report empty --out file": "directory.is_a_file",
}


@pytest.fixture(scope="module")
def strange(tmp_path_factory):
    """A folder full of things that are not what a verb asks for."""
    here = tmp_path_factory.mktemp("strange")
    (here / "empty").mkdir()
    (here / "file").write_text("hi\n")
    for name in ("base", "untyped", "cut", "foreign"):
        (here / name).mkdir()
        save_file({"w": torch.zeros(2)}, here / name / "model.safetensors")
        (here / name / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    (here / "untyped" / "config.json").write_text("{}")
    (here / "cut" / "model.safetensors").write_bytes(b"x" * 100)
    (here / "foreign" / "study.journal").write_text("not of Optuna\n")
    proxies = {
        "sound": f"{BUILD}{TRAIN}    report(0, 1.0)",
        "broken": "def build(width:",
        "raising": "x = 1\ny = x / 0",
        "silent": f"{BUILD}{TRAIN}    pass",
        "failing": f"{BUILD}{TRAIN}    len(steps)",
        "bare": "import torch",
        "hungry": f"{BUILD}def train(run): ...",
        "forgetful": f"def build(width): ...\n{TRAIN}    pass",
    }
    for name, text in proxies.items():
        (here / f"{name}.py").write_text(text + "\n")
    return here


def run_main(line: str) -> int | str | None:
    try:
        return main(shlex.split(line))
    except SystemExit as stop:
        return stop.code


def printed_codes(text: str) -> set[str]:
    return set(re.findall(r" \[([a-z_.]+)\]", text))


@pytest.mark.parametrize("line", COMMANDS)
def test_a_wrong_command_is_refused_and_changes_nothing(line, strange, monkeypatch, capsys):
    monkeypatch.chdir(strange)
    before = sorted(p.name for p in strange.iterdir() if not p.name.startswith(("study", "__")))
    assert run_main(line) == 2
    message = capsys.readouterr().err
    assert printed_codes(message) == set(COMMANDS[line].split()), message
    assert "Traceback" not in message
    assert "secret" not in message
    assert (strange / "file").read_text() == "hi\n"
    assert sorted(p.name for p in strange.iterdir() if not p.name.startswith(("study", "__"))) == before


def test_light_commands_are_refused_without_torch(strange):
    """All in one process, in which importing torch ends it; control: a command that works imports it."""
    code = f"""
        from mupscale.cli.main import main
        import shlex
        for line in {[*LIGHT]!r}:
            try:
                assert main(shlex.split(line)) == 2, line
            except SystemExit as stop:
                assert stop.code == 2, (line, stop.code)
    """
    done = without_torch(textwrap.dedent(code), cwd=strange)
    assert done.returncode == 0, done.stderr
    assert printed_codes(done.stderr) == {code for codes in LIGHT.values() for code in codes.split()}
    control = without_torch(
        "from mupscale.cli.main import main; main(['plan', 'base', '-k', '2'])", cwd=strange
    )
    assert "torch was imported" in control.stderr


def test_what_the_machinery_itself_raises_is_no_refusal(strange, monkeypatch):
    """The control: an error that never was in the user's file stays what it was."""

    def fail(_):
        raise KeyError("ours")

    monkeypatch.chdir(strange)
    monkeypatch.setattr("mupscale.studies.tune.read_proxy", fail)
    with pytest.raises(KeyError, match="ours"):
        main(shlex.split(f"tune sound.py {TUNE}"))


def test_a_place_that_cannot_be_written_to_is_refused_before_planning(strange, monkeypatch, capsys):
    monkeypatch.chdir(strange)
    monkeypatch.setattr("os.access", lambda *_: False)
    assert run_main(f"{GROW} --noise t=1") == 2
    assert printed_codes(capsys.readouterr().err) == {"directory.not_writable"}
