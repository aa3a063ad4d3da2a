"""How much noise each tensor gets: three schemes, each resolved to one reference constant σ̄ per tensor.

The absolute size is σ̄ · fold · q with q from `rules/sizes.py`; nothing here knows a power of the width.
Noise is added after the division by k, to weights and to every copy of them (averages, master weights), and
never to moments. One-dimensional tensors get none unless asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..errors import MupscaleError
from ..plans.plan import Plan, TensorPlan
from ..plans.selftest import source_of
from ..rules.scale import Scale
from ..rules.sizes import noise_size, size_of_ratios
from ..tensors.noise import TensorNoise
from ..tensors.philox import Stream
from ..tensors.spectral import gaussian_norm, spectral_norms

Sigma = float | tuple[float, ...]


@dataclass(frozen=True)
class MupNoise:
    """The paper's Algorithm 1: one σ̄ for all tensors, or one for each by name.

    >>> MupNoise(0.3).sigma
    0.3
    """

    sigma: float | Mapping[str, Sigma]
    vectors: bool = False
    """Whether one-dimensional tensors (biases, gains) get noise too."""


@dataclass(frozen=True)
class SignalNoise:
    """Noise whose spectral norm is t times that of the widened tensor, resolved per tensor to σ̄."""

    t: float
    vectors: bool = False


@dataclass(frozen=True)
class PairedNoise:
    """Noise that sums to zero over the copies along the in axis: outputs do not move, gradients of copies do.

    Tensors without copies along an in axis get none and are listed.
    """

    sigma: float | Mapping[str, Sigma]
    vectors: bool = False


Noise = MupNoise | SignalNoise | PairedNoise


@dataclass(frozen=True)
class NoisePlan:
    """Noise resolved: σ̄ and absolute size of every tensor. From here on it is plain, and it transfers."""

    sigmas: Mapping[str, Sigma]
    stds: Mapping[str, Sigma]
    paired: Mapping[str, int] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    """Tensors that a scheme leaves without noise although they are not one-dimensional."""
    seed: int = 0

    def tensor(self, name: str) -> TensorNoise | None:
        """The noise of one tensor, or None."""
        std = self.stds.get(name)
        if std is None or std == 0:
            return None
        return TensorNoise(Stream(self.seed, name), std, self.paired.get(name))

    def as_json(self) -> dict[str, Any]:
        return {"seed": self.seed, "sigmas": dict(self.sigmas), "paired": dict(self.paired)}


def resolve_noise(
    noise: Noise, plan: Plan, base: Mapping[str, Tensor], seed: int = 0, reference: Plan | None = None
) -> NoisePlan:
    """Fix σ̄ and the absolute size for every tensor of the wide model.

    `plan` leads from the base to the wide model; `reference`, from the reference to the base (by default the
    base is its own reference).
    """
    sigmas: dict[str, Sigma] = {}
    stds: dict[str, Sigma] = {}
    paired: dict[str, int] = {}
    without: list[str] = []
    for name, entry in plan.tensors.items():
        if entry.kind != "parameter" or not entry.sources or (len(entry.axes) < 2 and not noise.vectors):
            continue
        size = reference_size(name, plan, reference)
        if isinstance(noise, PairedNoise):
            dims = [d for d, axis in enumerate(entry.axes) if axis.role == "in" and axis.k > 1]
            if not dims:
                without.append(name)
                continue
            paired[name] = dims[0]
        if isinstance(noise, SignalNoise):
            sigma = _signal(noise.t, entry, source_of(entry, base), float(size))
        else:
            sigma = _given(noise.sigma, name)
        sigmas[name] = sigma
        stds[name] = (
            sigma * float(size) if isinstance(sigma, float) else tuple(s * float(size) for s in sigma)
        )
    return NoisePlan(sigmas, stds, paired, tuple(without), seed)


def reference_size(name: str, plan: Plan, reference: Plan | None) -> Scale:
    """fold · q of a wide tensor, counted from the reference."""
    entry = plan[name]
    if reference is None:
        return noise_size(entry.axes, entry.fold)
    early = reference[entry.sources[0]]
    pairs = [
        (a.role or b.role, Fraction(b.wide, a.base))
        for a, b in zip(early.axes, entry.axes, strict=True)
        if a.role or b.role
    ]
    return size_of_ratios(pairs, early.fold * entry.fold)


def _given(sigma: float | Mapping[str, Sigma], name: str) -> Sigma:
    if not isinstance(sigma, Mapping):
        return float(sigma)
    if name not in sigma:
        raise MupscaleError(f"the noise has no σ̄ for {name}; give one for every tensor, 0 for none")
    value = sigma[name]
    return value if isinstance(value, tuple) else float(value)


def _signal(t: float, entry: TensorPlan, weight: Tensor, size: float) -> Sigma:
    """σ̄ = t ‖s dup(W)‖ / ‖Δ‖, where copies make ‖dup(W)‖ = √c ‖W‖ and Δ has σ̄ = 1."""
    grown = float(entry.change.s) * float(entry.change.c) ** 0.5
    if len(entry.axes) < 2:
        norm = float(torch.linalg.vector_norm(weight.detach().double()))
        sigma: float = t * grown * norm / (gaussian_norm(max(1, prod(entry.wide_shape)), 1) * size)
        return sigma
    stacked = len(entry.axes) == 3 and not entry.axes[0].grows and entry.axes[1].grows and entry.axes[2].grows
    matrix = entry.wide_shape[1:] if stacked else entry.wide_shape
    delta = gaussian_norm(matrix[0], prod(matrix[1:])) * size
    norms = spectral_norms(weight, stacked) * (t * grown / delta)
    return tuple(norms.tolist()) if stacked else float(norms)
