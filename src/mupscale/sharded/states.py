"""Optimizers of a wide job: whether they are in units, whether the source's state fits them, and the state they get.

Reads the registry through `optimizers/`; states no exponent.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from math import isclose
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..errors import Fault, raise_faults
from ..optimizers.carry import carry_states, renamed
from ..optimizers.named import NamedGroup
from ..optimizers.read import read_live, settings_of
from ..optimizers.rows import split_by_row
from ..optimizers.settings import cannot_be_exact, factors_of, same_setting, scaled
from ..optimizers.sharded_steps import refused_on_shards
from ..plans.direction import Direction
from ..plans.ends import planned_parameters
from ..plans.plan import Plan
from ..rules.optimizer_rule import OptimizerRule
from ..rules.optimizers import RULES, rule_for
from ..runs.run import Run
from ..training.units.stepping import units_of
from .fill import Filling, state_fillings
from .source import AnySource

State = dict[Any, dict[str, Any]]


def prepare_states(
    run: Run,
    source: AnySource,
    direction: Direction,
    since: Plan,
    rules: Mapping[str, OptimizerRule] | None,
) -> tuple[list[State], list[Filling], list[str]]:
    """Empty state for every optimizer, the targets that will be filled, and remarks; all faults are one error."""
    plan = direction.plan
    names = planned_parameters(run.model, plan, "wide")
    states: list[State] = []
    fillings: list[Filling] = []
    faults: list[Fault] = []
    notes: list[str] = []
    for optimizer in run.optimizers:
        rule, kind = rule_for(type(optimizer), rules=rules), type(optimizer).__name__
        own = {names[id(p)]: p for g in optimizer.param_groups for p in g["params"] if id(p) in names}
        faults += refused_on_shards(type(optimizer), own, {**optimizer.defaults, **optimizer.param_groups[0]})
        idle = {name for name, parameter in own.items() if not parameter.requires_grad}
        continued: list[NamedGroup] = []
        for position, members in enumerate(optimizer.param_groups):
            known = tuple(names[id(parameter)] for parameter in members["params"] if id(parameter) in names)
            group = NamedGroup(known, settings_of(members), rule, position)
            if len(known) < len(members["params"]):
                remedy = "build the optimizer from the parameters of the model that is loaded"
                what = "it holds parameters that do not belong to the model"
                faults.append(
                    Fault("optimizer.foreign_parameters", f"{kind}, group {position}", what, remedy)
                )
            dimensions = {name: own[name].dim() for name in known}
            for part in split_by_row(group, dimensions, source.states, kind):
                faults += _unfit(optimizer, part, idle, source, plan, since)
                notes += _differences(optimizer, part, source, plan)
                here = tuple(name for name in part.names if name in source.states)
                continued.append(replace(part, names=here))
        found = {name: _with_numbers(source.states[name], source) for g in continued for name in g.names}
        carried, more = carry_states(continued, found, direction, idle)
        faults += more
        state: State = {}
        for group in continued:
            for name in group.names:
                filled = state_fillings(kind, own[name], name, carried[name], group.settings, source)
                state[own[name]], fillings, faults = filled[0], fillings + filled[1], faults + filled[2]
        if not state:
            notes.append(f"{kind} starts without state: the source has none")
            kept = (value for state in optimizer.state.values() for value in state.values())
            if any(isinstance(value, Tensor) and value.is_meta for value in kept):
                what = "it made its state when it was built, on the meta device, and the source has none to fill it"
                faults.append(
                    Fault(
                        "optimizer.state_on_meta",
                        kind,
                        what,
                        "load the model alone, then build the optimizer from it",
                    )
                )
        states.append(state)
    raise_faults("the optimizers of the wide run cannot continue from this source", _distinct(faults))
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
        # Entries without units are refused later, for the wide optimizer, which may be of another class.
        named, _ = read_live(optimizer, base.model, direction, rule_for(type(optimizer), rules=rules))
        there = renamed(named, direction)
        for group in there.groups:
            settings |= dict.fromkeys(group.names, group.settings)
        states |= {name: dict(sorted(state.items())) for name, state in there.state.items()}
    return states, settings


def _unfit(
    optimizer: Optimizer, group: NamedGroup, idle: Set[str], source: AnySource, plan: Plan, since: Plan
) -> list[Fault]:
    """Faults for tensors of a group that are not stepped in their units, cannot be exact, or have no matching state."""
    faults: list[Fault] = []
    if group.rule.stacked:
        what = "the state of many tensors lies in one stack, which is not loaded by parts"
        remedy = "grow the live optimizer or its state dict with grow_optimizer_state_dict"
        faults.append(
            Fault(
                "optimizer.stacks_its_state",
                f"{type(optimizer).__name__}, group {group.origin}",
                what,
                remedy,
            )
        )
    for name in group.names:
        faults += _not_in_units(optimizer, group, name, since)
        faults += cannot_be_exact(group.rule, group.settings, name, plan[name])
        if name in source.states:
            faults += _foreign(optimizer, group.rule, source.settings.get(name, {}), name)
        elif source.states and plan[name].sources and name not in source.settings and name not in idle:
            # If it has settings, the base's optimizer held it too, but it never had a gradient.
            what = "the source has optimizer state, and none for this tensor"
            faults.append(
                Fault(
                    "state.missing_for_tensor",
                    name,
                    what,
                    "leave it out of the optimizers, or load a run without them",
                )
            )
    return faults


def _not_in_units(optimizer: Optimizer, group: NamedGroup, name: str, since: Plan) -> list[Fault]:
    """A fault if the learning rates of a group are not in the units of its tensors."""
    units, kind = units_of(optimizer), type(optimizer).__name__
    expected = float(factors_of(group.rule, group.settings, since[name])["lr"])
    if units is None:
        found = float(group.settings.get("lr_factor", 1.0))
    else:
        found = (
            float(factors_of(group.rule, group.settings, units[name])["lr"]) if name in units.tensors else 1.0
        )
    if isclose(expected, found, rel_tol=1e-6):
        return []
    what = f"the learning rate of {name} has a factor of {found:g}, its units ask for {expected:g}"
    remedy = f"build it from mu.param_groups(model, since, {kind}, …), or use mu.step_in_units_"
    return [Fault("optimizer.not_in_units", f"{kind}, group {group.origin}", what, remedy)]


def _foreign(
    optimizer: Optimizer, rule: OptimizerRule, settings: Mapping[str, Any], name: str
) -> list[Fault]:
    """A fault if the source's settings show that the state belongs to another optimizer class."""
    strange = [
        key
        for key in settings
        if key not in optimizer.defaults and not rule.known(key) and any(r.known(key) for r in RULES.values())
    ]
    if not strange:
        return []
    what = f"the source's optimizer has {', '.join(sorted(strange))}, which {type(optimizer).__name__} does not have"
    return [
        Fault(
            "optimizer.state_of_other_class",
            name,
            what,
            "give it to the kind of optimizer that it was trained with",
        )
    ]


def _differences(optimizer: Optimizer, group: NamedGroup, source: AnySource, plan: Plan) -> list[str]:
    """Remarks about settings that differ from the source's. They are not changed; rates follow the run's schedule."""
    stock = units_of(optimizer) is not None
    if not group.names or (stock and source.since is not None):
        return []
    here, there = group.settings, source.settings.get(group.names[0], {})
    compared = [key for key in sorted(group.rule.constants) if there.get(key) is not None and key in here]
    factors = {} if stock else factors_of(group.rule, here, plan[group.names[0]])
    wanted = scaled({key: there[key] for key in compared}, factors)
    where = f"{type(optimizer).__name__}, group {group.origin}"
    return [
        f"{where}: {key} is {here[key]} here; the source's run is continued exactly with {wanted[key]}"
        for key in compared
        if not same_setting(wanted[key], here[key])
    ]


def _distinct(faults: list[Fault]) -> list[Fault]:
    return list(dict.fromkeys(faults))
