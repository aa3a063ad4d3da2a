"""Trains one spec: from its start, along the FLOPs clock, with checkpoints, to one result of plain numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from pathlib import Path
from statistics import fmean
from time import monotonic, process_time
from typing import Any

import torch
from torch import Tensor, nn

import mupscale as mu
from mupscale.studies.checkpoint import restore_
from mupscale.training.grow.loss_rise import measured

from ..setting import Setting
from ..stages import digest_text, rounded
from ..store import Store
from .clock import Rates, multiplier
from .methods import grow
from .spec import WARMED_UP_AGAIN, Spec, spec_of

POINTS = 20
EARLY = 0.01
"""The first part of the remaining budget, over which the training loss is averaged."""
SNAPSHOTS = (0.1, 0.25, 0.5)
"""Shares of a run from scratch at which it is kept, for runs that grow there."""
BATCHES = 8
"""Training batches of the losses around the noise."""
SAVE_EVERY = 600.0
"""Seconds between checkpoints."""

Result = dict[str, Any]
Known = Callable[[Spec], Result | None]
"""The stored result of a spec, or None."""


@dataclass
class Progress:
    """What a checkpoint holds besides weights."""

    step: int = 0
    curve: list[list[float]] = field(default_factory=list)
    early: list[float] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Phase:
    """The steps of a spec, numbered from 0, and where on the clock they begin."""

    steps: int
    begins: float
    """Share of the budget that is spent before."""
    first: int
    """The number of the first batch."""
    flops: int
    """FLOPs of one step."""
    budget: int

    def spent(self, step: float) -> float:
        return self.begins + step * self.flops / self.budget


@dataclass(frozen=True)
class Trainer:
    """Makes results and keeps them: lines in `store`, weights in `cache`.

    `setting` is by the spec's numbers of layers and of experts, in all and of a token.
    """

    store: Store
    cache: Path
    setting: Callable[[Spec], Setting]
    elsewhere: Known | None = None
    """Where the same runs may be stored by another study."""
    say: Callable[[str], object] = print
    save_every: float = SAVE_EVERY
    batches: int = BATCHES

    @cached_property
    def settings(self) -> dict[tuple[int, int, int], Setting]:
        return {}

    def of(self, spec: Spec) -> Setting:
        key = spec.layers, spec.experts, spec.top_k
        if key not in self.settings:
            self.settings[key] = self.setting(spec)
        return self.settings[key]

    def known(self, spec: Spec) -> Result | None:
        found = self.store.known(spec.key)
        return self.elsewhere(spec) if found is None and self.elsewhere is not None else found

    def all(self) -> list[tuple[Spec, Result]]:
        """Every stored run."""
        return [(spec_of(key), result) for key, result in self.store]

    def run(self, spec: Spec) -> Result:
        """The result of a spec, made if it is not stored; so is that of the run it starts from."""
        if spec.start is not None:
            self.run(spec.start)
        if (known := self.known(spec)) is not None:
            return known
        result = self.store.of(spec.key, lambda: self._train(spec, None)[1])
        self.say(f"{spec.label}: {result['held']} in {result['seconds']} s")
        return result

    def phase(self, spec: Spec) -> Phase:
        setting = self.of(spec)
        flops = setting.flops(spec.width)
        if spec.start is None:
            return Phase(max(1, round(spec.budget / flops)), 0.0, 0, flops, spec.budget)
        base = self.phase(spec.start)
        taken = round(base.steps * spec.at)
        spent = base.begins * base.budget + taken * base.flops
        begins = 0.0 if spec.rewarmed else spent / spec.budget
        steps = max(1, round((1 - begins) * spec.budget / flops))
        return Phase(steps, begins, base.first + taken, flops, spec.budget)

    def _train(self, spec: Spec, until: float | None) -> tuple[mu.Run, Result]:
        """Train to the end, or to a share of the steps."""
        setting, phase = self.of(spec), self.phase(spec)
        run, around = self._begin(spec)
        rates, progress = Rates(run.optimizer), Progress()
        unfinished = self._path(spec, None)
        if unfinished.is_file():
            told = torch.load(unfinished, weights_only=True)
            restore_(run, told["parts"])
            progress = Progress(**told["progress"])
        ends = {round(phase.steps * i / POINTS): i for i in range(1, POINTS + 1)}
        kept_at = {round(phase.steps * share): share for share in SNAPSHOTS} if spec.start is None else {}
        last = round(phase.steps * (spec.stop if until is None else until))
        early, diverged = max(1, round(phase.steps * EARLY)), False
        saved, begun = monotonic(), process_time() - progress.seconds
        for step in range(progress.step, last):
            rates.set_(self._factor(spec, phase, step))
            loss = setting.step(run, phase.first + step, spec.seed)
            done = step + 1
            if done <= early:
                progress.early.append(loss)
            if diverged := not isfinite(loss):
                break
            if done in ends or done == early:
                assert setting.watch is not None
                seen = setting.watch(run.model)["choose"]
                progress.curve.append([rounded(phase.spent(done)), rounded(seen)])
            if done in kept_at:
                self._keep(self._path(spec, kept_at[done]), run)
            if monotonic() - saved > self.save_every and done < last:
                progress.step, progress.seconds = done, process_time() - begun
                self._keep(unfinished, run, progress)
                saved = monotonic()
        if until is None and spec.stop == 1.0:
            self._keep(self._path(spec, 1.0), run)
        unfinished.unlink(missing_ok=True)
        ended = {} if diverged else setting.measure(run.model)
        result: Result = {
            name: rounded(ended[name]) if ended else None for name in ("held", "choose", "train")
        }
        result |= {
            "diverged": diverged,
            "early": rounded(fmean(progress.early)) if progress.early else None,
            "curve": progress.curve,
            "steps": last,
            "samples": last * setting.batch,
            "flops": last * phase.flops,
            "flops_before": self._flops_before(spec),
            "cpu_seconds": round(process_time() - begun, 1),
            **around,
        }
        return run, result

    def _factor(self, spec: Spec, phase: Phase, step: int) -> float:
        spent = phase.spent(step + 0.5)
        factor = multiplier(spent)
        if spec.state in WARMED_UP_AGAIN and not spec.rewarmed:  # over as much of what is left
            left = (spent - phase.begins) / (1 - phase.begins)
            factor *= multiplier(left, decay=0.0)
        return factor

    def _begin(self, spec: Spec) -> tuple[mu.Run, Result]:
        """The run before its first step at its peak rate, and for growth the losses around the noise."""
        setting = self.of(spec)
        if spec.start is None:
            return setting.fresh(spec.width, spec.lr, spec.seed), {}
        base = self._trained(spec.start, spec.at)
        phase = self.phase(spec)
        first = phase.first
        before = self._losses(setting, base, spec, first)
        if not spec.grows:
            mu.set_lr_(base.optimizer, spec.lr)
            return base, {"noise": {"before": before}}
        run = grow(
            setting, base, spec, phase.steps, lambda model: self._next_batches(setting, model, spec, first)
        )
        fresh = setting.fresh(spec.width, spec.lr, spec.seed)
        after, untrained = (self._losses(setting, each, spec, first) for each in (run, fresh))
        chosen = {"t": run.provenance["auto"]["t"]} if spec.by_rule else {}
        return run, {"noise": {"before": before, "after": after, "untrained": untrained, **chosen}}

    def _losses(self, setting: Setting, run: mu.Run, spec: Spec, first: int) -> dict[str, float]:
        """The held-out loss, and that of the next training batches, as a user would measure it around growth."""
        assert setting.watch is not None
        batches = measured(
            lambda model: self._next_batches(setting, model, spec, first), run.model, spec.seed
        )
        return {"choose": rounded(setting.watch(run.model)["choose"]), "train": rounded(batches)}

    def _next_batches(self, setting: Setting, model: nn.Module, spec: Spec, first: int) -> Tensor:
        steps = range(first, first + self.batches)
        return torch.stack([setting.loss(model, step, spec.seed) for step in steps]).mean()

    def _trained(self, spec: Spec, at: float) -> mu.Run:
        """A run as it was at a share of its steps, from the cache or trained again."""
        path = self._path(spec, at)
        if not path.is_file():
            run, _ = self._train(spec, None if at == 1.0 else at)
            self._keep(path, run)
            return run
        run, _ = self._begin(spec)
        restore_(run, torch.load(path, weights_only=True)["parts"])
        return run

    def _flops_before(self, spec: Spec) -> int:
        if spec.start is None:
            return 0
        base = self.phase(spec.start)
        return self._flops_before(spec.start) + round(base.steps * spec.at) * base.flops

    def _path(self, spec: Spec, at: float | None) -> Path:
        """Where the weights at a share of the steps are; None is the checkpoint of an unfinished run."""
        part = "unfinished" if at is None else f"{at:g}"
        return self.cache / f"{digest_text(spec.key)}_{part}.pt"

    def _keep(self, path: Path, run: mu.Run, progress: Progress | None = None) -> None:
        """Write weights, state and progress; whoever reads at the same time sees the old file or the new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{os.getpid()}-{path.name}")
        parts = {
            "model": run.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
            "schedulers": [],
        }
        torch.save({"parts": parts, "progress": {} if progress is None else vars(progress)}, unfinished)
        unfinished.replace(path)
