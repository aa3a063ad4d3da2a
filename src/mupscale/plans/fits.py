"""Which end of a plan a model, or a set of named shapes, must match; all faults at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import Fault, raise_faults
from .infer import fraction_fault
from .names import named_tensors, resolve
from .plan import Plan

End = Literal["base", "wide"]


def check_end(plan: Plan, model: nn.Module, end: End) -> None:
    """Raise unless `model` is exactly what the plan expects at its base or wide end."""
    tensors = {name: t for name, _, t in named_tensors(model)}
    check_shapes(plan, {name: tuple(t.shape) for name, t in tensors.items()}, end)


def check_shapes(plan: Plan, shapes: Mapping[str, tuple[int, ...]], end: End, complete: bool = True) -> None:
    faults: list[Fault] = []
    expected: dict[str, tuple[int, ...]] = {}
    for name, tensor in plan.tensors.items():
        if end == "wide":
            expected[name] = tensor.wide_shape
        elif tensor.cat is None:
            expected.update(dict.fromkeys(tensor.sources, tensor.base_shape))
    expected.update({alias: expected[name] for alias, name in plan.ties.items() if name in expected})
    seen = set()
    for name, shape in shapes.items():
        known = resolve(name, expected)
        if known is None:
            faults.append(
                Fault(
                    name,
                    f"no tensor of the plan has this name at its {end} end",
                    "infer the plan from this very model, or use plan.rename",
                )
            )
            continue
        seen.add(known)
        if shape != expected[known]:
            faults.append(Fault(name, f"shape {shape}, the plan's {end} end has {expected[known]}"))
    if complete:
        missing = [name for name in expected if name not in seen and name not in plan.ties]
        faults += [
            Fault(name, f"the plan expects this tensor at its {end} end; it is missing") for name in missing
        ]
    raise_faults(f"this is not the {end} model of the plan", faults)


def check_ties(plan: Plan, tensors: Mapping[str, Tensor]) -> None:
    """Raise when tensors that the plan ties hold different values: one of the two would be lost."""
    faults = []
    for alias, name in plan.ties.items():
        a, b = tensors.get(alias), tensors.get(name)
        if a is None or b is None or a is b or a.is_meta or b.is_meta or a.shape != b.shape:
            continue
        if not torch.equal(a.detach(), b.detach()):
            faults.append(
                Fault(
                    f"{alias} = {name}",
                    "tied in the plan, two different tensors here",
                    "tie them again, or infer a plan from the untied models",
                )
            )
    raise_faults("a tie of the plan is torn", faults)


def check_duplicates(plan: Plan) -> None:
    """Raise unless every axis grows by whole copies (and zeros)."""
    faults = [
        Fault(f"{name}, axis {dim}", fraction_fault(axis))
        for name, tensor in plan.tensors.items()
        for dim, axis in enumerate(tensor.axes)
        if not axis.duplicates
    ]
    raise_faults("copies come in whole numbers", faults)


def identity_plan(model: nn.Module) -> Plan:
    """The plan that leaves `model` as it is, ties included."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    shapes = []
    for name, kind, tensor in named_tensors(model):
        if id(tensor) in first:
            ties[name] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        shapes.append((name, kind, tuple(tensor.shape)))
    return Plan(Plan.identity(shapes).tensors, ties)  # type: ignore[arg-type]
