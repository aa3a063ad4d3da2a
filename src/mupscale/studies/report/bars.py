"""The cost of a study next to the runs it serves: scratch, base, tuning, upscaled; in FLOPs, or in steps if not counted.

Accounts come from `budgets/cost.py`, FLOPs of a step from the study's settings; this module fills in what a study did.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ...budgets.cost import ComparedRuns, Cost
from ..agenda.status import EQUAL_STEPS
from .known import Known


@dataclass(frozen=True)
class Bar:
    """A run, or all of tuning: its cost at the base's width, and at k times that width."""

    name: str
    narrow: Fraction
    wide: Fraction

    @property
    def total(self) -> Fraction:
        return self.narrow + self.wide


@dataclass(frozen=True)
class Bars:
    """The cost of all runs, in one unit."""

    unit: str
    bars: tuple[Bar, ...]
    why_steps: str = ""
    """Why FLOPs were not counted; empty when they were."""
    case: ComparedRuns | None = None
    cost: Cost | None = None
    """What `mupscale cost` says of the same case, tuning as it was done."""


def steps_taken(known: Known) -> tuple[int, int]:
    """Steps at the two widths, of the legs that count; a run that diverged is charged in full, as in recipes."""
    return _steps(known, full=False)


def steps_in_full(known: Known) -> tuple[int, int]:
    """Steps at the two widths if every point that was tried had gone to its end."""
    return _steps(known, full=True)


def _steps(known: Known, full: bool) -> tuple[int, int]:
    at_base = known.settings.control_at_base
    narrow = wide = min(EQUAL_STEPS, known.settings.after) if at_base and known.equality is not None else 0
    for sweep in (known.base, known.wide):
        for tried in sweep.tried if sweep is not None else ():
            steps = tried.goal if full else tried.steps
            if tried.point.noise is None or (tried.point.is_control and at_base):
                narrow += steps
            else:
                wide += steps
    narrow += sum(leg.end for leg, result in known.stay.items() if result is not None)
    return narrow, wide


def bars_of(known: Known) -> Bars:
    """The bars of a study, in FLOPs where its proxy could count them."""
    settings = known.settings
    done, full = steps_taken(known), steps_in_full(known)
    runs = (
        ("from scratch", (0, settings.after)),
        ("base", (settings.steps, 0)),
        ("tuning, as done", done),
        ("tuning, full grid", full),
        ("upscaled", (0, settings.after)),
    )
    if settings.flops is None:
        plain = tuple(Bar(name, Fraction(a), Fraction(b)) for name, (a, b) in runs)
        why = "the proxy's file has no inputs() on which a step could be counted"
        return Bars("steps", plain, why_steps=why)
    narrow, wide = settings.flops
    bars = tuple(Bar(name, Fraction(a * narrow), Fraction(b * wide)) for name, (a, b) in runs)
    case = ComparedRuns(
        width=settings.width,
        k=settings.k,
        proxy=settings.width,
        steps=settings.after,
        base_steps=settings.steps,
        trials=bars[2].total / (settings.after * wide),
    )
    return Bars(
        "FLOPs", bars, case=case, cost=case.cost(lambda width: narrow if width == settings.width else wide)
    )
