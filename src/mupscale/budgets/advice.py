"""Stay at this size, grow, or start anew: the expected loss of each for one budget, where it was measured.

Outside the measured sizes there is arithmetic only: FLOPs, samples per parameter, steps. Knows the law and no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, hypot, log

from ..arguments import wrong_number, wrong_whole
from ..errors import Fault, raise_faults
from .arms import Advice, Arm, Kind, Phase, Sureness
from .law import Finished, GrowthWorth, Law, fit, samples, stored

REACH = 1.05
"""How far beyond the measured sizes the law is used: people write 124e6 for 124,439,808, and no more than that is meant."""
SURE, LEANING = 2.0, 1.0
"""By how many errors of a difference the best arm is ahead of the best arm of another kind."""


def advise(
    params: float,
    *,
    spent: float,
    budget: float,
    to: float | Sequence[float],
    losses: Iterable[tuple[float, float, float]] | None = None,
    decayed: bool = True,
    batch: int | None = None,
    context: int = 1,
) -> Advice:
    """Compare what the FLOPs that are left can buy: stay at this size, grow, or start anew.

    Losses are predicted only for sizes and budgets between those of measured runs: the stored ones (small MLPs), or
    yours. Outside them the choice is "not measured at this size", and what is left is arithmetic.

    Args:
        params: Parameters of the base.
        spent: FLOPs that were spent on the base; 0 if it is not trained yet.
        budget: FLOPs that are left.
        to: Parameters of the wider model, or of several to choose from.
        losses: Your own finished runs from scratch as (parameters, FLOPs, held-out loss), 6 or more of at least 3 sizes.
            What growing is worth still comes from the stored runs.
        decayed: Whether the base's schedule has ended; False for a run that is on its way.
        batch: Samples (sequences) of one step, for the number of steps.
        context: Tokens of one sample.

    Returns:
        The `choice`, how `sure` it is, and every arm that was compared, with its expected loss where that was measured.

    Raises:
        MupscaleError: If a number cannot be used, or the losses are too few to fit a law.

    >>> advice = advise(124e6, spent=2e18, budget=3e18, to=248e6, batch=512, context=1024)
    >>> advice.choice, [(arm.kind, round(arm.samples_per_parameter, 1), arm.phases[0].steps) for arm in advice.arms]
    ('not measured at this size', [('stay', 32.5, 7691), ('grow', 8.1, 3845), ('scratch', 8.1, 3845)])
    """
    wider = tuple(to) if isinstance(to, Sequence) else (to,)
    _check(params, spent, budget, wider, batch, context)
    known = stored()
    law, source, own = known.law, f"{known.about}; for other models or data pass losses", losses is not None
    if losses is not None:
        law, source = fit(_finished(losses)), "your losses; what growing is worth, on " + known.about
    plan = _Question(
        params,
        spent,
        budget,
        decayed and spent > 0,
        law,
        known.growth,
        None if batch is None else batch * context,
    )
    arms = tuple(arm for size in (params, *wider) for arm in plan.arms(size))
    outside = tuple(dict.fromkeys(line for arm in arms for line in plan.outside(arm.kind, arm.params)))
    measured = sorted((arm for arm in arms if arm.loss is not None), key=lambda arm: arm.loss or 0.0)
    if {arm.kind for arm in measured} != {"stay", "grow", "scratch"}:
        return Advice("not measured at this size", "not measured", None, arms, None, None, outside, source)
    best = measured[0]
    error = max(known.growth.contrast, hypot(law.spread, law.spread)) if own else known.growth.contrast
    sure = _sureness(best, next(arm for arm in measured if arm.kind != best.kind), error)
    if own and sure == "sure":
        sure = "leaning"
    grows = best.kind == "grow"
    noise, peak = (known.growth.noise, known.growth.peak) if grows else (None, None)
    return Advice(best.kind, sure, best, arms, noise, peak, outside, source)


@dataclass(frozen=True)
class _Question:
    params: float
    spent: float
    budget: float
    decayed: bool
    law: Law
    growth: GrowthWorth
    batch: int | None

    def arms(self, size: float) -> Iterator[Arm]:
        if size == self.params:
            loss = self.growth.gone_on(self.law, (size, self.spent), self.budget, decayed=self.decayed)
            spread = self.growth.stay_spread if self.decayed else 0.0
            yield self._arm("stay", size, (self._phase(size, self.budget),), loss, spread)
            return
        for first in self._moments():
            base = (self.params, self.spent + first)
            loss = self.growth.grown(self.law, base, size, self.budget - first)
            phases = (self._phase(self.params, first),) * (first > 0) + (
                self._phase(size, self.budget - first),
            )
            yield self._arm("grow", size, phases, loss, self.growth.grown_spread)
        scratch = self.law.loss(size, self.budget)
        yield self._arm("scratch", size, (self._phase(size, self.budget),), scratch, 0.0)

    def outside(self, kind: Kind, size: float) -> Iterator[str]:
        """What of an arm lies outside the measured range."""
        law, growth = self.law, self.growth
        yield from _beyond("parameters", size, law.params)
        yield from _beyond("FLOPs left", self.budget, law.flops)
        if kind == "scratch":
            return
        if self.spent:
            yield from _beyond("FLOPs spent", self.spent, law.flops)
        if self.decayed:
            yield from _beyond("FLOPs left over FLOPs spent", self.budget / self.spent, growth.more)
        if kind == "grow":
            yield from _beyond("parameters", self.params, law.params)
            yield from _beyond("parameters over the base's", size / self.params, (1.0, growth.times))
            if not self.decayed:
                share = self.spent / (self.spent + self.budget)
                yield from _beyond(
                    "share of FLOPs before growth", share, (0.0, max(growth.shares, default=0.0))
                )

    def _moments(self) -> Iterator[float]:
        """FLOPs to spend at the base's size before growing."""
        if self.spent:
            yield 0.0
        if not self.decayed:
            total = self.spent + self.budget
            yield from (
                share * total - self.spent for share in self.growth.shares if share * total > self.spent
            )

    def _phase(self, params: float, flops: float) -> Phase:
        seen = samples(params, flops)
        return Phase(params, flops, seen, None if self.batch is None else round(seen / self.batch))

    def _arm(self, kind: Kind, size: float, phases: tuple[Phase, ...], loss: float, spread: float) -> Arm:
        if any(self.outside(kind, size)):
            return Arm(kind, size, phases)
        spread = max(spread, self.law.spread)
        between = loss * exp(-SURE * spread), loss * exp(SURE * spread)
        return Arm(kind, size, phases, loss, between)


def _sureness(best: Arm, second: Arm, error: float) -> Sureness:
    assert best.loss is not None
    assert second.loss is not None
    ahead = log(second.loss / best.loss)
    return "sure" if ahead > SURE * error else "leaning" if ahead > LEANING * error else "open"


def _beyond(what: str, value: float, measured: tuple[float, float]) -> Iterator[str]:
    low, high = measured
    if not low / REACH <= value <= high * REACH:
        known = f"measured from {low:,.6g} to {high:,.6g}" if high else "never measured"
        yield f"{what}: {value:,.6g}, {known}"


def _finished(losses: Iterable[tuple[float, float, float]]) -> list[Finished]:
    runs = list(losses)
    faults = [
        Fault(
            "advice.not_a_finished_run",
            f"losses[{i}]",
            f"it is {run!r}, expected three numbers above 0",
            "write (parameters, FLOPs, loss)",
        )
        for i, run in enumerate(runs)
        if not isinstance(run, Sequence)
        or len(run) != 3
        or any(wrong_number("", v, "", above=True) for v in run)
    ]
    raise_faults("these are not losses of runs", faults)
    return [Finished(*map(float, run)) for run in runs]


def _check(
    params: float, spent: float, budget: float, wider: tuple[float, ...], batch: int | None, context: int
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
