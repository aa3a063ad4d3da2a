"""Would a short probe have chosen? Every way to go on with a finished base, ranked early and at its end.

    python -m reproduce.growth.questions.probe --run    make the missing probes, then print
    python -m reproduce.growth.questions.probe          print what is stored

A probe trains a way for 3 % of its FLOPs with a schedule of its own, which is warmed up and decayed to zero, at the rate and
the noise that the whole run chose, which favours it. The stored curves know no such decay: their points are held-out losses
after 1 % and 5 % of what is left, in the middle of a run, and the mean training loss over the first 1 %. Figures are rank
correlations with the held-out loss at the end, for each case and reported seed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from ...data import CACHE
from ...store import RESULTS, Store
from ..choose import Known
from ..spec import Spec
from ..studies import STUDIES
from ..train import Result, Trainer
from . import new_units, sunk

SHARE = 0.03
"""Of the FLOPs of the whole run."""
ENOUGH = 0.8
"""The mean rank correlation from which a probe may choose."""
LEAST_ARMS = 3
LOOKS: Mapping[str, Callable[[Result], float]] = {
    "training loss over the first 1 %": lambda result: float(result["early"]),
    "curve at 1 %": lambda result: float(result["curve"][0][1]),
    "curve at 5 %": lambda result: float(result["curve"][1][1]),
}
"""What is known of a whole run early on its way."""
PROBED = "probe of 3 % with a decay"


@dataclass(frozen=True)
class Case:
    """A finished base of one seed, and the runs that go on with it."""

    study: str
    label: str
    arms: Mapping[str, Spec]


def cases(study: str, known: Known) -> Iterator[Case]:
    """The finished bases of a study, with the ways that are stored to their end."""
    sizes = STUDIES[study].sizes
    for base in sizes.cited_bases:
        for extra in sizes.cited_extras:
            told = {name: sunk.arm(known, sizes, base, name, extra) for name in sunk.names(sizes, base)}
            told |= {name: new_units.arm(known, sizes, base, name, extra) for name in new_units.METHODS}
            for seed in sizes.seeds:
                arms = {name: arm.chosen.with_seed(seed) for name, arm in told.items() if arm.chosen}
                arms = {name: spec for name, spec in arms.items() if _held(known, spec) is not None}
                if len(arms) >= LEAST_ARMS:
                    yield Case(study, f"{base.width}, {base.units} u, {extra:g} ×, seed {seed}", arms)


def trainer(study: str, results: Path = RESULTS, cache: Path = CACHE / "reproduce") -> Trainer:
    """Who trains the probes of a study: from its bases, into a file of their own."""
    stored = STUDIES[study].trainer(results, cache)
    return replace(stored, store=Store(results / f"probe_{study}.jsonl"), elsewhere=stored.known)


def probe(spec: Spec) -> Spec:
    return replace(spec, budget=round(SHARE * spec.budget))


def correlations(case: Case, known: Known) -> Iterator[tuple[str, bool, float]]:
    """By look, over all arms and over those that grow: the rank correlation with the end."""
    ends = {name: known(spec) for name, spec in case.arms.items()}
    looks: dict[str, dict[str, float]] = {
        look: {name: at(result) for name, result in ends.items() if result is not None}
        for look, at in LOOKS.items()
    }
    looks[PROBED] = {
        name: held for name, spec in case.arms.items() if (held := _held(known, probe(spec))) is not None
    }
    for look, early in looks.items():
        for every in (True, False):
            names = [name for name, spec in case.arms.items() if every or spec.grows]
            if len(names) >= LEAST_ARMS and early.keys() >= set(names):
                last = [_held(known, case.arms[name]) or 0.0 for name in names]
                yield look, every, spearman([early[name] for name in names], last)


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Rank correlation; values are told apart by all their digits, so no two are taken for equal.

    >>> round(spearman([1, 2, 3], [10, 30, 20]), 3), spearman([1, 2, 3], [3, 2, 1])
    (0.5, -1.0)
    """
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return round(float(np.corrcoef(ranks)[0, 1]), 6)


def figures(trainers: Mapping[str, Trainer]) -> dict[tuple[str, bool], list[float]]:
    found: dict[tuple[str, bool], list[float]] = {}
    for study, made in trainers.items():
        for case in cases(study, made.known):
            for look, every, value in correlations(case, made.known):
                found.setdefault((look, every), []).append(value)
    return found


def show(found: Mapping[tuple[str, bool], Sequence[float]]) -> str:
    """A line for each look, and the last line: what decides whether a probe may choose."""
    for (look, every), values in found.items():
        ways = "all ways to go on" if every else "ways of growing"
        print(f"{look}, {ways}: mean {fmean(values):.2f}, worst {min(values):.2f} of {len(values)}")
    cells = [f"{fmean(found.get((PROBED, every), [0.0])):.2f}" for every in (True, False)]
    curve = fmean(found.get(("curve at 5 %", True), [0.0]))
    count = len(found.get((PROBED, True), ()))
    return f"probed={count} all={cells[0]} growing={cells[1]} curve={curve:.2f} enough={ENOUGH}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m reproduce.growth.questions.probe")
    parser.add_argument("--run", action="store_true", help="make the missing probes")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    trainers = {study: trainer(study) for study in ("mlp", "text")}
    for study, made in trainers.items() if options.run else ():
        for case in cases(study, made.known):
            for spec in case.arms.values():
                made.run(probe(spec))
    print(show(figures(trainers)))
    return 0


def _held(known: Known, spec: Spec) -> float | None:
    found = known(spec)
    return None if found is None or found["held"] is None else float(found["held"])


if __name__ == "__main__":
    sys.exit(main())
