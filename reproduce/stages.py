"""The stages of one experiment, each kept as it is done: tuning, bases, and a curve for every method and seed.

Uses the library for all that it does to models; knows where results lie and how to go on after a stop.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from math import inf, isfinite
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any

import torch

import mupscale as mu
from mupscale.cli.printing.log_lines import log_lines
from mupscale.studies.agenda.grid import Point
from mupscale.studies.checkpoint import kept, restore_
from mupscale.studies.settings import Settings

from .peers import METHODS, Start, why_not
from .scale import Scale
from .setting import BLOWN_UP, Setting
from .store import Store

SAVE_EVERY = 60.0
"""Seconds between checkpoints of a run."""
SWEEP_POINTS = 48


@dataclass(frozen=True)
class Job:
    """One run: a method with one seed, its stage, width and steps."""

    stage: str
    method: str
    seed: int
    width: int
    steps: int
    first: int
    """The number of its first batch."""


@dataclass(frozen=True)
class Experiment:
    """One variant of a setting at one scale. Results are small and kept; the cache holds weights."""

    name: str
    setting: Setting
    scale: Scale
    results: Path
    cache: Path
    say: Callable[[str], object] = print

    @cached_property
    def store(self) -> Store:
        return Store(self.results / f"{self.setting.name}.jsonl", {"sizes": dict(self.scale.sizes)})

    def recipe_path(self, noise: str) -> Path:
        return self.results / f"{self.setting.name}_{noise}_recipe.json"

    def recipe(self, noise: str = "main") -> mu.studies.Recipe:
        """What tuning found, from its file or by tuning now; `noise` "paired" is the sweep with paired noise."""
        known = self.known_recipe(noise)
        if known is None:
            self.store.of(self.sweep_key(noise), lambda: self._tune(noise))
            if not self.recipe_path(noise).is_file():  # the sweep is known and its file was lost
                self._tune(noise)
            known = mu.studies.Recipe.read(self.recipe_path(noise))
        return known

    def known_recipe(self, noise: str = "main") -> mu.studies.Recipe | None:
        """The recipe if it is there already, and was tuned as this scale says."""
        path = self.recipe_path(noise)
        there = path.is_file() and self.store.known(self.sweep_key(noise)) is not None
        return mu.studies.Recipe.read(path) if there else None

    def sweep_key(self, noise: str) -> dict[str, Any]:
        """The key of a sweep: everything that decides what it finds."""
        scale = asdict(self.scale)
        told = {
            name: v
            for name, v in scale.items()
            if name not in ("base", "seeds", "peer_seeds", "peers", "points", "bars")
        }
        return {"sweep": noise, "study": digest_text([told, self.setting.reference])}

    def _tune(self, noise: str) -> dict[str, Any]:
        """Tune, write the recipe, and keep the curves at the best rate."""
        scale, folder = (
            self.scale,
            self.cache / f"{self.setting.name}_{noise}_{self.sweep_key(noise)['study']}",
        )
        lrs = scale.lrs
        if noise == "paired":  # sweep 1 has been done: its best, and neighbours so that it is no edge
            best = self.base_lr()
            lrs = (best / 2, best, best * 2) if scale.extend else (best,)
        settings = Settings(
            width=scale.proxy,
            k=scale.k,
            steps=scale.steps,
            reference=self.setting.reference,
            lrs=lrs,
            noises=scale.paired if noise == "paired" else scale.noises,
            scheme="paired" if noise == "paired" else scale.scheme,
            factors=scale.factors,
            extend=scale.extend,
            control_at_base=scale.control_at_base,
        )
        with log_lines(lambda line: self.say(f"{self.setting.name} tuning: {line}")):
            recipe = mu.tune(self.setting.proxy(seed=0), settings, folder=folder)
        self.results.mkdir(parents=True, exist_ok=True)
        recipe.save(self.recipe_path(noise))
        return {"curves": {f"{size:g}": curve for size, curve in self._sweep_curves(recipe, folder)}}

    def _sweep_curves(self, recipe: mu.studies.Recipe, folder: Path) -> Iterator[tuple[float, list[float]]]:
        """The curves of sweep 2 at the best learning rate, for every noise, as far as each went."""
        for row in recipe.tried:
            if row["sweep"] == "wide" and row["lr"] == recipe.lr:
                name = Point(row["lr"], row["noise"]).name
                for path in folder.glob(f"points/*/{name}.pt"):
                    found = kept(path)
                    if found is not None:
                        width = max(1, recipe.wide_steps // SWEEP_POINTS)
                        parts = [found.losses[i : i + width] for i in range(0, len(found.losses), width)]
                        yield float(row["noise"]), [rounded(fmean(part)) for part in parts]

    def methods(self) -> list[str]:
        """The methods that are compared and can be applied here."""
        return ["ours", *(name for name in self.scale.peers if why_not(name, self.setting) is None)]

    def refused(self) -> dict[str, str]:
        """The methods that were asked for and cannot be applied, with the reason."""
        told = {name: why_not(name, self.setting) for name in self.scale.peers}
        return {name: why for name, why in told.items() if why is not None}

    def jobs(self) -> list[Job]:
        """Every run after tuning, seed by seed within a stage, so that a stop leaves whole comparisons."""
        scale = self.scale
        jobs = [Job("base", "base", seed, scale.base, scale.steps, 0) for seed in range(scale.seeds)]
        jobs += [Job("scratch", "scratch", seed, scale.wide, scale.steps, 0) for seed in range(scale.seeds)]
        for name in self.methods():
            stage, seeds = ("ours", scale.seeds) if name == "ours" else ("peers", scale.peer_seeds)
            width, steps = scale.wide, scale.steps
            if name == "continue":  # as many FLOPs as the others, so more steps
                width = scale.base
                steps = scale.steps * self.setting.flops(scale.wide) // self.setting.flops(scale.base)
            jobs += [Job(stage, name, seed, width, steps, scale.steps) for seed in range(seeds)]
        return sorted(jobs, key=lambda job: (("base", "scratch", "ours", "peers").index(job.stage), job.seed))

    def key(self, job: Job) -> dict[str, Any] | None:
        """The key of a job's curve; None while the recipe that it needs is not there."""
        tuned = METHODS[job.method].tuned if job.method in METHODS else None
        main, recipe = self.known_recipe(), self.known_recipe(tuned or "main")
        if main is None or recipe is None:
            return None
        told = {"method": job.method, "seed": job.seed, "width": job.width, "steps": job.steps}
        return {**told, "base_lr": main.base_lr, "recipe": digest_of(recipe) if tuned else None}

    def curve(self, job: Job) -> dict[str, Any] | None:
        """The curve of a job, if it has been made."""
        key = self.key(job)
        return None if key is None else self.store.known(key)

    def run(self, job: Job) -> dict[str, Any]:
        """Make the curve of a job, or find it."""
        tuned = METHODS[job.method].tuned if job.method in METHODS else None
        recipe = self.recipe(tuned or "main")
        key = self.key(job)
        assert key is not None
        kept_at = self.cache / f"{self.setting.name}_{digest_text(key)}.pt"

        def make() -> dict[str, Any]:
            run = self._fresh_base(job.seed) if job.method == "base" else self._start(job, recipe)
            made = train_curve(self.setting, run, job, self.scale.points, kept_at)
            if job.method == "base":
                save(self._base_path(job.seed), run, [])
            kept_at.unlink(missing_ok=True)
            return made

        return self.store.of(key, make)

    def _start(self, job: Job, recipe: mu.studies.Recipe) -> mu.Run:
        # A run from scratch needs no base; the method does not look at the one it is given.
        base = self._fresh_base(job.seed) if job.method == "scratch" else self.base(job.seed)
        start = Start(self.setting, base, self.scale.base, self.scale.k, self.base_lr(), recipe, job.seed)
        return METHODS[job.method].grow(start)

    def base(self, seed: int) -> mu.Run:
        """The trained base of a seed, from the cache or trained again."""
        run, path = self._fresh_base(seed), self._base_path(seed)
        if path.is_file():
            restore_(run, torch.load(path, map_location="cpu", weights_only=True)["parts"])
            return run
        self.setting.train(run, range(self.scale.steps), seed)
        save(path, run, [])
        return run

    def base_lr(self) -> float:
        """The learning rate of bases and of runs from scratch: the best of sweep 1."""
        rate = self.recipe().base_lr
        assert rate is not None
        return rate

    def _fresh_base(self, seed: int) -> mu.Run:
        return self.setting.fresh(self.scale.base, self.base_lr(), seed)

    def _base_path(self, seed: int) -> Path:
        told = [self.scale.base, self.scale.steps, self.base_lr(), seed, sorted(self.scale.sizes.items())]
        return self.cache / f"{self.setting.name}_base_{digest_text(told)}.pt"


def train_curve(setting: Setting, run: mu.Run, job: Job, points: int, path: Path) -> dict[str, Any]:
    """Train a run from where its checkpoint stands; mean training loss and held-out figures at every point.

    A run that diverges ends there, and says so.
    """
    points = min(points, job.steps)
    ends = [job.first + job.steps * (i + 1) // points for i in range(points)]
    rows: list[dict[str, float]] = []
    if path.is_file():
        told = torch.load(path, map_location="cpu", weights_only=True)
        restore_(run, told["parts"])
        rows = told["rows"]
    saved = monotonic()
    for number in range(len(rows), points):
        begin = ends[number - 1] if number else job.first
        losses = setting.train(run, range(begin, ends[number]), job.seed, start=inf)
        mean = fmean(losses)
        if rows and mean > BLOWN_UP * rows[0]["loss"]:  # means, as a constant rate makes single losses jump
            mean = inf
        seen = setting.watch(run.model) if setting.watch is not None else {}
        rows.append({"loss": mean, **seen})
        if not isfinite(mean):
            break
        if monotonic() - saved > SAVE_EVERY:
            save(path, run, rows)
            saved = monotonic()
    made: dict[str, Any] = {
        name: [rounded(row[name]) for row in rows if isfinite(row[name])] for name in rows[0]
    }
    return {**made, "diverged": not isfinite(rows[-1]["loss"])}


def save(path: Path, run: mu.Run, rows: list[dict[str, float]]) -> None:
    """Write a run to be gone on with; whoever reads at the same time sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{os.getpid()}-{path.name}")
    parts = {
        "model": run.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "schedulers": [],
    }
    torch.save({"parts": parts, "rows": rows}, unfinished)
    unfinished.replace(path)


def rounded(value: float) -> float:
    """Five digits: enough for a figure.

    >>> rounded(0.123456789)
    0.12346
    """
    return float(f"{value:.5g}")


def digest_text(told: Any) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:10]


def digest_of(recipe: mu.studies.Recipe) -> str:
    """What tells one recipe from another: its constants and noise."""
    return digest_text([dict(recipe.constants), recipe.sigma, recipe.k, recipe.plan])
