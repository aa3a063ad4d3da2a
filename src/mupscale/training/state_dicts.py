"""The same maps for people with their own loop: state dict in, state dict out.

Optimizer state dicts may be keyed by name (as torch.distributed.checkpoint keys them) or by position,
in which case the groups must carry `param_names` or the names must be given.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..arguments import wrong_kind, wrong_list
from ..errors import Fault, MupscaleError, raise_faults
from ..plans.fits import check_shapes, check_ties
from ..plans.names import named_tensors, resolve
from ..plans.plan import Plan
from ..rules.optimizers import OptimizerRule, rule_for
from .direction import Direction
from .groups import expect_class
from .state import NamedGroup, carry_groups, carry_state, made_state, unknown_settings


def widen_state_dict(state: Mapping[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """A model's state dict at the wide end; keys keep their spelling, ties stay tied.

    >>> from mupscale import plan_between
    >>> plan = plan_between(lambda n: nn.Linear(n, n), 2, 4)
    >>> widen_state_dict(nn.Linear(2, 2).state_dict(), plan)["weight"].shape
    torch.Size([4, 4])
    """
    return carry_tensors(state, Direction(plan))


def narrow_state_dict(state: Mapping[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """The way back of `widen_state_dict`: the average of the copies.

    >>> from mupscale import plan_between
    >>> plan, state = plan_between(lambda n: nn.Linear(n, n), 2, 4), nn.Linear(2, 2).state_dict()
    >>> bool((narrow_state_dict(widen_state_dict(state, plan), plan)["weight"] == state["weight"]).all())
    True
    """
    return carry_tensors(state, Direction(plan, back=True))


def carry_tensors(
    state: Mapping[str, Tensor], direction: Direction, partial: bool = False
) -> dict[str, Tensor]:
    """Named tensors at the other end; `partial` allows some to be missing."""
    remedy = "write model.state_dict(); of a checkpoint, the part that holds the model"
    others = wrong_kind("state", state, Mapping, remedy)
    for name, value in state.items() if not others else ():
        others += wrong_kind(name, value, Tensor, "leave it out and carry it yourself")
    raise_faults("a state dict of tensors can be carried, and nothing else", others)
    tensors = dict(state)
    check_shapes(
        direction.plan, {n: tuple(t.shape) for n, t in tensors.items()}, direction.start, complete=False
    )
    ties = direction.plan.ties
    known = {*direction.reached, *ties}
    named = {resolve(n, known) or n: t for n, t in tensors.items()}
    check_ties(direction.plan, named)
    named.update({ties[n]: t for n, t in named.items() if n in ties and ties[n] not in named})
    missing = [
        n
        for n in direction.reached
        if n not in named
        and direction.plan[direction.reached[n][0] if not direction.back else n].kind == "parameter"
    ]
    if not partial:
        raise_faults(
            "the state dict is not complete",
            [
                Fault(n, "the plan needs this tensor; it is missing", "pass all of model.state_dict()")
                for n in missing
            ],
        )
    done: dict[str, Tensor] = {}
    out: dict[str, Tensor] = {}
    for key in tensors:
        name = resolve(key, known) or key
        start = direction.plan.planned(name)
        for end in direction.reached[start]:
            if direction.planned(end)[1].fill == "own":
                continue  # each model computes it for itself; load the result with strict=False
            if end not in done:
                done[end] = direction.tensor(named, end)
            out[key[: len(key) - len(name)] + (end if name == start else name)] = done[end]
    return out


def widen_optimizer_state_dict(
    state: Mapping[str, Any],
    plan: Plan,
    optimizer_class: type,
    *,
    names: Sequence[str] | None = None,
    rules: Mapping[str, OptimizerRule] | None = None,
) -> dict[str, Any]:
    """An optimizer's state dict at the wide end, its groups split where their factors differ.

    `names` gives the parameters' names in the order of the groups when the state dict has none. Load the
    result into `optimizer(groups_for(model, result))`.

    >>> import torch
    >>> from mupscale import plan_between
    >>> plan, base = plan_between(lambda n: nn.Linear(n, n), 2, 4), nn.Linear(2, 2)
    >>> state = torch.optim.AdamW(base.named_parameters(), lr=0.1).state_dict()
    >>> wide = widen_optimizer_state_dict(state, plan, torch.optim.AdamW)
    >>> [(group["param_names"], group["lr"]) for group in wide["param_groups"]]
    [(['weight'], 0.05), (['bias'], 0.1)]
    """
    return _carry(state, Direction(plan), optimizer_class, names, rules)


def narrow_optimizer_state_dict(
    state: Mapping[str, Any],
    plan: Plan,
    optimizer_class: type,
    *,
    names: Sequence[str] | None = None,
    rules: Mapping[str, OptimizerRule] | None = None,
) -> dict[str, Any]:
    """The way back of `widen_optimizer_state_dict`.

    >>> import torch
    >>> from mupscale import plan_between
    >>> plan, wide = plan_between(lambda n: nn.Linear(n, n), 2, 4), nn.Linear(4, 4)
    >>> state = torch.optim.AdamW([("weight", wide.weight)], lr=0.05).state_dict()
    >>> narrow_optimizer_state_dict(state, plan, torch.optim.AdamW)["param_groups"][0]["lr"]
    0.1
    """
    return _carry(state, Direction(plan, back=True), optimizer_class, names, rules)


def groups_for(model: nn.Module, state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Parameter groups of `model` in the order and with the settings of a carried state dict.

    >>> import torch
    >>> from mupscale import plan_between
    >>> plan, base, wide = plan_between(lambda n: nn.Linear(n, n), 2, 4), nn.Linear(2, 2), nn.Linear(4, 4)
    >>> state = torch.optim.AdamW(base.named_parameters(), lr=0.1).state_dict()
    >>> state = widen_optimizer_state_dict(state, plan, torch.optim.AdamW)
    >>> optimizer = torch.optim.AdamW(groups_for(wide, state))
    >>> optimizer.load_state_dict(state)
    >>> [group["lr"] for group in optimizer.param_groups]
    [0.05, 0.1]
    """
    parameters = {name: t for name, kind, t in named_tensors(model) if kind == "parameter"}
    groups = []
    told = state.get("param_groups", [{}]) if isinstance(state, Mapping) else [{}]
    if not all("param_names" in group for group in told):
        raise MupscaleError(
            "the state has no groups with names, expected what widen_optimizer_state_dict returned; pass that"
        )
    strangers = [n for group in told for n in group["param_names"] if n not in parameters]
    remedy = "pass the model at the end to which the state was carried"
    raise_faults(
        "this state does not belong to the model",
        [Fault(n, "the model has no such parameter", remedy) for n in strangers],
    )
    for group in told:
        settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append({**settings, "params": [(n, parameters[n]) for n in group["param_names"]]})
    return groups


def _carry(
    state: Mapping[str, Any],
    direction: Direction,
    optimizer_class: type,
    names: Sequence[str] | None,
    rules: Mapping[str, OptimizerRule] | None,
) -> dict[str, Any]:
    faults = wrong_kind("state", state, Mapping, "write optimizer.state_dict()")
    faults += [*expect_class(optimizer_class), *([] if names is None else wrong_list("names", names))]
    raise_faults("this optimizer state cannot be carried", faults)
    rule = rule_for(optimizer_class, rules=rules)
    if not ("param_groups" in state and "state" in state):
        raise MupscaleError(
            "an optimizer state dict has the keys 'state' and 'param_groups', found others; write "
            "optimizer.state_dict(), and ask torch.distributed.checkpoint for it without flatten_optimizer_state_dict"
        )
    spelled = _spelled(state, direction, names)
    groups = [
        NamedGroup(tuple(spelled[key] for key in group["params"]), group) for group in state["param_groups"]
    ]
    carried, faults = carry_groups(rule, groups, direction)
    accepted = inspect.signature(optimizer_class.__init__).parameters  # type: ignore[misc]
    own = {key for group in state["param_groups"] for key in group if key in accepted}
    faults += unknown_settings(rule, state["param_groups"], own, optimizer_class.__name__)
    orphans = [
        Fault(str(key), "state of no parameter in the groups", "remove it from the state dict")
        for key in state["state"]
        if key not in spelled
    ]
    raise_faults("this optimizer state cannot be widened exactly", orphans)
    found = {spelled[key]: value for key, value in state["state"].items()}
    order = [name for group in carried for name in group.names]
    by_name = any(isinstance(key, str) for key in spelled)
    position = {name: name if by_name else index for index, name in enumerate(order)}
    states: dict[Any, Any] = {}
    for group in carried:
        for end in group.names:
            planned, entry = direction.planned(end)
            source = planned if direction.back else entry.sources[0]
            stepped = source in found or not found  # a parameter without state beside others never trained
            settings = state["param_groups"][group.origin]
            new, problems = carry_state(rule, settings, found.get(source, {}), end, direction, stepped)
            faults += problems
            if source in found:
                states[position[end]] = made_state(new, direction)
    raise_faults("this optimizer state cannot be widened exactly", faults)
    param_groups = [
        {**g.settings, "params": [position[n] for n in g.names], "param_names": list(g.names)}
        for g in carried
    ]
    return {"state": states, "param_groups": param_groups}


def _spelled(state: Mapping[str, Any], direction: Direction, names: Sequence[str] | None) -> dict[Any, str]:
    """Key of the state dict -> name at the start of the plan."""
    keys: list[Any] = [key for group in state["param_groups"] for key in group["params"]]
    given: list[str] = []
    if all(isinstance(key, str) for key in keys):
        given = keys
    elif all("param_names" in group for group in state["param_groups"]):
        given = [name for group in state["param_groups"] for name in group["param_names"]]
    elif names is not None:
        given = list(names)
    else:
        raise MupscaleError(
            "this optimizer state dict is keyed by position and has no names; pass names=[name for name, _ in "
            "model.named_parameters()] in the order in which the optimizer was given them, or build it from "
            "named_parameters()"
        )
    if len(given) != len(keys):
        raise MupscaleError(
            f"{len(given)} names for {len(keys)} parameters in the optimizer state dict; name those it was given"
        )
    if len(set(given)) != len(given):
        raise MupscaleError(
            "two parameters of the optimizer have one name; write [name for name, _ in model.named_parameters()]"
        )
    known = {*direction.reached, *direction.plan.ties}
    faults = [
        Fault(
            n,
            f"no tensor of the plan has this name at its {direction.start} end",
            "name parameters as model.named_parameters() does, or use plan.rename",
        )
        for n in given
        if resolve(n, known) is None
    ]
    raise_faults("the optimizer state does not belong to this plan", faults)
    named = {key: resolve(name, known) or name for key, name in zip(keys, given, strict=True)}
    return {key: direction.plan.planned(name) for key, name in named.items()}
