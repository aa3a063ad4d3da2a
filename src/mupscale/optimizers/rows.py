"""The row of every tensor of a group, and state that the tensors of a group share in one stack.

A class may hold several optimizers and choose by group, by a parameter's state or by dimensions. Readers split groups by
row here, so that everything after them sees one row per group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import Fault, MupscaleError, raise_faults
from ..rules.optimizer_rule import OptimizerRule
from .named import NamedGroup

States = Mapping[str, Mapping[str, Any]]


def split_by_row(
    group: NamedGroup, dimensions: Mapping[str, int], state: States, where: str
) -> list[NamedGroup]:
    """One group per row, in the order of first appearance; raises for tensors that have none."""
    if group.rule.by is None:
        return [group]
    found: dict[int, tuple[OptimizerRule, list[str]]] = {}
    faults: list[Fault] = []
    for name in group.names:
        try:
            row = group.rule.row(group.settings, dimensions[name], state.get(name))
        except MupscaleError as error:
            faults.append(Fault(error.code, f"{where}, group {group.origin}, {name}", error.claim))
            continue
        found.setdefault(id(row), (row, []))[1].append(name)
    raise_faults("this optimizer holds tensors that have no row", faults)
    return [replace(group, names=tuple(names), rule=row) for row, names in found.values()]


def split_all(
    groups: Iterable[NamedGroup], state: States, dimensions: Mapping[str, int], where: str
) -> tuple[tuple[NamedGroup, ...], dict[str, dict[str, Any]], list[Fault]]:
    """Groups split by row, the state with stacks given to the tensors they belong to, and faults for the rest."""
    own = {name: dict(values) for name, values in state.items()}
    every: list[NamedGroup] = []
    faults: list[Fault] = []
    for group in groups:
        parts = split_by_row(group, dimensions, own, where)
        for part in parts:
            faults += _unstack_(part, own, where)
        every += parts
    return tuple(every), own, faults


def _unstack_(group: NamedGroup, state: dict[str, dict[str, Any]], where: str) -> list[Fault]:
    """Give every tensor of a group its part of the state that the first one holds for all."""
    if not group.rule.stacked or not group.names or group.names[0] not in state:
        return []
    first, many, faults = state.pop(group.names[0]), len(group.names), []
    place = f"{where}, {group.names[0]}"
    for key, value in first.items():
        if not isinstance(value, Tensor):
            what = f"its stacked state {key!r} is not a tensor in memory"
            remedy = "grow the live optimizer or its state dict"
            faults.append(Fault("state.stack_not_in_memory", place, what, remedy))
        elif not value.dim() or len(value) != many:
            what = f"its stacked state {key!r} has shape {tuple(value.shape)}, expected {many} tensors in a stack"
            remedy = "pass the state of this model's own optimizer"
            faults.append(Fault("state.other_stack_length", place, what, remedy))
        else:
            for name, part in zip(group.names, value, strict=True):
                state.setdefault(name, {})[key] = part
    return faults


def stacked(groups: Sequence[NamedGroup], state: States) -> dict[str, dict[str, Any]]:
    """The state as the optimizer keeps it: where its row says so, the first tensor of a group holds it for all.

    A tensor that joined its group has no state yet, and gets the zeros with which the optimizer starts.
    """
    kept = {name: dict(values) for name, values in state.items()}
    for group in groups:
        held = {name: kept.pop(name) for name in group.names if name in kept} if group.rule.stacked else {}
        if held:
            kept[group.names[0]] = _stack(group.names, held)
    return kept


def _stack(names: Sequence[str], held: States) -> dict[str, Any]:
    """One stack per key, with a place for every tensor of the group."""
    first, example = next(iter(held.items()))
    what = f"its state does not have the keys and shapes of that of {first}, with which it is stacked"
    faults = [
        Fault("state.cannot_be_stacked", name, what, "put it in a group of its own")
        for name, values in held.items()
        if {k: v.shape for k, v in values.items()} != {k: v.shape for k, v in example.items()}
    ]
    raise_faults("the state of these tensors cannot be stacked", faults)
    return {
        key: torch.stack([held[name][key] if name in held else torch.zeros_like(value) for name in names])
        for key, value in example.items()
    }
