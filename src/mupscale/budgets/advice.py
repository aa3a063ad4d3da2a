"""Stay at this size, grow, or start anew: how far each ends above or below staying, where that was measured.

Outside the measured range there is arithmetic only: FLOPs, samples per parameter, steps. Knows the law and no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import hypot
from typing import Literal

from ..arguments import wrong_number, wrong_whole
from ..errors import Fault, raise_faults
from .arms import Advice, Arm, Kind, Phase, Sureness
from .law import Law, Measured, Range, Span, Way, inside, samples, stored

SHARE = 0.25
"""Of all FLOPs: when growth on the way was measured."""
DEFAULT_WAY = "new units"


def advise(
    params: float,
    *,
    spent: float,
    budget: float,
    to: float | Sequence[float],
    like: str | None = None,
    decayed: bool = True,
    batch: int | None = None,
    context: int = 1,
) -> Advice:
    """Compare what the FLOPs that are left can buy: stay at this size, grow, or start anew.

    Differences are predicted only inside the range of measured runs, small MLPs and Llamas that double their width.
    Outside them the choice is "not measured", and what is left is arithmetic.

    Args:
        params: Parameters of the base.
        spent: FLOPs that were spent on the base; 0 if it is not trained yet.
        budget: FLOPs that are left.
        to: Parameters of the wider model, or of several to choose from.
        like: The kind of model whose measured runs count: "mlp" or "llama". Without it nothing counts as measured.
        decayed: Whether the base's schedule has ended; False for a run that is on its way.
        batch: Samples (sequences) of one step, for the number of steps.
        context: Tokens of one sample.

    Returns:
        The `choice`, how `sure` it is, and every arm that was compared, with the expected difference of its loss to
        staying where that was measured.

    Raises:
        MupscaleError: If a number cannot be used.

    >>> advice = advise(124e6, spent=2e18, budget=3e18, to=248e6, like="llama", batch=512, context=1024)
    >>> advice.choice, [(arm.kind, round(arm.samples_per_parameter, 1), arm.phases[0].steps) for arm in advice.arms]
    ('not measured', [('stay', 32.5, 7691), ('grow', 8.1, 3845), ('scratch', 8.1, 3845)])
    """
    law = stored()
    wider = tuple(to) if isinstance(to, Sequence) else (to,)
    _check(params, spent, budget, wider, like, law, batch, context)
    known = None if like is None else law.kinds[like]
    tokens = None if batch is None else batch * context
    plan = _Question(params, spent, budget, decayed and spent > 0, law, known, tokens)
    arms = (plan.stay(), *(arm for size in wider for arm in plan.wider(size)), *plan.others())
    about = "no kind of model is named: like= has those that were measured"
    source = about if known is None else f"measured on {known.about}"
    outside = tuple(dict.fromkeys(line for size in wider for line in plan.outside(size)))
    unit: Literal["per cent", "nats", ""] = "" if known is None else known.unit
    compared = [arm for arm in arms if arm.kind == "stay" or arm.between is not None]
    if {arm.kind for arm in compared} != {"stay", "grow", "scratch"}:
        return Advice("not measured", "not measured", None, arms, unit, outside, source)
    best, *rest = sorted(compared, key=_expected)
    second = next(arm for arm in rest if arm.kind != best.kind)
    return Advice(best.kind, _sureness(best, second), best, arms, unit, outside, source)


@dataclass(frozen=True)
class _Question:
    params: float
    spent: float
    budget: float
    finished: bool
    law: Law
    known: Measured | None
    batch: int | None

    def stay(self) -> Arm:
        return self._arm("stay", "", self.params, 0.0)

    def wider(self, size: float) -> Iterator[Arm]:
        """Every measured way to this size, and starting anew; the default way where none was measured."""
        ways = [way for way in self._ways(True) if not any(self._beyond(way, size / self.params))]
        for way in ways:
            if way.kind == "grow":
                yield self._measured(way, size)
        if not any(way.kind == "grow" for way in ways):
            yield self._arm("grow", DEFAULT_WAY, size, self._first)
        for way in ways:
            if way.kind == "scratch":
                yield self._measured(way, size)
        if not any(way.kind == "scratch" for way in ways):
            yield self._arm("scratch", "", size, 0.0)

    def others(self) -> Iterator[Arm]:
        """More layers and experts, where they were measured."""
        for way in self._ways(False):
            times = sum(way.times) / 2
            if not any(self._beyond(way, times)):
                yield self._measured(way, times * self.params)

    def outside(self, size: float) -> Iterator[str]:
        """What of the default way, and of starting anew, lies outside the measured range."""
        for way in self._ways(True):
            if way.name == DEFAULT_WAY or way.kind == "scratch":
                yield from self._beyond(way, size / self.params)

    @property
    def _first(self) -> float:
        """FLOPs to spend at the base's size before growing: none, or up to the share that was measured."""
        return 0.0 if self.finished else max(0.0, SHARE * (self.spent + self.budget) - self.spent)

    def _place(self, way: Way) -> tuple[float, float]:
        """Samples left per parameter of the base, and the share of FLOPs that it has had, when this way begins."""
        first = self._first if way.kind == "grow" else 0.0
        left = samples(self.params, self.budget - first) / self.params
        return left, (self.spent + first) / (self.spent + self.budget)

    def _ways(self, width: bool) -> Iterator[Way]:
        if self.known is not None:
            yield from (way for way in self.known.ways if way.width is width)

    def _beyond(self, way: Way, times: float) -> Iterator[str]:
        assert self.known is not None
        yield from _beyond("parameters of the base", self.params, self.known.params)
        name = "a new model" if way.kind == "scratch" else way.name
        yield from _beyond(f"{name}: parameters over the base's", times, way.times)
        span = self._span(way)
        if span is None:
            yield f"{name}: never measured " + ("on a finished base" if self.finished else "on the way")
            return
        left, share = self._place(way)
        yield from _beyond(f"{name}: samples left per parameter of the base", left, span.samples)
        yield from _beyond(f"{name}: share of all FLOPs that the base has had", share, span.share)

    def _span(self, way: Way) -> Span | None:
        """Where a way was measured. A new model beside a run on its way was not; its law holds there (`tests/budgets`)."""
        if self.finished or way.kind == "grow" or not self.spent:
            return way.finished if self.finished else way.going
        if way.finished is None or way.going is None:
            return None
        return Span(way.going.samples, (way.going.share[0], way.finished.share[1]))

    def _measured(self, way: Way, size: float) -> Arm:
        assert self.known is not None
        expected, shown = self.law.difference(way, *self._place(way)), self.known.shown
        between = None if way.within is None else (shown(expected - way.within), shown(expected + way.within))
        name, first = (way.name, self._first) if way.kind == "grow" else ("", 0.0)
        return self._arm(way.kind, name, size, first, shown(expected), between, way.peak)

    def _arm(
        self,
        kind: Kind,
        name: str,
        size: float,
        first: float,
        difference: float | None = None,
        between: Range | None = None,
        peak: Range | None = None,
    ) -> Arm:
        phases = (self._phase(self.params, first),) * (first > 0) + (self._phase(size, self.budget - first),)
        return Arm(kind, name, size, phases, difference, between, peak)

    def _phase(self, params: float, flops: float) -> Phase:
        seen = samples(params, flops)
        return Phase(params, flops, seen, None if self.batch is None else round(seen / self.batch))


def _expected(arm: Arm) -> float:
    return arm.difference or 0.0


def _sureness(best: Arm, second: Arm) -> Sureness:
    """Whether the best arm is ahead of the best one of another kind by more than the interval of their difference."""
    ahead = _expected(second) - _expected(best)
    within = hypot(
        *((arm.between[1] - arm.between[0]) / 2 for arm in (best, second) if arm.between is not None)
    )
    return "sure" if ahead > within else "leaning" if 2 * ahead > within else "open"


def _beyond(what: str, value: float, measured: Range) -> Iterator[str]:
    if not inside(value, measured):
        low, high = (f"{edge:.3g}" for edge in measured)
        yield f"{what}: {value:.3g}, measured " + (f"at {low}" if low == high else f"from {low} to {high}")


def _check(
    params: float,
    spent: float,
    budget: float,
    wider: tuple[float, ...],
    like: str | None,
    law: Law,
    batch: int | None,
    context: int,
) -> None:
    claim = "there is nothing to compare"
    faults = wrong_number("params", params, "pass the number of parameters of the base", above=True)
    faults += wrong_number("spent", spent, "pass FLOPs; 0 if the base is not trained yet")
    faults += wrong_number("budget", budget, "pass the FLOPs that are left", above=True)
    for size in wider:
        faults += wrong_number("to", size, "pass the number of parameters of the wider model", above=True)
    if not wider:
        faults.append(
            Fault("advice.no_wider_size", "to", "no size", "pass the number of parameters of the wider model")
        )
    if like is not None and (not isinstance(like, str) or like not in law.kinds):
        remedy = f"write one of {', '.join(sorted(law.kinds))}, or leave it out"
        faults.append(Fault("advice.unknown_kind", "like", f"nothing was measured on {like!r}", remedy))
    faults += [] if batch is None else wrong_whole("batch", batch, least=1)
    faults += wrong_whole("context", context, least=1)
    raise_faults(claim, faults)
    for size in wider:
        if size <= params:
            what = f"{size:,} parameters, not more than the base's {params:,}"
            faults.append(
                Fault(
                    "advice.not_wider_than_base", "to", what, f"write to={2 * params:.4g} for twice as many"
                )
            )
    raise_faults(claim, faults)
