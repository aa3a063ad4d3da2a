"""Ways to spend a budget, and advice between them as a value that prints itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..text import columns

Kind = Literal["stay", "grow", "scratch"]
Choice = Literal["stay", "grow", "scratch", "not measured at this size"]
Sureness = Literal["sure", "leaning", "open", "not measured"]


@dataclass(frozen=True)
class Phase:
    """Training at one size."""

    params: float
    flops: float
    samples: float
    steps: int | None
    """Known where the batch is."""


@dataclass(frozen=True)
class Arm:
    """One way to spend the budget; the loss is None where nothing like it was measured."""

    kind: Kind
    params: float
    phases: tuple[Phase, ...]
    loss: float | None = None
    between: tuple[float, float] | None = None
    """The interval of the loss: twice the error of the law to both sides."""

    @property
    def samples_per_parameter(self) -> float:
        """Samples (tokens) of this budget per parameter of the last size."""
        return sum(phase.samples for phase in self.phases) / self.params

    @property
    def name(self) -> str:
        if self.kind != "grow":
            return f"{self.kind} {self.params:,.0f}"
        first = self.phases[0].flops if len(self.phases) > 1 else 0.0
        return f"grow to {self.params:,.0f} {f'after {first:.3g} FLOPs' if first else 'now'}"


@dataclass(frozen=True)
class Advice:
    """What to do with a budget, how sure that is, and every arm that was compared."""

    choice: Choice
    sure: Sureness
    arm: Arm | None
    """The chosen arm: its size, its phases and its expected loss."""
    arms: tuple[Arm, ...]
    noise: tuple[float, float] | None
    """Sizes t of SignalNoise that were best in grown runs; None unless the choice is to grow."""
    peak: tuple[float, float] | None
    """Peak rates that were best there, over the base's peak, both written at the reference."""
    outside: tuple[str, ...]
    """What lies outside the measured range."""
    source: str
    """Which runs the law was fitted to."""

    @property
    def after(self) -> float | None:
        """FLOPs to spend at the base's size before growing; 0 is now, None is never."""
        if self.arm is None or self.arm.kind != "grow":
            return None
        return self.arm.phases[0].flops if len(self.arm.phases) > 1 else 0.0

    def __str__(self) -> str:
        head = self.choice if self.arm is None else f"{self.arm.name} ({self.sure})"
        rows = [("", "expected loss", "", "samples per parameter", "phases")]
        for arm in self.arms:
            loss = "not measured" if arm.loss is None else f"{arm.loss:.4g}"
            between = "" if arm.between is None else f"{arm.between[0]:.3g} to {arm.between[1]:.3g}"
            rows.append(
                (
                    arm.name,
                    loss,
                    between,
                    _plain(arm.samples_per_parameter),
                    " then ".join(map(_phase, arm.phases)),
                )
            )
        lines = [head, columns(rows, right=(1, 3))]
        if self.noise is not None and self.peak is not None:
            lines.append(
                f"  noise: SignalNoise(t), best at t = {_span(self.noise)}; peak rate: {_span(self.peak)} times the base's, "
                "warmed up again if the base's schedule has ended"
            )
        lines += [f"  {line}" for line in self.outside]
        return "\n".join([*lines, f"  measured on {self.source}"])


def _phase(phase: Phase) -> str:
    steps = "" if phase.steps is None else f", {phase.steps:,} steps"
    return f"{phase.flops:.3g} FLOPs at {phase.params:,.0f}: {phase.samples:.3g} samples{steps}"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _span(values: tuple[float, float]) -> str:
    low, high = values
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
