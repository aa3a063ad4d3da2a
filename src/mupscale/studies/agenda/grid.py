"""The points of a sweep: a grid with constant ratios, which is extended beyond an edge when the best point lies on it.

Pure functions of numbers and results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf


@dataclass(frozen=True, order=True)
class Point:
    """One choice of reference constants; without noise it is a run of the proxy base.

    >>> Point(0.01).name, Point(0.01, 0.2).name
    ('base-lr=0.01', 'wide-noise=0.2-lr=0.01')
    """

    lr: float
    noise: float | None = None

    @property
    def name(self) -> str:
        """Its name in the study and in the folder."""
        if self.noise is None:
            return f"base-lr={self.lr:.8g}"
        return f"wide-noise={self.noise:.8g}-lr={self.lr:.8g}"

    @property
    def is_control(self) -> bool:
        """Whether it has zero noise, that is, continues the base unchanged."""
        return self.noise == 0


def tidy(value: float) -> float:
    """Round to the eight digits that names have, so that equal names mean equal numbers.

    >>> tidy(0.1 * 2 * 0.5 / 3 * 3)
    0.1
    """
    return float(f"{value:.8g}")


def points_of(lrs: Iterable[float], noises: Iterable[float | None]) -> list[Point]:
    """Every learning rate with every noise, in order."""
    return [Point(tidy(lr), None if noise is None else tidy(noise)) for noise, lr in product(noises, lrs)]


def beyond(
    best: Point, lrs: Sequence[float], noises: Sequence[float | None], largest: float = inf
) -> list[Point]:
    """The points to add when the best one lies on an edge of the grid; none when it does not.

    The grid is extended by the ratio of its last two values, and noise not above `largest`. Where zero noise is best,
    smaller noise is tried.

    >>> [p.lr for p in beyond(Point(0.4), [0.1, 0.2, 0.4], [None])]
    [0.8]
    >>> [p.name for p in beyond(Point(0.2, 0.1), [0.1, 0.2, 0.4], [0, 0.1, 0.2])]
    ['wide-noise=0.05-lr=0.1', 'wide-noise=0.05-lr=0.2', 'wide-noise=0.05-lr=0.4']
    >>> {p.noise for p in beyond(Point(0.2, 0.0), [0.1, 0.2, 0.4], [0, 0.1, 0.2])}
    {0.05}
    >>> beyond(Point(0.2, 0.8), [0.1, 0.2, 0.4], [0, 0.4, 0.8], largest=1.0)
    []
    """
    more_lrs = [*lrs, *_next(best.lr, lrs)]
    positive = [noise for noise in noises if noise]
    added = _next(best.noise or min(positive), positive) if positive else []
    more_noises = [*noises, *(noise for noise in added if noise <= largest)]
    known = set(points_of(lrs, noises))
    return [point for point in points_of(more_lrs, more_noises) if point not in known]


def _next(value: float, line: Sequence[float]) -> list[float]:
    """The next value beyond the end of a line on which the value lies."""
    ordered = sorted(set(line))
    if len(ordered) == 1:
        return [tidy(value / 2), tidy(value * 2)]
    if value == ordered[0]:
        return [tidy(value * ordered[0] / ordered[1])]
    if value == ordered[-1]:
        return [tidy(value * ordered[-1] / ordered[-2])]
    return []
