"""The rule of the verdict: every seed is judged at the point that the seeds before it choose.

The best of twenty noisy points beats the best of five points without noise by chance alone. A point that other seeds have chosen
has no such advantage on the seed that judges it. An example with one rate, a loss of 1.0 without noise, and three seeds:

    noise   seed 0   seed 1   seed 2
      0.1      0.9      1.1      1.0
      0.2      1.0      0.7      0.8

Seed 1 is judged at noise 0.1, which seed 0 chooses: it gains 1.0 - 1.1 = -0.1. Seed 2 is judged at noise 0.2, whose mean over
seeds 0 and 1 is least: it gains 1.0 - 0.8 = 0.2. Picking the best of each seed would have found gains of 0.1, 0.3 and 0.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, log, sqrt
from statistics import fmean, stdev

from ..agenda.grid import Point

Losses = Mapping[Point, float]
"""One seed: the loss of every point that ran to its end; infinite if it diverged."""
LEAST = 3
"""Seeds that decide: the first one only chooses, and a spread needs two that are judged."""
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t for 1 to 10 degrees of freedom that chance exceeds in 2.5 % of cases; more seeds keep the last, which is
stricter."""


@dataclass(frozen=True)
class Gains:
    """By how much the loss was lower, on each seed that was judged.

    >>> Gains((0.2, 0.2, 0.3)).worth, Gains((0.2, -0.1, 0.3)).worth, Gains((-0.2, -0.2, -0.3)).worth
    (True, None, False)
    """

    each: tuple[float, ...]

    @property
    def known(self) -> bool:
        """Whether there is a spread to compare with; there is none if a run diverged, or if seeds change nothing."""
        return len(self.each) >= LEAST - 1 and all(map(isfinite, self.each)) and self.spread > 0

    @property
    def mean(self) -> float:
        return fmean(self.each)

    @property
    def spread(self) -> float:
        """The standard deviation over seeds."""
        return stdev(self.each)

    @property
    def needed(self) -> float:
        """The mean that decides, in spreads: 9.0 with two seeds that are judged, 0.84 with eight."""
        return _STUDENT[min(len(self.each) - 1, len(_STUDENT)) - 1] / sqrt(len(self.each))

    @property
    def worth(self) -> bool | None:
        """True for a gain and False for a cost that chance alone would hardly give; None if it is not decided."""
        if not self.known:
            return None
        return None if abs(self.mean) <= self.needed * self.spread else self.mean > 0


def nearest(seed: Losses, point: Point) -> Point | None:
    """The point of this noise that ran to its end at the nearest rate; None if this noise always diverged.

    >>> nearest({Point(0.1, 0.2): 1.0, Point(0.4, 0.2): 2.0, Point(0.3, 0.0): 3.0}, Point(0.3, 0.2))
    Point(lr=0.4, noise=0.2)
    """
    if seed.get(point, inf) < inf:
        return point
    row = [p for p, loss in seed.items() if p.noise == point.noise and loss < inf]
    return min(row, key=lambda p: (abs(log(p.lr / point.lr)), p.lr), default=None)


def loss_at(seed: Losses, point: Point) -> float:
    """The loss of a seed at the nearest point of this noise; infinite if this noise always diverged."""
    found = nearest(seed, point)
    return inf if found is None else seed[found]


def tried_by_all(seeds: Sequence[Losses]) -> list[Losses]:
    """The seeds without the noises that one of them has not tried; halving keeps a rate of every noise in the grid.

    >>> tried_by_all([{Point(1, 0.1): 0.9, Point(1, 0.8): 0.5}, {Point(2, 0.1): 0.7}])
    [{Point(lr=1, noise=0.1): 0.9}, {Point(lr=2, noise=0.1): 0.7}]
    """
    shared = set.intersection(*({point.noise for point in seed} for seed in seeds))
    return [{point: loss for point, loss in seed.items() if point.noise in shared} for seed in seeds]


def chosen(seeds: Sequence[Losses]) -> Point:
    """The point of the least mean loss over seeds, among noises that every seed has tried."""
    return min(
        {point for seed in tried_by_all(seeds) for point in seed},
        key=lambda p: (fmean(loss_at(seed, p) for seed in seeds), -1 if p.noise is None else p.noise, p.lr),
    )


def gains(ours: Sequence[Losses], theirs: Sequence[Losses]) -> Gains:
    """What ours gains over theirs on each seed after the first, each at the points that the seeds before it choose.

    Noises that some seed has not tried are left out on all: a grid may have been extended on one seed alone.

    >>> noisy = [{Point(1, 0.1): a, Point(1, 0.2): b} for a, b in ((0.9, 1.0), (1.1, 0.7), (1.0, 0.8))]
    >>> [round(gain, 9) for gain in gains(noisy, [{Point(1, 0.0): 1.0}] * 3).each]
    [-0.1, 0.2]
    """
    ours, theirs = tried_by_all(ours), tried_by_all(theirs)
    return Gains(
        tuple(
            loss_at(theirs[i], chosen(theirs[:i])) - loss_at(ours[i], chosen(ours[:i]))
            for i in range(1, len(ours))
        )
    )
