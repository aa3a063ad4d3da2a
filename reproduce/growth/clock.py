"""The rate as a function of FLOPs spent: warm-up, constant, then a line to zero over the last 30 % of the budget."""

from __future__ import annotations

from torch.optim import Optimizer

WARM_UP = 0.05
"""Share of the budget; a run of a thousand steps warms up for 50 of them."""
DECAY = 0.3


def multiplier(spent: float, warm_up: float = WARM_UP, decay: float = DECAY) -> float:
    """What the peak rate is multiplied by when this share of the budget is spent.

    >>> [round(multiplier(u), 3) for u in (0.0, 0.025, 0.05, 0.7, 0.85, 1.0)]
    [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]
    """
    up = 1.0 if spent >= warm_up else spent / warm_up
    down = 1.0 if spent <= 1 - decay else max(0.0, (1 - spent) / decay)
    return up * down


class Rates:
    """Sets the rate of every group, in the proportions that the groups have at the peak."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]

    def set_(self, factor: float) -> None:
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
