"""Hyperparameters found on the smallest pair are right at every width: noise and learning rate, on real data.

    python -m reproduce.transfer mlp_adamw [--seeds 3] [--figure docs/figures/transfer_mlp_adamw.png]
    python -m reproduce.transfer mlp_sgd
    python -m reproduce.transfer gpt2_adamw --seeds 1

Bases of half the target's width are trained at one learning rate, grown ×2 with noise, and trained as long again while
the rate falls to zero. The smallest pair is searched in both directions, in steps of two (GPT-2: first the
rate, then the noise); its best point is then tried
at every other width, with three points on either side in each direction. The control, with the first seed, takes the
same constants literally at the widest pair, without μP.

Every run is kept in reproduce/results, and a study that was cut off goes on. The last line is
`lr=R noise=R control=R control_own=R`: the loss of the smallest pair's best point over the best of each width, the worst of
the widths, along the learning rate and along the noise; the loss of that point at the widest pair without μP over the best
that is known there; and over the best of its own lines, whose base was trained at the same literal rate. The exit code is 1
when a bound fails: 1.01 for transfer, an optimum at an edge of the grid, or a control below 1.05.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf
from pathlib import Path
from statistics import fmean

import torch

import mupscale as mu

from .setting import Setting
from .store import RESULTS, Store

Lines = tuple[list[list[float]], list[list[float]]]
AROUND = range(-3, 4)
ALLOWED, CONTROL = 1.01, 1.05


@dataclass(frozen=True)
class Study:
    """One setting at several target widths, with where to look on the smallest pair, in powers of two."""

    title: str
    data: str
    setting: Setting
    targets: tuple[int, ...]
    steps: int
    base_rates: range
    rates: range
    noises: range
    whole: bool = True
    """Whether the smallest pair is searched as a grid; if not, its noise is searched at its best rate."""

    def store(self) -> Store:
        """Where results are kept, with what all of them share."""
        setting = self.setting
        shared = {
            "reference": setting.reference,
            "batch": setting.batch,
            "optimizer": setting.optimizer.__name__,
        }
        shared |= {"constants": dict(setting.constants), "clip": setting.clip, "data": self.data}
        return Store(RESULTS / f"transfer_{setting.name}.jsonl", shared)


@dataclass(frozen=True)
class Transfer:
    """The runs of a study, made when they are asked for."""

    study: Study
    seeds: int
    store: Store

    @cached_property
    def base_lr(self) -> float:
        """Sweep 1, at the smallest base."""
        width = self.study.targets[0] // 2

        def loss(power: int) -> float:
            return self._mean(lambda seed: self._base_loss(width, 2.0**power, seed))

        best = min(self.study.base_rates, key=loss)
        if best in (self.study.base_rates[0], self.study.base_rates[-1]):
            print(f"the base's best learning rate 2^{best} lies on the edge of what was tried")
        return 2.0**best

    @cached_property
    def best(self) -> tuple[int, int]:
        """The powers of two of learning rate and noise that are best at the smallest pair, by the mean of all seeds."""
        study = self.study
        if study.whole:
            return self._least(list(product(study.rates, study.noises)))
        middle = study.noises[len(study.noises) // 2]
        lr, _ = self._least([(power, middle) for power in study.rates])
        return self._least([(lr, power) for power in study.noises])

    def _least(self, points: Sequence[tuple[int, int]]) -> tuple[int, int]:
        losses = dict.fromkeys(points, 0.0)
        for seed in range(self.seeds):  # outermost, so that a base is trained once for all of its points
            for lr, noise in points:
                losses[lr, noise] += self.one(self.study.targets[0], lr, noise, seed)
        return min(losses, key=losses.__getitem__)

    def one(self, target: int, lr: int, noise: int, seed: int, mup: bool = True) -> float:
        """The training loss at the end of one run; infinite when it diverged."""
        key = {"target": target, "base_lr": self.base_lr, "lr": 2.0**lr, "noise": 2.0**noise, "seed": seed}
        key |= {"steps": self.study.steps, "mup": mup}

        def make() -> dict[str, object]:
            setting, steps = self.study.setting, self.study.steps
            base = self._base(target // 2, self.base_lr, seed, mup)
            run = setting.grown(base, target // 2, 2, mu.MupNoise(2.0**noise), 2.0**lr, seed)
            losses = setting.train(run, range(steps, 2 * steps), seed, falling=True)
            if losses[-1] == inf:
                return {"loss": None}
            return dict(setting.measure(run.model))

        new = self.store.known(key) is None
        result = self.store.of(key, make)
        if new:
            print(f"{self.study.setting.name} {key} {result}", flush=True)
        return inf if result["loss"] is None else float(result["loss"])

    def _mean(self, one: Callable[[int], float]) -> float:
        return fmean(one(seed) for seed in range(self.seeds))

    def _base_loss(self, width: int, lr: float, seed: int) -> float:
        key = {"base": width, "lr": lr, "seed": seed, "steps": self.study.steps}

        def make() -> dict[str, object]:
            base = self._base(width, lr, seed, True)
            return dict(self.study.setting.measure(base.model))

        return float(self.store.of(key, make)["loss"])

    def _base(self, width: int, lr: float, seed: int, mup: bool) -> mu.Run:
        wanted = (width, lr, seed, mup)
        if wanted not in _BASES:
            _BASES.clear()  # points are asked for base by base
            run = self.study.setting.fresh(width, lr, seed, mup=mup)
            self.study.setting.train(run, range(self.study.steps), seed)
            _BASES[wanted] = run
        return _BASES[wanted]


_BASES: dict[tuple[int, float, int, bool], mu.Run] = {}


def studies() -> dict[str, Callable[[], Study]]:
    def mlp(optimizer: str, base_rates: range, rates: range) -> Callable[[], Study]:
        def make() -> Study:
            from .mlp import setting

            rows = 100_000
            steps = 10 * setting.epoch(rows)
            small = setting.setting(optimizer, rows)
            title = f"MLP on Forest Cover Type, {small.optimizer.__name__}"
            return Study(
                title, f"{rows} rows", small, (64, 128, 256, 512), steps, base_rates, rates, range(-6, 1)
            )

        return make

    def gpt2() -> Study:
        from .gpt2 import setting

        small = setting.setting(setting.Sizes(context=32))
        return Study(
            "GPT-2 on textbooks, AdamW",
            "windows of 32 tokens",
            small,
            (64, 128, 256),
            300,
            range(-9, -2),
            range(-8, -2),
            range(-6, 1),
            whole=False,
        )

    return {
        "mlp_adamw": mlp("adamw", range(-8, 0), range(-7, 0)),
        "mlp_sgd": mlp("sgd", range(-3, 3), range(-3, 4)),
        "gpt2_adamw": gpt2,
    }


def lines(transfer: Transfer, target: int, seeds: int, mup: bool = True) -> Lines:
    """Each seed's losses along the learning rate and along the noise, through the best point of the smallest pair."""
    lr, noise = transfer.best
    along_lr, along_noise = [], []
    for seed in range(seeds):  # outermost, so that a base is trained once for all of its points
        along_lr.append([transfer.one(target, lr + i, noise, seed, mup) for i in AROUND])
        along_noise.append([transfer.one(target, lr, noise + i, seed, mup) for i in AROUND])
    return along_lr, along_noise


def mean(seeds: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(column) for column in zip(*seeds, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    known = studies()
    parser.add_argument("setting", choices=known)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--figure", type=Path, help="where to draw the losses")
    options = parser.parse_args()
    torch.set_num_threads(1)
    study = known[options.setting]()
    transfer = Transfer(study, options.seeds, study.store())
    found = {target: lines(transfer, target, options.seeds) for target in study.targets}
    without = lines(transfer, study.targets[-1], 1, mup=False)
    if options.figure is not None:
        draw(transfer, found, without, options.figure)
    return judge(transfer, found, without)


def judge(transfer: Transfer, found: Mapping[int, Lines], without: Lines) -> int:
    """Print the losses and what holds; the exit code."""
    lr, noise = transfer.best
    failed, ratios = [], {}
    print(f"\nbase at lr {transfer.base_lr:g}; best at the smallest pair: lr 2^{lr}, noise 2^{noise}")
    rows = {f"{target // 2} -> {target}": both for target, both in found.items()} | {"without μP": without}
    for name, both in rows.items():
        for what, seeds in zip(("lr", "noise"), both, strict=True):
            losses = mean(seeds)
            shown = " ".join("diverged" if loss == inf else f"{loss:8.4f}" for loss in losses)
            ratios[name, what] = losses[len(losses) // 2] / min(losses)
            print(f"{name:11} {what:5} {shown}   ratio {ratios[name, what]:.4f}")
            if name != "without μP" and min(losses) in (losses[0], losses[-1]):
                failed.append(f"{name}: the best {what} lies on the edge of the grid")
    alone = max(ratios.pop(("without μP", what)) for what in ("lr", "noise"))
    widest = [loss for seeds in found[transfer.study.targets[-1]] for loss in mean(seeds)]
    control = mean(without[0])[len(AROUND) // 2] / min(widest)
    worst = {w: max(r for (_, what), r in ratios.items() if what == w) for w in ("lr", "noise")}
    for what, value in worst.items():
        if value > ALLOWED:
            failed.append(
                f"the {what} of the smallest pair costs {value:.4f} at some width, allowed {ALLOWED}"
            )
    if not control >= CONTROL:
        failed.append(f"without μP the cost is {control:.4f}, expected at least {CONTROL}")
    for failure in failed:
        print(f"FAILED: {failure}")
    hours = transfer.store.seconds / 3600
    print(
        f"\nlr={worst['lr']:.4f} noise={worst['noise']:.4f} control={control:.4f} control_own={alone:.4f} hours={hours:.2f}"
    )
    return 1 if failed else 0


def draw(transfer: Transfer, found: Mapping[int, Lines], without: Lines, path: Path) -> None:
    from .figures import draw_transfer

    lr, noise = transfer.best
    bands = {f"{target // 2} → {target}": both for target, both in found.items()}
    widest = transfer.study.targets[-1]
    bands[f"without μP, {widest // 2} → {widest}"] = without
    powers = [lr + i for i in AROUND], [noise + i for i in AROUND]
    draw_transfer(transfer.study.title, powers, bands, path)


if __name__ == "__main__":
    sys.exit(main())
