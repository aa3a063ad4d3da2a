"""How near rules for the noise come to the best noise: runs that differ in noise alone, from what is stored.

A rule names a share of what the base has learned that noise may cost, as `mu.AutoNoise` does. Its loss is read between the
two runs whose noise costs a little less and a little more, on a line over the logarithm of the share. Its regret is that
loss over the lowest of the runs; below the smallest noise and above the largest one the nearest run counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log
from statistics import fmean

from mupscale.rules.noise_defaults import DEFAULT_RISE, MOST_RISE, STEPS_OF_ALL, rise_for

from ..spec import Spec
from ..train import Result

LEAST = 3
"""Noises that a case needs: two tell which is better, three tell where the best is."""
SMALLEST = 1e-3


@dataclass(frozen=True)
class Case:
    """One growth with several noises."""

    label: str
    steps: int
    """Steps that follow."""
    more: float
    """FLOPs that follow, over those that were spent."""
    points: tuple[tuple[float, float], ...]
    """The share of what was learned that a noise costs, and the loss at the end, by share."""

    @property
    def best(self) -> float:
        """The share of the noise that ends lowest."""
        return min(self.points, key=lambda point: point[1])[0]

    def regret(self, share: float) -> float:
        """How much higher than the best a share would end, relative to it.

        >>> round(Case("", 1, 1.0, ((0.01, 1.0), (0.1, 0.5), (1.0, 1.0))).regret(0.01), 3)
        1.0
        """
        lowest = min(loss for _, loss in self.points)
        known = [(log(max(each, SMALLEST)), loss) for each, loss in self.points]
        at = min(max(log(share), known[0][0]), known[-1][0])
        for (left, low), (right, high) in pairwise(known):
            if left <= at <= right:
                part = (at - left) / (right - left) if right > left else 0.0
                return (low + part * (high - low)) / lowest - 1
        raise AssertionError("a case has two points or more")


Rule = Callable[[Case], float]
RULES: Mapping[str, Rule] = {
    f"a fixed {DEFAULT_RISE:g}": lambda case: DEFAULT_RISE,
    "a fixed 0.1": lambda case: 0.1,
    "a fixed 0.25": lambda case: 0.25,
    "a fixed 1": lambda case: 1.0,
    "0.25 × FLOPs left / spent": lambda case: 0.25 * case.more,
    "steps left / 2,000, at most 1": lambda case: min(case.steps / 2000, MOST_RISE),
    f"steps left / {STEPS_OF_ALL:,}, at most {MOST_RISE:g} (the rule)": lambda case: rise_for(case.steps),
    "steps left / 8,000, at most 1": lambda case: min(case.steps / 8000, MOST_RISE),
    "steps left / 4,000, at most 3": lambda case: min(case.steps / 4000, 3.0),
}


def cases(runs: Iterable[tuple[Spec, Result]]) -> list[Case]:
    """Growth that differs in noise alone, without other states and methods, and without runs that diverged.

    The MLP of another depth is left out too: rules are judged on it, not found.
    """
    found: dict[Spec, list[tuple[float, Result]]] = {}
    for spec, result in runs:
        usual = (spec.method, spec.state, spec.stop, spec.layers) == ("ours", "carried", 1.0, 4)
        if spec.grows and usual and not spec.by_rule and result["choose"] is not None:
            found.setdefault(replace(spec, noise=0.0), []).append((_share(result), result))
    told = []
    for spec, results in found.items():
        if len(results) >= LEAST:
            any_of = results[0][1]
            points = sorted((share, float(result["choose"])) for share, result in results)
            more = any_of["flops"] / any_of["flops_before"]
            told.append(Case(_label(spec), any_of["steps"], more, tuple(points)))
    return told


def regrets(known: Iterable[Case], rule: Rule) -> tuple[float, float]:
    """The mean and the worst regret of a rule."""
    every = [case.regret(rule(case)) for case in known]
    return fmean(every), max(every)


def _share(result: Result) -> float:
    """What the noise of a run has cost, as a share of what was learned, on training batches."""
    before, after, untrained = (result["noise"][name]["train"] for name in ("before", "after", "untrained"))
    return float((after - before) / (untrained - before))


def _label(spec: Spec) -> str:
    return spec.label.partition(" t=")[0]
