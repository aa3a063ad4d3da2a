"""Successive halving, and the agenda of a sweep: from the results so far to the legs that are open.

Pure, so that all workers who see the same results find the same work. A leg takes one point from the end
of one rung to the end of the next. A rung is judged when all its legs are finished, so the order in
which workers finish does not matter.

Four learning rates with the rungs 10, 20 and 40, half of them kept. All four run to step 10, the best two to
step 20, the best one to step 40: 4·10 + 2·10 + 1·20 = 80 steps where the full grid takes 160. Here the loss
is the distance from 4:

>>> ladder, points = Ladder((10, 20, 40)), points_of([1, 2, 4, 8], [None])
>>> results: dict[str, float] = {}
>>> while (missing := climb(points, results, ladder)[0]):
...     print([leg.key for leg in missing])
...     results |= {leg.key: abs(leg.point.lr - 4) for leg in missing}
['base-lr=1 to step 10', 'base-lr=2 to step 10', 'base-lr=4 to step 10', 'base-lr=8 to step 10']
['base-lr=4 to step 20', 'base-lr=2 to step 20']
['base-lr=4 to step 40']
>>> ladder.steps_for(points)
80
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from operator import mul

from .grid import Point, beyond, points_of

Results = Mapping[str, float]
"""Loss by the key of a leg; infinite if it diverged."""


@dataclass(frozen=True)
class Leg:
    """The part of a run that one worker does at a time.

    >>> Leg(Point(0.1), 0, 50).key
    'base-lr=0.1 to step 50'
    """

    point: Point
    begin: int
    end: int

    @property
    def key(self) -> str:
        """What a study stores it by; nobody takes it apart."""
        return f"{self.point.name} to step {self.end}"


LEAST = 10
"""Steps before the first comparison: a loss is reported before its step, so the first ones are the same for all."""


@dataclass(frozen=True)
class Ladder:
    """Where runs are compared, in steps, and which share of them continues."""

    rungs: tuple[int, ...]
    keep: float = 0.5

    def legs(self, point: Point) -> list[Leg]:
        """The legs that take a point to the last rung.

        >>> [(leg.begin, leg.end) for leg in Ladder((5, 10)).legs(Point(0.1))]
        [(0, 5), (5, 10)]
        """
        return [Leg(point, begin, end) for begin, end in pairwise((0, *self.rungs))]

    @staticmethod
    def of(steps: int, fractions: Sequence[float], keep: float) -> Ladder:
        """
        >>> Ladder.of(80, (0.125, 0.25, 0.5), 0.5).rungs
        (10, 20, 40, 80)
        """
        rungs = {min(steps, max(LEAST, round(steps * fraction))) for fraction in (*fractions, 1)}
        return Ladder(tuple(sorted(rungs)), keep)

    def kept(self, count: int) -> int:
        """How many of `count` runs continue: the share, rounded down, and at least one."""
        return max(1, int(count * self.keep))

    def on_rungs(self, points: Sequence[Point]) -> list[int]:
        """How many of these points are on each rung, if none diverges. Each noise keeps its own share:

        >>> Ladder((10, 20, 40)).on_rungs([Point(lr, noise) for lr in (1, 2, 4, 8) for noise in (0, 0.1)])
        [8, 4, 2]
        """
        counts, found = list(Counter(point.noise for point in points).values()), []
        for _ in self.rungs:
            found.append(sum(counts))
            counts = [self.kept(count) for count in counts]
        return found

    def steps_for(self, points: Sequence[Point]) -> int:
        """How many steps it takes to bring these points up the ladder.

        >>> Ladder((10, 20, 40, 80)).steps_for([Point(lr) for lr in range(1, 9)])
        200
        """
        lengths = [end - begin for begin, end in pairwise((0, *self.rungs))]
        return sum(map(mul, self.on_rungs(points), lengths))


def climb(
    points: Sequence[Point], results: Results, ladder: Ladder, earlier: Sequence[Point] = ()
) -> tuple[list[Leg], dict[Point, float]]:
    """The legs that are open now, or, if there are none, the points that reached the top with their loss.

    A share continues for every noise, zero noise included: noise first raises the loss and pays later, so
    runs with different noise are compared at the top only. If there are `earlier` points, each point that
    continues must also beat one of those that continued. When a point diverges later, the next best one takes
    its place, as below:

    >>> climb([Point(0.1), Point(0.2)], {}, Ladder((5, 10)))[0][1].key
    'base-lr=0.2 to step 5'
    >>> done = {"base-lr=0.1 to step 5": 1.0, "base-lr=0.2 to step 5": 2.0}
    >>> [leg.key for leg in climb([Point(0.1), Point(0.2)], done, Ladder((5, 10)))[0]]
    ['base-lr=0.1 to step 10']
    >>> [s.key for s in climb([Point(0.1), Point(0.2)], done | {"base-lr=0.1 to step 10": inf}, Ladder((5, 10)))[0]]
    ['base-lr=0.2 to step 10']
    """
    begin, alive = 0, list(points)
    missing: list[Leg] = []
    for end in ladder.rungs:
        legs = {point: Leg(point, begin, end) for point in alive}
        # The results decide everything anew at every call, from the first rung on: nothing has to be
        # remembered.
        missing += [leg for leg in legs.values() if leg.key not in results]
        if missing:
            return missing, {}
        losses = {point: results[leg.key] for point, leg in legs.items()}
        # Divergence on a later rung counts on this one, so that the place of the point is free here already.
        lasting = [point for point in alive if not _diverges(point, results, ladder)]
        ranked = sorted(lasting, key=lambda p: (losses[p], p.lr, p.noise or 0))
        if end == ladder.rungs[-1]:
            return [], {point: losses[point] for point in ranked}
        bars = _bars(earlier, results, ladder, end)
        of = Counter(point.noise for point in alive)
        kept = {noise: [p for p in ranked if p.noise == noise][: ladder.kept(n)] for noise, n in of.items()}
        alive = [p for some in kept.values() for p in some if losses[p] < bars.get(p.noise, inf)]
        begin = end
    return [], {}


def _diverges(point: Point, results: Results, ladder: Ladder) -> bool:
    """True when some leg of this point has diverged, on whichever rung."""
    return any(results.get(Leg(point, 0, end).key) == inf for end in ladder.rungs)


def _bars(points: Sequence[Point], results: Results, ladder: Ladder, end: int) -> dict[float | None, float]:
    """For every noise, the largest loss at a rung with which a point has continued without diverging."""
    bars: dict[float | None, float] = {}
    following = ladder.rungs[ladder.rungs.index(end) + 1]
    for point in points:
        if Leg(point, end, following).key in results and not _diverges(point, results, ladder):
            bars[point.noise] = max(bars.get(point.noise, 0.0), results[Leg(point, 0, end).key])
    return bars


@dataclass(frozen=True)
class Agenda:
    """What a sweep has to do next, or what it has found."""

    open: tuple[Leg, ...]
    top: Mapping[Point, float]
    """The points that ran to the end, with their loss."""
    points: tuple[Point, ...]
    on_edge: bool
    """Whether the best point still lies on an edge at the end of the sweep."""
    steps: int
    """How many steps the sweep takes, as far as is known."""
    growing: bool = False
    """Whether the best point is sought among those that grow: zero noise is a control alone."""

    @property
    def best(self) -> Point | None:
        """The point of least loss; None while the sweep is running, or if every point diverged."""
        return None if self.open else _best(self.top, self.growing)


def _best(top: Mapping[Point, float], growing: bool) -> Point | None:
    """The point of least loss; with `growing` among those that are no control. None if there is none."""
    points = [point for point in top if not (growing and point.is_control)]
    return min(points, key=lambda p: (top[p], p.lr, p.noise or 0), default=None)


def grid_agenda(
    lrs: Sequence[float],
    noises: Sequence[float | None],
    results: Results,
    ladder: Ladder,
    extend: int,
    largest: float = inf,
    growing: bool = False,
) -> Agenda:
    """A grid, extended at most `extend` times beyond the edge on which the best point lies, noise up to `largest`.

    The best rate is 7, the grid has 1 and 2. It is extended by 4, by 8 and by 16, and then 8 is best and
    inside:

    >>> from math import log
    >>> results, agenda = {}, grid_agenda([1, 2], [None], {}, Ladder((9,)), extend=4)
    >>> while agenda.open:
    ...     results |= {leg.key: abs(log(leg.point.lr / 7)) for leg in agenda.open}
    ...     agenda = grid_agenda([1, 2], [None], results, Ladder((9,)), extend=4)
    >>> agenda.best, len(agenda.points), agenda.on_edge
    (Point(lr=8.0, noise=None), 5, False)
    """
    new, points, top, steps = points_of(lrs, noises), list[Point](), dict[Point, float](), 0
    for _ in range(extend + 1):
        steps += ladder.steps_for(new)
        missing, reached = climb(new, results, ladder, points)
        points += new
        top |= reached
        if missing:
            return Agenda(tuple(missing), top, tuple(points), False, steps, growing)
        best = _best(top, growing)
        grown = sorted({p.lr for p in points}), list(dict.fromkeys(p.noise for p in points))
        new = [] if best is None else beyond(best, *grown, largest)
        if not new:
            break
    # Points that are left over lie beyond an edge.
    return Agenda((), top, tuple(points), bool(new), steps, growing)
