"""The plan from a wide model back to its base: sizes and units only, for a reference that is wider than the model."""

from __future__ import annotations

from dataclasses import replace

from ..errors import Fault, raise_faults
from ..rules.axes import Axis
from ..rules.scale import ONE
from .plan import Plan
from .tensor_plan import TensorPlan


def backward(plan: Plan) -> Plan:
    """The plan whose reference is the wide end of `plan` and whose other end is its base.

    Rates, decay and sizes of initialisation need it when a proxy is narrower than the model at whose width constants are
    written. Nothing can be copied by it: its multipliers are below one.

    >>> plan = Plan({"w": TensorPlan(("w",), (Axis.parse("out: 4x2"), Axis.parse("in: 8x2")))})
    >>> back = backward(plan)
    >>> back["w"].base_shape, back["w"].wide_shape, str(back["w"].change.s), str(back.then(plan)["w"].change.s)
    ((8, 16), (4, 8), '2', '1')
    """
    faults = [
        Fault(
            "plan.not_a_copy",
            name,
            "it is new, padded or made of several tensors",
            "give a plan in which each tensor is copied",
        )
        for name, entry in plan.tensors.items()
        if entry.sources != (name,) or entry.padded
    ]
    raise_faults("this plan has no way back in units", faults)
    tensors = {name: _back(entry) for name, entry in plan.tensors.items()}
    return replace(plan, tensors=tensors)


def _back(entry: TensorPlan) -> TensorPlan:
    axes = tuple(
        Axis.fixed(axis.wide).resized(axis.base, axis.role) if axis.grows else axis for axis in entry.axes
    )
    return replace(entry, axes=axes, fold=ONE / entry.fold, spread=1 / entry.spread)
