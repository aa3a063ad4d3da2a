"""Which norms of the base a noise is relative to, found without measuring any: they can then be measured in any order."""

from __future__ import annotations

import torch
from torch import Tensor

from ..plans.plan import Plan
from .noise_kinds import Noise
from .noise_places import Exempt
from .noises import NOTHING, resolve_noise

Wanted = tuple[str, bool]
"""A wide tensor whose source is measured, and whether as a stack of matrices with a norm each."""


def norms_wanted(
    noise: Noise, *, plan: Plan, since: Plan | None = None, exempt: Exempt = NOTHING
) -> dict[Wanted, int]:
    """What resolving this noise asks for, with how many numbers each answer is.

    >>> from mupscale import SignalNoise
    >>> from mupscale.plans import TensorPlan
    >>> from mupscale.rules import Axis
    >>> plan = Plan({"w": TensorPlan(("w",), (Axis.parse("out: 2x4"), Axis.parse("in: 2x4")))})
    >>> norms_wanted(SignalNoise(0.1), plan=plan)
    {('w', False): 1}
    """
    wanted: dict[Wanted, int] = {}

    def note(name: str, stacked: bool) -> Tensor:
        wanted[name, stacked] = plan[name].base_shape[0] if stacked else 1
        return torch.ones(wanted[name, stacked]) if stacked else torch.ones(())

    resolve_noise(note, noise, plan=plan, since=since, exempt=exempt)
    return wanted
