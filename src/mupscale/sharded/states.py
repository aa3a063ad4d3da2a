"""Optimizers of a wide job: are they in units, does the source's state belong to them, and what becomes of it.

Reads the registry through `training/state.py`; states no exponent.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..errors import Fault, MupscaleError, raise_faults
from ..plans.fits import planned_parameters
from ..plans.plan import Plan
from ..rules.optimizers import RULES, OptimizerRule, rule_for
from ..runs.run import Run
from ..training.direction import Direction
from ..training.groups import refused_on_shards
from ..training.state import cannot_be_exact, factors_of, scale_setting
from ..training.stepping import units_of
from .fill import Filling, state_fillings
from .source import COMPARED, AnySource

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
        rule, kind, state = rule_for(type(optimizer), rules=rules), type(optimizer).__name__, {}
        of_model = {names[id(p)]: p for g in optimizer.param_groups for p in g["params"] if id(p) in names}
        faults += refused_on_shards(
            type(optimizer), of_model, {**optimizer.defaults, **optimizer.param_groups[0]}
        )
        for position, group in enumerate(optimizer.param_groups):
            where = f"{kind}, group {position}"
            members = [(parameter, names.get(id(parameter))) for parameter in group["params"]]
            if any(name is None for _, name in members):
                remedy = "build the optimizer from the parameters of the model that is loaded"
                faults.append(Fault(where, "it holds parameters that do not belong to the model", remedy))
                continue
            for parameter, name in members:
                assert name is not None
                faults += _not_in_units(optimizer, rule, group, name, since, where)
                faults += cannot_be_exact(rule, group, name, plan[name])
                if not source.states or not plan[name].sources:
                    continue
                if name not in source.states and (name in source.settings or not parameter.requires_grad):
                    continue  # the base's optimizer held it too, and never had a gradient for it
                if name not in source.states:
                    what = "the source has optimizer state, and none for this tensor"
                    faults.append(
                        Fault(name, what, "leave it out of the optimizers, or load a run without them")
                    )
                    continue
                faults += _foreign(optimizer, rule, source.settings.get(name, {}), name)
                made, more, problems = state_fillings(
                    optimizer, parameter, name, source, rule, group, direction
                )
                state[parameter], fillings, faults = made, fillings + more, faults + problems
            notes += _differences(optimizer, rule, group, [n for _, n in members if n], source, plan, where)
        if not state:
            notes.append(f"{kind} starts without state: the source has none")
            made_on_meta = any(
                isinstance(v, Tensor) and v.is_meta for s in optimizer.state.values() for v in s.values()
            )
            if made_on_meta:
                what = "it made its state when it was built, on the meta device, and the source has none to fill it"
                faults.append(Fault(kind, what, "load the model alone, then build the optimizer from it"))
        states.append(state)
    raise_faults("the optimizers of the wide run cannot go on from this source", _distinct(faults))
    return states, fillings, list(dict.fromkeys(notes))


def live_states(base: Run, plan: Plan) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """State and settings of a running base by wide name."""
    names = planned_parameters(base.model, plan, "base")
    states: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    strangers = sum(id(p) not in names for o in base.optimizers for g in o.param_groups for p in g["params"])
    if strangers:
        raise MupscaleError(
            f"{strangers} parameters of the base's optimizers do not belong to its model, so their state has no name; "
            "build the optimizers from the parameters of this model"
        )
    for optimizer in base.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for wide in plan.sources.get(names.get(id(parameter), ""), ()):
                    settings[wide] = {k: v for k, v in group.items() if k not in ("params", "param_names")}
                    if optimizer.state.get(parameter):
                        states[wide] = dict(sorted(optimizer.state[parameter].items()))
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
    for key in COMPARED:
        if told.get(key) is None or key not in group:
            continue
        wanted = told[key] if stock or key not in factors else scale_setting(told[key], factors[key])
        if not _same(wanted, group[key]):
            found.append(
                f"{where}: {key} is {group[key]} here; the source's run is continued exactly with {wanted}"
            )
    return found


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    numbers = isinstance(a, (int, float)) and isinstance(b, (int, float))
    return isclose(a, b, rel_tol=1e-6) if numbers else bool(a == b)


def _distinct(faults: list[Fault]) -> list[Fault]:
    return list(dict.fromkeys(faults))
