"""Is the advice right? Every stored case is asked with itself left out of the fit.

    python benchmarks/advise.py          judge the advice on the stored cases
    python benchmarks/advise.py --fit    write src/mupscale/budgets/law.json from the stores

A case is a base with what it has cost and FLOPs that are left, with the measured losses of staying, growing to twice the
width and a new model of that width. The last line is `cases=N right=N within_2pct=N share=S score=R stay=R grow=R scratch=R`.
`right` counts cases in which the named way has the lowest measured held-out loss, `within_2pct` those in which it is at most
2 % above that (MLPs) or 0.02 nats (Llamas), and `share` is theirs of all. `score` is the mean regret: by how much the loss of
the named way exceeds the lowest, relative to it (MLPs) or in nats. Next to it stand the regrets of always staying, always
growing by new units (by copies where those were not run) and always starting anew. The control turns the measured outcomes
of each way round among the cases. The exit code is 1 when the store is missing, law.json was not written from it, or the
control is no worse.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness.frontier_advice import judged, whole
from harness.frontier_store import cases
from harness.program import Outcome, option, run

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "reproduce" / "results"
LAW = ROOT / "src" / "mupscale" / "budgets" / "law.json"


def measure(chosen: argparse.Namespace) -> Outcome:
    if chosen.fit:
        LAW.write_text(whole(cases(chosen.results)).to_json(), "utf-8")
        return Outcome("")
    return judged(chosen.results, LAW if chosen.results == RESULTS else None)


if __name__ == "__main__":
    fit = option("--fit", action="store_true", help="write law.json from the stores")
    results = option(
        "--results", type=Path, default=RESULTS, help="the runs (default: those of the repository)"
    )
    sys.exit(run(measure, fit, results, doc=__doc__))
