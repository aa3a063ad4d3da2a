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
STUDIED = ("mlp", "text")
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
    return round(float(np.asarray(np.corrcoef(ranks))[0, 1]), 6)


def figures(trainers: Mapping[str, Trainer]) -> dict[tuple[str, bool, bool], list[float]]:
    """By what was seen early, whether over all ways to go on, and whether over cases that have a probe alone."""
    found: dict[tuple[str, bool, bool], list[float]] = {}
    for study, made in trainers.items():
        for case in cases(study, made.known):
            seen = list(correlations(case, made.known))
            probed = any(look == PROBED for look, _, _ in seen)
            for look, every, value in seen:
                for alone in (False, True) if probed else (False,):
                    found.setdefault((look, every, alone), []).append(value)
    return found


def table(found: Mapping[tuple[str, bool, bool], Sequence[float]]) -> str:
    """The rank correlations as Markdown: over all ways to go on and over those that grow, in all cases and where probed."""
    cases = {
        alone: max(len(seen) for key, seen in found.items() if key[2] is alone) for alone in (False, True)
    }
    heads = [
        f"{ways}, {count} cases and seeds"
        for count in cases.values()
        for ways in ("all ways", "ways of growing")
    ]
    lines = [f"| seen early | {' | '.join(heads)} |", "|---|---|---|---|---|"]
    for look in (*LOOKS, PROBED):
        columns = [found.get((look, every, alone), ()) for alone in (False, True) for every in (True, False)]
        whole = [
            seen if len(seen) == count else ()
            for seen, count in zip(columns, (cases[False],) * 2 + (cases[True],) * 2, strict=True)
        ]
        cells = [f"{fmean(seen):.2f} (worst {min(seen):.2f})" if seen else "" for seen in whole]
        lines.append(f"| {look} | {' | '.join(cells)} |")
    return "\n".join(lines)


def stored() -> str:
    """The table of what is stored."""
    return table(figures({study: trainer(study) for study in STUDIED}))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m reproduce.growth.questions.probe")
    parser.add_argument("--run", action="store_true", help="make the missing probes")
    parser.add_argument("--study", choices=STUDIED, help="make those of one study alone")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    trainers = {study: trainer(study) for study in STUDIED}
    for study, made in trainers.items() if options.run else ():
        for case in cases(study, made.known) if options.study in (None, study) else ():
            for spec in case.arms.values():
                made.run(probe(spec))
    print(table(figures(trainers)))
    return 0


def _held(known: Known, spec: Spec) -> float | None:
    found = known(spec)
    return None if found is None or found["held"] is None else float(found["held"])


if __name__ == "__main__":
    sys.exit(main())
