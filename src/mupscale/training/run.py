"""A run: a model with everything that trains it. Any part may be absent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..plans.plan import Plan


@dataclass(frozen=True, init=False)
class Run:
    """What training needs to go on: model, optimizers, schedulers, an average of the weights, the step.

    >>> import torch
    >>> model = nn.Linear(4, 4)
    >>> run = Run(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> len(run.optimizers), run.ema is None
    (1, True)
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[Any, ...]
    ema: nn.Module | Mapping[str, Tensor] | None
    step: int
    plan: Plan | None
    """The plan that made this run wide, if one did."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer] = (),
        schedulers: Any | Sequence[Any] = (),
        ema: nn.Module | Mapping[str, Tensor] | None = None,
        step: int = 0,
        plan: Plan | None = None,
    ) -> None:
        fields = {
            "model": model,
            "optimizers": tuple(optimizers) if isinstance(optimizers, Sequence) else (optimizers,),
            "schedulers": tuple(schedulers) if isinstance(schedulers, Sequence) else (schedulers,),
            "ema": ema,
            "step": step,
            "plan": plan,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
