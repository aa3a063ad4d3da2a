"""What a study will train, before it starts: points, steps at the two widths, FLOPs and tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...rules.schemes import STUDIED
from ...text import columns
from ..settings import Settings
from .grid import Point, points_of
from .status import EQUAL_STEPS


@dataclass(frozen=True)
class Outlook:
    """Steps at the two widths, if no grid is extended and no run diverges.

    >>> settings = Settings(width=8, k=2, steps=100, lrs=[1, 2], noises=[0.1], factors=[1], flops=(10, 30), halving=False)
    >>> Outlook.of(settings)
    Outlook(narrow=1008, wide=108, stay=700)
    """

    narrow: int
    wide: int
    stay: int
    """Steps of the runs that do not grow, which are part of `narrow`."""

    @staticmethod
    def of(settings: Settings) -> Outlook:
        lrs = settings.lrs or ()
        first = settings.base_ladder.steps_for(points_of(lrs, (None,)))
        rates = settings.factors
        control = settings.wide_ladder.steps_for([Point(rate, 0.0) for rate in rates])
        noisy = settings.wide_ladder.steps_for(points_of(rates, settings.sizes))
        both = min(EQUAL_STEPS, settings.after) if settings.control_at_base else 0
        stay = 0 if settings.stay_steps is None else settings.steps + 2 * settings.stay_steps
        at_base = control if settings.control_at_base else 0
        return Outlook(first + at_base + both + stay, noisy + control - at_base + both, stay)


def described(settings: Settings, tokens: int | None = None) -> str:
    """The study as text; `tokens` are those of one step, where they are known."""
    look = Outlook.of(settings)
    wide = settings.k * settings.width
    how = "by new units, and the base at the same rates"
    if not settings.by_units:
        how = f"noise {_list([0.0, *settings.sizes])} ({STUDIED[settings.scheme].size})"
    rows = [
        (f"width {settings.width:,}", f"{look.narrow:,} steps", _flops(settings, 0, look.narrow)),
        (f"width {wide:,}", f"{look.wide:,} steps", _flops(settings, 1, look.wide)),
    ]
    lines = [
        f"proxy: width {settings.width:,} -> {wide:,} (k = {settings.k}), constants written at width {settings.at:,}",
        f"base:  {settings.steps:,} steps, learning rates {_list(settings.lrs or ())}",
        f"grown: {settings.after:,} steps, {_list(settings.factors)} times the best of them, {how}",
    ]
    if look.stay:
        lines.append(
            f"stay:  the base's width for as many FLOPs, {look.stay:,} steps in two runs, to see whether growing pays"
        )
    lines += ["to train, unless a grid is extended or runs diverge:", columns(rows, right=(1, 2))]
    if settings.flops is not None:
        total = look.narrow * settings.flops[0] + look.wide * settings.flops[1]
        lines.append(
            f"in all {total:.3g} FLOPs"
            + (f", {(look.narrow + look.wide) * tokens:,} tokens" if tokens else "")
        )
    return "\n".join(lines)


def _flops(settings: Settings, end: int, steps: int) -> str:
    return "" if settings.flops is None else f"{steps * settings.flops[end]:.3g} FLOPs"


def _list(values: Iterable[float]) -> str:
    return ",".join(f"{value:.4g}" for value in values)
