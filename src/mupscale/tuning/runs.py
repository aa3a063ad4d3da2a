"""The runs of a study at their first step: the proxy base under μP, and the upscaled proxy grown from its best.

Deterministic: the same point is the same run in every process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ..arguments import wrong_kind
from ..errors import Fault, MupscaleError, raise_faults
from ..plans.infer import plan_between
from ..plans.plan import Plan
from ..runs.run import Run
from ..training.groups import param_groups, set_lr_
from ..training.init import init_
from ..training.noise_kinds import CLASSES, Noise
from ..training.upscale import replace_run, upscale
from .checkpoint import restore_, seed_
from .grid import Point
from .proxy import Proxy
from .settings import Settings


def _constant(optimizer: Optimizer, _: int) -> Any:
    return LambdaLR(optimizer, lambda step: 1.0)


@dataclass(frozen=True)
class Runs:
    """Builds the runs of one study."""

    proxy: Proxy
    settings: Settings

    @cached_property
    def reference(self) -> Plan | None:
        """From the reference to the proxy base; None when the base is the reference."""
        return (
            None
            if self.settings.at == self.settings.width
            else self._plan(self.settings.at, self.settings.width)
        )

    @cached_property
    def plan(self) -> Plan:
        """From the proxy base to k times its width."""
        return self._plan(self.settings.width, self.settings.k * self.settings.width)

    @cached_property
    def since(self) -> Plan:
        """From the reference to k times the proxy's width."""
        return self.plan if self.reference is None else self.reference.then(self.plan)

    def _plan(self, narrow: int, wide: int) -> Plan:
        plan = plan_between(self.proxy.build, narrow, wide, loss=self.proxy.loss)
        if not plan.proved:
            what = "build(width) returns a model with code of its own, and shapes do not show that it grows exactly"
            remedy = "write def loss(model): …, which returns the loss of one batch as a tensor"
            raise_faults(
                "the proxy needs a loss to prove that it grows exactly", [Fault("loss", what, remedy)]
            )
        return plan

    def base(self, lr: float) -> Run:
        """The proxy base before its first step."""
        seed_(self.settings.seed)
        model = self._built(self.settings.width)
        since = self.reference
        if since is not None:
            seed_(self.settings.seed)
            init_(model, since, std=self._built(self.settings.at), seed=self.settings.seed)
        run = self._with_optimizer(model, since, lr)
        seed_(self.settings.seed)
        return self._scheduled(run, self.settings.steps, self.proxy.schedule)

    def wide(self, point: Point, parts: dict[str, Any], at_base: bool, constant: bool = False) -> Run:
        """The run that continues the best base with a point's noise and learning rate, on its own schedule.

        `constant` replaces the proxy's schedule by a constant rate.
        """
        base = self.base(point.lr)
        restore_(base, parts)
        for optimizer in base.optimizers:
            for group in optimizer.param_groups:
                group.pop("initial_lr", None)  # left by the schedule that has ended
        run = replace_run(base, schedulers=(), steps=self.settings.steps)
        if not at_base:
            width = self.settings.k * self.settings.width
            run = upscale(
                run,
                lambda: self._built(width),
                self.noise(point),
                plan=self.plan,
                seed=self.settings.seed,
            )
        for optimizer in run.optimizers:
            set_lr_(optimizer, point.lr)
        seed_(self.settings.seed + 1)
        return self._scheduled(run, self.settings.after, _constant if constant else self.proxy.schedule)

    def _built(self, width: int) -> nn.Module:
        model = self.proxy.build(width)
        faults = wrong_kind(f"build({width})", model, nn.Module, "end build with return model")
        raise_faults("the proxy's model cannot be trained", faults)
        return model

    def noise(self, point: Point) -> Noise:
        """The noise of a point; of a point of the base, none."""
        return CLASSES[self.settings.scheme](point.noise or 0.0)

    def _with_optimizer(self, model: nn.Module, since: Plan | None, lr: float) -> Run:
        if self.proxy.device is not None:
            model = model.to(self.proxy.device)
        groups = param_groups(
            model, Run(model, since=since), self.proxy.optimizer, lr=lr, **self.proxy.settings
        )
        make: Any = self.proxy.optimizer
        return Run(model, make(groups), since=since)

    def _scheduled(self, run: Run, steps: int, schedule: Callable[[Optimizer, int], Any] | None) -> Run:
        if self.proxy.schedule is None or schedule is None:
            return run
        with warnings.catch_warnings():
            # A new schedule on an optimizer that has already stepped is intended.
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
            schedulers = [schedule(optimizer, steps) for optimizer in run.optimizers]
        if any(scheduler is None for scheduler in schedulers):
            raise MupscaleError(
                "schedule(optimizer, steps) returned None; write return torch.optim.lr_scheduler.…(optimizer, …)"
            )
        return replace_run(run, schedulers=schedulers)
