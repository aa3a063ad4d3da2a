"""An optimizer's state dict at the wide end with its groups as they were: reference constants, units in the state.

For checkpoints that a stock trainer loads again; `stepping.py` puts the constants into units while it trains.
Knows: state dicts keyed by position. Does not know: files, or which parameter a position means.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import Fault, MupscaleError
from ..plans.plan import Plan
from ..rules.optimizers import OptimizerRule
from .direction import Direction
from .state import cannot_be_exact, carry_state, unknown_settings

Names = Sequence[Sequence[str]]
"""Parameters' names, group by group."""
Groups = list[dict[str, Any]]
States = dict[Any, dict[str, Any]]
_SCHEDULED = frozenset({"max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"})


def settings_of(groups: Iterable[Mapping[str, Any]]) -> Groups:
    """What an optimizer reads from its groups: without parameters, and without what torch's schedulers note there."""
    left_out = _SCHEDULED | {"params", "param_names"}
    return [{key: value for key, value in group.items() if key not in left_out} for group in groups]


def parts(tree: Any, where: str) -> tuple[Groups, States]:
    """Groups and state of an optimizer's state dict, whose form is checked and nothing else."""
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
            f"{where} is not the state dict of one optimizer, with positions for parameters; save optimizer.state_dict()"
        )
    return groups, state


def carry_kept(
    groups: Groups,
    state: States,
    order: Names,
    wide_order: Names,
    rule: OptimizerRule,
    direction: Direction,
    where: str,
) -> tuple[dict[str, Any], list[Fault]]:
    """The wide state dict, groups kept, and what could not be carried; names are the plan's, at both ends.

    Its state tensors are not made yet: each is a `Moment` that the caller makes now, or has written by a move.
    """
    plan = direction.plan
    settings = settings_of(groups)
    faults = unknown_settings(rule, settings, {key for group in settings for key in group}, where)
    keys = {n: k for g, of in zip(groups, order, strict=True) for k, n in zip(g["params"], of, strict=True)}
    faults += [
        Fault(f"{where}, state {key!r}", "it belongs to no group", "remove it from the state dict")
        for key in state.keys() - keys.values()
    ]
    wide_state: States = {}
    wide_groups: Groups = []
    position = 0
    for group, of in zip(groups, wide_order, strict=True):
        named = {"param_names": list(of)} if "param_names" in group else {}
        wide_groups.append({**group, **named, "params": list(range(position, position + len(of)))})
        for name in of:
            faults += cannot_be_exact(rule, group, name, plan[name])
            found = state.get(keys[plan[name].sources[0]])
            if found is not None:
                wide_state[position], more = carry_state(rule, group, found, name, direction)
                faults += more
            position += 1
    return {"state": wide_state, "param_groups": wide_groups}, faults


def misfits(plan: Plan, order: Names, wide_order: Names) -> list[Fault]:
    """Wide tensors that are not made of one trained tensor each, in the same group."""
    group_of: Mapping[str, int] = {name: i for i, of in enumerate(order) for name in of}
    faults = []
    if len(group_of) != sum(map(len, order)):
        faults.append(Fault("param_groups", "a parameter appears twice in them", "put it into one group"))
    for i, of in enumerate(wide_order):
        for name in of:
            sources = plan[name].sources
            if len(sources) != 1:
                what = f"made of {len(sources)} tensors of the base, so there is no state for it"
                faults.append(Fault(name, what, "carry the weights alone, and start its state afresh"))
            elif group_of.get(sources[0]) != i:
                what = (
                    f"{sources[0]} is in group {group_of.get(sources[0])} of the base, this one in group {i}"
                )
                faults.append(Fault(name, what, "group the parameters of both models alike"))
    made = {name for of in wide_order for name in of}
    lost = [n for source in group_of for n in plan.sources[source] if n not in made]
    remedy = "group the parameters of both models alike"
    return faults + [Fault(n, "trained in the base, in no group of the wide model", remedy) for n in lost]
