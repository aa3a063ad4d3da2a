"""Noise whose size a loss chooses: what is asked for. The search for the size is in `training/grow/auto_noise.py`."""

from __future__ import annotations

from dataclasses import dataclass

from ..arguments import wrong_number, wrong_whole
from ..errors import Fault
from ..rules.noise_defaults import DEFAULT_RISE, rise_for


@dataclass(frozen=True)
class AutoNoise:
    """`SignalNoise` with the size at which the loss rises by a share of what the base has learned.

    What was learned is the loss of the untrained wide model minus that of the base.

    Args:
        rise: The share. By default a 4,000th for each of the `steps`, at most 1, and without both a twentieth, or less if that
            would be a jump of the loss, which `upscale` warns of.
        untrained: The loss of the untrained model. By default it is measured on the model that the factory builds.
        steps: How many steps the wide model will be trained for. Give this or `rise`.

    >>> AutoNoise(rise=0.1).share, AutoNoise(steps=1000).share, AutoNoise().share
    (0.1, 0.25, 0.05)
    """

    rise: float | None = None
    untrained: float | None = None
    steps: int | None = None

    @property
    def share(self) -> float:
        """The share of what was learned that the noise may cost."""
        return rise_for(self.steps) if self.rise is None else self.rise

    @property
    def may_jump(self) -> bool:
        """Whether a share or the steps ahead were given; otherwise the loss must not jump."""
        return self.rise is not None or self.steps is not None


def wrong_auto(noise: AutoNoise) -> list[Fault]:
    """Faults of the numbers in an `AutoNoise`."""
    faults: list[Fault] = []
    if noise.rise is not None:
        faults = wrong_number("rise", noise.rise, f"write AutoNoise(rise={DEFAULT_RISE})")
        if not faults and not noise.rise > 0:
            faults = [
                Fault(
                    "noise.zero_rise",
                    "rise",
                    "it is 0, which asks for no noise",
                    "write mu.grow, which adds none",
                )
            ]
    if noise.steps is not None:
        faults += wrong_whole("steps", noise.steps, least=1)
        if noise.rise is not None:
            faults += [
                Fault(
                    "noise.rise_and_steps",
                    "steps",
                    "rise= sets the share already",
                    "leave out rise= or steps=",
                )
            ]
    if noise.untrained is not None:
        faults += wrong_number("untrained", noise.untrained, "write the loss of a model that was not trained")
    return faults
