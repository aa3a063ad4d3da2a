"""The ledger of an experiment from what is stored: finals, speedups on four accounts, break-even. Trains nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import inf
from statistics import fmean
from typing import Any

from mupscale.budgets.cost import ACCOUNTS
from mupscale.budgets.flops import quadratic

from .ledger import Entry, Tuning, entry, final, pays_from, reached, share_of, still_falling, tuning_of
from .peers import METHODS
from .stages import Experiment, Job

Range = tuple[float, float, float]
"""Mean, lowest and highest over seeds."""
BARS = (1.0, 1.2)
"""Speedups, with everything charged, for which the smallest n/n0 is looked for."""


@dataclass(frozen=True)
class Books:
    """Everything that the page says about an experiment in numbers."""

    target: float
    """The loss of the run from scratch at its end, mean over seeds."""
    falling: float
    """What share of it the last tenth of the run from scratch took off."""
    finals: Mapping[str, Mapping[str, Range]]
    """For every method: training loss, held-out loss and accuracy at the end."""
    entries: Mapping[str, Entry]
    grid: Entry
    """Ours, with every point of sweep 2 charged to its end."""
    tuning: Tuning
    pays: Mapping[float, float | None]
    below: tuple[int, int]
    """On how many seeds ours ends below the run from scratch, and of how many."""
    hours: float


def curves_of(experiment: Experiment, method: str) -> list[tuple[Job, dict[str, Any]]]:
    """The curves of a method that are there."""
    found = [(job, experiment.curve(job)) for job in experiment.jobs() if job.method == method]
    return [(job, curve) for job, curve in found if curve is not None]


def books(experiment: Experiment) -> Books | None:
    """The books, or None while the runs from scratch or ours are missing."""
    scratch, mine, recipe = (
        curves_of(experiment, "scratch"),
        curves_of(experiment, "ours"),
        experiment.known_recipe(),
    )
    whole_ones = [curve["loss"] for _, curve in scratch if not curve["diverged"]]
    if not whole_ones or not mine or recipe is None:
        return None
    setting, scale = experiment.setting, experiment.scale
    target = fmean(map(final, whole_ones))
    whole, base = scale.steps * setting.flops(scale.wide), scale.steps * setting.flops(scale.base)
    entries: dict[str, Entry] = {}
    finals: dict[str, dict[str, Range]] = {}
    shares: dict[str, list[Fraction | None]] = {}
    for name in ("base", "scratch", *experiment.methods()):
        found = curves_of(experiment, name)
        if not found:
            continue
        finals[name] = {
            key: span([final(curve[key]) for _, curve in found if not curve["diverged"]])
            for key in ("loss", "held_out", "accuracy")
            if key in found[0][1]
        }
        if name in ("base", "scratch"):
            continue
        shares[name] = [None if curve["diverged"] else reached(curve["loss"], target) for _, curve in found]
        method = METHODS[name]
        known = experiment.known_recipe(method.tuned) if method.tuned and not method.control else None
        cost = tuning_of(known, setting.flops, scale.control_at_base).halving if known is not None else 0
        budget = found[0][0].steps * setting.flops(found[0][0].width)
        entries[name] = entry(shares[name], whole, 0 if method.control else base, cost, budget)
    tuning = tuning_of(recipe, setting.flops, scale.control_at_base)
    return Books(
        target,
        fmean(map(still_falling, whole_ones)),
        finals,
        entries,
        entry(shares["ours"], whole, base, tuning.grid),
        tuning,
        _pays(experiment, shares["ours"], tuning),
        _below(dict(_ends(mine)), dict(_ends(scratch))),
        experiment.store.seconds / 3600,
    )


def _ends(found: list[tuple[Job, dict[str, Any]]]) -> Iterator[tuple[int, float]]:
    """The seed and the final training loss of every curve."""
    for job, curve in found:
        yield job.seed, inf if curve["diverged"] else final(curve["loss"])


def _below(mine: Mapping[int, float], scratch: Mapping[int, float]) -> tuple[int, int]:
    """On how many seeds the first is lower, and how many both have.

    >>> _below({0: 1.0, 1: 3.0, 2: 0.5}, {0: 2.0, 1: 2.0})
    (1, 2)
    """
    both = mine.keys() & scratch.keys()
    return sum(mine[seed] < scratch[seed] for seed in both), len(both)


def _pays(experiment: Experiment, shares: list[Fraction | None], tuning: Tuning) -> dict[float, float | None]:
    """The smallest n/n0 for each speedup; FLOPs at any width by the polynomial through four counts."""
    setting, scale = experiment.setting, experiment.scale
    share = share_of(shares)
    flops = quadratic([(w, setting.flops(w)) for w in (setting.reference * m for m in (1, 2, 4, 8))])
    if flops is None or share > 1:
        return dict.fromkeys(BARS)
    return {
        bar: pays_from(share, tuning.trials, flops, scale.k, scale.base, scale.steps, bar) for bar in BARS
    }


def span(values: list[float]) -> Range:
    """Mean, lowest and highest; not a number where there is none.

    >>> span([1.0, 3.0])
    (2.0, 1.0, 3.0)
    """
    return (fmean(values), min(values), max(values)) if values else (float("nan"),) * 3


def missed(known: Books, bars: Mapping[str, float]) -> list[str]:
    """Where ours stays below a bar of its scale, or a seed of it above the run from scratch; nothing without bars."""
    ours = known.entries["ours"]
    told = []
    for account, bar in bars.items():
        found = ours.speedups[account][0] if ours.speedups else 0.0
        if ours.missed or not found >= bar:
            told.append(
                f"{account}: {found:.2f} on {ours.seeds - ours.missed} of {ours.seeds} seeds, expected {bar:g}"
            )
    if bars and known.below[0] < known.below[1]:
        told.append("ours ends below the run from scratch on {} of {} seeds only".format(*known.below))
    return told


def print_books(experiment: Experiment) -> bool:
    """The books as lines of text, the last of them `name=value …`; whether no bar of the scale is missed."""
    known = books(experiment)
    name = experiment.setting.name
    if known is None:
        print(f"\n{name}: no ledger yet, runs from scratch or ours are missing")
        return True
    print(
        f"\n{name}: from scratch ends at {known.target:.4f}; its last tenth took off {100 * known.falling:.1f} %"
    )
    print(f"  {'speedup':22}" + "".join(f"{account:>24}" for account in ACCOUNTS))
    for method, told in known.entries.items():
        print(f"  {METHODS[method].label:22}" + "".join(f"{cell(told, account):>24}" for account in ACCOUNTS))
    print(f"  {'ours, whole grid':22}" + "".join(f"{cell(known.grid, account):>24}" for account in ACCOUNTS))
    for bar, ratio in known.pays.items():
        print(
            f"  {bar} times cheaper with both charged: {'never' if ratio is None else f'from n/n0 = {ratio:.1f}'}"
        )
    ours = known.entries["ours"].speedups
    values = [f"{a.replace(' ', '_')}={ours[a][0] if ours else 0:.2f}" for a in ACCOUNTS]
    grid = known.grid.speedups
    both = f"both_grid={grid['both charged'][0] if grid else 0:.2f}"
    failures = missed(known, experiment.scale.bars)
    for failure in failures:
        print(f"FAILED: {failure}")
    print(f"{name} {' '.join(values)} {both} below={known.below[0]} of={known.below[1]}")
    return not failures


def cell(told: Entry, account: str) -> str:
    """A speedup with its range, or that the loss was not reached.

    >>> cell(Entry({"base sunk": (2.0, 1.5, 2.5)}, 5, 1), "base sunk")
    '2.00 (1.50–2.50), 4 of 5'
    """
    if not told.speedups:
        return "not reached"
    mean, low, high = told.speedups[account]
    text = f"{mean:.2f}" if told.seeds == 1 else f"{mean:.2f} ({low:.2f}–{high:.2f})"
    return f"{text}, {told.seeds - told.missed} of {told.seeds}" if told.missed else text
