"""How much noise each tensor gets: a kind of noise, resolved to one reference constant σ̄ per tensor.

The absolute size is σ̄ · fold · q with q from `rules/sizes.py`; nothing here knows a power of the width.
Noise is added after the division by k, to weights and to every copy of them (averages, master weights), and
never to moments. Which weights get noise is the rule of `noise_places.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import prod

from torch import Tensor

from ..errors import Fault, raise_faults
from ..plans.plan import Plan
from ..plans.tensor_plan import TensorPlan
from ..rules.noise_defaults import WAKE
from ..tensors.spectral import gaussian_norm
from .checks import Measure, each, measured, pairing, unknown_names
from .kinds import Noise, PairedNoise, Sigma, SignalNoise, relative_size, t_of, wrong_noise
from .measures import Statistic, statistic
from .resolved import NoisePlan, reference_size, std_of, wakings
from .where import (
    Exempt,
    has_copies,
    new_words,
    noisy_weights,
    pads_width,
    typical_gains,
    waking_gains,
)

NOTHING = Exempt()
"""A model of which nothing is known beyond its plan."""


def resolve_noise(
    base: Mapping[str, Tensor] | Measure,
    noise: Noise,
    *,
    plan: Plan,
    seed: int = 0,
    since: Plan | None = None,
    exempt: Exempt = NOTHING,
) -> NoisePlan:
    """Fix σ̄ and the absolute size for every tensor of the wide model that gets noise.

    `plan` leads from the base to the wide model, `since` from the reference to the base (by default the base
    is its own reference). `base` is a mapping of the base's tensors, or a function that measures their norms.
    `exempt` is what the model itself leaves out: frozen weights, gains of norms, padding rows.

    >>> from mupscale import MupNoise
    >>> from mupscale.rules import Axis
    >>> plan = Plan({"w": TensorPlan(("w",), (Axis.parse("out: 2x4"), Axis.parse("in: 2x4")))})
    >>> resolve_noise({}, MupNoise(0.3), plan=plan).stds                 # σ̄ over the root of the growth
    {'w': 0.15}
    """
    raise_faults(
        "this noise cannot be added", wrong_noise(noise) or unknown_names(noise, plan, base, seed, exempt)
    )
    measure = base if callable(base) else lambda name, what: statistic(plan[name].source(base), what)
    sigmas: dict[str, Sigma] = {}
    stds: dict[str, Sigma] = {}
    paired: dict[str, int] = {}
    asleep: list[str] = []
    woken: dict[str, Sigma] = {}
    noisy = noisy_weights(plan, exempt, vectors=noise.vectors)
    everything = noisy_weights(plan, replace(exempt, frozen=frozenset()), vectors=noise.vectors)
    without = [name for name in everything if name not in noisy]
    for name, entry in noisy.items():
        size = reference_size(name, plan, since)
        if entry.new:
            given = 0.0 if _is_silent(noise) else _named(noise, name)
            if given is not None and not any(each(given)):
                without.append(name)
                continue
            wake = _dense(measure, measured(name, plan), plan)
            sigmas[name] = _signal(WAKE, entry, wake, float(size)) if given is None else _given(given)
            stds[name] = std_of(sigmas[name], size)
            asleep += [name] if len(entry.axes) > 1 and not any(each(sigmas[name])) else []
            continue
        if entry.padded and not _is_silent(noise):
            known = len(entry.axes) > 1 and not entry.gain and pads_width(entry)
            woken[name] = _signal(WAKE, entry, partial(measure, name), float(size)) if known else 0.0
        if entry.padded and not has_copies(entry):
            continue
        if isinstance(noise, PairedNoise):
            if (dim := pairing(entry)) is None:
                without.append(name)
                continue
            paired[name] = dim
        if (relative := relative_size(noise)) is not None:
            t = t_of(relative, name)
            if t is None:
                without.append(name)
                paired.pop(name, None)
                continue
            sigma = _signal(t, entry, _dense(measure, name, plan), float(size))
        else:
            assert not isinstance(noise, SignalNoise)
            assert noise.sigma is not None
            sigma = _given(noise.sigma[name] if isinstance(noise.sigma, Mapping) else noise.sigma)
        sigmas[name] = sigma
        stds[name] = std_of(sigma, size)
    means: dict[str, tuple[float, ...]] = {}
    if not _is_silent(noise):
        woken.update(dict.fromkeys(waking_gains(plan, exempt), 0.0))
        for name in new_words(plan, exempt):
            woken.setdefault(name, 0.0)
            means[name] = tuple(map(_rounded, measure(name, "mean").reshape(-1).tolist()))
        for name in typical_gains(plan, exempt):
            woken.setdefault(name, 0.0)
            means[name] = (_typical(measure(name, "norm"), plan[name]),)
    what = "it is new, and the tensor that it is like is zero, so that noise of its size would not wake it"
    remedy = "put the new block behind a trained one, after=…"
    raise_faults(
        "this noise wakes nothing", [Fault("noise.wakes_nothing", name, what, remedy) for name in asleep]
    )
    rows = {name: row for name, row in exempt.rows.items() if name in stds or name in woken}
    zeros = wakings(woken, means, plan, since)
    return NoisePlan(sigmas, stds, paired, tuple(without), _seed(seed, since), rows, woken, zeros, means)


def _typical(length: Tensor, entry: TensorPlan) -> float:
    """The root mean square of a gain; 1, as in most fresh models, if the base's is zero."""
    return _rounded(float(length) / prod(entry.base_shape) ** 0.5) or 1.0


def _named(noise: Noise, name: str) -> Sigma | None:
    """The σ̄ that the noise names for a new tensor: 0 where patterns of t leave it out, None where it wakes as usual."""
    if (relative := relative_size(noise)) is not None:
        return None if t_of(relative, name) else 0.0
    assert not isinstance(noise, SignalNoise)
    return noise.sigma.get(name) if isinstance(noise.sigma, Mapping) else None


def _is_silent(noise: Noise) -> bool:
    """Whether the noise is zero everywhere, which leaves new tensors asleep too."""
    size = noise.sigma if (relative := relative_size(noise)) is None else relative  # type: ignore[union-attr]
    return all(not value for value in (size.values() if isinstance(size, Mapping) else [size]))


def _dense(measure: Measure, name: str, plan: Plan) -> Callable[[Statistic], Tensor]:
    """What measures the source of a tensor; of a stack of copies, the one matrix that they are copies of."""
    copied = plan[name].stack is not None
    return (lambda _: measure(name, "norms")[:1]) if copied else partial(measure, name)


def _seed(seed: int, since: Plan | None) -> int:
    """A run that grows again draws other numbers for the same seed, so that its two noises are independent."""
    if since is None:
        return seed
    return _digest(f"{seed} after {since.hash}")


def unused_seed(seed: int, since: Plan | None, used: frozenset[int]) -> int:
    """The seed, or one that follows from it if its numbers were added as noise before: twice the same is no second draw."""
    while _seed(seed, since) in used:
        seed = _digest(f"{seed} again")
    return seed


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _given(sigma: Sigma) -> Sigma:
    return sigma if isinstance(sigma, tuple) else float(sigma)


def is_stacked(entry: TensorPlan) -> bool:
    """Whether a tensor is a stack of matrices (experts), each with its own noise size."""
    return len(entry.axes) == 3 and [axis.grows for axis in entry.axes] == [False, True, True]


def copied_norm(entry: TensorPlan) -> float:
    """‖s dup(W)‖ over ‖W‖: copies multiply a spectral norm by √c; experts are measured one by one."""
    experts = 1 if entry.stack is None else entry.axes[entry.stack].k
    norm: float = float(entry.change.s) * float(entry.change.c / experts) ** 0.5
    return norm


def _signal(t: float, entry: TensorPlan, measure: Callable[[Statistic], Tensor], size: float) -> Sigma:
    """σ̄ = t ‖s dup(W)‖ / ‖Δ‖, where Δ has σ̄ = 1; of experts that the base does not have, every one like its dense layer."""
    stacked = is_stacked(entry) and entry.stack is None
    matrix = entry.wide_shape[1:] if stacked or entry.stack == 0 else entry.wide_shape
    delta = gaussian_norm(max(1, prod(matrix[:1])), prod(matrix[1:])) * size
    norms = measure("norms" if stacked else "norm").reshape(-1).tolist()
    sigmas = [_rounded(norm * t * copied_norm(entry) / delta) for norm in norms]
    return tuple(sigmas) if stacked else sigmas[0]


def _rounded(sigma: float) -> float:
    """Round to seven digits, on which all thread counts and machines agree when they measure the same tensor."""
    return float(f"{sigma:.7g}")
