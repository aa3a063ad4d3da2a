"""The sizes of one experiment, as data. Knows numbers; what is trained, a setting says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Scale:
    """Tune on proxy -> k · proxy, grow base -> k · base, each trained for `steps` before and after.

    >>> scale = Scale(proxy=32, base=64, k=4, steps=100, seeds=5, peer_seeds=3, lrs=powers(-6, -4), noises=(0.1,))
    >>> scale.wide, scale.lrs
    (256, (0.015625, 0.03125, 0.0625))
    """

    proxy: int
    base: int
    k: int
    steps: int
    seeds: int
    peer_seeds: int
    lrs: tuple[float, ...]
    """Learning rates of sweep 1, at the reference."""
    noises: tuple[float, ...]
    """Noises of sweep 2; none is always tried too."""
    factors: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    """Learning rates of sweep 2, as multiples of the best of sweep 1."""
    paired: tuple[float, ...] = ()
    """Noises of the sweep with paired noise; empty when no peer needs it."""
    scheme: str = "sigma"
    peers: tuple[str, ...] = ()
    points: int = 100
    """Points of a curve."""
    extend: int = 1
    control_at_base: bool = True
    """Whether points without noise run at the proxy's own width; not where float32 rounding grows too fast to tell."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """What the setting is made with: rows of data, layers, …"""
    device: str = "cpu"
    bars: Mapping[str, float] = field(default_factory=dict)
    """The least speedup of ours on an account, by its name; below it, or above the run from scratch, the command fails."""

    @property
    def wide(self) -> int:
        return self.k * self.base


def powers(low: int, high: int) -> tuple[float, ...]:
    """Powers of two from 2^low to 2^high."""
    return tuple(2.0**power for power in range(low, high + 1))
