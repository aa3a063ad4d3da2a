"""Ways to spend a budget, and advice between them as a value that prints itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..text import columns, size

Kind = Literal["stay", "grow", "scratch"]
Choice = Literal["stay", "grow", "scratch", "not measured"]
Sureness = Literal["sure", "leaning", "open", "not measured"]

BYTES = 16
"""Of a parameter in float32 with AdamW: the weight, its gradient and two moments."""
WRITE: Mapping[str, str] = {
    "new units": "mu.upscale(run, make_wide), then mu.rewarm_(wide, mu.GrowthSchedule(steps), empty_state=True); or mupscale "
    "upscale ./base ./wide -k 2",
    "copies": 'mu.upscale(run, make_wide, by="copies"), or mupscale upscale ./base ./wide -k 2 --by copies',
    "more layers": "mupscale upscale ./base ./deep --layers N, with twice the layers",
    "experts": "mupscale upscale ./base ./wide --experts 8 --top-k 2 --expert-ffn N, half of the dense width",
}
"""What makes a growth, by its way."""


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
    """One way to spend the budget. The difference is None where nothing like it was measured."""

    kind: Kind
    way: str
    """How it grows: new units, copies, more layers or experts; "" for the other kinds."""
    params: float
    """Of the model that is trained last; with more layers or experts, those that a sample passes."""
    phases: tuple[Phase, ...]
    difference: float | None = None
    """Expected loss at the end minus that of staying, in the unit of the advice; below zero it ends lower."""
    between: tuple[float, float] | None = None
    """The interval of the difference; None if it was measured once, so that nothing is known of its error."""
    peak: tuple[float, float] | None = None
    """Peaks of the rate over that of the base, in the runs that were measured."""

    @property
    def samples_per_parameter(self) -> float:
        """Samples (tokens) of this budget per parameter of the last size."""
        return sum(phase.samples for phase in self.phases) / self.params

    @property
    def memory(self) -> int | None:
        """Bytes of weights, gradients and AdamW's two moments in float32; None where the total is not known here."""
        return None if self.way in ("more layers", "experts") else round(BYTES * self.params)

    @property
    def after(self) -> float:
        """FLOPs to spend at the base's size before growing."""
        return self.phases[0].flops if len(self.phases) > 1 else 0.0

    @property
    def name(self) -> str:
        if self.kind != "grow":
            return f"{self.kind} {self.params:,.0f}"
        when = f"after {self.after:.3g} FLOPs" if self.after else "now"
        return f"grow to {self.params:,.0f} by {self.way} {when}"


@dataclass(frozen=True)
class Advice:
    """What to do with a budget, how sure that is, and every arm that was compared."""

    choice: Choice
    sure: Sureness
    arm: Arm | None
    """The chosen arm: its way, its size, its phases and its expected difference to staying."""
    arms: tuple[Arm, ...]
    unit: Literal["per cent", "nats", ""]
    """What differences are in."""
    outside: tuple[str, ...]
    """What lies outside the measured range."""
    source: str
    """Which runs were measured."""

    @property
    def after(self) -> float | None:
        """FLOPs to spend at the base's size before growing; 0 is now, None is never."""
        return self.arm.after if self.arm is not None and self.arm.kind == "grow" else None

    def __str__(self) -> str:
        head = self.choice if self.arm is None else f"{self.arm.name} ({self.sure})"
        rows = [("", "loss against staying", "", "memory", "samples per parameter", "phases")]
        for arm in self.arms:
            memory = "" if arm.memory is None else size(arm.memory)
            phases = " then ".join(map(_phase, arm.phases))
            rows.append((arm.name, *self._difference(arm), memory, _plain(arm.samples_per_parameter), phases))
        lines = [head, columns(rows, right=(1, 3, 4))]
        if self.arm is not None and self.arm.way in WRITE:
            lines.append(f"  {self.arm.way}: {WRITE[self.arm.way]}")
        if self.arm is not None and self.arm.peak is not None:
            again = ", warmed up again" if self.arm.kind == "grow" else ""
            lines.append(f"  peak rate: {_span(self.arm.peak)} times the base's{again}")
        if self.arm is None:
            lines.append("  which of them ends lowest is not known; the rest is arithmetic")
        lines += [f"  {line}" for line in self.outside]
        return "\n".join([*lines, f"  {self.source}"])

    def _difference(self, arm: Arm) -> tuple[str, str]:
        unit = "%" if self.unit == "per cent" else self.unit
        if arm.kind == "stay" or arm.difference is None:
            return "" if arm.kind == "stay" else "not measured", ""
        digits = ".1f" if self.unit == "per cent" else ".3f"
        if arm.between is None:
            return f"{arm.difference:+{digits}} {unit}", "measured once"
        low, high = arm.between
        return f"{arm.difference:+{digits}} {unit}", f"{low:+{digits}} to {high:+{digits}}"


def _phase(phase: Phase) -> str:
    steps = "" if phase.steps is None else f", {phase.steps:,} steps"
    return f"{phase.flops:.3g} FLOPs at {phase.params:,.0f}: {phase.samples:.3g} samples{steps}"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _span(values: tuple[float, float]) -> str:
    low, high = values
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
