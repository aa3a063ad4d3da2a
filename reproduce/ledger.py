"""The accounts of an experiment: FLOPs until the loss of the run from scratch is reached, and who pays for what.

Pure functions over curves and step counts. What a step costs, the library counts; the four accounts are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, inf
from statistics import fmean, median

from mupscale.budgets.cost import ACCOUNTS, ComparedRuns, Cost, Number
from mupscale.studies import Recipe

SMOOTH = 5
"""Points of a curve over which its loss is averaged."""


def smoothed(losses: Sequence[float], over: int = SMOOTH) -> list[float]:
    """The mean of the last points at every point, or of those there are.

    >>> smoothed([4.0, 2.0, 0.0], over=2)
    [4.0, 3.0, 1.0]
    """
    return [fmean(losses[max(0, i - over + 1) : i + 1]) for i in range(len(losses))]


def final(losses: Sequence[float], over: int = SMOOTH) -> float:
    """The loss at the end: the mean of the last points.

    >>> final([9.0, 2.0, 4.0], over=2)
    3.0
    """
    return fmean(losses[-over:])


def still_falling(losses: Sequence[float]) -> float:
    """What share of the final loss the last tenth of the run took off: near 0 where a curve has flattened.

    >>> still_falling([2.0] * 50 + [1.0] * 50), round(still_falling([200.0 - i for i in range(100)]), 2)
    (0.0, 0.09)
    """
    tenth = max(1, len(losses) // 10)
    before = losses[-2 * tenth : -tenth] or losses[:1]
    return median(before) / median(losses[-tenth:]) - 1  # one spike is no trend


def reached(losses: Sequence[float], target: float, over: int = SMOOTH) -> Fraction | None:
    """After which share of the run its smoothed loss is at the target or below; None where it never is.

    >>> reached([5.0, 4.0, 3.0, 2.0], 3.0, over=1), reached([5.0, 4.0], 3.0, over=1)
    (Fraction(3, 4), None)
    """
    for number, loss in enumerate(smoothed(losses, over), 1):
        if loss <= target:
            return Fraction(number, len(losses))
    return None


@dataclass(frozen=True)
class Tuning:
    """FLOPs of sweep 2: as it was done, with runs that were stopped early, and with every point to its end.

    Sweep 1 is not in it: a run from scratch needs its learning rate as well.
    """

    halving: int
    grid: int
    trials: Fraction
    """Full runs of the grown proxy that the sweep as done is worth."""


def tuning_of(recipe: Recipe, flops_at: Callable[[int], int], control_at_base: bool = True) -> Tuning:
    """What the second sweep of a recipe cost; points without noise ran at the width of the proxy base, as a rule.

    >>> rows = [{"sweep": "wide", "noise": n, "lr": 0.1, "steps": s, "loss": 1.0} for n, s in ((0, 10), (0.1, 10), (0.2, 5))]
    >>> recipe = Recipe("torch.optim.SGD", {"lr": 0.1}, 0.1, k=2, tensors={}, width=4, wide_steps=10, tried=rows)
    >>> tuning_of(recipe, lambda width: width)
    Tuning(halving=160, grid=200, trials=Fraction(2, 1))
    """
    narrow, wide = flops_at(recipe.width), flops_at(recipe.k * recipe.width)
    halving = grid = 0
    for row in recipe.tried:
        if row["sweep"] == "wide":
            each = narrow if control_at_base and not row["noise"] else wide
            halving += int(row["steps"]) * each
            grid += recipe.wide_steps * each
    return Tuning(halving, grid, Fraction(halving, recipe.wide_steps * wide))


@dataclass(frozen=True)
class Entry:
    """One method in the ledger: its speedup on every account, as mean, lowest and highest over seeds.

    Empty where no seed reached the loss of the run from scratch; `missed` counts those that did not.
    """

    speedups: Mapping[str, tuple[float, float, float]]
    seeds: int
    missed: int


def entry(
    shares: Sequence[Fraction | None], scratch: int, base: int, tuning: int, budget: int | None = None
) -> Entry:
    """A method's entry from the share of its budget after which each seed was as good as from scratch.

    `budget` is what its whole run costs, by default as much as the run from scratch. The paper's numbers:

    >>> told = entry([Fraction(3031, 11326)], 11326, 740, 0)
    >>> round(told.speedups["base charged"][0], 1)
    3.0
    """
    whole = scratch if budget is None else budget
    costs = [Cost(scratch, base, tuning, share * whole) for share in shares if share is not None]
    speedups = {}
    for account in ACCOUNTS if costs else ():
        every = [cost.speedup(account) for cost in costs]
        speedups[account] = (fmean(every), min(every), max(every))
    return Entry(speedups, len(shares), len(shares) - len(costs))


def pays_from(
    share: float,
    trials: Fraction,
    flops_at: Callable[[int], Number],
    k: int,
    width: int,
    steps: int,
    speedup: float,
) -> float | None:
    """The smallest n/n0 at which growing is `speedup` times cheaper with base and tuning charged; None if none is.

    The target stays as it is, and the proxy is made narrower until the library's cost says so.

    >>> square = lambda width: width**2
    >>> pays_from(0.25, Fraction(25), square, 4, 500, 1000, 1.0), pays_from(0.25, Fraction(25), square, 4, 500, 1000, 4.0)
    (6.097560975609756, None)
    """
    low, high = 0, width
    while low < high:
        middle = (low + high + 1) // 2
        case = ComparedRuns(width, k, middle, steps, steps, trials, max(1, ceil(share * steps)))
        if case.cost(flops_at).speedup("both charged") >= speedup:
            low = middle
        else:
            high = middle - 1
    return width / low if low else None


def share_of(mean: Sequence[Fraction | None]) -> float:
    """The mean share of the budget over seeds; infinite where one never got there.

    >>> share_of([Fraction(1, 2), Fraction(1, 4)]), share_of([None, Fraction(1, 2)])
    (0.375, inf)
    """
    return inf if not mean or None in mean else fmean(float(share) for share in mean if share is not None)
