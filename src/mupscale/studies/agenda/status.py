"""The status of a study: both sweeps in order, with the theorem measured between them and the runs that do not grow last.

A pure function from settings and results to the open legs, so workers that see the same results agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import Fault, MupscaleError
from ...rules.schemes import STUDIED
from ..settings import Settings
from .grid import Point
from .halving import Agenda, Ladder, Leg, Results, grid_agenda


@dataclass(frozen=True)
class LegResult:
    """The result of the trial that counts for a leg."""

    loss: float
    number: int
    details: Mapping[str, Any]
    """What its worker recorded: steps, seconds, the step it resumed from, its curve."""
    begin: int = 0
    """The step at which the leg begins."""

    @property
    def resumed(self) -> bool:
        """Whether its worker continued what another one had begun."""
        return int(self.details.get("resumed_at", 0)) > self.begin


EQUAL_STEPS = 8
EQUALITY = "zero noise is the base"


class Equality(Leg):
    """A few steps of zero noise at both widths, once per study: it measures the theorem."""

    @property
    def key(self) -> str:
        return EQUALITY


GOES_ON, FROM_SCRATCH = "going on", "from scratch"


@dataclass(frozen=True)
class Stay(Leg):
    """A run at the base's width for as many FLOPs as the grown one: it shows what not growing gives.

    Going on, the best base is continued at the rate that is best without noise. From scratch, one schedule spans all
    FLOPs, those of the base too, at the base's best rate.

    >>> Stay(Point(0.1), 0, 400, FROM_SCRATCH).key
    'stay, from scratch to step 400'
    """

    how: str = GOES_ON

    @property
    def key(self) -> str:
        return f"stay, {self.how} to step {self.end}"


def stays(settings: Settings, base: Agenda, wide: Agenda) -> tuple[Stay, ...]:
    """The runs that do not grow, of a study whose sweeps are done; none where FLOPs are not known."""
    if settings.stay_steps is None or base.best is None:
        return ()
    controls = {point: loss for point, loss in wide.top.items() if point.is_control}
    rate = min(controls, key=controls.__getitem__).lr if controls else base.best.lr
    return (
        Stay(Point(rate, 0.0), 0, settings.stay_steps, GOES_ON),
        Stay(base.best, 0, settings.steps + settings.stay_steps, FROM_SCRATCH),
    )


@dataclass(frozen=True)
class StudyStatus:
    """Which legs of a study are open, and what its sweeps have found."""

    base: Agenda
    wide: Agenda | None
    open: tuple[Leg, ...]

    @property
    def done(self) -> bool:
        return self.wide is not None and not self.open


def base_agenda(settings: Settings, results: Results) -> Agenda:
    """The first sweep: the learning rate of the proxy base.

    >>> [leg.key for leg in base_agenda(Settings(width=8, k=2, steps=40, lrs=[0.1]), {}).open]
    ['base-lr=0.1 to step 10']
    """
    if settings.lrs is None:
        raise MupscaleError(
            "lrs is None: the default follows from the optimizer; call for_proxy(proxy) first",
            code="study.rates_not_chosen",
        )
    return _agenda(settings, settings.lrs, (None,), results, settings.base_ladder)


def wide_agenda(settings: Settings, best: Point, results: Results) -> Agenda:
    """The second sweep: noise and learning rate of the upscaled proxy, zero noise always among them.

    By new units it is a sweep over rates, and zero noise, the base that is trained on, is never its best point.
    """
    rates = tuple(best.lr * factor for factor in settings.factors)
    noises = (0.0, *dict.fromkeys(sorted(settings.sizes)))
    return _agenda(settings, rates, noises, results, settings.wide_ladder)


def _agenda(
    settings: Settings,
    lrs: Sequence[float],
    noises: Sequence[float | None],
    results: Results,
    ladder: Ladder,
) -> Agenda:
    largest = STUDIED[settings.scheme].largest
    growing = settings.by_units and 0.0 in noises
    return grid_agenda(lrs, noises, results, ladder, settings.extend, largest, growing)


def study_status(settings: Settings, results: Mapping[str, LegResult]) -> StudyStatus:
    """What is open now, as a function of the results."""
    losses = {key: done.loss for key, done in results.items()}
    base = base_agenda(settings, losses)
    if base.open:
        return StudyStatus(base, None, base.open)
    if base.best is None:
        raise MupscaleError(
            "every run of the proxy base diverged: give lower learning rates",
            [Fault("study.base_diverged", f"lr = {p.lr:g}", "diverged") for p in base.points],
        )
    equality = Equality(Point(base.best.lr, 0.0), 0, min(EQUAL_STEPS, settings.after))
    if settings.control_at_base and equality.key not in losses:
        return StudyStatus(base, None, (equality,))
    wide = wide_agenda(settings, base.best, losses)
    if not wide.open and wide.best is None:
        raise MupscaleError(
            "every run of the upscaled proxy diverged, zero noise too: give lower factors",
            code="study.wide_diverged",
        )
    missing = () if wide.open else tuple(leg for leg in stays(settings, base, wide) if leg.key not in losses)
    return StudyStatus(base, wide, wide.open or missing)
