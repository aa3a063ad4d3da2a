"""Upscale: the exact map plus noise, and the learning rate to continue with. Steps 1 to 3 of the method, in one call.

Weights and every copy of them get the same noise, moments none. The provenance of the result records how it was made.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import nn

from ...arguments import wrong_function, wrong_kind, wrong_number, wrong_whole
from ...errors import Fault, raise_faults
from ...models.build import Make, build
from ...models.example_loss import ExampleInputs
from ...models.names import named_tensors
from ...noise.apart import kept_tokens
from ...noise.auto import AutoNoise, wrong_auto
from ...noise.kinds import EXAMPLES, NewUnits, Noise, SignalNoise, SplitNoise, wrong_noise
from ...noise.resolve import resolve_noise, unused_seed
from ...noise.resolved import NoisePlan
from ...noise.where import exempt_of
from ...planning.declare import Declared
from ...planning.infer import measured_with
from ...plans.block_order import new_blocks
from ...plans.direction import Direction
from ...plans.plan import Plan
from ...proofs.identity import Loss
from ...rules.optimizer_rule import OptimizerRule
from ...rules.products import By, Ways
from ...runs.run import Run
from ..rates.after_growth import new_rates
from ..rates.schedules import begin_stage_, wrong_step_cost
from ..recipe import Recipe, at_recipe, wrong_with_recipe
from .auto_noise import ChosenNoise, choose_noise
from .carry import carry, check_start
from .left_behind import hand_over_
from .loss_rise import is_jump, jump_message, less_of, measured
from .prove import proved_plan
from .woken import check_woken, refuse_other_way

_LOG = logging.getLogger("mupscale")


def upscale(
    base: Run | nn.Module,
    wide: Make,
    noise: Noise | AutoNoise | None = None,
    *,
    by: By | None = None,
    loss: Loss | None = None,
    example_inputs: ExampleInputs | None = None,
    plan: Plan | None = None,
    declared: Declared | None = None,
    lr: float | None = None,
    peak_lr: float | None = None,
    step_cost: float | None = None,
    recipe: Recipe | None = None,
    seed: int = 0,
    prove: bool = True,
    rules: Mapping[str, OptimizerRule] | None = None,
) -> Run:
    """Grow a run, wake what is new, and set the learning rate: the result can use its new width.

    Without options the width grows by new units. They read what trained units read, plus noise; the weights that read them are
    zero. So the loss after growth is the loss before, up to rounding, and every new unit learns from the second step on. In front
    of a LayerNorm new channels carry the mean of the old ones, which keeps the outputs; this needs a `loss` or
    `example_inputs`. A space that can have neither, as the stream of a BERT, grows by copies, of which each weight reads
    one. Warm the rate up afterwards with `rewarm_`: new entries take large steps at first in optimizers that count steps once for all.

    With `by="copies"`, the method of the paper, every unit is copied, and noise parts the copies. That costs some loss at first.

    Args:
        base: The run to grow, or its model alone. It is not changed.
        wide: A function without arguments that builds the larger model, or that model.
        noise: `NewUnits` says what new units read. Other kinds part copies, so they imply `by="copies"`; their sizes are written
            at the run's reference.
        by: "units", "copies" or "padded", as for `grow`. By default what `noise` or `recipe` asks for, and otherwise "units".
        loss: `loss(model)`, your loss on one fixed batch, proves the plan before anything wakes, in train and in eval mode, as
            for `grow`. With new units it decides nothing else: it is measured before and after, in eval mode, and growth is
            refused if it moved. With `by="copies"` and no `noise` it also chooses the size, in at most 11 forward passes: the loss
            rises by a twentieth of what the base has learned, or less if that would be a jump.
        example_inputs: One batch for `forward`, a tuple or a dict, which proves the plan in place of `loss`.
        plan: The plan to grow by. Without it one is found.
        declared: What shapes do not show, such as the blocks in which an axis is laid out.
        lr: The learning rate right after growth, written at the reference. By default the base's.
        peak_lr: The rate that a carried schedule multiplies: at 0.6 of the peak, `peak_lr=5e-3` is `lr=3e-3`. Give one of the two.
        step_cost: What one step costs from now on; needed if, and only if, the run has a `GrowthSchedule`.
        recipe: Way of growth, noise and learning rate as `tune` found them; refused if it does not apply to this run.
        seed: The number on which all noise depends.
        prove: False grows by a plan that nothing has proved, and `provenance` says so.
        rules: Rows to use in place of the registry of optimizers, by full class name.

    Returns:
        A new run whose new units are awake. `provenance` holds the noise, the rate and, with `loss`, both losses. The reference is
        that of the base: repeated growth keeps the first one.

    Raises:
        NotExact: If growing without noise is not exact, or waking moves the loss.
        Undecided: If nothing proves the plan, or a `loss` or a declaration is needed to find one.
        WrongArgument: If an argument cannot be used. These and all others are `MupscaleError`.

    >>> from mupscale import MupNoise
    >>> base = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> make = lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> wide = upscale(base, make, MupNoise(0.1), seed=0)
    >>> bool((wide.model[0].weight[0] != wide.model[0].weight[1]).all())
    True
    """
    start = base if isinstance(base, Run) else Run(base)
    sizes = recipe.noise if isinstance(recipe, Recipe) else noise
    copies = by == "copies" or not isinstance(sizes, NewUnits | None)
    waking: Noise | AutoNoise = (AutoNoise() if copies else NewUnits()) if noise is None else noise
    faults = _unusable(start, waking if recipe is None else noise, lr, peak_lr, recipe, seed, loss)
    ways = Ways(by or ("copies" if copies else "units"), centred=True)
    faults += wrong_step_cost(start.schedulers, step_cost)
    raise_faults("upscale cannot use what it was given", faults)
    if recipe is not None:
        waking, lr = recipe.noise, recipe.lr if start.optimizers else None
    check_start(start)
    set_rates_ = new_rates(start, lr, peak_lr)
    refuse_other_way(by, plan)
    built = build(wide)
    wakes = waking if isinstance(waking, NewUnits | SplitNoise) else None
    measure = measured_with(loss, example_inputs)
    chosen, proof = proved_plan(start.model, built, plan, measure, prove, ways, wide, wakes, declared)
    if recipe is not None:
        start = at_recipe(recipe, start, chosen, rules)
    sized, resolved, choice = _sized(start, wide, waking, chosen, seed, loss, settings=prove)
    direction = Direction(chosen, noise=resolved)
    grown = carry(start, built, wide, direction, rules, settings=prove)
    set_rates_(grown)
    jumping = isinstance(waking, AutoNoise) and waking.may_jump
    less = "write AutoNoise(), which takes less" if jumping else less_of(sized)
    losses = None if loss is None else _losses(loss, start.model, grown.model, chosen, seed, choice, less)
    if wakes is not None:
        given = plan is not None or by == "padded"
        check_woken(losses, grown.model, chosen, resolved, proof.get("unlearned", ()), given)
    _LOG.info("%s", _summary(chosen, losses))
    begin_stage_(grown.schedulers, step_cost)
    provenance = grown.provenance.noting(
        **hand_over_(start, grown, direction, proof, new_rate=lr is not None),
        noise={"kind": type(sized).__name__, **resolved.as_json()},
        auto=None if choice is None else choice.as_json(),
        seed=seed,
        lr=lr,
        peak_lr=peak_lr,
        recipe=None if recipe is None else recipe.summary(),
        loss=losses,
    )
    return replace(grown, provenance=provenance)


def _unusable(
    run: Run,
    noise: Noise | AutoNoise | None,
    lr: float | None,
    peak_lr: float | None,
    recipe: Recipe | None,
    seed: int,
    loss: Loss | None,
) -> list[Fault]:
    """Faults for wrong or missing arguments of `upscale`, and for weights on the meta device."""
    faults = wrong_whole("seed", seed)
    if isinstance(noise, AutoNoise):
        faults += wrong_auto(noise)
        what = "its size is chosen by a loss, and none is given"
        remedy = f"add loss=lambda model: …, the loss of one batch, or write noise={EXAMPLES}"
        faults += [] if loss is not None else [Fault("noise.needs_loss", "AutoNoise", what, remedy)]
    elif noise is not None:
        faults += wrong_noise(noise)
    for name, rate in (("lr", lr), ("peak_lr", peak_lr)):
        remedy = f"write {name}=1e-3, for example, or leave it out"
        faults += [] if rate is None else wrong_number(name, rate, remedy)
    faults += [] if loss is None else wrong_function("loss", loss, "model")
    faults += (
        []
        if recipe is None
        else wrong_kind("recipe", recipe, Recipe, "write recipe=mu.studies.Recipe.read(path)")
    )
    if isinstance(recipe, Recipe):
        faults += wrong_with_recipe(recipe, loss, noise=noise, lr=lr, peak_lr=peak_lr)
    empty = [name for name, kind, t in named_tensors(run.model) if kind == "parameter" and t.is_meta]
    what, remedy = (
        "it is on the meta device and has no numbers",
        "load its weights first: noise is added to numbers",
    )
    return faults + [Fault("model.on_meta_device", name, what, remedy) for name in empty]


def _sized(
    run: Run,
    wide: Make,
    noise: Noise | AutoNoise,
    plan: Plan,
    seed: int,
    loss: Loss | None,
    settings: bool,
) -> tuple[Noise, NoisePlan, ChosenNoise | None]:
    """The noise with its size, the noise of every tensor, and how the size was chosen if it was not given."""
    exempt = exempt_of(run.model, plan, "base")
    seed = unused_seed(seed, run.since, run.provenance.seeds)
    choice = None
    if isinstance(noise, AutoNoise):
        assert loss is not None
        choice = choose_noise(
            run.model,
            wide,
            noise,
            loss,
            plan=plan,
            seed=seed,
            since=run.since,
            exempt=exempt,
            settings=settings,
        )
        _LOG.info("%s", choice)
        noise = SignalNoise(choice.t)
    tensors = {name: tensor for name, _, tensor in named_tensors(run.model)}
    resolved = resolve_noise(tensors, noise, plan=plan, seed=seed, since=run.since, exempt=exempt)
    return noise, resolved, choice


def _summary(plan: Plan, losses: dict[str, float] | None) -> str:
    """One line: which sizes grew in which way, and the loss before and after.

    >>> from mupscale.plans import plan_between
    >>> plan = plan_between(lambda n: nn.Sequential(nn.Linear(3, n), nn.ReLU(), nn.Linear(n, 2)), 4, 8, by="units")
    >>> _summary(plan, {"before": 0.25, "after": 0.25})
    'grown by new units: 4 -> 8; loss 0.25 before, 0.25 after'
    """
    ways: dict[str, dict[str, None]] = {}
    for axis in (axis for entry in plan.tensors.values() for axis in entry.axes if axis.grows):
        way = "copies" if axis.k != 1 else "new units"
        ways.setdefault(way, {})[f"{axis.base} -> {axis.wide}"] = None
    parts = [f"by {way}: {', '.join(sizes)}" for way, sizes in ways.items()]
    if blocks := new_blocks(plan):
        parts.append("by new blocks: " + ", ".join(f"{new} like {like}" for new, like in blocks.items()))
    parts = parts or ["by new tensors"]
    after = "" if losses is None else f"; loss {losses['before']:.6g} before, {losses['after']:.6g} after"
    kept = (
        ""
        if losses is None or "kept" not in losses
        else f"; {losses['kept']:.1%} of tokens keep their experts"
    )
    return f"grown {', '.join(parts)}{after}{kept}"


def _losses(
    loss: Loss,
    base: nn.Module,
    wide: nn.Module,
    plan: Plan,
    seed: int,
    choice: ChosenNoise | None,
    less: str,
) -> dict[str, float]:
    """The loss before and after noise, for the provenance; warns if it jumps, or rises by more than was asked for.

    `less` is what to write for less noise.
    """
    if choice is None:
        before, after = (measured(loss, model, seed) for model in (base, wide))
    else:
        before, after = choice.before, choice.after
    if is_jump(before, after) and less:
        warnings.warn(jump_message(before, after, less), stacklevel=3)
    elif choice is not None and not choice.found <= 1.5 * choice.rise:
        warnings.warn(
            f"no size was found that costs {choice.rise:.0%} of what was learned; {choice}", stacklevel=3
        )
    return {
        "before": before,
        "after": after,
        **kept_tokens(plan, base, wide, partial(measured, loss, seed=seed)),
    }
