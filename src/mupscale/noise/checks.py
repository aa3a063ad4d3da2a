"""What is wrong with a noise for a plan: names that are missing or unknown, sizes that mean nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from torch import Tensor

from ..arguments import wrong_whole
from ..errors import Fault
from ..plans.plan import Plan
from ..plans.tensor_plan import TensorPlan
from .kinds import Noise, PairedNoise, Sigma, SignalNoise, relative_size
from .measures import Statistic
from .where import Exempt, has_copies, noisy_weights

Measure = Callable[[str, Statistic], Tensor]
"""A statistic of the source of a wide tensor."""


def unknown_names(
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
                    "noise.pattern_matches_nothing",
                    f"t, {pattern}",
                    "it matches no weight that gets noise",
                    f"take one of {', '.join(list(noisy)[:3])}",
                )
                for pattern in relative
                if not any(fnmatchcase(name, pattern) for name in noisy)
            ]
            faults += _named_new(relative, noisy)
        asked = [] if callable(base) else [measured(name, plan) for name in noisy]
        needed = [source for name in asked for source in plan[name].sources]
        remedy = "pass the base's tensors: dict(model.named_parameters())"
        missing = [name for name in needed if name not in known]
        return faults + [
            Fault("noise.norm_missing", n, "its norm is needed, and the base does not hold it", remedy)
            for n in missing
        ]
    assert not isinstance(noise, SignalNoise)
    if not isinstance(noise.sigma, Mapping):
        return faults
    for name, entry in noisy.items():
        alone = isinstance(noise, PairedNoise) and pairing(entry) is None
        left_alone = entry.new or not has_copies(entry) or alone
        if name not in noise.sigma and not left_alone:
            faults.append(
                Fault(
                    "noise.size_missing",
                    name,
                    "the noise has no σ̄ for it",
                    "give one for every tensor, 0 for none",
                )
            )
    for name, sigma in noise.sigma.items():
        if name not in plan:
            faults.append(
                Fault(
                    "noise.unknown_tensor",
                    name,
                    "it has a σ̄, but no tensor of the plan has such a name",
                    "leave it out",
                )
            )
        elif plan[name].new and plan[name].quiet and any(each(sigma)):
            what = "it is new and writes into the stream, so that noise in it would change the output"
            faults.append(Fault("noise.in_new_writer", name, what, "leave it out"))
        elif isinstance(sigma, tuple) and (len(sigma),) != plan[name].wide_shape[:1]:
            what = f"{len(sigma)} sizes for {plan[name].wide_shape[0]} matrices"
            faults.append(
                Fault("noise.other_number_of_sizes", name, what, "write one for each, or one number for all")
            )
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
            faults.append(Fault("noise.new_weights_alone", f"t, {pattern}", what, remedy))
    return faults


def each(sigma: Sigma) -> tuple[float, ...]:
    return sigma if isinstance(sigma, tuple) else (sigma,)


def measured(name: str, plan: Plan) -> str:
    """The wide tensor whose source is measured for the noise of a tensor: of a new one, one that it is like."""
    like = plan[name].like
    return name if like is None else plan.sources[like][0]


def pairing(entry: TensorPlan) -> int | None:
    """The dimension along which paired noise sums to zero: the first `in` dimension that has copies."""
    return next((d for d, axis in enumerate(entry.axes) if axis.role == "in" and axis.k > 1), None)
