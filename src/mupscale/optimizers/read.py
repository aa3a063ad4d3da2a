"""Optimizers read as named data: live ones, and state dicts keyed by name or by position.

Every reader returns the named optimizer, and faults for entries without a name or without units. Does not know: files.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..errors import Fault, MupscaleError, raise_faults
from ..models.names import resolve
from ..plans.direction import Direction
from ..plans.ends import planned_parameters
from ..rules.optimizer_rule import OptimizerRule
from .named import NamedGroup, NamedOptimizer
from .quantised import folded, overridden
from .rows import split_all
from .settings import unknown_settings

Names = Sequence[Sequence[str]]
"""Parameters' names, group by group."""
Groups = list[dict[str, Any]]
States = dict[Any, dict[str, Any]]
_MEMBERS = frozenset({"params", "param_names"})
_SCHEDULED = frozenset({"max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"})


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group: without its parameters, and without the keys that torch's schedulers add."""
    return _without(group, _SCHEDULED | _MEMBERS)


def _without(group: Mapping[str, Any], keys: frozenset[str]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in keys}


def read_live(
    optimizer: Optimizer, model: nn.Module, direction: Direction, rule: OptimizerRule
) -> tuple[NamedOptimizer, list[Fault]]:
    """Read an optimizer of the model at the start of `direction`; raises if it holds parameters of another model."""
    where = type(optimizer).__name__
    names = planned_parameters(model, direction.plan, direction.start)
    groups: list[NamedGroup] = []
    foreign: list[Fault] = []
    for position, group in enumerate(optimizer.param_groups):
        known = tuple(names[id(p)] for p in group["params"] if id(p) in names)
        lost, many = len(group["params"]) - len(known), len(group["params"])
        if lost:
            what = f"{lost} of its {many} parameters do not belong to the model"
            remedy = "build the optimizer from this model's parameters"
            foreign.append(Fault("optimizer.foreign_parameters", f"{where}, group {position}", what, remedy))
        groups.append(NamedGroup(known, _without(group, _MEMBERS), rule, position))
    raise_faults("this optimizer does not belong to the model", foreign)
    held = {names[id(p)]: s for p, s in optimizer.state.items() if id(p) in names and s}
    dimensions = {names[id(p)]: p.dim() for g in optimizer.param_groups for p in g["params"]}
    split, state, faults = split_all(groups, held, dimensions, where)
    faults += [*unknown_settings(split, optimizer.defaults, where), *overridden(optimizer, where)]
    orphans = sum(id(key) not in names for key in optimizer.state)
    if orphans:
        what = f"{orphans} entries of its state belong to no parameter of the model"
        remedy = "remove them, or grow the run without this optimizer"
        faults.append(Fault("state.of_no_parameter", where, what, remedy))
    idle = {names[id(p)] for group in optimizer.param_groups for p in group["params"] if not p.requires_grad}
    return NamedOptimizer(where, split, state, idle), faults


def read_state_dict(
    state: Mapping[str, Any],
    direction: Direction,
    optimizer: type,
    rule: OptimizerRule,
    names: Sequence[str] | None = None,
) -> tuple[NamedOptimizer, list[Fault]]:
    """Read a state dict that is keyed by name, or by position with names in its groups or in `names`."""
    if not ("param_groups" in state and "state" in state):
        raise MupscaleError(
            "an optimizer state dict has the keys 'state' and 'param_groups', found others; write "
            "optimizer.state_dict(), and ask torch.distributed.checkpoint for it without flatten_optimizer_state_dict",
            code="state.not_a_state_dict",
        )
    spelled = _spelled(state, direction, names)
    what, remedy = "state of no parameter in the groups", "remove it from the state dict"
    orphans = [
        Fault("state.in_no_group", str(key), what, remedy) for key in state["state"] if key not in spelled
    ]
    raise_faults("this optimizer state cannot be widened exactly", orphans)
    groups = tuple(
        NamedGroup(tuple(spelled[key] for key in group["params"]), _without(group, _MEMBERS), rule, position)
        for position, group in enumerate(state["param_groups"])
    )
    accepted = inspect.signature(optimizer.__init__).parameters  # type: ignore[misc]
    own = {key for group in groups for key in group.settings if key in accepted}
    held = {spelled[key]: folded(value) for key, value in state["state"].items()}
    dimensions = {name: _dimensions(name, direction) for name in spelled.values()}
    groups, found, faults = split_all(groups, held, dimensions, optimizer.__name__)
    # A parameter without state has never trained if other parameters have state.
    idle = set(spelled.values()) - found.keys() if found else frozenset[str]()
    named = NamedOptimizer(optimizer.__name__, groups, found, idle)
    return named, faults + unknown_settings(groups, own, named.label)


def _dimensions(name: str, direction: Direction) -> int:
    """How many dimensions a tensor has; 0 for one that the plan leaves behind."""
    ends = direction.reached.get(name, ())
    return len(direction.planned(ends[0])[1].axes) if ends else 0


def _spelled(state: Mapping[str, Any], direction: Direction, names: Sequence[str] | None) -> dict[Any, str]:
    """Key of the state dict -> name at the start of the plan."""
    groups = state["param_groups"]
    keys: list[Any] = [key for group in groups for key in group["params"]]
    if all(isinstance(key, str) for key in keys):
        given = keys
    elif all("param_names" in group for group in groups):
        given = [name for group in groups for name in group["param_names"]]
    elif names is not None:
        given = list(names)
    else:
        raise MupscaleError(
            "this optimizer state dict is keyed by position and has no names; pass names=[name for name, _ in "
            "model.named_parameters()] in the order in which the optimizer was given them, or build it from "
            "named_parameters()",
            code="state.no_names",
        )
    if len(given) != len(keys):
        raise MupscaleError(
            f"{len(given)} names for {len(keys)} parameters in the optimizer state dict; name those it was given",
            code="state.other_number_of_names",
        )
    if len(set(given)) != len(given):
        raise MupscaleError(
            "two parameters of the optimizer have one name; write [name for name, _ in model.named_parameters()]",
            code="state.name_taken_twice",
        )
    known = {*direction.reached, *direction.plan.ties}
    found = {name: resolve(name, known) for name in given}
    what = f"no tensor of the plan has this name at its {direction.start} end"
    remedy = "name parameters as model.named_parameters() does, or use plan.rename"
    unknown = [name for name, its in found.items() if its is None]
    faults = [Fault("state.unknown_name", name, what, remedy) for name in unknown]
    raise_faults("the optimizer state does not belong to this plan", faults)
    return {key: direction.plan.planned(found[name] or name) for key, name in zip(keys, given, strict=True)}


def parts(tree: Any, where: str) -> tuple[Groups, States]:
    """Groups and state of an optimizer's state dict, quantised tensors folded. Only its form is checked."""
    groups = tree.get("param_groups") if isinstance(tree, dict) else None
    state = tree.get("state") if isinstance(tree, dict) else None
    if not (
        isinstance(groups, list)
        and isinstance(state, dict)
        and all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups)
        and all(isinstance(s, dict) and all(isinstance(k, str) for k in s) for s in state.values())
        and all(type(key) is int for g in groups for key in g["params"])
    ):
        raise MupscaleError(
            f"{where} is not the state dict of one optimizer, with positions for parameters; save optimizer.state_dict()",
            code="state.not_a_state_dict",
        )
    return groups, {key: folded(of) for key, of in state.items()}


def read_positions(
    groups: Groups, state: Mapping[Any, Mapping[str, Any]], order: Names, rule: OptimizerRule, where: str
) -> tuple[NamedOptimizer, list[Fault]]:
    """A trainer's state dict, as `parts` returns it, with the planned names of its positions in `order`."""
    settings = list(map(settings_of, groups))
    named = tuple(
        NamedGroup(tuple(of), own, rule, position)
        for position, (of, own) in enumerate(zip(order, settings, strict=True))
    )
    keys = {n: k for g, of in zip(groups, order, strict=True) for n, k in zip(of, g["params"], strict=True)}
    held = {name: state[key] for name, key in keys.items() if key in state}
    dimensions = {name: _most_dimensions(held.get(name, {})) for name in keys}
    split, found, faults = split_all(named, held, dimensions, where)
    faults += unknown_settings(split, {key for own in settings for key in own}, where)
    orphans = [f"{where}, state {key!r}" for key in state.keys() - keys.values()]
    what, remedy = "it belongs to no group", "remove it from the state dict"
    faults += [Fault("state.in_no_group", orphan, what, remedy) for orphan in orphans]
    return NamedOptimizer(where, split, found, keys.keys() - found.keys()), faults


def _most_dimensions(state: Mapping[str, Any]) -> int:
    """The most dimensions of any state of a tensor, which are those of the tensor unless its state is stacked."""
    return max((len(getattr(value, "shape", ())) for value in state.values()), default=0)
