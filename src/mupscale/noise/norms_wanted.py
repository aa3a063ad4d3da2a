"""Which norms and means of the base a noise needs, found without measuring any: they can then be measured in any order."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ..plans.plan import Plan
from .kinds import Noise
from .measures import Statistic
from .resolve import NOTHING, resolve_noise
from .where import Exempt

Wanted = tuple[str, Statistic]
"""A wide tensor whose source is measured, and what of it."""


def norms_wanted(
    noise: Noise, *, plan: Plan, since: Plan | None = None, exempt: Exempt = NOTHING
) -> dict[Wanted, int]:
    """What resolving this noise asks for, with how many numbers each answer is.

    >>> from mupscale import SignalNoise
    >>> from mupscale.plans import TensorPlan
    >>> from mupscale.rules import Axis
    >>> plan = Plan({"w": TensorPlan(("w",), (Axis.parse("out: 2x4"), Axis.parse("in: 2x4")))})
    >>> norms_wanted(SignalNoise(0.1), plan=plan)
    {('w', 'norm'): 1}
    """
    wanted: dict[Wanted, int] = {}

    def note(name: str, what: Statistic) -> Tensor:
        shape = plan[name].base_shape
        wanted[name, what] = {"norm": 1, "norms": prod(shape[:1]), "mean": prod(shape[1:])}[what]
        return torch.ones(wanted[name, what], device="cpu")

    resolve_noise(note, noise, plan=plan, since=since, exempt=exempt)
    return wanted
