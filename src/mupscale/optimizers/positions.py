"""Which parameter each position of an optimizer's state means, at both ends of a plan.

Knows: names and groups. Reads no file and touches no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import Fault, MupscaleError
from ..files.strict import printable, raise_few
from ..models.names import resolve
from ..plans.block_order import in_wide_order
from ..plans.direction import Direction
from ..plans.plan import Plan
from .read import Names

CLAIM = "the optimizer state cannot be widened"
LEAVE = "move optimizer.pt and scheduler.pt away to grow the weights alone"
Ordered = list[list[str]]


def planned_orders(
    groups: Sequence[Mapping[str, Any]], plan: Plan, base: Names, wide: Names
) -> tuple[Ordered, Ordered]:
    """Planned names at the base and at the wide end, from the names of each group's parameters there."""
    order = _checked(groups, plan, base)
    wide_order = [[_planned(name, plan, plan.tensors) for name in of] for of in wide]
    raise_few(CLAIM, _misfits(plan, order, wide_order))
    return order, wide_order


def named_orders(
    groups: Sequence[Mapping[str, Any]], plan: Plan, names: Names | None
) -> tuple[Ordered, Ordered]:
    """Planned names at both ends, for groups whose names are given, or kept in them; the wide end follows the base's order."""
    given = names if names is not None else [list(map(str, group["param_names"])) for group in groups]
    order = _checked(groups, plan, given)
    joining = Direction(plan).joining
    made = [[end for name in of for end in (*plan.sources[name], *joining.get(name, ()))] for of in order]
    once = [list(dict.fromkeys(ends)) for ends in made]
    wide_order = [in_wide_order(ends, of, plan) for ends, of in zip(once, order, strict=True)]
    raise_few(CLAIM, _misfits(plan, order, wide_order))
    return order, wide_order


def _checked(groups: Sequence[Mapping[str, Any]], plan: Plan, names: Names) -> Ordered:
    many, expected = [len(group["params"]) for group in groups], [len(of) for of in names]
    if many != expected:
        what = f"groups of {many} parameters, expected {expected}: some are frozen, or were grouped otherwise"
        remedy = f"say which parameters they hold with names=[[...], ...], or {LEAVE}"
        raise MupscaleError(CLAIM, [Fault("state.group_sizes_differ", "param_groups", what, remedy)])
    return [[_planned(name, plan, plan.sources) for name in of] for of in names]


def _planned(name: str, plan: Plan, known: Mapping[str, Any]) -> str:
    found = resolve(name, {*known, *plan.ties})
    planned = None if found is None else found if found in known else plan.ties[found]
    if planned is None or planned not in known:
        raise MupscaleError(
            CLAIM,
            [Fault("plan.unknown_tensor", printable(name), "no tensor of the plan has this name", LEAVE)],
        )
    return planned


def _misfits(plan: Plan, order: Names, wide_order: Names) -> list[Fault]:
    """Wide tensors that are not made of trained tensors in the same group."""
    group_of = {name: i for i, of in enumerate(order) for name in of}
    wide_group = {name: i for i, of in enumerate(wide_order) for name in of}
    alike, faults = "group the parameters of both models alike", []
    if len(group_of) != sum(map(len, order)):
        faults.append(
            Fault(
                "state.parameter_in_two_groups",
                "param_groups",
                "a parameter appears twice in them",
                "put it into one group",
            )
        )
    for name, i in wide_group.items():
        new = plan[name].like
        for source in plan[name].sources if new is None else (new,):
            if (first := group_of.get(source)) != i:
                what = f"{source} is in group {first} of the base, this one in group {i}"
                faults.append(Fault("state.groups_differ", name, what, alike))
    lost = [n for source in group_of for n in plan.sources[source] if n not in wide_group]
    return faults + [
        Fault("state.in_no_wide_group", n, "trained in the base, in no group of the wide model", alike)
        for n in lost
    ]
