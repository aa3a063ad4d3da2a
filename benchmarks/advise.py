"""Is the advice right? Every stored case is asked with the runs of its budget left out of the fit.

    python benchmarks/advise.py          judge the advice on the stored cases
    python benchmarks/advise.py --fit    write src/mupscale/budgets/law.json from the store

The last line is `cases=N right=N within_2pct=N score=R stay=R grow=R scratch=R`. `right` counts cases in which the named
arm has the lowest measured held-out loss, `within_2pct` those in which it is at most 2 % above that. `score` is the mean
regret: by how much the loss of the named arm exceeds the lowest, relative to it. Next to it stand the regrets of always
staying, always growing and always starting anew, each at its best measured size; advice has to name its size. The exit
code is 1 when the store is missing or law.json was not written from it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness.frontier_advice import judged, law_of
from harness.program import Outcome, option, run

ROOT = Path(__file__).resolve().parents[1]
STORE = ROOT / "reproduce" / "results" / "frontier.jsonl"
LAW = ROOT / "src" / "mupscale" / "budgets" / "law.json"


def measure(chosen: argparse.Namespace) -> Outcome:
    if chosen.fit and chosen.store.is_file():
        LAW.write_text(law_of(chosen.store)[1].to_json(), "utf-8")
        return Outcome("")
    return judged(chosen.store, LAW if chosen.store == STORE else None)


if __name__ == "__main__":
    fit = option("--fit", action="store_true", help="write law.json from the store")
    store = option("--store", type=Path, default=STORE, help="the runs (default: those of the repository)")
    sys.exit(run(measure, fit, store, doc=__doc__))
