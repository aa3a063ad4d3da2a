"""A live optimizer carried to the wide model: same class, same settings in new units, same state.

The new optimizer has one group for every distinct set of factors, in the order of the base's groups.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..errors import Fault, MupscaleError, raise_faults
from ..plans.fits import planned_parameters
from ..plans.names import named_tensors
from ..rules.optimizers import OptimizerRule, rule_for
from .direction import Direction
from .state import NamedGroup, carry_groups, carry_state, made_state, unknown_settings


def carry_optimizer(
    optimizer: Optimizer,
    start: nn.Module,
    end: nn.Module,
    direction: Direction,
    rules: Mapping[str, OptimizerRule] | None = None,
) -> tuple[Optimizer, list[NamedGroup], list[Fault]]:
    """The optimizer of the model at the end of the walk, its groups, and what could not be carried."""
    rule = rule_for(type(optimizer), rules=rules)
    where = type(optimizer).__name__
    faults = unknown_settings(rule, optimizer.param_groups, optimizer.defaults, where)
    names = planned_parameters(start, direction.plan, direction.start)
    groups: list[NamedGroup] = []
    foreign: list[Fault] = []
    for position, group in enumerate(optimizer.param_groups):
        known = [names.get(id(p)) for p in group["params"]]
        if None in known:
            foreign.append(
                Fault(
                    f"{where}, group {position}",
                    f"{known.count(None)} of its {len(known)} parameters do not belong to the model",
                    "build the optimizer from this model's parameters",
                )
            )
        groups.append(NamedGroup(tuple(n for n in known if n), group))
    raise_faults("this optimizer does not belong to the model", foreign)
    carried, more = carry_groups(rule, groups, direction)
    parameters = {n: t for n, k, t in named_tensors(end) if k == "parameter"}
    new = _construct(optimizer, carried, parameters)
    orphans = [key for key in optimizer.state if id(key) not in names]
    if orphans:
        faults.append(
            Fault(
                where,
                f"{len(orphans)} entries of its state belong to no parameter of the model",
                "remove them, or widen the run without this optimizer",
            )
        )
    states = {names[id(p)]: s for p, s in optimizer.state.items() if id(p) in names}
    for made in carried:
        for end_name in made.names:
            planned, entry = direction.planned(end_name)
            source = planned if direction.back else entry.sources[0]
            base_group = optimizer.param_groups[made.origin]
            found = states.get(source, {})
            trains = parameters[end_name].requires_grad
            state, problems = carry_state(rule, base_group, found, end_name, direction, trains)
            more += problems
            if found:
                new.state[parameters[end_name]] = made_state(state, direction)
    return new, carried, faults + more


def _construct(optimizer: Optimizer, groups: list[NamedGroup], parameters: Mapping[str, Any]) -> Optimizer:
    """An optimizer of the same class with these groups, and without state."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    settings = {k: copy.deepcopy(v) for k, v in optimizer.defaults.items() if k in accepted}
    built: list[dict[str, Any]] = []
    for group in groups:
        named = "param_names" in optimizer.param_groups[group.origin]
        members = [(n, parameters[n]) if named else parameters[n] for n in group.names]
        built.append({**group.settings, "params": members})
    try:
        return type(optimizer)(built, **settings)
    except (TypeError, ValueError) as error:
        raise MupscaleError(
            f"{type(optimizer).__name__} could not be built again from its defaults: {error}; carry its state dict with "
            "widen_optimizer_state_dict instead"
        ) from error
