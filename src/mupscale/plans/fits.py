"""Which end of a plan a model, or a set of named shapes, must match; all faults at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import nn

from ..errors import Fault, raise_faults
from .infer import fraction_fault
from .names import named_tensors, resolve
from .plan import Plan

End = Literal["base", "wide"]


def check_end(plan: Plan, model: nn.Module, end: End) -> None:
    """Raise unless `model` is exactly what the plan expects at its base or wide end."""
    check_shapes(plan, {name: tuple(t.shape) for name, _, t in named_tensors(model)}, end)


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


def check_duplicates(plan: Plan) -> None:
    """Raise unless every axis grows by whole copies (and zeros)."""
    faults = [
        Fault(f"{name}, axis {dim}", fraction_fault(axis))
        for name, tensor in plan.tensors.items()
        for dim, axis in enumerate(tensor.axes)
        if not axis.duplicates
    ]
    raise_faults("copies come in whole numbers", faults)
