"""Widen a run, or narrow it back: weights, buffers, averages, optimizers, schedulers, in one call.

The result shares no memory with the input, is deterministic, and the wide model is built without initialising
weights that would be overwritten.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...arguments import shown
from ...errors import Fault, MupscaleError, raise_faults
from ...models.build import Make, build
from ...models.example_loss import ExampleInputs
from ...models.names import averaged, named_tensors, resolve
from ...optimizers.carry import carry_optimizer, made
from ...optimizers.read import read_live
from ...optimizers.schedulers import carry_scheduler, driven_by, refuse_absolute, refuse_readers
from ...optimizers.write import write_live
from ...planning.infer import measured_with
from ...plans.direction import Direction
from ...plans.ends import check_end, check_ties
from ...plans.plan import Plan
from ...plans.wide_model import fill_model_
from ...proofs.identity import Loss
from ...rules.optimizer_rule import OptimizerRule
from ...rules.optimizers import rule_for
from ...runs.provenance import Growth
from ...runs.run import Run
from ...tensors.parts import is_sharded
from ..rates.schedules import begin_stage_, wrong_step_cost
from ..units.stepping import units_of
from .hooks import carry_clips_, carry_units_
from .left_behind import hand_over_
from .prove import proved_plan
from .state_dicts import carry_tensors


def widen(
    base: Run | nn.Module,
    wide: Make,
    *,
    loss: Loss | None = None,
    example_inputs: ExampleInputs | None = None,
    plan: Plan | None = None,
    step_cost: float | None = None,
    unproved: bool = False,
    rules: Mapping[str, OptimizerRule] | None = None,
) -> Run:
    """Widen a run: the result continues `base` exactly, at the width of `wide`, a factory or a module.

    A plan is found and measured with `loss(model)`, your loss on one batch, or with `example_inputs`, a tuple or a dict
    for `forward`; a given `plan` is measured. Neither is needed for a plan that was proved before, or if torch's own
    modules decide it. Otherwise the run is refused, or widened without a proof if `unproved=True`, which its provenance
    records. Tensors keep the base's dtype and device. A run with a `GrowthSchedule` needs `step_cost`, what one step
    costs from now on.

    >>> base = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> wide = widen(Run(base), lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)))
    >>> import torch
    >>> x = torch.randn(5, 3)
    >>> torch.allclose(base(x), wide.model(x))
    True
    """
    start = base if isinstance(base, Run) else Run(base)
    raise_faults("this schedule cannot be continued", wrong_step_cost(start.schedulers, step_cost))
    check_start(start)
    built = build(wide)
    chosen, proof = proved_plan(start.model, built, plan, measured_with(loss, example_inputs), unproved)
    direction = Direction(chosen)
    grown = carry(start, built, wide, direction, rules, settings=not unproved)
    begin_stage_(grown.schedulers, step_cost)
    left = hand_over_(start, grown, direction, proof)
    return replace(grown, provenance=grown.provenance.noting(**left))


def narrow(
    wide: Run | nn.Module,
    base: Make,
    *,
    plan: Plan | None = None,
    rules: Mapping[str, OptimizerRule] | None = None,
) -> Run:
    """Narrow a run: every entry is the average of its copies. Undoes `widen`.

    >>> def make(n): return nn.Sequential(nn.Linear(3, n), nn.Linear(n, 2))
    >>> base = make(4)
    >>> back = narrow(widen(base, lambda: make(8)), lambda: make(4))
    >>> import torch
    >>> torch.equal(back.model[0].weight, base[0].weight)
    True
    """
    start = wide if isinstance(wide, Run) else Run(wide)
    chosen = plan if plan is not None else start.plan
    if chosen is None:
        raise MupscaleError(
            "narrow needs the plan by which the run was widened; pass plan=", code="plan.not_given"
        )
    direction = Direction(chosen, back=True)
    cut = carry(start, build(base), base, direction, rules)
    hand_over_(start, cut, direction, {})
    return cut


def check_since(run: Run) -> None:
    """Raise if the run has `since` and it does not end at the shapes of its model."""
    if run.since is None:
        return
    try:
        check_end(run.since, run.model, "wide")
    except MupscaleError as error:
        claim = "since= ends at other shapes than the model of this run"
        raise MupscaleError(claim, error.faults, code=error.code) from None


def check_start(run: Run) -> None:
    """Raise for what is seen without a proof, which may take minutes: a wrong `since`, schedulers that cannot be carried."""
    check_since(run)
    raise_faults("this run cannot be widened exactly", _refused_schedulers(run))


def _refused_schedulers(run: Run) -> list[Fault]:
    """Faults for schedulers that cannot follow other units. Groups that are stepped in units keep those of the reference."""
    return refuse_absolute(tuple(s for s in run.schedulers if units_of(driven_by(s)) is None))


def carry(
    run: Run,
    built: nn.Module,
    make: Make,
    direction: Direction,
    rules: Mapping[str, OptimizerRule] | None = None,
    settings: bool = True,
    in_place: bool = False,
) -> Run:
    """Everything in `run`, at the other end of the plan; `settings` and `in_place` are as for `fill_model_`."""
    if any(is_sharded(tensor) for _, _, tensor in named_tensors(run.model)):
        raise MupscaleError(
            "a sharded run is not widened in one process: shard a model that was built wide, and fill it with "
            "mu.load_wide(base, wide, plan=plan)",
            code="run.sharded",
        )
    check_end(direction.plan, run.model, direction.start)
    check_end(direction.plan, built, direction.end)
    check_ties(direction.plan, {name: t for name, _, t in named_tensors(run.model)})
    if not direction.back:
        check_since(run)
    faults = _refused_schedulers(run) + refuse_readers(run.schedulers, run.optimizers, run.model)
    if run.optimizers:
        lone = [name for name, t in direction.plan.tensors.items() if t.new and t.like is None]
        what = "it is new and like no tensor of the base, so it belongs to no group"
        remedy = "widen without optimizers and add it to a group yourself"
        faults += [Fault("optimizer.tensor_without_group", name, what, remedy) for name in lone]
    raise_faults("this run cannot be widened exactly", faults)
    model = fill_model_(built, run.model, direction, settings=settings, in_place=in_place)
    optimizers, groups = [], {}
    rounded: dict[str, float] = {}
    for optimizer in run.optimizers:
        named, unread = read_live(optimizer, run.model, direction, rule_for(type(optimizer), rules=rules))
        # Groups that are stepped in units hold the constants of the reference, which growth does not change.
        carried, uncarried = carry_optimizer(named, direction, split=units_of(optimizer) is None)
        faults += unread + uncarried
        whole = made(carried, direction)
        rounded |= {f"{whole.label}, {where}": apart for where, apart in whole.rounded.items()}
        new = write_live(whole, optimizer, model)
        optimizers.append(new)
        groups[id(optimizer)] = (new, carried.groups)
    schedulers, driven = [], set()
    for scheduler in run.schedulers:
        owner = driven_by(scheduler)
        if id(owner) not in groups:
            what = "it drives an optimizer that is not part of the run"
            remedy = "put that optimizer into Run(optimizers=[...]), or leave the scheduler out"
            faults.append(Fault("schedule.foreign_optimizer", type(scheduler).__name__, what, remedy))
            continue
        schedulers.append(carry_scheduler(scheduler, *groups[id(owner)]))
        driven.add(id(owner))
    _forget_initial_rates([new for owner, (new, _) in groups.items() if owner not in driven])
    raise_faults("this run cannot be widened exactly", faults)
    carry_units_(run, optimizers, model, direction, rules)
    ema = _carry_ema(run.ema, make, direction, settings)
    if direction.back:
        carry_clips_(run.optimizers, optimizers, model, None, direction.plan)
        plan, early, before = _narrowed(run, direction.plan)
        return Run(
            model,
            optimizers,
            schedulers,
            plan=plan,
            since=early,
            ema=ema,
            steps=run.steps,
            earlier=before,
            provenance=run.provenance.narrowed(direction.plan),
        )
    since = direction.plan if run.since is None else run.since.then(direction.plan)
    carry_clips_(run.optimizers, optimizers, model, direction.plan, None)
    return Run(
        model,
        optimizers,
        schedulers,
        ema=ema,
        steps=run.steps,
        plan=direction.plan,
        since=since,
        earlier=(*run.earlier, (run.plan, run.since)),
        provenance=run.provenance.grown(Growth.by(direction.plan, run.since, rounded=rounded)),
    )


_Before = tuple[tuple[Plan | None, Plan | None], ...]


def _narrowed(run: Run, undone: Plan) -> tuple[Plan | None, Plan | None, _Before]:
    """`plan`, `since` and `earlier` of the run that this one was widened from by the plan that is undone."""
    if run.earlier and run.plan == undone:
        return *run.earlier[-1], run.earlier[:-1]
    if run.since is not None and run.since != undone:
        warnings.warn(
            "the narrow run has no reference: this run does not know the one it was widened from. If there is one, "
            "write run = dataclasses.replace(run, since=plan), with the plan from the reference to the narrow model",
            stacklevel=4,
        )
    return None, None, ()


def _forget_initial_rates(optimizers: list[Optimizer]) -> None:
    """Drop `initial_lr` of a schedule that is not carried, so that a new scheduler does not start from it.

    torch's schedulers start from `initial_lr` if a group has it, otherwise from the group's `lr`. Setting it to `lr`
    would let a scheduler that is built with last_epoch=n silently start from a rate that has already decayed.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.pop("initial_lr", None)


def _wrapped(outer: nn.Module, inner: nn.Module, filled: nn.Module) -> nn.Module:
    """The wrappers around `inner`, with copies of their own buffers, around `filled`."""
    if outer is inner or "module" not in outer._modules:
        return filled
    wrapper = copy.copy(outer)
    held = outer._modules["module"]
    assert held is not None
    wrapper._modules = {**outer._modules, "module": _wrapped(held, inner, filled)}
    wrapper._buffers = {k: None if b is None else b.detach().clone() for k, b in outer._buffers.items()}
    wrapper._parameters = dict(outer._parameters)
    return wrapper


def _carry_ema(
    ema: nn.Module | Mapping[str, Tensor] | None, make: Make, direction: Direction, settings: bool
) -> Any:
    if ema is None:
        return None
    if isinstance(ema, nn.Module):
        inner = averaged(ema, {*direction.reached, *direction.plan.ties})
        check_end(direction.plan, inner, direction.start)
        filled = fill_model_(build(make), inner, direction, settings=settings, hooks=False)
        return _wrapped(ema, inner, filled)
    if not isinstance(ema, Mapping):
        raise MupscaleError(
            f"ema is {shown(ema)}, expected a module (AveragedModel among them) or a mapping of names to tensors; "
            "leave out other averages, and carry them with widen_state_dict",
            code="argument.wrong_type",
        )
    counters = {
        k: v.detach().clone()
        for k, v in ema.items()
        if isinstance(v, Tensor) and v.dim() == 0 and resolve(k, direction.reached) is None
    }
    tensors = {k: v for k, v in ema.items() if k not in counters}
    return {**carry_tensors(tensors, direction, partial=True), **counters}
