"""One leg of one point, trained by the user's loop: reported, checkpointed, stopped at its end.

Knows runs and files; the caller says whether this worker still owns the point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any

from torch import Tensor

from ..errors import MupscaleError
from ..runs.run import Run
from .agenda.halving import Leg
from .checkpoint import keep, kept, restore_, set_random_state_
from .proxy import Proxy

DIVERGED = 10.0
"""A run whose mean loss, over ten steps or where runs are compared, is this many times the untrained model's has diverged."""
_CURVE = 48  # points kept per leg for its curve


class Stop(BaseException):
    """Ends the user's loop when a leg has ended. A BaseException, so that `except Exception` in the loop cannot catch it."""


class Lost(BaseException):
    """Ends the user's loop when another worker has taken the point over."""


@dataclass(frozen=True)
class LegOutcome:
    """The result of a leg as its worker reports it."""

    loss: float
    """The mean over its last steps; infinite when it diverged."""
    resumed_at: int
    """The step from which this worker resumed."""
    steps: int
    """How many steps this worker took."""
    seconds: float
    curve: list[tuple[int, float]] = field(default_factory=list)
    """Steps and mean losses between them, for drawing."""
    tolerance: float | None = None
    """The largest loss allowed, where the loss is a difference that should be zero."""

    @property
    def diverged(self) -> bool:
        return self.loss == inf


def smoothed(losses: Sequence[float], end: int) -> float:
    """The mean loss over the last tenth of the steps up to `end`, but at least ten steps where there are that many.

    >>> smoothed([9.0] * 10 + [1.0, 3.0] * 5, 20), smoothed([1.0, 3.0], 2)
    (2.0, 2.0)
    """
    return fmean(losses[end - min(end, max(10, end // 10)) : end])


def untrained(losses: Sequence[float]) -> float:
    """The loss that divergence is measured against; infinite when it is not positive, because a multiple of it says nothing."""
    return losses[0] if losses and isfinite(losses[0]) and losses[0] > 0 else inf


def has_diverged(losses: Sequence[float], start: float) -> bool:
    """Whether the last loss is not finite, or the mean of the last ten exceeds `DIVERGED` times the untrained loss.

    >>> has_diverged([1.0, float("nan")], 1.0), has_diverged([1.0] * 9 + [50.0], 1.0), has_diverged([50.0] * 10, 1.0)
    (True, False, True)
    """
    last = losses[-10:]
    return bool(losses) and (not isfinite(losses[-1]) or (len(last) == 10 and fmean(last) > DIVERGED * start))


def train_leg(
    proxy: Proxy,
    make: Callable[[], Run],
    leg: Leg,
    path: Path,
    *,
    total: int,
    start: float | None = None,
    every: float = 30.0,
    owned: Callable[[], bool] = lambda: True,
) -> LegOutcome:
    """Train a point from its checkpoint to the end of the leg.

    `make` gives the run before its first step; `total` is the number of steps of the whole sweep, which the user's loop receives;
    `start` is the untrained loss, by default the first one reported.
    """
    began = monotonic()
    found = kept(path)
    losses = [] if found is None else list(found.losses)
    at = len(losses)
    limit = start if start is not None else untrained(losses) if losses else None
    if at >= leg.end or (limit is not None and has_diverged(losses, limit)):
        return _outcome(losses, leg, at, at, began, limit)
    run = make()
    before = run.steps
    if found is not None:
        restore_(run, found.parts)
        set_random_state_(found.random)
    run = replace(run, steps=before + at)
    reporter = _Reporter(run, leg, path, losses, before, limit, every, owned)
    try:
        proxy.train(run, before + total, reporter)
        if len(losses) < leg.end:
            raise MupscaleError(
                f"train returned after {len(losses)} of {leg.end} steps; loop over range(run.steps, steps) and end "
                "each iteration with report(step, loss)",
                code="proxy.loop_ended_early",
            )
    except Stop:
        pass
    finally:
        reporter.close()
    return _outcome(losses, leg, at, len(losses), began, reporter.limit)


class _Reporter:
    """The `report` that the user's loop calls."""

    def __init__(
        self,
        run: Run,
        leg: Leg,
        path: Path,
        losses: list[float],
        before: int,
        limit: float | None,
        every: float,
        owned: Callable[[], bool],
    ) -> None:
        self.run, self.leg, self.path, self.losses = run, leg, path, losses
        self.before, self.limit, self.every, self.owned = before, limit, every, owned
        self.kept_at, self.stepped = monotonic(), 0
        self.counted = [int(getattr(s, "last_epoch", 0)) for s in run.schedulers]
        self.hooks = [o.register_step_post_hook(self._count) for o in run.optimizers]

    def _count(self, *_: Any) -> None:
        self.stepped += 1

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def __call__(self, step: int, loss: float | Tensor) -> None:
        self._check(step)
        self.losses.append(float(loss.detach() if isinstance(loss, Tensor) else loss))
        if self.limit is None:
            self.limit = untrained(self.losses)
        diverged = has_diverged(self.losses, self.limit)
        ended = diverged or len(self.losses) >= self.leg.end
        if not self.owned():
            raise Lost
        if ended or monotonic() - self.kept_at >= self.every:
            keep(self.path, self.run, self.losses)
            self.kept_at = monotonic()
        if ended:
            raise Stop

    def _check(self, step: int) -> None:
        expected = self.before + len(self.losses)
        if step != expected:
            raise MupscaleError(
                f"report was called for step {step}, expected {expected}: loop over range(run.steps, steps) and report each",
                code="proxy.step_out_of_order",
            )
        if not self.stepped:
            raise MupscaleError(
                "report was called before the optimizer's step; end each iteration of the loop with report(step, loss)",
                code="proxy.reported_before_step",
            )
        for scheduler, count in zip(self.run.schedulers, self.counted, strict=True):
            if hasattr(scheduler, "last_epoch") and scheduler.last_epoch == count:
                raise MupscaleError(
                    "the loop does not step its schedulers: for s in run.schedulers: s.step()",
                    code="proxy.schedulers_not_stepped",
                )
        self.counted = [int(getattr(s, "last_epoch", 0)) for s in self.run.schedulers]
        self.stepped = 0


def _outcome(
    losses: list[float], leg: Leg, at: int, until: int, began: float, limit: float | None
) -> LegOutcome:
    assert limit is not None
    diverged = has_diverged(losses, limit) or smoothed(losses, leg.end) > DIVERGED * limit
    loss = inf if diverged else smoothed(losses, leg.end)
    window = max(1, len(losses) // _CURVE)
    ends = range(max(leg.begin, 0) + window, min(len(losses), leg.end) + 1, window)
    curve = [(end, fmean(losses[end - window : end])) for end in ends]
    return LegOutcome(
        loss, at, until - at, monotonic() - began, [(end, value) for end, value in curve if isfinite(value)]
    )
