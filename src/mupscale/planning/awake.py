"""Where new units are cut off, so that waking them moves no output: where they are read, or where they are written.

A new unit works when one side of it is zero. A hidden unit reads and is not read: its row is awake, its column zero. A
channel of a stream that a norm averages over would change the norm, so it is read and not written. Norms that are modules
are known (`facts/padded_norms.py`); a norm that is written out in a forward is not, and is found here by waking the units
in float64 and looking at the loss. Below, units of 4 numbers are brought to unit length before they are read:

>>> import mupscale as mu
>>> class Unit(nn.Module):
...     def __init__(self, n: int) -> None:
...         super().__init__()
...         self.a, self.b = nn.Linear(3, n), nn.Linear(n, 2)
...
...     def forward(self, x: torch.Tensor) -> torch.Tensor:
...         return self.b(nn.functional.normalize(self.a(x)))
>>> x = torch.randn(5, 3)
>>> plan = mu.infer_plan(Unit(4), Unit(8), loss=lambda model: model(x.to(model.a.weight)).square().sum(), by="units")
>>> plan["a.weight"].cut, plan["b.weight"].cut                     # cut where it is written, and not where it is read
((0,), ())
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from ..models.names import named_tensors, pattern_of
from ..noise.kinds import NewUnits
from ..noise.resolve import resolve_noise
from ..noise.where import exempt_of
from ..plans.direction import Direction
from ..plans.plan import Plan
from ..plans.tensor_plan import TensorPlan
from ..plans.wide_model import fill_model_
from ..proofs.identity import Loss
from ..tensors.differences import loss_gap
from .search.not_found import NoPlanError, Sizes

Place = tuple[str, int]
"""A dimension of a tensor, by the tensor's name."""
_TOLERANCE = 1e-9
"""How far the loss may move in float64. Products with zeros are exact, and sums are rounded in another order; what is not
cut moves a loss by a thousandth or more."""


def cut_for_waking(plan: Plan, base: nn.Module, wide: nn.Module, loss: Loss) -> Plan:
    """The plan with its zeros cut so that new units wake without a change of the loss; raises if no cut does that.

    The wide model is written over.
    """
    with torch.no_grad():
        before = float(loss(base))
        for turned in _sides(plan):
            tried = plan.with_tensors(
                {name: _turned(name, entry, turned) for name, entry in plan.tensors.items()}
            )
            tensors = {name: tensor for name, _, tensor in named_tensors(base)}
            noise = resolve_noise(tensors, NewUnits(), plan=tried, exempt=exempt_of(base, tried, "base"))
            fill_model_(wide, base, Direction(tried, noise=noise), in_place=True)
            if _can_learn(tried) and loss_gap(before, float(loss(wide))) <= _TOLERANCE:
                return tried if turned else plan
    error = NoPlanError("waking new units would change the loss", code="search.waking_moves_loss")
    error.sizes = _padded_sizes(plan)
    raise error


def _padded_sizes(plan: Plan) -> Sizes:
    return frozenset((a.base, a.wide) for entry in plan.tensors.values() for a in entry.axes if a.padded)


def _places(plan: Plan) -> dict[tuple[int, int], set[Place]]:
    """The dimensions with zeros that noise would wake, by the sizes of their space."""
    found: dict[tuple[int, int], set[Place]] = {}
    for name, entry in plan.tensors.items():
        if entry.kind == "parameter" and not entry.gain and not entry.typical:
            for dim, axis in enumerate(entry.axes):
                if axis.padded:
                    found.setdefault((axis.base, axis.wide), set()).add((name, dim))
    return found


def _sides(plan: Plan) -> Iterator[set[Place]]:
    """Places to be cut, or not, other than in the plan: none; all of a space; all; single ones, for products of two tables."""
    spaces = sorted(_places(plan).items())
    yield set()
    for _, places in spaces:
        yield places
    if len(spaces) > 1:
        yield set().union(*(places for _, places in spaces))
    for _, places in spaces:
        alike: dict[str, set[Place]] = {}
        for name, dim in sorted(places):
            alike.setdefault(f"{pattern_of(name)} {dim}", set()).add((name, dim))
        yield from alike.values()


def _turned(name: str, entry: TensorPlan, places: set[Place]) -> TensorPlan:
    """The entry with some of its dimensions cut that were not, and not cut that were."""
    cut = set(entry.cut) ^ {dim for other, dim in places if other == name}
    return replace(entry, cut=tuple(sorted(cut)))


def _can_learn(plan: Plan) -> bool:
    """Whether every space that is written has a matrix whose zeros wake: zeros that meet only zeros never get a gradient."""
    for places in _places(plan).values():
        matrices = [(plan[name], dim) for name, dim in places if len(plan[name].axes) > 1]
        written = any(entry.axes[dim].role == "out" for entry, dim in matrices)
        if written and all(dim in entry.cut for entry, dim in matrices):
            return False
    return True
