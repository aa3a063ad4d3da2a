"""When a run steps, at which rate, and when it grows.

Knows: the two conventions of time. The paper sets W_T = W_{T-1} + noise, so that growth takes the place of the
gradient step at T-1; a run that trains at every step and then grows has one step more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mupscale.arguments import wrong_kind, wrong_number, wrong_whole
from mupscale.errors import Fault, raise_faults


@dataclass(frozen=True)
class Schedule:
    """`steps` outputs are computed; the run grows at `grow_at`, before its output is; rates are reference rates.

    A run that grows at `steps` never does.

    >>> Schedule(steps=6, grow_at=3, rate=0.1).rates()
    [0.1, 0.1, 0.1, 0.1, 0.1, 0.1]
    >>> Schedule(steps=6, grow_at=3, rate=0.1, rate_after=0.05, growth_takes_a_step=True).rates()
    [0.1, 0.1, 0.0, 0.05, 0.05, 0.05]
    """

    steps: int
    grow_at: int
    rate: float
    rate_after: float | None = None
    """None: as before."""
    growth_takes_a_step: bool = False
    """The paper's convention: no gradient step at grow_at - 1."""

    def __post_init__(self) -> None:
        faults = [*wrong_whole("steps", self.steps, least=1), *wrong_whole("grow_at", self.grow_at, least=1)]
        faults += wrong_number("rate", self.rate, "write rate=0.1, for example")
        if self.rate_after is not None:
            faults += wrong_number("rate_after", self.rate_after, "write rate_after=0.05, for example")
        if not faults and self.grow_at > self.steps:
            what = f"it is {self.grow_at} of {self.steps} steps"
            faults.append(Fault("limits.growth_after_end", "grow_at", what, "write a step from 1 to steps"))
        raise_faults("this schedule cannot run", faults)

    def rates(self) -> list[float]:
        """The rate of the gradient step that follows each output; 0 where there is none."""
        after = self.rate if self.rate_after is None else self.rate_after
        rates = [self.rate if t < self.grow_at else after for t in range(self.steps)]
        if self.growth_takes_a_step:
            rates[self.grow_at - 1] = 0.0
        return rates


def check_noise(noise: Mapping[str, float], layers: str) -> None:
    """Refuse sizes for layers that are not there, and layers without a size."""
    remedy = f"write a size for each of {', '.join(layers)}; 0 for none"
    raise_faults("noise is given by layer", wrong_kind("noise", noise, Mapping, remedy))
    faults = [
        Fault("limits.layer_without_size", name, "no size is given", remedy)
        for name in layers
        if name not in noise
    ]
    faults += [
        Fault("limits.no_such_layer", name, "there is no such layer", remedy)
        for name in noise
        if name not in layers
    ]
    raise_faults("noise is given by layer", faults)
