"""A run: a model with everything that trains it. Any part may be absent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..arguments import wrong_kind
from ..errors import raise_faults
from ..plans.fits import identity_plan
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
    reference: Plan | None
    """The plan from the reference to this model; None when the model is its own reference."""
    provenance: Mapping[str, Any]
    """What made this run: plan, seed, noise, versions; plain values, to be saved beside the weights."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer] | None = (),
        schedulers: Any | Sequence[Any] = (),
        ema: nn.Module | Mapping[str, Tensor] | None = None,
        step: int = 0,
        plan: Plan | None = None,
        reference: Plan | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        fields = {
            "model": model,
            "optimizers": _several(optimizers),
            "schedulers": _several(schedulers),
            "ema": ema,
            "step": step,
            "plan": plan,
            "reference": reference,
            "provenance": dict(provenance or {}),
        }
        faults = wrong_kind("model", model, nn.Module, "hand over the module that is trained")
        for i, optimizer in enumerate(_several(optimizers)):
            faults += wrong_kind(f"optimizers[{i}]", optimizer, Optimizer, "write optimizers=[optimizer, …]")
        for name, given in (("plan", plan), ("reference", reference)):
            if given is not None:
                faults += wrong_kind(name, given, Plan, f"write {name}=plan_between(make, base, wide)")
        raise_faults("this is not a run", faults)
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def since_reference(self) -> Plan:
        """The plan that leads from the reference to this model, for clipping, groups and sizes."""
        return self.reference if self.reference is not None else identity_plan(self.model)


def _several(parts: Any) -> tuple[Any, ...]:
    if parts is None:
        return ()
    return tuple(parts) if isinstance(parts, Sequence) else (parts,)
