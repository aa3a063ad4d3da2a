"""One log line per finished leg: its result, the best so far, and what is left."""

from __future__ import annotations

from collections.abc import Mapping

from .agenda.halving import Leg
from .agenda.status import Equality, LegResult, Stay, study_status
from .leg import LegOutcome
from .settings import Settings


def line_of(
    settings: Settings, leg: Leg, outcome: LegOutcome, results: Mapping[str, LegResult], busy: int
) -> str:
    """One line for a leg that a worker has finished, the same on a terminal and in a log."""
    now = study_status(settings, results)
    sweep, agenda = ("wide", now.wide) if now.wide is not None else ("base", now.base)
    ladder = settings.base_ladder if now.wide is None else settings.wide_ladder
    legs = {one.key: one for point in agenda.points for one in ladder.legs(point)}
    done = {key: found for key, found in results.items() if key in legs}
    work = sum(legs[key].end - legs[key].begin for key in done)
    total = max(work, agenda.steps, 1)
    if isinstance(leg, Stay):
        return f"{_described(leg, outcome)}  ·  the base's width for as many FLOPs as the grown one"
    parts = [_described(leg, outcome), f"{sweep} sweep {100 * work // total} %, {len(done)} trials"]
    best = min(((-legs[key].end, found.loss, key) for key, found in done.items()), default=None)
    if best is not None:
        parts.append(f"best {best[1]:.5g} ({best[2]})")
    seconds = sum(float(found.details.get("seconds", 0.0)) for found in done.values())
    if work and not now.done:
        parts.append(f"about {_span(seconds / work * (total - work) / max(1, busy))} left in this sweep")
    return "  ·  ".join(parts)


def _described(leg: Leg, outcome: LegOutcome) -> str:
    if isinstance(leg, Equality):
        return f"zero noise at both widths: losses differ by {outcome.loss:.1e}"
    loss = "diverged" if outcome.diverged else f"loss {outcome.loss:.5g}"
    again = f", resumed from step {outcome.resumed_at}" if outcome.resumed_at > leg.begin else ""
    return f"{leg.key}: {loss}{again}"


def _span(seconds: float) -> str:
    """A length of time in its largest unit.

    >>> _span(5), _span(200), _span(8000)
    ('5 s', '3 min', '2.2 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
