"""Studies whose losses are drawn, not trained: how often a rule calls noise worth it, by chance or because it is."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import sqrt

from mupscale.studies.agenda.grid import Point
from mupscale.studies.report.held_out import Gains, Losses

NOISES, RATES = (0.05, 0.1, 0.2, 0.4), (0.25, 0.5, 1.0, 2.0, 4.0)
SPREADS = 2 * sqrt(2)
"""Two spreads of the gain, which is a difference of two losses with a spread of 1."""
Rule = Callable[[Sequence[Losses], Sequence[Losses]], Gains]


def naive(ours: Sequence[Losses], theirs: Sequence[Losses]) -> Gains:
    """What the best point of every seed gains over its best control: the loss of its recipe, and that without noise."""
    return Gains(tuple(min(b.values()) - min(a.values()) for a, b in zip(ours, theirs, strict=True)))


def drawn(
    random: random.Random, noises: Sequence[float], count: int, gain: float, halved: bool
) -> list[dict[Point, float]]:
    """Losses of so many seeds at these noises."""
    return [
        {
            Point(rate, noise): random.gauss(10 - gain, 1)
            for noise in noises
            for rate in (random.sample(RATES, 1) if halved else RATES)
        }
        for _ in range(count)
    ]


def worth(rule: Rule, seeds: int, draws: int, gain: float = 0.0, halved: bool = False) -> float:
    """The percentage of draws in which the rule says that noise is worth it."""
    source = random.Random(seeds)
    said = 0
    for _ in range(draws):
        noisy = drawn(source, NOISES, seeds, gain, halved)
        said += rule(noisy, drawn(source, (0.0,), seeds, 0.0, halved)).worth is True
    return 100 * said / draws
