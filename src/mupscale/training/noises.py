"""How much noise each tensor gets: a kind of noise, resolved to one reference constant σ̄ per tensor.

The absolute size is σ̄ · fold · q with q from `rules/sizes.py`; nothing here knows a power of the width.
Noise is added after the division by k, to weights and to every copy of them (averages, master weights), and
never to moments. Which weights get noise is the rule of `noise_places.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..arguments import wrong_whole
from ..errors import Fault, MupscaleError, raise_faults
from ..plans.plan import Plan, TensorPlan
from ..rules.noise_defaults import WAKE
from ..rules.scale import ONE, Scale
from ..rules.sizes import noise_size, size_of_ratios
from ..tensors.noise import TensorNoise, Waking
from ..tensors.philox import Stream
from ..tensors.spectral import gaussian_norm, spectral_norms
from .noise_kinds import Noise, PairedNoise, Sigma, SignalNoise, relative_size, t_of, wrong_noise
from .noise_places import Exempt, has_copies, noisy_weights, waking_gains

NOTHING = Exempt()
"""A model of which nothing is known beyond its plan."""
Measure = Callable[[str, bool], Tensor]
"""Spectral norm of the source of a wide tensor, or of every matrix along dimension 0 if the flag is True. The norm of
a vector is its length."""


@dataclass(frozen=True)
class NoisePlan:
    """Resolved noise: σ̄ and absolute size per tensor. σ̄ is written at the reference, so it transfers across widths."""

    sigmas: Mapping[str, Sigma]
    stds: Mapping[str, Sigma]
    paired: Mapping[str, int] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    """Tensors that grow and get no noise although they are no vectors: frozen ones, and what a scheme leaves out."""
    seed: int = 0
    rows: Mapping[str, int] = field(default_factory=dict)
    """Embedding -> the row that gets no noise, its padding."""
    woken: Mapping[str, Sigma] = field(default_factory=dict)
    """σ̄ of the zeros behind copies, where it is not that of the copies; 0 for gains, which get a level."""
    zeros: Mapping[str, Waking] = field(default_factory=dict)
    """What follows from it, by tensor."""

    def tensor(self, name: str) -> TensorNoise | None:
        """The noise of one tensor, or None."""
        std, zeros = self.stds.get(name, 0.0), self.zeros.get(name)
        if std == 0 and zeros is None:
            return None
        return TensorNoise(Stream(self.seed, name), std, self.paired.get(name), self.rows.get(name), zeros)

    def as_json(self) -> dict[str, Any]:
        """What `restore_noise` needs to draw the same bits again."""
        return {
            "seed": self.seed,
            "sigmas": dict(self.sigmas),
            "paired": dict(self.paired),
            "without": list(self.without),
            "rows": dict(self.rows),
            **({"woken": dict(self.woken)} if self.woken else {}),
        }


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
        "this noise cannot be added", wrong_noise(noise) or _unknown(noise, plan, base, seed, exempt)
    )
    measure = base if callable(base) else lambda name, stacked: norms_of(plan[name].source(base), stacked)
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
            if given is not None and not any(_each(given)):
                without.append(name)
                continue
            wake = _dense(measure, _measured(name, plan), plan)
            sigmas[name] = _signal(WAKE, entry, wake, float(size)) if given is None else _given(given)
            stds[name] = _std(sigmas[name], size)
            asleep += [name] if len(entry.axes) > 1 and not any(_each(sigmas[name])) else []
            continue
        if entry.padded and not _is_silent(noise):
            known = len(entry.axes) > 1 and not entry.gain
            woken[name] = _signal(WAKE, entry, partial(measure, name), float(size)) if known else 0.0
        if entry.padded and not has_copies(entry):
            continue
        if isinstance(noise, PairedNoise):
            if (dim := _pairing(entry)) is None:
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
        stds[name] = _std(sigma, size)
    if not _is_silent(noise):
        woken.update(dict.fromkeys(waking_gains(plan, exempt), 0.0))
    what = "it is new, and the tensor that it is like is zero, so that noise of its size would not wake it"
    remedy = "put the new block behind a trained one, after=…"
    raise_faults("this noise wakes nothing", [Fault(name, what, remedy) for name in asleep])
    rows = {name: row for name, row in exempt.rows.items() if name in stds or name in woken}
    zeros = _wakings(woken, plan, since)
    return NoisePlan(sigmas, stds, paired, tuple(without), _seed(seed, since), rows, woken, zeros)


def _wakings(woken: Mapping[str, Sigma], plan: Plan, since: Plan | None) -> dict[str, Waking]:
    """What the zeros of each tensor get: noise of their size, or of a gain its fold, which is 1 in a fresh model."""
    found = {}
    for name, sigma in woken.items():
        entry, level = plan[name], 0.0
        if entry.gain:
            early = ONE if since is None else since[entry.sources[0]].fold
            level = float(early * entry.fold) - entry.shift
        found[name] = Waking(_std(sigma, reference_size(name, plan, since)), entry.cut, level)
    return found


def _each(sigma: Sigma) -> tuple[float, ...]:
    return sigma if isinstance(sigma, tuple) else (sigma,)


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


def _measured(name: str, plan: Plan) -> str:
    """The wide tensor whose source is measured for the noise of a tensor: of a new one, one that it is like."""
    like = plan[name].like
    return name if like is None else plan.sources[like][0]


def _dense(measure: Measure, name: str, plan: Plan) -> Callable[[bool], Tensor]:
    """What measures the source of a tensor; of a stack of copies, the one matrix that they are copies of."""
    copied = plan[name].stack is not None
    return (lambda _: measure(name, True)[:1]) if copied else partial(measure, name)


def _pairing(entry: TensorPlan) -> int | None:
    """The dimension along which paired noise sums to zero: the first `in` dimension that has copies."""
    return next((d for d, axis in enumerate(entry.axes) if axis.role == "in" and axis.k > 1), None)


def _unknown(
    noise: Noise, plan: Plan, base: Mapping[str, Tensor] | Measure, seed: int, exempt: Exempt
) -> list[Fault]:
    """Faults for tensors that the noise names or needs and that are missing."""
    faults = wrong_whole("seed", seed)
    noisy = noisy_weights(plan, exempt, vectors=noise.vectors)
    if (relative := relative_size(noise)) is not None:
        known = {} if callable(base) else base
        if isinstance(relative, Mapping):
            faults += [
                Fault(
                    f"t, {pattern}",
                    "it matches no weight that gets noise",
                    f"take one of {', '.join(list(noisy)[:3])}",
                )
                for pattern in relative
                if not any(fnmatchcase(name, pattern) for name in noisy)
            ]
            faults += _named_new(relative, noisy)
        measured = [] if callable(base) else [_measured(name, plan) for name in noisy]
        needed = [source for name in measured for source in plan[name].sources]
        remedy = "pass the base's tensors: dict(model.named_parameters())"
        missing = [name for name in needed if name not in known]
        return faults + [
            Fault(n, "its norm is needed, and the base does not hold it", remedy) for n in missing
        ]
    assert not isinstance(noise, SignalNoise)
    if not isinstance(noise.sigma, Mapping):
        return faults
    for name, entry in noisy.items():
        alone = isinstance(noise, PairedNoise) and _pairing(entry) is None
        left_alone = entry.new or not has_copies(entry) or alone
        if name not in noise.sigma and not left_alone:
            faults.append(Fault(name, "the noise has no σ̄ for it", "give one for every tensor, 0 for none"))
    for name, sigma in noise.sigma.items():
        if name not in plan:
            faults.append(
                Fault(name, "it has a σ̄, but no tensor of the plan has such a name", "leave it out")
            )
        elif plan[name].new and plan[name].quiet and any(_each(sigma)):
            what = "it is new and writes into the stream, so that noise in it would change the output"
            faults.append(Fault(name, what, "leave it out"))
        elif isinstance(sigma, tuple) and (len(sigma),) != plan[name].wide_shape[:1]:
            what = f"{len(sigma)} sizes for {plan[name].wide_shape[0]} matrices"
            faults.append(Fault(name, what, "write one for each, or one number for all"))
    return faults


def _named_new(t: Mapping[str, float], noisy: Mapping[str, TensorPlan]) -> list[Fault]:
    """Faults for a size that is named for new tensors alone: t is relative to a weight, and theirs is zero."""
    faults = []
    for pattern, size in t.items():
        named = [entry for name, entry in noisy.items() if fnmatchcase(name, pattern)]
        if size and named and all(entry.new for entry in named) and not all(e.new for e in noisy.values()):
            what = (
                "it names new weights alone; their noise has the size of the weight that each of them is like"
            )
            remedy = "write 0 to leave them asleep, or a pattern that names the same weight of the base's blocks too"
            faults.append(Fault(f"t, {pattern}", what, remedy))
    return faults


def _seed(seed: int, since: Plan | None) -> int:
    """A run that grows again draws other numbers for the same seed, so that its two noises are independent."""
    if since is None:
        return seed
    text = f"{seed} after {since.hash}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def restore_noise(record: Mapping[str, Any], plan: Plan, since: Plan | None = None) -> NoisePlan:
    """The noise that `NoisePlan.as_json` recorded, for the same plan and reference: the same bits.

    >>> from mupscale import MupNoise
    >>> from mupscale.rules import Axis
    >>> plan = Plan({"w": TensorPlan(("w",), (Axis.parse("out: 2x2"), Axis.parse("in: 2x2")))})
    >>> noise = resolve_noise({}, MupNoise(0.3), plan=plan, seed=1)
    >>> restore_noise(noise.as_json(), plan) == noise
    True
    """
    try:
        sigmas = {name: _stored(value) for name, value in record["sigmas"].items()}
        unknown = [name for name in (*sigmas, *record.get("woken", {})) if name not in plan.tensors]
        if unknown:
            raise MupscaleError(
                f"the record has noise for {unknown[0]}, which the plan does not have; use the plan it was made for"
            )
        woken = {name: _stored(value) for name, value in record.get("woken", {}).items()}
        stds = {name: _std(sigma, reference_size(name, plan, since)) for name, sigma in sigmas.items()}
        paired = {str(name): int(dim) for name, dim in record["paired"].items()}
        rows = {str(name): int(row) for name, row in record["rows"].items()}
        seed, without = int(record["seed"]), tuple(record["without"])
        zeros = _wakings(woken, plan, since)
        return NoisePlan(sigmas, stds, paired, without, seed, rows, woken, zeros)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise MupscaleError(f"this is not a record of noise, expected what as_json gave; {reason}") from None


def _stored(value: Any) -> Sigma:
    return tuple(map(float, value)) if isinstance(value, (list, tuple)) else float(value)


def _std(sigma: Sigma, size: Scale) -> Sigma:
    return sigma * float(size) if isinstance(sigma, float) else tuple(s * float(size) for s in sigma)


def reference_size(name: str, plan: Plan, since: Plan | None) -> Scale:
    """fold · q of a wide tensor, counted from the reference."""
    entry = plan[name]
    if since is None:
        return noise_size(entry.axes, entry.fold)
    early = since[entry.sources[0] if entry.like is None else entry.like]
    pairs = [
        (a.role or b.role, Fraction(b.wide, a.base))
        for a, b in zip(early.axes, entry.axes, strict=True)
        if a.role or b.role
    ]
    return size_of_ratios(pairs, early.fold * entry.fold)


def _given(sigma: Sigma) -> Sigma:
    return sigma if isinstance(sigma, tuple) else float(sigma)


def is_stacked(entry: TensorPlan) -> bool:
    """Whether a tensor is a stack of matrices (experts), each with its own noise size."""
    return len(entry.axes) == 3 and [axis.grows for axis in entry.axes] == [False, True, True]


def norms_of(weight: Tensor, stacked: bool) -> Tensor:
    """The spectral norm of a tensor, or of every matrix along dimension 0; of a vector, its length."""
    if weight.dim() < 2:
        length: Tensor = torch.linalg.vector_norm(weight.detach().double())
        return length
    return spectral_norms(weight, stacked)


def copied_norm(entry: TensorPlan) -> float:
    """‖s dup(W)‖ over ‖W‖: copies multiply a spectral norm by √c; experts are measured one by one."""
    experts = 1 if entry.stack is None else entry.axes[entry.stack].k
    norm: float = float(entry.change.s) * float(entry.change.c / experts) ** 0.5
    return norm


def _signal(t: float, entry: TensorPlan, measure: Callable[[bool], Tensor], size: float) -> Sigma:
    """σ̄ = t ‖s dup(W)‖ / ‖Δ‖, where Δ has σ̄ = 1; of experts that the base does not have, every one like its dense layer."""
    stacked = is_stacked(entry) and entry.stack is None
    matrix = entry.wide_shape[1:] if stacked or entry.stack == 0 else entry.wide_shape
    delta = gaussian_norm(max(1, prod(matrix[:1])), prod(matrix[1:])) * size
    sigmas = [
        _rounded(norm * t * copied_norm(entry) / delta) for norm in measure(stacked).reshape(-1).tolist()
    ]
    return tuple(sigmas) if stacked else sigmas[0]


def _rounded(sigma: float) -> float:
    """Round to seven digits, on which all thread counts and machines agree when they measure the same tensor."""
    return float(f"{sigma:.7g}")
