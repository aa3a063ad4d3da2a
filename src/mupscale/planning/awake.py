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

from ..models.names import named_tensors
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
            tried = plan.with_tensors({name: _turned(entry, turned) for name, entry in plan.tensors.items()})
            tensors = {name: tensor for name, _, tensor in named_tensors(base)}
            noise = resolve_noise(tensors, NewUnits(), plan=tried, exempt=exempt_of(base, tried, "base"))
            fill_model_(wide, base, Direction(tried, noise=noise), in_place=True)
            if loss_gap(before, float(loss(wide))) <= _TOLERANCE:
                return tried if turned else plan
    error = NoPlanError("waking new units would change the loss")
    error.sizes = _padded_sizes(plan)
    raise error


def _padded_sizes(plan: Plan) -> Sizes:
    return frozenset((a.base, a.wide) for entry in plan.tensors.values() for a in entry.axes if a.padded)


def _sides(plan: Plan) -> Iterator[Sizes]:
    """Spaces, by their sizes, to be cut at their other side: none, each of them, all."""
    sizes = sorted(_padded_sizes(plan))
    yield frozenset()
    for size in sizes:
        yield frozenset({size})
    if len(sizes) > 1:
        yield frozenset(sizes)


def _turned(entry: TensorPlan, sizes: Sizes) -> TensorPlan:
    """The entry with axes of these sizes cut where they are written in place of where they are read, or the other way."""
    if entry.kind != "parameter" or entry.gain or entry.typical:
        return entry
    cut = set(entry.cut)
    for dim, axis in enumerate(entry.axes):
        if axis.padded and (axis.base, axis.wide) in sizes:
            cut ^= {dim}
    return replace(entry, cut=tuple(sorted(cut)))
