"""Optimizers of a wide job: are they in units, does the source's state belong to them, and what becomes of it.

Reads the registry through `optimizers/`; states no exponent.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..errors import Fault, raise_faults
from ..optimizers.carry import carry_states, renamed
from ..optimizers.named import NamedGroup
from ..optimizers.read import read_live, settings_of
from ..optimizers.settings import cannot_be_exact, factors_of, same_setting, scale_setting
from ..plans.direction import Direction
from ..plans.fits import planned_parameters
from ..plans.plan import Plan
from ..rules.optimizers import RULES, OptimizerRule, rule_for
from ..runs.run import Run
from ..training.groups import refused_on_shards
from ..training.stepping import units_of
from .fill import Filling, state_fillings
from .source import AnySource

State = dict[Any, dict[str, Any]]


def prepare_states(
    run: Run, source: AnySource, plan: Plan, since: Plan, rules: Mapping[str, OptimizerRule] | None
) -> tuple[list[State], list[Filling], list[str]]:
    """Empty state for every optimizer, what will fill it, and remarks; all that does not fit is one error."""
    names = planned_parameters(run.model, plan, "wide")
    direction = Direction(plan)
    states: list[State] = []
    fillings: list[Filling] = []
    faults: list[Fault] = []
    notes: list[str] = []
    for optimizer in run.optimizers:
        rule, kind = rule_for(type(optimizer), rules=rules), type(optimizer).__name__
        of_model = {names[id(p)]: p for g in optimizer.param_groups for p in g["params"] if id(p) in names}
        faults += refused_on_shards(
            type(optimizer), of_model, {**optimizer.defaults, **optimizer.param_groups[0]}
        )
        groups: list[NamedGroup] = []
        for position, group in enumerate(optimizer.param_groups):
            where = f"{kind}, group {position}"
            members = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
            if len(members) < len(group["params"]):
                remedy = "build the optimizer from the parameters of the model that is loaded"
                faults.append(Fault(where, "it holds parameters that do not belong to the model", remedy))
                continue
            continued: list[str] = []
            for name in members:
                faults += _not_in_units(optimizer, rule, group, name, since, where)
                faults += cannot_be_exact(rule, group, name, plan[name])
                if not source.states or not plan[name].sources:
                    continue
                if name in source.states:
                    faults += _foreign(optimizer, rule, source.settings.get(name, {}), name)
                    continued.append(name)
                elif name not in source.settings and of_model[name].requires_grad:
                    # Where it has settings, the base's optimizer held it too, and never had a gradient for it.
                    what = "the source has optimizer state, and none for this tensor"
                    remedy = "leave it out of the optimizers, or load a run without them"
                    faults.append(Fault(name, what, remedy))
            groups.append(NamedGroup(tuple(continued), settings_of(group), rule, position))
            notes += _differences(optimizer, rule, group, members, source, plan, where)
        state: State = {}
        found = {name: _with_numbers(source.states[name], source) for g in groups for name in g.names}
        idle = {name for name in found if not of_model[name].requires_grad}
        carried, problems = carry_states(groups, found, direction, idle)
        faults += problems
        for named in groups:
            for name in named.names:
                parameter, own = of_model[name], named.settings
                made, more, problems = state_fillings(kind, parameter, name, carried[name], own, source)
                state[parameter], fillings, faults = made, fillings + more, faults + problems
        if not state:
            notes.append(f"{kind} starts without state: the source has none")
            kept = (value for state in optimizer.state.values() for value in state.values())
            if any(isinstance(value, Tensor) and value.is_meta for value in kept):
                what = "it made its state when it was built, on the meta device, and the source has none to fill it"
                faults.append(Fault(kind, what, "load the model alone, then build the optimizer from it"))
        states.append(state)
    raise_faults("the optimizers of the wide run cannot go on from this source", _distinct(faults))
    return states, fillings, list(dict.fromkeys(notes))


def _with_numbers(state: Mapping[str, Any], source: AnySource) -> dict[str, Any]:
    """State as a source has it, with tensors that have no dimensions read."""
    return {
        key: source.number(value) if getattr(value, "shape", None) == () else value
        for key, value in state.items()
    }


def live_states(
    base: Run, plan: Plan, rules: Mapping[str, OptimizerRule] | None
) -> tuple[dict[str, dict[str, Any]], dict[str, Mapping[str, Any]]]:
    """State and settings of a running base by wide name."""
    direction = Direction(plan)
    states: dict[str, dict[str, Any]] = {}
    settings: dict[str, Mapping[str, Any]] = {}
    for optimizer in base.optimizers:
        # What has no units is refused where the wide optimizer is, which may be another.
        named, _ = read_live(optimizer, base.model, direction, rule_for(type(optimizer), rules=rules))
        there = renamed(named, direction)
        for group in there.groups:
            settings |= dict.fromkeys(group.names, group.settings)
        states |= {name: dict(sorted(state.items())) for name, state in there.state.items()}
    return states, settings


def _not_in_units(
    optimizer: Optimizer, rule: OptimizerRule, group: Mapping[str, Any], name: str, since: Plan, where: str
) -> list[Fault]:
    """An optimizer whose rates are not those of its tensors would train another run."""
    expected = float(factors_of(rule, group, since[name])["lr"])
    attached = units_of(optimizer)
    if attached is None:
        found = float(group.get("lr_factor", 1.0))
    else:
        found = float(factors_of(rule, group, attached[name])["lr"]) if name in attached.tensors else 1.0
    if isclose(expected, found, rel_tol=1e-6):
        return []
    what = f"the learning rate of {name} has a factor of {found:g}, its units ask for {expected:g}"
    remedy = f"build it from mu.param_groups(model, since, {type(optimizer).__name__}, …), or use mu.step_in_units_"
    return [Fault(where, what, remedy)]


def _foreign(
    optimizer: Optimizer, rule: OptimizerRule, settings: Mapping[str, Any], name: str
) -> list[Fault]:
    """Settings that some other optimizer has tell whose state it is."""
    strange = [
        key
        for key in settings
        if key not in optimizer.defaults and not rule.known(key) and any(r.known(key) for r in RULES.values())
    ]
    if not strange:
        return []
    what = f"the source's optimizer has {', '.join(sorted(strange))}, which {type(optimizer).__name__} does not have"
    return [Fault(name, what, "give it to the kind of optimizer that it was trained with")]


def _differences(
    optimizer: Optimizer,
    rule: OptimizerRule,
    group: Mapping[str, Any],
    names: list[str],
    source: AnySource,
    plan: Plan,
    where: str,
) -> list[str]:
    """Settings that differ from the source's, told and left as they are; rates are the schedule's business."""
    stock = units_of(optimizer) is not None
    if not names or (stock and source.since is not None):
        return []
    told = source.settings.get(names[0], {})
    factors = factors_of(rule, group, plan[names[0]])
    found = []
    for key in sorted(rule.constants):
        if told.get(key) is None or key not in group:
            continue
        wanted = told[key] if stock or key not in factors else scale_setting(told[key], factors[key])
        if not same_setting(wanted, group[key]):
            found.append(
                f"{where}: {key} is {group[key]} here; the source's run is continued exactly with {wanted}"
            )
    return found


def _distinct(faults: list[Fault]) -> list[Fault]:
    return list(dict.fromkeys(faults))
