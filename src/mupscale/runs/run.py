"""A run: a model with everything that trains it. Any part may be absent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..arguments import wrong_kind
from ..errors import Fault, MupscaleError, raise_faults
from ..plans.ends import expect_since, identity_plan
from ..plans.plan import Plan
from .provenance import Provenance


@dataclass(frozen=True, init=False)
class Run:
    """A model with everything that trains it: optimizers, schedulers, an average of the weights, the steps taken.

    Args:
        model: The module that is trained.
        optimizers: One optimizer, or a list. May be left out, as everything but the model.
        schedulers: One learning rate scheduler, or a list.
        plan: The plan that made this run wide, if one did; `grow` and `upscale` fill it in.
        since: The plan from the reference, where constants such as the learning rate are written, to this model. None when the
            model is its own reference.
        ema: An average of the weights, a module or named tensors, which grows with them.
        steps: How many optimizer steps have been taken.
        earlier: `plan` and `since` of the runs that this one was grown from, the latest last; `narrow` goes back to them.
        provenance: How this run was made, growth by growth: plan, seed, noise, versions. Save `provenance.as_json()` with the weights.

    Raises:
        MupscaleError: If the model is no module, an optimizer no optimizer, or a plan no plan.

    >>> import torch
    >>> model = nn.Linear(4, 4)
    >>> run = Run(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> run.optimizer.param_groups[0]["lr"], run.ema is None
    (0.1, True)
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[Any, ...]
    ema: nn.Module | Mapping[str, Tensor] | None
    steps: int
    plan: Plan | None
    since: Plan | None
    earlier: tuple[tuple[Plan | None, Plan | None], ...]
    provenance: Provenance

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer] | None = (),
        schedulers: Any | Sequence[Any] = (),
        *,
        plan: Plan | None = None,
        since: Plan | None = None,
        ema: nn.Module | Mapping[str, Tensor] | None = None,
        steps: int = 0,
        earlier: Sequence[tuple[Plan | None, Plan | None]] = (),
        provenance: Provenance | Mapping[str, Any] | None = None,
    ) -> None:
        fields = {
            "model": model,
            "optimizers": _several(optimizers),
            "schedulers": _several(schedulers),
            "ema": ema,
            "steps": steps,
            "plan": plan,
            "since": since,
            "earlier": tuple(earlier),
            "provenance": _history({} if provenance is None else provenance, (*earlier, (plan, since))),
        }
        faults = wrong_kind("model", model, nn.Module, "pass the module that is trained")
        for i, optimizer in enumerate(_several(optimizers)):
            faults += wrong_kind(f"optimizers[{i}]", optimizer, Optimizer, "write optimizers=[optimizer, …]")
        for name, given in (("plan", plan), ("since", since)):
            if given is not None:
                faults += wrong_kind(name, given, Plan, f"write {name}=plan_between(make, base, wide)")
        raise_faults("this is not a run", faults)
        if plan is not None and since is not None and plan != since:
            fields["plan"] = replace(plan, later=True)
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read pickles of 0.2.0 too, whose provenance is a dict."""
        self.__dict__.update(state)
        history = _history(self.provenance, (*self.earlier, (self.plan, self.since)))
        object.__setattr__(self, "provenance", history)

    @property
    def optimizer(self) -> Optimizer:
        """The only optimizer of the run; refused when there are none or several."""
        optimizer: Optimizer = _only("optimizer", self.optimizers)
        return optimizer

    @property
    def scheduler(self) -> Any:
        """The only scheduler of the run; refused when there are none or several."""
        return _only("scheduler", self.schedulers)


Since = Plan | Run
"""A plan from the reference to a model, or the run that knows it."""


def since_of(since: Since, model: nn.Module) -> Plan:
    """The plan from the reference to `model`; a run gives its own, or the identity when it is its own reference.

    >>> from mupscale.plans import plan_between
    >>> make = lambda n: nn.Linear(n, n)
    >>> model, plan = make(4), plan_between(make, 2, 4)
    >>> since_of(plan, model) == since_of(Run(model, since=plan), model) == plan
    True
    >>> str(since_of(Run(model), model)["weight"].change.s)
    '1'
    """
    if not isinstance(since, Run):
        expect_since(since, model)
        if since.later:
            what = "it is the plan of a later growth, which begins where the run stood then and not at the run's reference"
            raise_faults(
                "learning rates and units count from the reference",
                [Fault("plan.of_later_growth", "since", what, "write the run, or run.since")],
            )
        return since
    if since.model is not model:
        raise MupscaleError(
            "the run given as since= has another model than the one acted on; write run.model and run, of one run",
            code="run.other_model",
        )
    return since.since if since.since is not None else identity_plan(model)


def model_of(since: Since, model: nn.Module | None, call: str) -> nn.Module:
    """The model that an optimizer trains: the run's, or the one given with a plan."""
    if isinstance(since, Run):
        if model is not None and model is not since.model:
            raise MupscaleError(
                f"model= is not the model of the run; write {call}(…, run) without model=",
                code="run.other_model",
            )
        return since.model
    if model is None:
        raise MupscaleError(
            f"a plan does not hold the model; write {call}(…, run), or {call}(…, plan, model=model)",
            code="run.model_missing",
        )
    return model


def _history(
    given: Provenance | Mapping[str, Any], stages: Sequence[tuple[Plan | None, Plan | None]]
) -> Provenance:
    """The provenance of a run; of what 0.2.0 stored, with the growths that only `plan`, `since` and `earlier` show."""
    if isinstance(given, Provenance):
        return given
    before = [None, *(since for _, since in stages)]
    steps = [(plan, since) for (plan, _), since in zip(stages, before, strict=False) if plan is not None]
    return Provenance.from_json(given).completed(steps if given else ())


def _only(word: str, parts: tuple[Any, ...]) -> Any:
    if len(parts) != 1:
        raise MupscaleError(
            f"run.{word} is the only {word} of a run, and this run has {len(parts)}; write run.{word}s[i]",
            code="run.not_exactly_one",
        )
    return parts[0]


def _several(parts: Any) -> tuple[Any, ...]:
    if parts is None:
        return ()
    return tuple(parts) if isinstance(parts, Sequence) else (parts,)
