"""What an experiment trains, and how a run of it is made and trained under μP: the base, and the run grown from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn

import mupscale as mu
from mupscale.budgets.flops import step_of
from mupscale.studies.proxy import Proxy

BLOWN_UP = 10.0
"""A loss of so many times the untrained one has diverged."""


@dataclass(frozen=True)
class Setting:
    """A model at any width, its data, and its optimizer with the constants that are not tuned.

    `loss(model, step, seed)` is the training loss on batch `step`; `measure(model)` gives what is reported at the
    end: `loss` over training data, and figures on held-out data. Constants are written at the `reference` width.
    `watch(model)` gives figures on held-out data that are cheap enough for every point of a curve. A step takes
    `parts` batches one after the other, so that large ones fit into memory; `inputs()` is what one of them calls the
    model with.
    """

    name: str
    build: Callable[[int], nn.Module]
    loss: Callable[[nn.Module, int, int], Tensor]
    measure: Callable[[nn.Module], dict[str, float]]
    optimizer: type[torch.optim.Optimizer]
    reference: int
    constants: Mapping[str, Any] = field(default_factory=dict)
    clip: float | None = None
    shapes_tell: bool = True
    declare: Callable[[int, int], mu.Declared] | None = None
    """What shapes do not tell about the plan between two widths; without it the gradient identity decides."""
    watch: Callable[[nn.Module], dict[str, float]] | None = None
    inputs: Callable[[], Any] | None = None
    counted: Callable[[int], nn.Module] | None = None
    """A model that takes as many FLOPs, where the model itself cannot be counted because its data decide what it does."""
    batch: int = 0
    parts: int = 1
    device: str = "cpu"

    def plan(self, narrow: int, wide: int) -> mu.Plan:
        """The plan between two widths, found once."""
        return _plan(self, narrow, wide)

    def __hash__(self) -> int:
        return hash((self.name, self.reference))

    def fresh(self, width: int, lr: float, seed: int, *, mup: bool = True) -> mu.Run:
        """A run before its first step. Without `mup` the constants are taken literally at this width."""
        torch.manual_seed(seed)
        model = self.build(width)
        since = self.plan(self.reference, width) if mup and width != self.reference else None
        if since is not None:
            torch.manual_seed(seed)
            mu.init_weights_(model, since, std=self.build(self.reference), seed=seed)
        model = model.to(self.device)
        groups = mu.param_groups(model, mu.Run(model, since=since), self.optimizer, lr=lr, **self.constants)
        make: Any = self.optimizer
        return mu.Run(model, make(groups), since=since)

    def grown(self, base: mu.Run, width: int, k: int, noise: mu.Noise, lr: float, seed: int) -> mu.Run:
        """The run that goes on at k times the width, with a learning rate of its own."""
        run = mu.upscale(
            base, lambda: self.build(k * width), noise, plan=self.plan(width, k * width), seed=seed
        )
        for optimizer in run.optimizers:
            mu.set_lr_(optimizer, lr)
        return run

    def train(
        self, run: mu.Run, steps: range, seed: int, *, falling: bool = False, start: float | None = None
    ) -> list[float]:
        """Take the steps; the loss of every batch before its step. `falling`: the rate goes to zero on a line.

        A run that diverges ends there, and its last loss is infinite: it is so many times the `start`, by default
        the first loss of these steps.
        """
        groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
        tops = [group["lr"] for group in groups]
        losses: list[float] = []
        for number, step in enumerate(steps):
            if falling:
                for group, top in zip(groups, tops, strict=True):
                    group["lr"] = top * (1 - number / len(steps))
            losses.append(self.step(run, step, seed))
            if not isfinite(losses[-1]) or losses[-1] > BLOWN_UP * (losses[0] if start is None else start):
                losses[-1] = inf
                return losses
        return losses

    def step(self, run: mu.Run, step: int, seed: int) -> float:
        """Take one step; the loss of its batch before it."""
        for optimizer in run.optimizers:
            optimizer.zero_grad()
        total = 0.0
        for part in range(self.parts):
            loss = self.loss(run.model, step * self.parts + part, seed) / self.parts
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        if self.clip is not None:
            mu.trainers.clip_grad_norm_(run.model, run, max_norm=self.clip)
        for optimizer in run.optimizers:
            optimizer.step()
        return total

    def flops(self, width: int) -> int:
        """FLOPs of one training step at a width, counted on the model by the library."""
        return _flops(self, width)

    def proxy(self, seed: int) -> Proxy:
        """The setting as `mu.tune` wants it; data are those of one seed."""

        def train(run: mu.Run, steps: int, report: Callable[[int, float], None]) -> None:
            for step in range(run.steps, steps):
                report(step, self.step(run, step, seed))

        return Proxy(
            self.build,
            train,
            self.optimizer,
            dict(self.constants),
            loss=None if self.shapes_tell else (lambda model: self.loss(model, 0, 0)),
            device=None if self.device == "cpu" else self.device,
            batch=self.batch * self.parts or None,
            digest=self.name,
        )


@cache
def _flops(setting: Setting, width: int) -> int:
    if setting.inputs is None:
        raise mu.MupscaleError(f"{setting.name} does not say what its model is called with: give it inputs=")
    make = setting.counted or setting.build
    return setting.parts * step_of(lambda: make(width), setting.inputs(), width).counted


@cache
def _plan(setting: Setting, narrow: int, wide: int) -> mu.Plan:
    declared = None if setting.declare is None else setting.declare(narrow, wide)
    # A plan from the reference may have a fraction of copies: it gives units, and nothing grows by it.
    grows = wide % narrow == 0 and not setting.shapes_tell
    prove = (lambda model: setting.loss(model, 0, 0)) if grows else None
    return mu.plans.plan_between(setting.build, narrow, wide, loss=prove, declared=declared)
