"""Measure one hypothesis on two models in float64: fill the wide model, compare the loss, then every gradient."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

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
    Identity,
    Loss,
    compare_buffers,
    compare_gradients,
    gradients,
)
from ...tensors.differences import loss_gap
from ..draft import Draft
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
        self.compare = Comparison(_ratios(made))
        self.buffers: dict[str, Tensor] = {}
        self.value, self.grads, self.trace, self.last = self._evaluated(base, self.buffers)
        if not bool(self.value.isfinite()):
            raise MupscaleError(
                f"the loss of the base model is {float(self.value)}, expected a finite number; plans are found by "
                "comparing losses, so check the batch",
                code="search.loss_not_finite",
            )
        if not loss_gap(float(self.value), float(gradients(base, loss)[0])) <= GRADIENT_TOLERANCE:
            raise MupscaleError(DRAWS, code="search.loss_not_repeatable")

    def measure(self, trial: Draft) -> TrialOutcome:
        """How far a draft gets."""
        try:
            plan = trial.plan()
            direction = Direction(plan)
        except MupscaleError as error:
            return TrialOutcome((-1.0, 0), tuple(f.where for f in error.faults), str(error), error=error)
        fill_model_(self.wide, self.base, direction, in_place=True)
        buffers: dict[str, Tensor] = {}
        value, grads, trace, _ = self._evaluated(self.wide, buffers)
        gap = loss_gap(float(self.value), float(value))
        aligned = Alignment(self.trace, trace, self.compare)
        if not self._agrees(value):
            where = aligned.first(self.last)
            path = where.call.path if where.call is not None else ""
            says = f"the loss differs by {gap:.1e}"
            names: tuple[str, ...] = (pattern_of(path),) if path else ()
            score: tuple[float, int] = (float(where.index), 0)
            return TrialOutcome(score, names, says, trial=trial, deviation=where)
        identity = compare_gradients(self.grads, grads, plan)
        state = compare_buffers(self.buffers, buffers, plan)
        wrong = [n for n, e in {**identity.errors, **state}.items() if not e <= GRADIENT_TOLERANCE]
        if not wrong:
            return TrialOutcome((float("inf"), 0), (), "", plan, identity, gap, trial)
        name, worst = identity.worst
        says = f"the loss agrees, the gradient of {name} is off by {worst:.1e}"
        if worst <= GRADIENT_TOLERANCE:
            name, worst = wrong[0], state[wrong[0]]
            says = f"loss and gradients agree, and forward leaves {name} off by {worst:.1e}"
        names = tuple(dict.fromkeys(map(pattern_of, wrong)))
        score = (float("inf"), -len(wrong))
        return TrialOutcome(score, names, says, trial=trial, deviation=aligned.harmless(self.last))

    def _evaluated(
        self, model: nn.Module, after: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor | None], Trace, int]:
        """The loss, the gradients (of the wide model only if the loss agrees), all calls, and which made the loss."""
        found: list[tuple[Trace, int]] = []

        def recorded(model: nn.Module) -> Tensor:
            value, trace = traced(model, lambda: self.loss(model))
            ends = [i for i, call in enumerate(trace.calls) if any(t is value for t in call.outputs)]
            found.append((trace, ends[-1] if ends else len(trace.calls) - 1))
            return value

        wanted = None if model is self.base else self._agrees
        value, grads = gradients(model, recorded, wanted=wanted, after=after)
        return value, grads, *found[-1]

    def _agrees(self, value: Tensor) -> bool:
        # Not `gap > tolerance`: a loss that is not a number must count as different.
        return loss_gap(float(self.value), float(value)) <= GRADIENT_TOLERANCE


def _ratios(made: Draft) -> set[Fraction]:
    """How many copies the axes of a draft have."""
    pairs = ((e.base_shape[d], e.wide_shape[d]) for e in made.entries.values() for d in e.growing)
    return {Fraction(b, a) for a, b in pairs if a and b > a}
