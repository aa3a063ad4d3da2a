"""The kinds of noise that a user writes: noise that parts copies, and what new units become when they wake."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import ClassVar, Literal, get_args

from ..arguments import shown, wrong_kind, wrong_number
from ..errors import Fault
from ..rules.noise_defaults import DEFAULT_T, LARGEST_T

Sigma = float | tuple[float, ...]
"""One size, or one for every matrix of a stack (experts)."""


@dataclass(frozen=True)
class MupNoise:
    """Noise with the sizes of the paper's Algorithm 2, written at the reference.

    Args:
        sigma: One σ̄ for all tensors, or one per tensor by name; a tuple has one for every matrix of a stack of experts.
        vectors: Whether biases and gains that grow get noise too.

    >>> MupNoise(0.3).sigma
    0.3
    """

    sigma: float | Mapping[str, Sigma]
    vectors: bool = False


@dataclass(frozen=True)
class SignalNoise:
    """Noise whose spectral norm is a share of that of the grown tensor.

    Args:
        t: The share: one number, or numbers by pattern of names. The first pattern that matches counts, and a weight that none
            matches gets no noise.
        vectors: Whether biases and gains that grow get noise too.

    >>> import torch, mupscale as mu
    >>> base = torch.nn.Linear(4, 4)
    >>> wide = mu.upscale(base, lambda: torch.nn.Linear(8, 8), SignalNoise(0.05))
    >>> list(wide.provenance["noise"]["sigmas"])
    ['weight']
    """

    t: float | Mapping[str, float]
    vectors: bool = False


@dataclass(frozen=True)
class PairedNoise:
    """Noise that sums to zero over the copies that are read: outputs do not move, gradients of copies do.

    Tensors that read no copies get none and are listed. Weights are rounded to their dtype after the noise is added, so in
    bfloat16 outputs move by its rounding.

    Args:
        sigma: The size as for `MupNoise`. Give this or `t`.
        vectors: Whether biases and gains that grow get noise too.
        t: The size as for `SignalNoise`.

    >>> import torch, mupscale as mu
    >>> make = lambda n: torch.nn.Sequential(torch.nn.Linear(3, n), torch.nn.Tanh(), torch.nn.Linear(n, 1))
    >>> base, x = make(4), torch.ones(1, 3)
    >>> wide = mu.upscale(base, lambda: make(8), PairedNoise(1.0)).model
    >>> torch.allclose(wide(x), base(x), atol=1e-5)
    True
    """

    sigma: float | Mapping[str, Sigma] | None = None
    vectors: bool = False
    t: float | Mapping[str, float] | None = None


Readers = Literal["copied", "random"]


@dataclass(frozen=True)
class NewUnits:
    """What new units read when they wake, while nothing reads them: outputs move by rounding only.

    Spaces that the plan grows by copies are parted as by `SplitNoise`.

    Args:
        readers: "copied" gives a new unit the weights, bias and gain of a trained unit, plus noise on the weights. "random" gives it
            noise alone.
        size: The size of this noise, relative to the root mean square of the trained weight.

    >>> import torch, mupscale as mu
    >>> make = lambda n: torch.nn.Sequential(torch.nn.Linear(3, n), torch.nn.Tanh(), torch.nn.Linear(n, 1))
    >>> base, x = make(4), torch.ones(1, 3)
    >>> plan = mu.infer_plan(base, lambda: make(6), example_inputs=(x,), by="units")
    >>> wide = mu.upscale(base, lambda: make(6), NewUnits("random"), plan=plan).model
    >>> bool((wide[0].weight[4:] != 0).all()), torch.allclose(wide(x), base(x), atol=1e-6)
    (True, True)
    """

    readers: Readers = "copied"
    size: float = 1.0
    vectors: ClassVar[bool] = False


@dataclass(frozen=True)
class SplitNoise:
    """Each weight that reads copies goes whole to one of them, drawn at random: outputs do not move, copies part.

    Of k copies one is read with k times its share, and the others with 0. Weights that only write copies stay as they are.

    >>> import torch, mupscale as mu
    >>> make = lambda n: torch.nn.Sequential(torch.nn.Linear(3, n), torch.nn.Tanh(), torch.nn.Linear(n, 1))
    >>> base = make(4)
    >>> wide = mu.upscale(base, lambda: make(8), SplitNoise()).model
    >>> torch.equal(wide[2].weight.view(1, 4, 2).sum(2), base[2].weight)
    True
    """

    vectors: ClassVar[bool] = False


LaterNoise = MupNoise | SignalNoise
"""The kinds that can be added after growth too: the others keep outputs only while copies are equal and new units zero."""
AddedNoise = LaterNoise | PairedNoise
"""The schemes that have a size and are added to copies."""
Noise = AddedNoise | NewUnits | SplitNoise
CLASSES: Mapping[str, Callable[[float], AddedNoise]] = {
    "t": SignalNoise,
    "sigma": MupNoise,
    "paired": PairedNoise,
}
"""The class of every scheme in `rules/schemes.py`, by its name."""
EXAMPLES = f"MupNoise(0.1), SignalNoise({DEFAULT_T}) or PairedNoise(1.0)"
"""The schemes that part copies, as messages show them."""


def wrong_noise(noise: object) -> list[Fault]:
    """Faults unless this is a kind of noise and its sizes are valid numbers.

    >>> [fault.code for fault in wrong_noise(0.1)]
    ['argument.wrong_type']
    """
    if not isinstance(noise, Noise):
        return wrong_kind("noise", noise, get_args(Noise), f"write NewUnits(), {EXAMPLES}")
    if isinstance(noise, SplitNoise):
        return []
    if isinstance(noise, NewUnits):
        return _wrong_new_units(noise)
    if isinstance(noise, PairedNoise) and (noise.sigma is None) == (noise.t is None):
        return [
            Fault(
                "noise.sigma_or_t",
                "PairedNoise",
                "it needs one of sigma= and t=",
                "write PairedNoise(1.0) or PairedNoise(t=0.1)",
            )
        ]
    if (relative := relative_size(noise)) is not None:
        by_name = relative if isinstance(relative, Mapping) else {"": relative}
        sizes = {f"t, {pattern}" if pattern else "t": t for pattern, t in by_name.items()}
        word = "t=" if isinstance(noise, PairedNoise) else ""
        remedy = f"write {type(noise).__name__}({word}{DEFAULT_T})"
        return [fault for where, t in sizes.items() for fault in _wrong_t(where, t, remedy)]
    sigmas = given_sigma(noise)
    if not isinstance(sigmas, Mapping):
        return wrong_number("sigma", sigmas, f"write {type(noise).__name__}(0.1), for example")
    faults = []
    for name, sigma in sigmas.items():
        remedy = "write a number, or a tuple with one for every matrix; 0 for none"
        faults += [fault for size in each(sigma) for fault in wrong_number(f"sigma, {name}", size, remedy)][
            :1
        ]
    return faults


def _wrong_new_units(noise: NewUnits) -> list[Fault]:
    faults = wrong_number("size", noise.size, "write NewUnits(size=1.0), or another number", above=True)
    if noise.readers not in get_args(Readers):
        what = f"it is {shown(noise.readers)}, and new units are copied or random"
        faults.append(Fault("noise.unknown_readers", "readers", what, 'write readers="copied" or "random"'))
    return faults


def _wrong_t(where: str, t: object, remedy: str) -> list[Fault]:
    """A fault unless t is a number of zero or more, and not larger than the weight that noise is added to."""
    faults = wrong_number(where, t, remedy)
    if faults or not isinstance(t, (int, float)) or t <= LARGEST_T:
        return faults
    what = (
        f"it is {t:g}, and noise above {LARGEST_T:g} times the norm of a weight leaves nothing of the weight"
    )
    return [Fault("noise.above_norm", where, what, f"{remedy}, or a number up to {LARGEST_T:g}")]


def each(sigma: Sigma) -> tuple[float, ...]:
    return sigma if isinstance(sigma, tuple) else (sigma,)


def relative_size(noise: Noise) -> float | Mapping[str, float] | None:
    """t, if the noise is sized relative to each weight."""
    return noise.t if isinstance(noise, (SignalNoise, PairedNoise)) else None


def given_sigma(noise: Noise) -> float | Mapping[str, Sigma] | None:
    """σ̄, if the noise is sized by it."""
    return noise.sigma if isinstance(noise, (MupNoise, PairedNoise)) else None


def with_twins(noise: Noise, twins: Mapping[str, str]) -> Noise:
    """The noise in which a tensor without a σ̄ has that of its twin, where σ̄ is given by name.

    >>> with_twins(MupNoise({"a": 0.1}), {"b": "a"}).sigma
    {'b': 0.1, 'a': 0.1}
    """
    if not isinstance(noise, (MupNoise, PairedNoise)) or not isinstance(noise.sigma, Mapping):
        return noise
    known = {name: noise.sigma[twin] for name, twin in twins.items() if twin in noise.sigma}
    return replace(noise, sigma={**known, **noise.sigma})


def given_size(noise: Noise) -> float | Mapping[str, float] | Mapping[str, Sigma] | None:
    """What the user gave as the size of noise that is added to copies: t, or σ̄."""
    relative = relative_size(noise)
    return given_sigma(noise) if relative is None else relative


def t_of(t: float | Mapping[str, float], name: str) -> float | None:
    """t of one tensor: the first pattern that matches its name, or None.

    >>> t_of({"*.mlp.*": 0.1, "*": 0.05}, "layers.0.mlp.up.weight"), t_of({"*.mlp.*": 0.1}, "embed.weight")
    (0.1, None)
    """
    if not isinstance(t, Mapping):
        return t
    return next((size for pattern, size in t.items() if fnmatchcase(name, pattern)), None)
