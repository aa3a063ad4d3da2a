"""The runs of a study at their first step: the proxy base under μP, and the upscaled proxy grown from its best.

Deterministic: the same point is the same run in every process.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ..arguments import wrong_kind
from ..errors import Fault, MupscaleError, raise_faults
from ..families.config.goal import Way
from ..noise.auto import AutoNoise
from ..noise.kinds import CLASSES, NewUnits, Noise, SignalNoise
from ..noise.where import exempt_of
from ..planning.infer import plan_between
from ..plans.plan import Plan
from ..rules.schemes import RISE
from ..runs.run import Run
from ..training.grow.auto_noise import choose_noise
from ..training.grow.upscale import upscale
from ..training.rates.reference import set_lr_
from ..training.start.init import init_weights_
from ..training.units.groups import param_groups
from .agenda.grid import Point
from .checkpoint import restore_, seed_
from .proxy import Proxy
from .settings import Settings

_log = logging.getLogger(__name__)


def _constant(optimizer: Optimizer, _: int) -> Any:
    return LambdaLR(optimizer, lambda step: 1.0)


@dataclass(frozen=True)
class Runs:
    """Builds the runs of one study."""

    proxy: Proxy
    settings: Settings
    sizes: dict[float, float] = field(default_factory=dict)
    """t by the rise that it costs."""

    @cached_property
    def reference(self) -> Plan | None:
        """From the reference to the proxy base; None when the base is the reference."""
        return (
            None
            if self.settings.at == self.settings.width
            else self._plan(self.settings.at, self.settings.width, "copies")
        )

    @cached_property
    def plan(self) -> Plan:
        """From the proxy base to k times its width."""
        by: Way = "units" if self.settings.by_units else "copies"
        return self._plan(self.settings.width, self.settings.k * self.settings.width, by)

    @cached_property
    def since(self) -> Plan:
        """From the reference to k times the proxy's width."""
        return self.plan if self.reference is None else self.reference.then(self.plan)

    def _plan(self, narrow: int, wide: int, by: Way) -> Plan:
        if self.proxy.plan is not None:
            plan = self.proxy.plan(narrow, wide, by)
        else:
            plan = plan_between(self.proxy.build, narrow, wide, loss=self.proxy.loss, by=by)
        if not plan.proved:
            what = "build(width) returns a model with code of its own, and shapes do not show that it grows exactly"
            remedy = "write def loss(model): …, which returns the loss of one batch as a tensor"
            raise_faults(
                "the proxy needs a loss to prove that it grows exactly",
                [Fault("proxy.loss_needed_for_proof", "loss", what, remedy)],
            )
        return plan

    @cached_property
    def _reference_model(self) -> nn.Module:
        """The model at the reference, whose sizes the proxy base is initialised with."""
        seed_(self.settings.seed)
        return self._built(self.settings.at)

    def base(self, lr: float, steps: int | None = None) -> Run:
        """The proxy base before its first step, on a schedule of its own length or of `steps`."""
        since = self.reference
        reference = None if since is None else self._reference_model
        seed_(self.settings.seed)
        model = self._built(self.settings.width)
        if since is not None:
            init_weights_(model, since, std=reference, seed=self.settings.seed)
        run = self._with_optimizer(model, since, lr)
        seed_(self.settings.seed)
        return self._scheduled(run, steps or self.settings.steps, self.proxy.schedule)

    def wide(
        self,
        point: Point,
        parts: dict[str, Any],
        at_base: bool,
        constant: bool = False,
        steps: int | None = None,
    ) -> Run:
        """The run that continues the best base with a point's noise, or new units, and learning rate, on its own schedule.

        `constant` replaces the proxy's schedule by a constant rate; `steps` is its length if it is not that of the sweep.
        """
        base = self.base(point.lr)
        restore_(base, parts)
        for optimizer in base.optimizers:
            for group in optimizer.param_groups:
                group.pop("initial_lr", None)  # left by the schedule that has ended
        run = replace(base, schedulers=(), steps=self.settings.steps)
        if not at_base:
            width = self.settings.k * self.settings.width
            run = upscale(
                run,
                lambda: self._built(width),
                self.noise(point, run),
                plan=self.plan,
                seed=self.settings.seed,
            )
        for optimizer in run.optimizers:
            set_lr_(optimizer, point.lr)
        seed_(self.settings.seed + 1)
        return self._scheduled(
            run, steps or self.settings.after, _constant if constant else self.proxy.schedule
        )

    def _built(self, width: int) -> nn.Module:
        model = self.proxy.build(width)
        faults = wrong_kind(f"build({width})", model, nn.Module, "end build with return model")
        raise_faults("the proxy's model cannot be trained", faults)
        return model

    def noise(self, point: Point, base: Run) -> Noise:
        """The noise of a point that is grown from a base, or what wakes new units; of a point of the base, none."""
        size = point.noise or 0.0
        if self.settings.by_units:
            return NewUnits() if size else SignalNoise(0.0)
        if self.settings.scheme != RISE.name:
            return CLASSES[self.settings.scheme](size)
        if size and size not in self.sizes:  # every point grows from the same base
            self.sizes[size] = self._measured(size, base)
        return SignalNoise(self.sizes[size] if size else 0.0)

    def _measured(self, rise: float, base: Run) -> float:
        """The t at which the loss of the upscaled proxy has risen by a share of what its base has learned."""
        if self.proxy.loss is None:
            what = "the size of the noise is a rise of the loss, and there is none to measure"
            remedy = "write def loss(model): …, which returns the loss of one batch as a tensor"
            raise MupscaleError(
                "the proxy needs a loss", [Fault("proxy.loss_needed_for_noise", "loss", what, remedy)]
            )
        choice = choose_noise(
            base.model,
            lambda: self._built(self.settings.k * self.settings.width),
            AutoNoise(rise),
            self.proxy.loss,
            plan=self.plan,
            seed=self.settings.seed,
            since=base.since,
            exempt=exempt_of(base.model, self.plan, "base"),
        )
        _log.info("%s", choice)
        return choice.t

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
                "schedule(optimizer, steps) returned None; write return torch.optim.lr_scheduler.…(optimizer, …)",
                code="proxy.schedule_returned_none",
            )
        return replace(run, schedulers=tuple(schedulers))
