"""Successive halving finds what the full grid finds, for a third of its FLOPs: on Forest Cover Type.

MLPs with AdamW are tuned by `mu.tune` on two proxies, 32 → 128 and 64 → 256, from three seeds, once on the full grid
of 5 noises (zero among them) x 5 learning rates and once with successive halving as it is set by default. Both are
real studies of both sweeps. The learning rate is constant, as in the paper. FLOPs are
those of the steps that were taken, each counted by `mupscale.budgets.flops` at its own width: zero noise runs at the
base's. A run that diverged stopped early, in the grid too, and is charged for no more.

    python benchmarks/tuning_cost.py

The controls choose among the same cells by the nearest wrong rules: at random, as many whole runs as halving's FLOPs
pay for, on average over all draws; by halving that compares runs with different noise before the end, where noise has
cost and not yet paid; and by the loss at 1/32 of the budget. Each must miss the bound on the loss. The ladder that is set
by default is also replayed on the grid's curves, noise by noise, by the library's own `climb`, and must give what the real
study gave.

Needs covtype/covtype.npz under $MUPSCALE_DATA or ../shared/data; without it the exit code is 2. The last line is
`cost_ratio=C loss_ratio=L …`, each the worst of all proxies and seeds; the exit code is 1 when a bound fails: C at most
0.35, with sweep 1 and without; L at most 1.01, in the real studies, whose sweep 1 may choose another base than the
grid's, and replayed on the grid's base; no more than a third of the cells diverged; 20 minutes on two cores, by
the time that they computed, which others on the same machine do not lengthen.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import comb, inf
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import mupscale as mu
from benchmarks.covertype import load, make
from harness.data import DATA
from harness.program import Outcome, UsageError, pool, run
from harness.runs import step
from mupscale.budgets.flops import step_of
from mupscale.studies.agenda.grid import Point
from mupscale.studies.agenda.halving import Ladder, climb
from mupscale.studies.agenda.status import EQUAL_STEPS
from mupscale.studies.checkpoint import kept
from mupscale.studies.leg import DIVERGED, has_diverged, smoothed, untrained
from mupscale.studies.proxy import Proxy, ReportLoss
from mupscale.studies.settings import RUNGS, Settings

WIDTHS, K, SEEDS = (32, 64), 4, (0, 1, 2)
STEPS, BATCH = 1000, 512
RATES, STRENGTHS = tuple(2.0**power for power in range(-9, -2)), (0.0, 0.1, 0.2, 0.4, 0.8)
LOSS, SECONDS, CORES = 1.01, 1200.0, 2
BOUNDS = {
    "cost_ratio": 0.35,
    "without_sweep_1": 0.35,
    "loss_ratio": LOSS,
    "same_base": LOSS,
    "diverged": 1 / 3,
}
LADDER = Ladder.of(STEPS, RUNGS, 1 / 2)
FIRST_LOOK = Ladder.of(STEPS, (1 / 32,), 1e-9)


@cache
def data() -> tuple[Tensor, Tensor]:
    x, y = load()
    return x.float(), y


def train(run: mu.Run, steps: int, report: ReportLoss) -> None:
    x, y = data()
    for number in range(run.steps, steps):
        rows = torch.randint(len(y), (BATCH,))  # from the global generator, which the study's seed starts
        loss = F.cross_entropy(run.model(x[rows]), y[rows])
        step(run, loss)
        report(number, loss)


@dataclass(frozen=True)
class Found:
    """What a study found, with the loss of every step of every point."""

    width: int
    seed: int
    halving: bool
    recipe: mu.studies.Recipe
    base: Mapping[Point, Sequence[float]]
    wide: Mapping[Point, Sequence[float]]

    @property
    def name(self) -> str:
        return f"{self.width} -> {K * self.width}, seed {self.seed}"

    @property
    def best(self) -> Point:
        return min(self.wide, key=lambda p: (self.loss(p, STEPS), p.lr, p.noise or 0))

    @property
    def diverged(self) -> int:
        return sum(self.loss(point, min(STEPS, len(of))) == inf for point, of in self.wide.items())

    def loss(self, point: Point, end: int) -> float:
        """What the library compares at a step: the mean over the last tenth, infinite for runs that diverged."""
        losses = self.wide[point][:end]
        start = untrained(next(of for p, of in self.base.items() if p.lr == self.recipe.base_lr))
        if len(losses) < end or has_diverged(losses, start) or smoothed(losses, end) > DIVERGED * start:
            return inf
        return smoothed(losses, end)

    def flops(self, sweep_1: bool) -> int:
        """FLOPs of the steps that were taken; with sweep 1, those that measured the theorem too."""
        narrow, wide = flops_at(self.width), flops_at(K * self.width)
        total = sum(len(of) * (narrow if point.is_control else wide) for point, of in self.wide.items())
        if sweep_1:
            total += sum(map(len, self.base.values())) * narrow + EQUAL_STEPS * (narrow + wide)
        return total


@cache
def flops_at(width: int) -> int:
    return step_of(lambda: make(width), torch.zeros(BATCH, 54)).counted


def study(width: int, seed: int, halving: bool, folder: Path) -> Found:
    """One real study, both sweeps, in this process."""
    torch.set_num_threads(1)
    known = Proxy(make, train, torch.optim.AdamW, {"weight_decay": 0.01}, batch=BATCH)
    settings = Settings(
        width=width, k=K, steps=STEPS, lrs=RATES, noises=STRENGTHS, seed=seed, halving=halving, extend=0
    )
    recipe = mu.tune(known, settings, folder=folder)
    sweeps: dict[str, dict[Point, Sequence[float]]] = {"base": {}, "wide": {}}
    for row in recipe.tried:
        point = Point(row["lr"], row["noise"])
        (path,) = folder.glob(f"points/*/{point.name}.pt")
        found = kept(path)
        assert found is not None
        sweeps[row["sweep"]][point] = found.losses
    return Found(width, seed, halving, recipe, **sweeps)


def replay(full: Found, ladder: Ladder) -> tuple[Point, float]:
    """What a ladder finds on the grid's own curves, noise by noise, and its share of the grid's FLOPs in sweep 2."""
    top, taken = dict[Point, float](), 0
    for noise in dict.fromkeys(point.noise for point in full.wide):
        points, results = [point for point in full.wide if point.noise == noise], dict[str, float]()
        cost = flops_at(full.width if noise == 0 else K * full.width)
        while legs := climb(points, results, ladder)[0]:
            for leg in legs:
                results[leg.key] = full.loss(leg.point, leg.end)
                begin, end = (min(at, len(full.wide[leg.point])) for at in (leg.begin, leg.end))
                taken += (end - begin) * cost
        top |= climb(points, results, ladder)[1]
    return min(top, key=lambda p: (top[p], p.lr, p.noise or 0)), taken / full.flops(sweep_1=False)


def mixed(full: Found, ladder: Ladder) -> float:
    """The wrong rule: all cells in one ranking from the start; its loss against the grid's best."""
    alive = list(full.wide)
    for end in ladder.rungs[:-1]:
        alive = sorted(alive, key=lambda point: full.loss(point, end))[: ladder.kept(len(alive))]
    return min(ratio(full, point) for point in alive)


def at_random(full: Found, runs: int) -> float:
    """The loss that the best of so many cells has on average over all draws, against the grid's best."""
    losses = sorted(full.loss(point, STEPS) for point in full.wide)
    worst = max(loss for loss in losses if loss < inf)
    ways = comb(len(losses), runs)
    mean = sum(min(loss, worst) * comb(len(losses) - i - 1, runs - 1) for i, loss in enumerate(losses)) / ways
    return mean / losses[0]


def ratio(full: Found, point: Point) -> float:
    return full.loss(point, STEPS) / full.loss(full.best, STEPS)


@dataclass
class Tally:
    """The worst of all studies, and what should not have been seen."""

    worst: dict[str, float]
    failures: list[str]

    def note(self, name: str, value: float) -> None:
        self.worst[name] = max(value, self.worst.get(name, 0.0))

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.failures.append(what)


def judge(full: Found, halved: Found, tally: Tally) -> None:
    """One proxy and seed: halving against the grid, the controls next to them."""
    assert full.recipe.loss is not None
    assert halved.recipe.loss is not None
    loss = halved.recipe.loss / full.recipe.loss
    cost, alone = (halved.flops(sweep) / full.flops(sweep) for sweep in (True, False))
    runs = int(max(cost, alone) * len(full.wide))
    drawn, ranked, first = at_random(full, runs), mixed(full, LADDER), mixed(full, FIRST_LOOK)
    point, cheap = replay(full, LADDER)
    same = halved.recipe.base_lr == full.recipe.base_lr
    print(
        f"{full.name}: grid {full.recipe.loss:.4f} (noise {full.best.noise:g}, lr {full.best.lr:g}), halving "
        f"{halved.recipe.loss:.4f} (noise {halved.best.noise:g}, lr {halved.best.lr:g}), loss ratio {loss:.4f}, "
        f"cost ratio {cost:.3f}, {alone:.3f} without sweep 1; {'the same base' if same else 'another base, on the same '}"
        f"{'' if same else f'{ratio(full, point):.4f}'}\n"
        f"    {runs} cells at random {drawn:.4f}, noises mixed {ranked:.4f}, by the first look {first:.4f}; "
        f"without noise {full.recipe.control:.4f}; {full.diverged} of {len(full.wide)} diverged",
        flush=True,
    )
    for remark in full.recipe.remarks:
        if "edge" in remark:
            print(f"    {remark}")
    for name, value in (
        ("cost_ratio", cost),
        ("without_sweep_1", alone),
        ("loss_ratio", loss),
        ("same_base", ratio(full, point)),
        ("at_random", drawn),
        ("mixed", ranked),
        ("first_look", first),
        ("diverged", full.diverged / len(full.wide)),
    ):
        tally.note(name, value)
    zero = any(cell.is_control for cell in full.wide)
    tally.expect(zero and len(full.wide) >= 25, f"{full.name}: no 5 x 5 grid with zero noise")
    if same:
        told = f"the replay says {point.name} for {cheap:.4f}, the study {halved.best.name} for {alone:.4f}"
        tally.expect(point == halved.best and abs(cheap - alone) < 1e-12, f"{full.name}: {told}")


def measure(_: argparse.Namespace) -> Outcome:
    if not (DATA / "covtype" / "covtype.npz").is_file():
        raise UsageError(f"needs covtype/covtype.npz in {DATA}; name another folder in MUPSCALE_DATA")
    os.environ["OMP_NUM_THREADS"] = "1"
    began, tally = time.monotonic(), Tally({}, [])
    jobs = sorted(product(WIDTHS, SEEDS, (False, True)), key=lambda job: (-job[0], job[2], job[1]))
    found: dict[tuple[int, int, bool], Found] = {}
    with tempfile.TemporaryDirectory() as room, pool(CORES) as workers:
        waiting = {job: workers.submit(study, *job, Path(room) / "-".join(map(str, job))) for job in jobs}
        for job, result in waiting.items():
            found[job] = result.result()
    waited = time.monotonic() - began
    seconds = sum(os.times()[:4]) / CORES  # of this process and its children
    grids = [found[width, seed, False] for width, seed in product(WIDTHS, SEEDS)]
    for full in grids:
        judge(full, found[full.width, full.seed, True], tally)
    worst = tally.worst
    for name, bound in BOUNDS.items():
        tally.expect(worst[name] <= bound, f"{name} {worst[name]:.4f}, allowed {bound:.4g}")
    for name in ("at_random", "mixed", "first_look"):
        tally.expect(worst[name] > LOSS, f"{name}: a wrong rule reaches {worst[name]:.4f}")
    tally.expect(seconds <= SECONDS, f"{seconds:.0f} seconds, allowed {SECONDS:.0f}")
    told = " ".join(f"{name}={value:.4f}" for name, value in worst.items())
    return Outcome(f"{told} seconds={seconds:.0f} waited={waited:.0f}", tally.failures)


if __name__ == "__main__":
    sys.exit(run(measure, doc=__doc__))
