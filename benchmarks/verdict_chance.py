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
import random
import sys
from collections.abc import Callable, Sequence
from math import sqrt

from mupscale.reports.held_out import Gains, Losses, gains
from mupscale.tuning.grid import Point

SEEDS = (3, 5, 8)
NOISES, RATES = (0.05, 0.1, 0.2, 0.4), (0.25, 0.5, 1.0, 2.0, 4.0)
SPREADS = 2 * sqrt(2)
"""Two spreads of the gain, which is a difference of two losses with a spread of 1."""
MOST_FALSE, LEAST_NAIVE = 4.0, 5.0
Rule = Callable[[Sequence[Losses], Sequence[Losses]], Gains]


def naive(ours: Sequence[Losses], theirs: Sequence[Losses]) -> Gains:
    """What the best point of every seed gains over its best control: the loss of its recipe, and that without noise."""
    return Gains(tuple(min(b.values()) - min(a.values()) for a, b in zip(ours, theirs, strict=True)))


def drawn(
    random: random.Random, noises: Sequence[float], count: int, gain: float, halved: bool
) -> list[dict[Point, float]]:
    """Losses of so many seeds at these noises."""
    return [
        {
            Point(rate, noise): random.gauss(10 - gain, 1)
            for noise in noises
            for rate in (random.sample(RATES, 1) if halved else RATES)
        }
        for _ in range(count)
    ]


def worth(rule: Rule, seeds: int, draws: int, gain: float = 0.0, halved: bool = False) -> float:
    """The percentage of draws in which the rule says that noise is worth it."""
    source = random.Random(seeds)
    said = 0
    for _ in range(draws):
        noisy = drawn(source, NOISES, seeds, gain, halved)
        said += rule(noisy, drawn(source, (0.0,), seeds, 0.0, halved)).worth is True
    return 100 * said / draws


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--draws", type=int, default=2000)
    draws = arguments.parse_args().draws
    false = [worth(gains, seeds, draws) for seeds in SEEDS]
    halved = [worth(gains, seeds, draws, halved=True) for seeds in SEEDS]
    found = [worth(gains, seeds, draws, gain=SPREADS) for seeds in SEEDS]
    wrong = [worth(naive, seeds, draws) for seeds in SEEDS]
    told = {"false": false, "halved": halved, "found": found, "naive": wrong}
    print(" ".join(f"{name}={','.join(f'{v:.1f}' for v in values)}" for name, values in told.items()))
    return int(max(*false, *halved) > MOST_FALSE or min(wrong) < LEAST_NAIVE)


if __name__ == "__main__":
    sys.exit(main())
