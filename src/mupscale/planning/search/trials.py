"""Measure one hypothesis on two models in float64: fill the wide model, compare the loss, then every gradient."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import isfinite

from torch import Tensor, nn

from ...errors import MupscaleError
from ...models.calls import Trace, traced
from ...models.names import pattern_of
from ...plans.direction import Direction
from ...plans.plan import Plan
from ...plans.wide_model import fill_model_
from ...proofs.identity import (
    DRAWS,
    GRADIENT_TOLERANCE,
    Compared,
    Evaluated,
    Identity,
    Loss,
    evaluated,
)
from ...tensors.differences import loss_gap
from ..draft import Draft
from ..facts.padded_norms import centred_sizes
from .first_wrong_call import Alignment, Deviation
from .up_to_copies import Comparison


@dataclass(frozen=True)
class TrialOutcome:
    """How far one choice got."""

    score: tuple[float, int]
    """Larger is better: calls that agree (infinite if the loss does), then minus the number of wrong gradients."""
    where: tuple[str, ...]
    """Module or tensor names (as patterns) at fault."""
    says: str
    """What failed."""
    plan: Plan | None = None
    identity: Identity | None = None
    gap: float = 0.0
    trial: Draft | None = None
    deviation: Deviation | None = None
    error: MupscaleError | None = None
    """Why no plan could be built from it."""


class Trials:
    """A base and a wide model on which drafts are tried."""

    def __init__(self, made: Draft, base: nn.Module, wide: nn.Module, loss: Loss) -> None:
        self.base, self.wide, self.loss = base, wide, loss
        self.compare = Comparison(_ratios(made), bool(centred_sizes(made)))
        self.found, self.trace, self.last = self._evaluated(base)
        if not isfinite(self.found.value):
            raise MupscaleError(
                f"the loss of the base model is {self.found.value}, expected a finite number; plans are found by "
                "comparing losses, so check the batch",
                code="search.loss_not_finite",
            )
        if not self._agrees(evaluated(base, loss).value):
            raise MupscaleError(DRAWS, code="search.loss_not_repeatable")

    def measure(self, trial: Draft) -> TrialOutcome:
        """How far a draft gets."""
        try:
            plan = trial.plan()
            direction = Direction(plan)
        except MupscaleError as error:
            return TrialOutcome((-1.0, 0), tuple(f.where for f in error.faults), str(error), error=error)
        fill_model_(self.wide, self.base, direction, in_place=True)
        wide, trace, _ = self._evaluated(self.wide)
        found = Compared(self.found, wide, plan)
        gap = found.gap
        aligned = Alignment(self.trace, trace, self.compare)
        if not found.agrees:
            where = aligned.first(self.last)
            path = where.call.path if where.call is not None else ""
            says = f"the loss differs by {gap:.1e}"
            names: tuple[str, ...] = (pattern_of(path),) if path else ()
            score: tuple[float, int] = (float(where.index), 0)
            return TrialOutcome(score, names, says, trial=trial, deviation=where)
        identity, wrong = found.identity, found.wrong
        if not wrong:
            return TrialOutcome((float("inf"), 0), (), "", plan, identity, gap, trial)
        name, worst = identity.worst
        says = f"the loss agrees, the gradient of {name} is off by {worst:.1e}"
        if worst <= GRADIENT_TOLERANCE:
            name, worst = wrong[0], found.buffers[wrong[0]]
            says = f"loss and gradients agree, and forward leaves {name} off by {worst:.1e}"
        names = tuple(dict.fromkeys(map(pattern_of, wrong)))
        score = (float("inf"), -len(wrong))
        return TrialOutcome(score, names, says, trial=trial, deviation=aligned.harmless(self.last))

    def _evaluated(self, model: nn.Module) -> tuple[Evaluated, Trace, int]:
        """The loss, the gradients (of the wide model only if the loss agrees), all calls, and which made the loss."""
        seen: list[tuple[Trace, int]] = []

        def recorded(model: nn.Module) -> Tensor:
            value, trace = traced(model, lambda: self.loss(model))
            ends = [i for i, call in enumerate(trace.calls) if any(t is value for t in call.outputs)]
            seen.append((trace, ends[-1] if ends else len(trace.calls) - 1))
            return value

        if model is self.base:
            return evaluated(model, recorded), *seen[-1]
        return evaluated(model, recorded, wanted=self._agrees), *seen[-1]

    def _agrees(self, value: float) -> bool:
        return loss_gap(self.found.value, value) <= GRADIENT_TOLERANCE


def _ratios(made: Draft) -> set[Fraction]:
    """How many copies the axes of a draft have."""
    pairs = ((e.base_shape[d], e.wide_shape[d]) for e in made.entries.values() for d in e.growing)
    return {Fraction(b, a) for a, b in pairs if a and b > a}
