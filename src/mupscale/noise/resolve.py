"""How much noise each tensor gets: a kind of noise, resolved to one reference constant σ̄ per tensor.

Copies get noise that is added, or each entry that reads them goes whole to one of them. Zeros get noise of the size of
trained weights, alone or added to copies of trained units. A new block becomes a copy of the block that it is like, but
for what writes into the stream. Copied units get noise, which parts them from those that they are copies of; copied blocks
need none, because blocks differ by the depth at which they stand, and get it only where their units are copies.

The absolute size is σ̄ · fold · q with q from `rules/sizes.py`; nothing here knows a power of the width.
Noise is added after the division by k, to weights and to every copy of them (averages, master weights), and
never to moments. Which weights get noise is the rule of `where.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from ..errors import Fault, raise_faults
from ..plans.more_experts import scores_experts
from ..plans.plan import Plan
from ..plans.tensor_plan import Becomes, TensorPlan
from ..rules.noise_defaults import APART, WAKE
from ..tensors.spectral import gaussian_norm
from .checks import refuse_unparted, unknown_names
from .kinds import (
    NewUnits,
    Noise,
    PairedNoise,
    Sigma,
    SplitNoise,
    each,
    given_sigma,
    given_size,
    relative_size,
    t_of,
    with_twins,
    wrong_noise,
)
from .measures import Measure, Statistic, Wanted, measured, statistic
from .resolved import NoisePlan, ResolvedNoise, reference_size, sized
from .where import Exempt, has_copies, noisy_weights, pairing, woken_values

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
    """Fix the size of the noise of every tensor, before anything is drawn.

    Args:
        base: The base's tensors by name, or a function that measures them.
        noise: The kind of noise, with its size.
        plan: The plan from the base to the wide model.
        seed: The number on which the noise depends.
        since: The plan from the reference to the base. By default the base is its own reference.
        exempt: What the model itself leaves out: frozen weights, gains of norms, padding rows.

    Returns:
        For every tensor that gets noise its σ̄, at the reference, and its standard deviation.

    Raises:
        MupscaleError: If the noise cannot be used with this plan, as where it names a tensor that is not in it.

    >>> from mupscale import MupNoise
    >>> from mupscale.rules import Axis
    >>> plan = Plan({"w": TensorPlan(("w",), (Axis.parse("out: 2x4"), Axis.parse("in: 2x4")))})
    >>> resolve_noise({}, MupNoise(0.3), plan=plan).tensors["w"].std     # σ̄ over the root of the growth
    0.15
    """
    raise_faults(
        "this noise cannot be added", wrong_noise(noise) or unknown_names(noise, plan, base, seed, exempt)
    )
    if isinstance(noise, NewUnits):
        # What a frozen layer reads for new units is drawn too: with zeros, what reads the layer would get no gradient.
        exempt = replace(exempt, frozen=frozenset(n for n in exempt.frozen if not plan[n].padded))
    given = base if callable(base) else lambda name, what: statistic(plan[name].source(base), what)
    asleep, plan = plan, _with_copied_blocks(plan, noise, given)
    repeating = [name for name, entry in asleep.tensors.items() if entry.new and not plan[name].new]
    # Where its units are copies, a copied block has the σ̄ of the block that it is like.
    noise = with_twins(noise, {name: measured(name, asleep) for name in repeating})

    def measure(name: str, what: Statistic) -> Tensor:
        # A tensor that repeats another has the numbers of that one, which the base holds.
        return given(measured(name, asleep) if asleep[name].repeats else name, what)

    noisy = noisy_weights(plan, exempt, vectors=noise.vectors)
    everything = noisy_weights(plan, replace(exempt, frozen=frozenset()), vectors=noise.vectors)
    without = [name for name in everything if name not in noisy]
    found: dict[str, ResolvedNoise] = {}
    for name, entry in noisy.items():
        of_kind = _new if entry.new else _padded if entry.padded else _copied
        one = of_kind(name, noise, plan, measure, float(reference_size(entry, since)))
        if one != ResolvedNoise():
            found[name] = one
        if one.sigma is None and one.split is None and (entry.new or has_copies(entry)):
            without.append(name)
    for name, becomes in {} if _is_silent(noise) else woken_values(plan, exempt).items():
        one = found.get(name, ResolvedNoise())
        copied = _copies_units(noise) and becomes != "mean"
        mean = None if copied else _mean(name, becomes, plan, measure)
        found[name] = replace(one, woken=one.woken or 0.0, copied=one.copied or copied, mean=mean)
    if _copies_units(noise):
        for name, entry in noisy_weights(plan, exempt, vectors=True).items():
            if name not in found and entry.padded and entry.sleep.wakes:
                found[name] = ResolvedNoise(woken=0.0, copied=True)  # biases, which get no noise
    _refuse_asleep(found, plan)
    found |= {name: replace(found.get(name, ResolvedNoise()), repeats=True) for name in repeating}
    tensors = {
        name: sized(replace(one, without_row=exempt.padding.get(name)), name, asleep, since)
        for name, one in found.items()
    }
    refuse_unparted(tensors, plan)
    return NoisePlan(tensors, _seed(seed, since), tuple(without))


def norms_wanted(
    noise: Noise, *, plan: Plan, since: Plan | None = None, exempt: Exempt = NOTHING
) -> dict[Wanted, int]:
    """What resolving this noise measures, with how many numbers each answer is; the caller can measure in any order.

    >>> from mupscale import SignalNoise
    >>> from mupscale.rules import Axis
    >>> plan = Plan({"w": TensorPlan(("w",), (Axis.parse("out: 2x4"), Axis.parse("in: 2x4")))})
    >>> norms_wanted(SignalNoise(0.1), plan=plan)
    {('w', 'norm'): 1}
    """
    wanted: dict[Wanted, int] = {}

    def note(name: str, what: Statistic) -> Tensor:
        shape = plan[name].base_shape
        each_one, row = prod(shape[:1]), prod(shape[1:])
        sizes = {"norm": 1, "norms": each_one, "rms": 1, "each_rms": each_one, "mean": row}
        wanted[name, what] = sizes[what]
        return torch.ones(wanted[name, what], device="cpu")

    resolve_noise(note, noise, plan=plan, since=since, exempt=exempt)
    return wanted


def _new(name: str, noise: Noise, plan: Plan, measure: Measure, size: float) -> ResolvedNoise:
    """The noise of a tensor that the base does not have: relative to the tensor that it is like, unless σ̄ is given for it."""
    given = 0.0 if _is_silent(noise) else _given_to_new(name, noise)
    if given is None:
        like = _measure_one_expert(measured(name, plan), plan, measure)
        return ResolvedNoise(_relative_sigma(WAKE, plan[name], like, size))
    return ResolvedNoise(_as_floats(given) if any(each(given)) else None)


def _padded(name: str, noise: Noise, plan: Plan, measure: Measure, size: float) -> ResolvedNoise:
    """The noise of a tensor with zeros, which get noise relative to the whole tensor, and with or without copies."""
    entry = plan[name]
    copies = _copied(name, noise, plan, measure, size) if has_copies(entry) else ResolvedNoise()
    if _is_silent(noise):
        return copies
    if entry.rows == "experts" and not any(axis.padded and axis.role for axis in entry.axes):
        return replace(copies, woken=0.0, copied=True)
    woken: Sigma = 0.0
    if len(entry.axes) > 1 and not entry.gain and entry.sleep.wakes:
        if isinstance(noise, NewUnits):
            woken = _trained_sigma(noise.size, entry, partial(measure, name), size)
        else:
            woken = _relative_sigma(WAKE, entry, partial(measure, name), size)
    return replace(copies, woken=woken, copied=_copies_units(noise) and entry.sleep.wakes)


def _copied(name: str, noise: Noise, plan: Plan, measure: Measure, size: float) -> ResolvedNoise:
    """The noise of a tensor with copies; none if it is left out, or has no copies that the noise could be paired over.

    The router of experts that part tokens gets its vectors in place of any noise: drawn row by row, noise leaves a token both
    copies of one expert until it is far larger than the router.
    """
    entry = plan[name]
    wanted = _of_kind(name, noise, plan, measure, size)
    if not scores_experts(name, entry) or not (_parts_alone(noise) or any(each(wanted.sigma or 0.0))):
        return wanted
    apart = _trained_sigma(APART, entry, partial(measure, name), size)
    _refuse_equal_scores(name, apart)
    return ResolvedNoise(apart, apart=entry.chosen)


def _parts_alone(noise: Noise) -> bool:
    """Whether this kind parts copies without a size of its own."""
    return isinstance(noise, (NewUnits, SplitNoise))


def _of_kind(name: str, noise: Noise, plan: Plan, measure: Measure, size: float) -> ResolvedNoise:
    """What a kind of noise says of a tensor with copies."""
    if isinstance(noise, (NewUnits, SplitNoise)):
        entry = plan[name]
        # Copies of experts get their tokens from the router, whose rows alone part.
        return ResolvedNoise(split=pairing(entry) if entry.chosen is None else None)
    paired = pairing(plan[name]) if isinstance(noise, PairedNoise) else None
    relative = relative_size(noise)
    t = None if relative is None else t_of(relative, name)
    if (relative is not None and t is None) or (isinstance(noise, PairedNoise) and paired is None):
        return ResolvedNoise()
    if t is not None:
        one = _measure_one_expert(name, plan, measure)
        return ResolvedNoise(_relative_sigma(t, plan[name], one, size), paired)
    sigma = given_sigma(noise)
    assert sigma is not None
    return ResolvedNoise(_as_floats(sigma[name] if isinstance(sigma, Mapping) else sigma), paired)


def _mean(name: str, becomes: Becomes, plan: Plan, measure: Measure) -> tuple[float, ...] | None:
    """What is measured for zeros that become more than noise: the mean row, or the root mean square of a gain."""
    if becomes == "mean":
        return tuple(map(_rounded, measure(name, "mean").reshape(-1).tolist()))
    if becomes == "fold":
        return None
    length = float(measure(name, "norm"))
    # Of a gain that is zero it is 1, as in most fresh models.
    return (_rounded(length / prod(plan[name].base_shape) ** 0.5) or 1.0,)


def _refuse_asleep(found: Mapping[str, ResolvedNoise], plan: Plan) -> None:
    """Raise if noise would leave new matrices zero."""
    new = (name for name in found if plan[name].new and len(plan[name].axes) > 1)
    _refuse_zeros([name for name in new if not any(each(found[name].sigma or 0.0))])


def _refuse_zeros(names: Sequence[str]) -> None:
    what = "it is new, and the tensor that it is like is zero, so that neither a copy nor noise of its size would wake it"
    remedy = "put the new block behind a trained one, after=…"
    faults = [Fault("noise.wakes_nothing", name, what, remedy) for name in names]
    raise_faults("this noise wakes nothing", faults)


def _refuse_equal_scores(name: str, apart: Sigma) -> None:
    """Raise for a router of zeros: its experts all have one score, so which of them a token goes to is chance."""
    what = "this router is zero, so all its experts have the same score for every token, and copies cannot take over some of them"
    faults = [Fault("experts.router_is_zero", name, what, "")] if not any(each(apart)) else []
    raise_faults("this mixture cannot get more experts for as many of them per token", faults)


def _given_to_new(name: str, noise: Noise) -> Sigma | None:
    """The σ̄ that is given for a new tensor: 0 where patterns of t leave it out, None where it wakes as usual."""
    if (relative := relative_size(noise)) is not None:
        return None if t_of(relative, name) else 0.0
    sigma = given_sigma(noise)
    return sigma.get(name) if isinstance(sigma, Mapping) else None


def _with_copied_blocks(plan: Plan, noise: Noise, measure: Measure) -> Plan:
    """The plan in which new tensors that wake as copies are made from those that they are like.

    Left out are those with a σ̄ of their own, and those that patterns of t leave asleep. Copies of zeros are refused.
    """
    if _is_silent(noise) or (isinstance(noise, NewUnits) and noise.readers == "random"):
        return plan
    awake = {
        name: entry.woken_as_copy()
        for name, entry in plan.tensors.items()
        if entry.repeats and _given_to_new(name, noise) is None
    }
    matrices = [name for name, entry in awake.items() if len(entry.axes) > 1]
    _refuse_zeros([name for name in matrices if not bool(measure(measured(name, plan), "rms"))])
    return plan.with_tensors(awake)


def _is_silent(noise: Noise) -> bool:
    """Whether the noise is zero everywhere, which leaves new tensors asleep too."""
    if isinstance(noise, NewUnits | SplitNoise):
        return False
    size = given_size(noise)
    return all(not value for value in (size.values() if isinstance(size, Mapping) else [size]))


def _copies_units(noise: Noise) -> bool:
    """Whether zeros become copies of trained units."""
    return isinstance(noise, NewUnits) and noise.readers == "copied"


def _measure_one_expert(name: str, plan: Plan, measure: Measure) -> Callable[[Statistic], Tensor]:
    """What measures the source of a tensor: of a stack of copies, the one matrix that they are copies of."""
    copied = plan[name].stack is not None
    return (lambda _: measure(name, "norms")[:1]) if copied else partial(measure, name)


def _seed(seed: int, since: Plan | None) -> int:
    """A run that grows again draws other numbers for the same seed, so that its two noises are independent."""
    return seed if since is None else _digest(f"{seed} after {since.hash}")


def unused_seed(seed: int, since: Plan | None, used: frozenset[int]) -> int:
    """The seed, or one that follows from it if its numbers were added as noise before, so that each noise is a new draw."""
    while _seed(seed, since) in used:
        seed = _digest(f"{seed} again")
    return seed


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _as_floats(sigma: Sigma) -> Sigma:
    return sigma if isinstance(sigma, tuple) else float(sigma)


def copied_norm(entry: TensorPlan) -> float:
    """‖s dup(W)‖ over ‖W‖: copies multiply a spectral norm by √c; experts are measured one by one."""
    experts = 1 if entry.stack is None else entry.axes[entry.stack].k
    norm: float = float(entry.change.s) * float(entry.change.c / experts) ** 0.5
    return norm


def _relative_sigma(
    t: float, entry: TensorPlan, measure: Callable[[Statistic], Tensor], size: float
) -> Sigma:
    """The σ̄ at which noise has t times the spectral norm of the widened tensor: t ‖s dup(W)‖ / ‖Δ‖, where Δ has σ̄ = 1.

    A stack of experts has a σ̄ for each matrix. Experts that are copies of a dense layer have the norm of that layer, and
    share one.
    """
    stacked = _is_stacked(entry)
    matrix = entry.wide_shape[1:] if stacked or entry.stack == 0 else entry.wide_shape
    delta = gaussian_norm(max(1, prod(matrix[:1])), prod(matrix[1:])) * size
    norms = measure("norms" if stacked else "norm").reshape(-1).tolist()
    sigmas = [_rounded(norm * t * copied_norm(entry) / delta) for norm in norms]
    return tuple(sigmas) if stacked else sigmas[0]


def _trained_sigma(
    size: float, entry: TensorPlan, measure: Callable[[Statistic], Tensor], reference: float
) -> Sigma:
    """The σ̄ at which noise has `size` times the root mean square of the entries that the wide tensor takes from the base.

    A stack of experts has a σ̄ for each matrix.
    """
    stacked = _is_stacked(entry)
    found = measure("each_rms" if stacked else "rms").reshape(-1).tolist()
    sigmas = [_rounded(rms * size * float(entry.change.s) / reference) for rms in found]
    return tuple(sigmas) if stacked else sigmas[0]


def _is_stacked(entry: TensorPlan) -> bool:
    """Whether dimension 0 counts experts that are matrices of their own in the base."""
    grows = [axis.grows for axis in entry.axes]
    return grows == [False, True, True] and entry.stack is None


def _rounded(sigma: float) -> float:
    """Round to seven digits, on which all thread counts and machines agree when they measure the same tensor."""
    return float(f"{sigma:.7g}")
