"""Upscale: the exact map plus noise, and the learning rate to continue with. Steps 1 to 3 of the method, in one call.

Weights and every copy of them get the same noise, moments none. The provenance of the result records how it was made.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import isclose
from typing import Any

from torch import nn

from ...arguments import wrong_function, wrong_kind, wrong_number, wrong_whole
from ...errors import Fault, raise_faults
from ...models.build import Make, build
from ...models.example_loss import ExampleInputs
from ...models.names import named_tensors, parameter_names, resolve
from ...noise.kinds import EXAMPLES, Noise, SignalNoise, wrong_noise
from ...noise.resolve import resolve_noise, unused_seed
from ...noise.where import exempt_of
from ...optimizers.settings import in_units
from ...planning.infer import measured_with
from ...plans.direction import Direction
from ...plans.plan import Plan
from ...proofs.identity import Loss
from ...rules.optimizer_rule import OptimizerRule
from ...rules.optimizers import rule_for
from ...runs.run import Run, since_of
from ..rates.after_growth import new_rates
from ..rates.schedules import begin_stage_, wrong_step_cost
from ..recipe import Recipe, TensorGrowth
from .auto_noise import AutoNoise, Choice, choose_noise, wrong_auto
from .carry import carry, check_start
from .left_behind import hand_over_
from .loss_rise import is_jump, jump_message, less_of, measured
from .prove import proved_plan

_LOG = logging.getLogger("mupscale")


def upscale(
    base: Run | nn.Module,
    wide: Make,
    noise: Noise | AutoNoise | None = None,
    *,
    loss: Loss | None = None,
    example_inputs: ExampleInputs | None = None,
    plan: Plan | None = None,
    lr: float | None = None,
    peak_lr: float | None = None,
    step_cost: float | None = None,
    recipe: Recipe | None = None,
    seed: int = 0,
    unproved: bool = False,
    rules: Mapping[str, OptimizerRule] | None = None,
) -> Run:
    """Widen `base`, add noise, and set the learning rate: a run that can use its new width.

    `lr` is the learning rate now, right after growth; None keeps the base's. `peak_lr` is the rate that a carried
    schedule multiplies: with a schedule that stands at 0.6 of its peak, `lr=3e-3` and `peak_lr=5e-3` are the same.
    A run with a `GrowthSchedule` needs `step_cost`, what one step costs from now on.
    Noise sizes and learning rates are written at the run's reference. It is the base itself unless the run has
    `since=`, and repeated growth keeps the first reference.
    `recipe` gives noise and learning rate as tuning found them, and is refused if it does not apply to this run.
    `loss(model)`, your loss on one batch, proves that growing is exact before noise is added, as for `widen`, and
    measures what the noise costs: both losses are saved in the provenance, and a large increase causes a warning.
    Without `noise` and `recipe` the noise is chosen by this loss: the size at which it has risen by a twentieth of
    what the base has learned, or less if that would be a large increase, found with at most 11 forward passes.
    `AutoNoise(steps=…)` asks for more where long training follows.
    `example_inputs`, `plan` and `unproved` are as for `widen`.

    >>> from mupscale import MupNoise
    >>> base = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> make = lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> wide = upscale(base, make, MupNoise(0.1), seed=0)
    >>> bool((wide.model[0].weight[0] != wide.model[0].weight[1]).all())
    True
    """
    start = base if isinstance(base, Run) else Run(base)
    faults = _unusable(start, noise, lr, peak_lr, recipe, seed, loss)
    raise_faults(
        "upscale cannot use what it was given", [*faults, *wrong_step_cost(start.schedulers, step_cost)]
    )
    if recipe is not None:
        noise, lr = recipe.noise, recipe.lr if start.optimizers else None
    check_start(start)
    set_rates_ = new_rates(start, lr, peak_lr)
    built = build(wide)
    chosen, proof = proved_plan(start.model, built, plan, measured_with(loss, example_inputs), unproved)
    if recipe is not None:
        start = at_recipe(recipe, start, chosen, rules)
    tensors = {name: tensor for name, _, tensor in named_tensors(start.model)}
    exempt = exempt_of(start.model, chosen, "base")
    drawn = unused_seed(seed, start.since, start.provenance.seeds)
    choice, given = None, noise
    if noise is None or isinstance(noise, AutoNoise):
        assert loss is not None
        auto = AutoNoise() if noise is None else noise
        about: dict[str, Any] = {"plan": chosen, "seed": drawn, "since": start.since, "exempt": exempt}
        choice = choose_noise(start.model, wide, auto, loss, **about, settings=not unproved)
        _LOG.info("%s", choice)
        noise = SignalNoise(choice.t)
    resolved = resolve_noise(tensors, noise, plan=chosen, seed=drawn, since=start.since, exempt=exempt)
    direction = Direction(chosen, noise=resolved)
    grown = carry(start, built, wide, direction, rules, settings=not unproved)
    set_rates_(grown)
    losses = None if loss is None else _losses(loss, start.model, grown.model, noise, seed, choice, given)
    begin_stage_(grown.schedulers, step_cost)
    provenance = grown.provenance.noting(
        **hand_over_(start, grown, direction, proof, new_rate=lr is not None),
        noise={"kind": type(noise).__name__, **resolved.as_json()},
        auto=None if choice is None else choice.as_json(),
        seed=seed,
        lr=lr,
        peak_lr=peak_lr,
        recipe=None if recipe is None else recipe.summary(),
        loss=losses,
    )
    return replace_run(grown, provenance=provenance)


def _unusable(
    run: Run,
    noise: Noise | AutoNoise | None,
    lr: float | None,
    peak_lr: float | None,
    recipe: Recipe | None,
    seed: int,
    loss: Loss | None,
) -> list[Fault]:
    """Faults for arguments of `upscale` of the wrong type, and for weights on the meta device."""
    faults = wrong_whole("seed", seed)
    if isinstance(noise, AutoNoise):
        faults += wrong_auto(noise)
        what, remedy = "it needs a loss, by which the size is chosen", "add loss=lambda model: …"
        faults += [] if loss is not None else [Fault("noise.needs_loss", "AutoNoise", what, remedy)]
    elif noise is not None:
        faults += wrong_noise(noise)
    for name, rate in (("lr", lr), ("peak_lr", peak_lr)):
        remedy = f"write {name}=1e-3, for example, or leave it out"
        faults += [] if rate is None else wrong_number(name, rate, remedy)
    faults += [] if recipe is None else wrong_kind("recipe", recipe, Recipe, "write recipe=Recipe.read(path)")
    faults += [] if loss is None else wrong_function("loss", loss, "model")
    faults += _noise_missing_or_twice(noise, lr, peak_lr, recipe, loss)
    empty = [name for name, kind, t in named_tensors(run.model) if kind == "parameter" and t.is_meta]
    remedy = "load its weights first: noise is added to numbers"
    return [
        *faults,
        *(
            Fault("model.on_meta_device", name, "it is on the meta device and has no numbers", remedy)
            for name in empty
        ),
    ]


def _noise_missing_or_twice(
    noise: Noise | AutoNoise | None,
    lr: float | None,
    peak_lr: float | None,
    recipe: Recipe | None,
    loss: Loss | None,
) -> list[Fault]:
    """Faults if nothing says how much noise to add, or a recipe and an argument do."""
    if not isinstance(recipe, Recipe):
        what = "nothing says how much to add"
        remedy = (
            "write loss=lambda model: …, the loss of one batch, and it is chosen by what it costs, or "
            f"noise={EXAMPLES}, or recipe="
        )
        missing = noise is None and recipe is None and loss is None
        return [Fault("noise.not_given", "noise", what, remedy)] if missing else []
    given = {"noise": noise, "lr": lr, "peak_lr": peak_lr}
    what = "a recipe sets noise and learning rate"
    faults = [
        Fault("recipe.with_other_settings", name, what, f"leave out {name}=, or the recipe")
        for name, value in given.items()
        if value is not None
    ]
    if isinstance(recipe.noise, AutoNoise) and loss is None:
        what = "it gives the noise as a rise of the loss, whose size is measured on this base"
        remedy = "add loss=lambda model: …, the loss of one batch"
        faults.append(Fault("recipe.needs_loss", "recipe", what, remedy))
    return faults


def _losses(
    loss: Loss,
    base: nn.Module,
    wide: nn.Module,
    noise: Noise,
    seed: int,
    choice: Choice | None,
    given: Noise | AutoNoise | None,
) -> dict[str, float]:
    """The loss before and after noise, for the provenance; warns if it jumps, or rises by more than was asked for."""
    remedy = less_of(noise)
    if choice is None:
        before, after = (measured(loss, model, seed) for model in (base, wide))
    else:
        before, after = choice.before, choice.after
        if isinstance(given, AutoNoise) and given.may_jump:
            remedy = "write AutoNoise(), which takes less"
    if is_jump(before, after):
        warnings.warn(jump_message(before, after, remedy), stacklevel=3)
    elif choice is not None and not choice.found <= 1.5 * choice.rise:
        warnings.warn(
            f"no size was found that costs {choice.rise:.0%} of what was learned; {choice}", stacklevel=3
        )
    return {"before": before, "after": after}


def at_recipe(recipe: Recipe, run: Run, plan: Plan, rules: Mapping[str, OptimizerRule] | None = None) -> Run:
    """The run written at the recipe's reference; raises if the recipe does not apply, warns of allowed differences.

    A run with another reference can be rewritten if its parameter groups were made at the recipe's reference: then
    their factors lead from that reference to each tensor. Otherwise its learning rates have other proportions than
    the tuned ones, which no single learning rate can correct, and the recipe is refused.
    """
    since = recipe.since(plan)
    if since is not None and run.optimizers:
        same = TensorGrowth.all_of(plan, since) == TensorGrowth.all_of(plan, run.since)
        written = list(settings_at(since, run, rules))
        if not same and all(isclose(s["lr_factor"], 1.0, rel_tol=1e-9) for s in written):
            grows = any(entry.grows for entry in since.tensors.values())
            run = replace_run(run, since=since if grows else None)
    recipe.check(plan, run.since, run.optimizers)
    _check_rates(run, rules)
    schedules = {type(scheduler).__name__ for scheduler in run.schedulers}
    # A run without a scheduler may get one after it has grown, so its schedule is not known (None), not constant.
    lines = recipe.differences(schedule="+".join(sorted(schedules)) or None)
    others = recipe.other_constants(settings_at(since_of(run, run.model), run, rules))
    if others:
        lines.append(f"other constants than the recipe was tuned with: {'; '.join(others)}")
    for line in lines:
        warnings.warn(line, stacklevel=3)
    return run


def _check_rates(run: Run, rules: Mapping[str, OptimizerRule] | None) -> None:
    """Raise unless learning rates have the proportions that μP gives them at the run's reference."""
    if all(
        isclose(s["lr_factor"], 1.0, rel_tol=1e-9) for s in settings_at(since_of(run, run.model), run, rules)
    ):
        return
    what = "the learning rates of its tensors are not in the proportions of the reference that the run names"
    remedy = (
        "train the base with mu.param_groups(model, since, …); for a base that was trained without "
        "μP, tune the proxy with reference= the base's width, and leave since= out of the run"
    )
    raise_faults(
        "this recipe does not apply to this run",
        [Fault("recipe.rates_out_of_proportion", "param_groups", what, remedy)],
    )


def settings_at(
    since: Plan, run: Run, rules: Mapping[str, OptimizerRule] | None = None
) -> Iterator[dict[str, Any]]:
    """The settings of every trained tensor, in the units of the reference from which `since` leads to the model."""
    names = parameter_names(run.model)
    for optimizer in run.optimizers:
        rule = rule_for(type(optimizer), rules=rules)
        for group in optimizer.param_groups:
            settings = {"lr_factor": 1.0, **{key: value for key, value in group.items() if key != "params"}}
            for parameter in group["params"]:
                name = resolve(names.get(id(parameter), ""), since)
                row = rule.row(settings, parameter.dim(), optimizer.state.get(parameter))
                yield settings if name is None else in_units(row, settings, since[name], back=True)


def replace_run(run: Run, **changes: Any) -> Run:
    """A run with some of its parts replaced."""
    return replace(run, **changes)
