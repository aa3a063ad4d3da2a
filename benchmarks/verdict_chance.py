"""How often the verdict of a study is wrong by chance, and how often it finds a gain that is there.

    python benchmarks/verdict_chance.py [--draws 2000]

Losses are drawn, not trained: 4 noises and no noise, each at 5 rates, with a normal spread of 1 around one loss for each seed.
The gain of noise over no noise then has a spread of √2 over seeds. Half of the draws have no gain. In the others every noise
gains two spreads. The control is the naive rule: the same test on what the best point of each seed gains over the best point
without noise of the same seed. `halved` are draws in which successive halving has left one rate, by chance, of
every noise.

The last line is `false=… halved=… found=… naive=…`: false verdicts of the rule in percent with 3, 5 and 8 seeds, the
same with halving, gains that it finds, and false verdicts of the naive rule. The exit code is 1 if the rule is
wrong in more than 4 %, or the naive rule in less than 5 %.
"""

from __future__ import annotations

import argparse
import sys

from harness.program import Outcome, option, run
from harness.verdicts import SPREADS, naive, worth
from mupscale.studies.report.held_out import gains

SEEDS = (3, 5, 8)
MOST_FALSE, LEAST_NAIVE = 4.0, 5.0


def measure(chosen: argparse.Namespace) -> Outcome:
    draws = chosen.draws
    false = [worth(gains, seeds, draws) for seeds in SEEDS]
    halved = [worth(gains, seeds, draws, halved=True) for seeds in SEEDS]
    found = [worth(gains, seeds, draws, gain=SPREADS) for seeds in SEEDS]
    wrong = [worth(naive, seeds, draws) for seeds in SEEDS]
    figures = {"false": false, "halved": halved, "found": found, "naive": wrong}
    line = " ".join(f"{name}={','.join(f'{v:.1f}' for v in values)}" for name, values in figures.items())
    failed = []
    if max(*false, *halved) > MOST_FALSE:
        failed.append(f"the rule is wrong in {max(*false, *halved):.1f} %, expected at most {MOST_FALSE} %")
    if min(wrong) < LEAST_NAIVE:
        failed.append(
            f"the naive rule is wrong in {min(wrong):.1f} % only, expected at least {LEAST_NAIVE} %"
        )
    return Outcome(line, failed)


if __name__ == "__main__":
    sys.exit(run(measure, option("--draws", type=int, default=2000, help="studies drawn"), doc=__doc__))
