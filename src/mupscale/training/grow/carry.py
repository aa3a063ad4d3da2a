"""Everything in a run, at the other end of a plan: model, optimizers, schedulers, average, hooks and history.

Shapes, ties, schedulers and optimizers are checked before a tensor is made.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...arguments import shown
from ...errors import Fault, MupscaleError, raise_faults
from ...models.build import Make, build
from ...models.names import averaged, named_tensors, resolve
from ...optimizers.carry import carry_optimizer, made
from ...optimizers.named import NamedOptimizer
from ...optimizers.read import read_live
from ...optimizers.schedulers import carry_scheduler, driven_by, refuse_absolute, refuse_readers
from ...optimizers.write import write_live
from ...plans.direction import Direction
from ...plans.ends import check_end, check_ties
from ...plans.wide_model import fill_model_
from ...rules.optimizer_rule import OptimizerRule
from ...rules.optimizers import rule_for
from ...runs.provenance import Growth
from ...runs.run import Run
from ...tensors.parts import is_sharded
from ..units.stepping import units_of
from .hooks import carry_clips_, carry_units_
from .state_dicts import carry_tensors

_REFUSED = "this run cannot be widened exactly"


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
    _check(run, built, direction)
    named = carry_optimizers(run, direction, rules)
    model = fill_model_(built, run.model, direction, settings=settings, in_place=in_place)
    whole = [made(one, direction) for one in named]
    optimizers = [write_live(one, like, model) for one, like in zip(whole, run.optimizers, strict=True)]
    schedulers = carry_schedulers(run, optimizers, named)
    carry_units_(run, optimizers, model, direction, rules)
    onward, undone = (None, direction.plan) if direction.back else (direction.plan, None)
    carry_clips_(run.optimizers, optimizers, model, onward, undone)
    ema = carry_ema(run.ema, make, direction, settings)
    rounded = {f"{one.label}, {where}": apart for one in whole for where, apart in one.rounded.items()}
    history = _narrowed(run, direction) if direction.back else _grown(run, direction, rounded)
    return Run(model, optimizers, schedulers, ema=ema, steps=run.steps, **history)


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
    raise_faults(_REFUSED, _refused_schedulers(run))


def _check(run: Run, built: nn.Module, direction: Direction) -> None:
    """Raise for shapes, ties, schedulers and new tensors by which the run cannot be carried."""
    tensors = {name: tensor for name, _, tensor in named_tensors(run.model)}
    if any(map(is_sharded, tensors.values())):
        raise MupscaleError(
            "a sharded run is not widened in one process: shard a model that was built wide, and fill it with "
            "mu.load_grown_(base, wide, plan=plan)",
            code="run.sharded",
        )
    check_end(direction.plan, run.model, direction.start)
    check_end(direction.plan, built, direction.end)
    check_ties(direction.plan, tensors)
    if not direction.back:
        check_since(run)
    faults = _refused_schedulers(run) + refuse_readers(run.schedulers, run.optimizers, run.model)
    if run.optimizers:
        lone = [name for name, t in direction.plan.tensors.items() if t.new and t.like is None]
        what = "it is new and like no tensor of the base, so it belongs to no group"
        remedy = "grow without optimizers and add it to a group yourself"
        faults += [Fault("optimizer.tensor_without_group", name, what, remedy) for name in lone]
    raise_faults(_REFUSED, faults)


def _refused_schedulers(run: Run) -> list[Fault]:
    """Faults for schedulers that cannot follow other units, or whose optimizer is not there."""
    # Groups that are stepped in units keep those of the reference.
    faults = refuse_absolute(tuple(s for s in run.schedulers if units_of(driven_by(s)) is None))
    what = "it drives an optimizer that is not part of the run"
    remedy = "put that optimizer into Run(optimizers=[...]), or leave the scheduler out"
    foreign = [s for s in run.schedulers if all(driven_by(s) is not o for o in run.optimizers)]
    return faults + [Fault("schedule.foreign_optimizer", type(s).__name__, what, remedy) for s in foreign]


def carry_optimizers(
    run: Run, direction: Direction, rules: Mapping[str, OptimizerRule] | None
) -> list[NamedOptimizer]:
    """The run's optimizers as named data at the other end, their tensors not made yet; raises if one cannot be exact."""
    found, faults = [], []
    for optimizer in run.optimizers:
        named, unread = read_live(optimizer, run.model, direction, rule_for(type(optimizer), rules=rules))
        # Groups that are stepped in units hold the constants of the reference, which growth does not change.
        carried, uncarried = carry_optimizer(named, direction, split=units_of(optimizer) is None)
        faults += unread + uncarried
        found.append(carried)
    raise_faults(_REFUSED, faults)
    return found


def carry_schedulers(run: Run, optimizers: Sequence[Optimizer], named: Sequence[NamedOptimizer]) -> list[Any]:
    """The run's schedulers, each on the new optimizer in place of the one that it drives.

    Where no scheduler is carried, `initial_lr` of an earlier one is dropped: torch's schedulers start from it if a group
    has it, otherwise from the group's `lr`. Setting it to `lr` would let a scheduler that is built with last_epoch=n
    silently start from a rate that has already decayed.
    """
    new = {id(old): (o, n.groups) for old, o, n in zip(run.optimizers, optimizers, named, strict=True)}
    driven = {id(driven_by(scheduler)) for scheduler in run.schedulers}
    for group in (group for old in new.keys() - driven for group in new[old][0].param_groups):
        group.pop("initial_lr", None)
    return [carry_scheduler(scheduler, *new[id(driven_by(scheduler))]) for scheduler in run.schedulers]


def _grown(run: Run, direction: Direction, rounded: Mapping[str, float]) -> dict[str, Any]:
    """Plans and provenance of the run that grows by a further plan."""
    plan = direction.plan
    return {
        "plan": plan,
        "since": plan if run.since is None else run.since.then(plan),
        "earlier": (*run.earlier, (run.plan, run.since)),
        "provenance": run.provenance.grown(Growth.by(plan, run.since, rounded=rounded)),
    }


def _narrowed(run: Run, direction: Direction) -> dict[str, Any]:
    """Plans and provenance of the run that this one was widened from."""
    undone = direction.plan
    known = bool(run.earlier) and run.plan == undone
    if not known and run.since is not None and run.since != undone:
        warnings.warn(
            "the narrow run has no reference: this run does not know the one it was widened from. If there is one, "
            "write run = dataclasses.replace(run, since=plan), with the plan from the reference to the narrow model",
            stacklevel=4,
        )
    plan, since = run.earlier[-1] if known else (None, None)
    earlier, provenance = run.earlier[:-1] if known else (), run.provenance.narrowed(undone)
    return {"plan": plan, "since": since, "earlier": earlier, "provenance": provenance}


def carry_ema(
    ema: nn.Module | Mapping[str, Tensor] | None, make: Make, direction: Direction, settings: bool
) -> Any:
    """An average of the weights at the other end: a module, AveragedModel among them, or tensors by name."""
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
            "leave out other averages, and carry them with grow_state_dict",
            code="argument.wrong_type",
        )
    counters = {
        k: v.detach().clone()
        for k, v in ema.items()
        if isinstance(v, Tensor) and v.dim() == 0 and resolve(k, direction.reached) is None
    }
    tensors = {k: v for k, v in ema.items() if k not in counters}
    return {**carry_tensors(tensors, direction, partial=True), **counters}


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
