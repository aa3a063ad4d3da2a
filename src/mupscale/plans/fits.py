"""Which end of a plan a model, or a set of named shapes, must match; all faults at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import Fault, raise_faults
from ..rules.axes import Axis
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
    """Raise when a tie of the plan is torn, or when tensors are tied that the plan takes for two."""
    faults = []
    for alias, name in plan.ties.items():
        a, b = tensors.get(alias), tensors.get(name)
        if a is None or b is None or a is b or a.is_meta or b.is_meta or a.shape != b.shape:
            continue
        if not torch.equal(a.detach(), b.detach()):
            remedy = "tie them again, or infer a plan from the untied models"
            faults.append(Fault(f"{alias} = {name}", "tied in the plan, two different tensors here", remedy))
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        other = first.setdefault(id(tensor), name)
        planned = {plan.ties.get(n, n) for n in (resolve(name, plan) or name, resolve(other, plan) or other)}
        if isinstance(tensor, nn.Parameter) and len(planned) > 1:
            remedy = "infer the plan from models that are tied like this one"
            faults.append(Fault(f"{name} = {other}", "one tensor here, two in the plan", remedy))
    raise_faults("the plan and the model disagree about ties", faults)


def fraction_fault(axis: Axis) -> str:
    k = max(int(axis.k), 1)
    return (
        f"grows from {axis.base} to {axis.wide}, which is not a whole number of copies; nearest: "
        f"{axis.base * k} (x{k}), {axis.base * (k + 1)} (x{k + 1}); or pad with zeros (pad=True)"
    )


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
