"""What noise needs to know of the base's tensors: norms, root mean squares, and the mean row of a table of words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ..plans.plan import Plan
from ..plans.tensor_plan import TensorPlan
from ..tensors.devices import exact
from ..tensors.expand import expand
from ..tensors.making import Making
from ..tensors.spectral import spectral_norms

Statistic = Literal["norm", "norms", "rms", "each_rms", "mean"]
"""The spectral norm of a tensor or of every matrix along dimension 0, the root mean square of either, or the mean of its rows.
The norm of a vector is its length."""
Measure = Callable[[str, Statistic], Tensor]
"""A statistic of the source of a wide tensor."""
Wanted = tuple[str, Statistic]
"""A wide tensor whose source is measured, and what of it."""


def statistic(weight: Tensor, what: Statistic) -> Tensor:
    """A statistic of a tensor in float64.

    >>> statistic(torch.tensor([[1.0, 2.0], [3.0, 2.0]]), "mean").tolist()
    [2.0, 2.0]
    """
    if what == "mean":
        return exact(weight.detach()).mean(0).reshape(-1)
    if what in ("rms", "each_rms"):
        rows = exact(weight.detach()).reshape(1 if what == "rms" else len(weight), -1)
        return rows.square().mean(1).sqrt()
    if weight.dim() < 2:
        length: Tensor = torch.linalg.vector_norm(exact(weight.detach()))
        return length
    return spectral_norms(weight, what == "norms")


def measured(name: str, plan: Plan) -> str:
    """The wide tensor whose source is measured for the noise of a tensor: of a new one, one that it is like."""
    like = plan[name].like
    return name if like is None else plan.sources[like][0]


def wide_row(entry: TensorPlan, row: tuple[float, ...]) -> tuple[float, ...]:
    """A row of the base as a row of the wide tensor: s · dup, and zeros where the row has zeros.

    >>> from mupscale.rules import Axis
    >>> wide_row(TensorPlan(("w",), (Axis.parse("5+3"), Axis.parse("in: 2x2+1"))), (2.0, 4.0))
    (1.0, 1.0, 2.0, 2.0, 0.0)
    """
    base = torch.tensor(row, dtype=torch.float64, device="cpu").view(entry.base_shape[1:])
    wide = expand(base, Making(entry.axes[1:], entry.change.s, entry.shift))
    return tuple(wide.reshape(-1).tolist())
