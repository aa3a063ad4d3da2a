"""What a learning rate is: where an optimizer and its schedulers hold it, and how it is read and changed.

A group holds `lr` in the units of its tensors. Divided by the group's `lr_factor` it is the rate at the reference; a group
without `lr_factor` is at the reference itself. A schedule leaves the rate that it starts from in the group (`initial_lr`;
OneCycleLR also `max_lr`), and has lists of its own with a rate for every group (`base_lrs`).

A schedule that stands at half of a peak of 0.1, on a matrix whose rate is a quarter of the reference's, and on its bias:

>>> import torch
>>> params = [torch.zeros(1, requires_grad=True) for _ in range(2)]
>>> groups = [{"params": [params[0]], "lr": 0.025, "lr_factor": 0.25}, {"params": [params[1]], "lr": 0.1}]
>>> optimizer = torch.optim.SGD(groups)
>>> scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
>>> rates = Rates(optimizer, [scheduler])
>>> [group["lr"] for group in optimizer.param_groups], rates.at_reference(), rates.peaks
([0.0125, 0.05], [0.05, 0.05], [0.025, 0.1])
>>> rates.scale_(2.0)
>>> [group["lr"] for group in optimizer.param_groups], scheduler.base_lrs
([0.025, 0.1], [0.05, 0.2])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..rules.optimizer_rule import RATES
from .schedulers import driven_by

SAME = 1e-6
"""Rates of groups went through factors of the width in floating point, and may be tensors of float32."""
_PEAKS = ("max_lr", "initial_lr", "lr")
"""Where an earlier schedule left its peak in a group, the first that is there; OneCycleLR's initial_lr is not its peak."""


@dataclass(frozen=True)
class Rates:
    """The learning rates of one optimizer, and those that its schedulers have stored."""

    optimizer: Optimizer
    schedulers: Sequence[Any] = ()
    """Schedulers of the run; those that drive other optimizers are passed over."""

    @property
    def factors(self) -> list[float]:
        """What the rate at the reference is multiplied by in every group."""
        return [float(group.get("lr_factor", 1.0)) for group in self.optimizer.param_groups]

    def of_groups(self, key: str = "lr") -> list[float]:
        """The rate that every group has under this key, in its own units; without the key, its `lr`."""
        return [float(group.get(key, group["lr"])) for group in self.optimizer.param_groups]

    def at_reference(self, rates: Sequence[float] | None = None) -> list[float]:
        """Rates of the groups, by default the present ones, as they are at the reference."""
        rates = self.of_groups() if rates is None else rates
        return [rate / factor for rate, factor in zip(rates, self.factors, strict=True)]

    @property
    def peaks(self) -> list[float]:
        """The highest rate of every group, in its own units: what the schedule multiplies, or the peak that it rises to.

        Without a scheduler it is what an earlier one has left in the group.
        """
        driving = self._driving
        if not driving:
            groups = self.optimizer.param_groups
            return [float(next(group[key] for key in _PEAKS if key in group)) for group in groups]
        while driving:
            scheduler = driving.pop()
            driving += getattr(scheduler, "_schedulers", ())
            if type(scheduler).__name__ == "OneCycleLR":
                return self.of_groups("max_lr")
            if hasattr(scheduler, "max_lrs"):  # CyclicLR
                return [float(rate) for rate in scheduler.max_lrs]
        return self.of_groups("initial_lr")

    def set_(self, lr: float | Tensor) -> None:
        """Set the rate at the reference: every group gets it times its own factor.

        torch's schedulers start at `initial_lr` where a group has one, whatever its `lr` is, so it is set too. Most
        schedulers that drive the optimizer already have their own copy (`base_lrs`). OneCycleLR reads `initial_lr` at every
        step and marks its groups with `max_lr`, so theirs is left alone.
        """
        for group, factor in zip(self.optimizer.param_groups, self.factors, strict=True):
            set_rate_(group, lr * factor)
            if "initial_lr" in group and "max_lr" not in group:
                group["initial_lr"] = float(lr * factor)

    def scale_(self, ratio: float) -> None:
        """Multiply every rate of the groups, and those that the schedulers have stored."""
        for group in self.optimizer.param_groups:
            for key in group.keys() & set(RATES) - {"lr_factor"}:
                group[key] *= ratio  # a tensor stays the same tensor
        for scheduler in self._driving:
            _scale_stored_(scheduler, ratio)

    @property
    def _driving(self) -> list[Any]:
        return [scheduler for scheduler in self.schedulers if driven_by(scheduler) is self.optimizer]


def set_rate_(group: dict[str, Any], rate: float | Tensor) -> None:
    """Set the rate of a group, in its own units; a tensor stays the same tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(float(rate))
    else:
        group["lr"] = rate


def are_one(rates: Sequence[float]) -> bool:
    """Whether rates of several groups, at the reference, are one rate up to rounding."""
    return max(rates) - min(rates) <= SAME * max(map(abs, rates))


def _scale_stored_(scheduler: Any, ratio: float) -> None:
    for key in ("base_lrs", "_last_lr", "max_lrs"):
        if hasattr(scheduler, key):
            setattr(scheduler, key, [rate * ratio for rate in getattr(scheduler, key)])
    if (floor := getattr(scheduler, "eta_min", None)) is not None:
        scheduler.eta_min = [one * ratio for one in floor] if isinstance(floor, list) else floor * ratio
    for inner in getattr(scheduler, "_schedulers", ()):
        _scale_stored_(inner, ratio)
