"""Noise chosen by what it costs: the size at which the loss has risen by a share of what the base has learned.

One size does not fit all models. On a small MLP t = 0.2 doubles a loss of 0.3; on a small GPT it takes 2.6 to 12. What
can be compared between models is the loss itself, between two marks: the base's loss, and that of a wide model that
has learned nothing. A few forward passes find the size.

Worked example, a base at 0.30 and an untrained model at 1.95 (seven classes), rise = 0.1: the loss should be
0.30 + 0.1 · 1.65 = 0.465 after noise. t = 0.05 gives 0.32, a rise of 0.02 where 0.165 is wanted. Small noise raises a
loss by its square, so the next size is 0.05 · √(0.165 / 0.02) = 0.144. That gives 0.49, a rise of 0.19: too much. A
power of t through both points leads to 0.135, where the loss is 0.463, within a tenth of the rise that is wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import inf, isfinite, log, sqrt
from typing import Any

from torch import Tensor, nn

from ...errors import Fault, MupscaleError, raise_faults
from ...models.build import Make, build
from ...models.clone import copied
from ...models.names import named_tensors
from ...noise.auto import AutoNoise
from ...noise.kinds import SignalNoise
from ...noise.measures import Statistic, statistic
from ...noise.resolve import resolve_noise
from ...noise.resolved import NoisePlan
from ...noise.where import Exempt
from ...plans.direction import Direction
from ...plans.plan import Plan
from ...plans.wide_model import fill_model_
from ...proofs.identity import Loss
from ...rules.noise_defaults import DEFAULT_RISE, DEFAULT_T
from ...tensors.random_states import forked
from .loss_rise import largest_rise, measured

MOST_NOISE = 0.4
"""The largest size that is chosen, whatever the loss allows: with t = 0.4 a model ended worse than with
0.2 (`python -m reproduce.without_proxy`)."""
CLOSE = 0.1
"""The search ends when the rise is this close to the one that is wanted, relative to it."""
MOST = 9
"""Sizes that are tried. With the losses of the base and of the untrained model this makes 11 forward passes."""


@dataclass(frozen=True)
class ChosenNoise:
    """The size that was found, and the losses on the way to it."""

    t: float
    before: float
    after: float
    untrained: float
    tried: tuple[tuple[float, float], ...]
    """Every size that was tried, with its loss."""
    rise: float
    """The share that was asked for."""

    @property
    def found(self) -> float:
        """The share of what was learned that the noise costs."""
        return (self.after - self.before) / (self.untrained - self.before)

    def as_json(self) -> dict[str, Any]:
        return {
            "t": self.t,
            "before": self.before,
            "after": self.after,
            "rise": self.rise,
            "found": self.found,
            "untrained": self.untrained,
            "tried": [list(pair) for pair in self.tried],
        }

    def __str__(self) -> str:
        return (
            f"noise t = {self.t:.3g}: the loss goes from {self.before:.4g} to {self.after:.4g}, {self.found:.0%} of the way to "
            f"an untrained model's {self.untrained:.4g} ({len(self.tried)} sizes tried)"
        )


def choose_noise(
    base: nn.Module,
    wide: Make,
    noise: AutoNoise,
    loss: Loss,
    *,
    plan: Plan,
    seed: int = 0,
    since: Plan | None = None,
    exempt: Exempt,
    settings: bool = True,
) -> ChosenNoise:
    """The size at which the loss of the wide model has risen by the share that is asked for.

    With `settings` the trial models get the base's attributes that are not tensors, as the result does.
    """
    tensors = {name: tensor for name, _, tensor in named_tensors(base)}

    @cache
    def measure(name: str, what: Statistic) -> Tensor:
        return statistic(plan[name].source(tensors), what)

    def resolved(t: float) -> NoisePlan:
        return resolve_noise(measure, SignalNoise(t), plan=plan, seed=seed, since=since, exempt=exempt)

    first = resolved(DEFAULT_T)
    if not first.tensors:
        raise_faults(
            "no noise can be chosen",
            [Fault("noise.no_weight_gets_any", "plan", "no weight of it gets noise", "use mu.grow")],
        )

    def at(t: float) -> float:
        direction = Direction(plan, noise=resolved(t))
        model = fill_model_(build(wide), base, direction, settings=settings, hooks=False)
        return measured(loss, model, seed)

    before = measured(loss, base, seed)
    untrained = noise.untrained if noise.untrained is not None else _untrained(wide, base, loss, seed)
    most = inf if noise.may_jump else largest_rise(before)
    return chosen_size(at, before, untrained, noise.share, most)


def _untrained(wide: Make, base: nn.Module, loss: Loss, seed: int) -> float:
    """The loss of the wide model with the weights that its factory gives it, on the device and in the dtype of the base."""
    with forked(base, seed=seed):
        model = copied(wide) if isinstance(wide, nn.Module) else wide()
    if any(tensor.is_meta for _, _, tensor in named_tensors(model)):
        what = "it is on the meta device, so the loss of an untrained model cannot be measured"
        remedy = "write noise=AutoNoise(untrained=…), for a language model the logarithm of its vocabulary"
        raise_faults("no noise can be chosen", [Fault("model.on_meta_device", "wide", what, remedy)])
    like = next(tensor for tensor in base.parameters() if tensor.is_floating_point())
    return measured(loss, model.to(like.device, like.dtype), seed)


def chosen_size(
    at: Callable[[float], float],
    before: float,
    untrained: float,
    rise: float = DEFAULT_RISE,
    most: float = inf,
) -> ChosenNoise:
    """Search for the size t at which `at(t)` is `before` plus a share of the way to `untrained`, and at most plus `most`.

    >>> found = chosen_size(lambda t: 0.3 + 8 * t**2, before=0.3, untrained=1.95, rise=0.1)
    >>> round(found.t, 3), len(found.tried)
    (0.144, 2)
    """
    learned = untrained - before
    if not (isfinite(learned) and learned > 0):
        what = f"{before:.4g}, and an untrained model has {untrained:.4g}"
        remedy = "check that loss(model) is what the base was trained on, or give a size, such as SignalNoise(0.05)"
        raise_faults(
            "the base has learned nothing on this batch",
            [Fault("noise.nothing_learned", "loss of the base", what, remedy)],
        )
    wanted = min(rise * learned, most / (1 + CLOSE))
    tried: dict[float, float] = {}
    low: tuple[float, float] | None = None
    high: tuple[float, float] | None = None
    same, t = 0, DEFAULT_T
    while t not in tried and len(tried) < MOST:
        tried[t] = at(t)
        risen = tried[t] - before
        if abs(risen - wanted) <= CLOSE * wanted:
            break
        if risen < wanted:
            same, low = max(same, 0) + 1, (t, risen)
        else:
            same, high = min(same, 0) - 1, (t, risen if isfinite(risen) else inf)
        # Three digits are enough, and machines that round otherwise find the same ones.
        t = float(f"{_next(low, high, wanted, halve=abs(same) > 1):.3g}")
    rises = {
        size: abs(log(max(value - before, 1e-12) / wanted))
        for size, value in tried.items()
        if isfinite(value)
    }
    if not rises:
        raise MupscaleError(
            "the loss is not finite with any noise that was tried; give a size, such as SignalNoise(0.01)",
            code="noise.loss_not_finite",
        )
    below = [size for size in rises if tried[size] - before <= most]
    best = min(below or rises, key=rises.__getitem__)
    return ChosenNoise(best, before, tried[best], untrained, tuple(tried.items()), rise)


def _next(
    low: tuple[float, float] | None, high: tuple[float, float] | None, wanted: float, halve: bool
) -> float:
    """The next size: by the square root of the ratio of rises, or between the two nearest by a power of t."""
    if high is None:
        assert low is not None
        factor = sqrt(wanted / low[1]) if low[1] > 0 else 4.0
        return min(MOST_NOISE, low[0] * min(max(factor, 1.2), 4.0))
    if low is None:
        return high[0] / min(max(sqrt(high[1] / wanted), 1.2), 8.0)
    if halve or not 0 < low[1] < high[1] < inf:
        return sqrt(low[0] * high[0])
    power = log(high[0] / low[0]) / log(high[1] / low[1])
    t: float = low[0] * (wanted / low[1]) ** power
    return t
