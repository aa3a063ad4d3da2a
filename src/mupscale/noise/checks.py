"""What is wrong with a noise for a plan: names that are missing or unknown, sizes that mean nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from torch import Tensor

from ..arguments import wrong_whole
from ..errors import Fault, raise_faults
from ..plans.more_experts import equal_scores, scores_experts
from ..plans.plan import Plan
from ..plans.tensor_plan import TensorPlan
from .kinds import NewUnits, Noise, PairedNoise, Sigma, SplitNoise, each, given_sigma, relative_size
from .measures import Measure, measured
from .resolved import ResolvedNoise
from .where import Exempt, has_copies, noisy_weights, pairing


def unknown_names(
    noise: Noise, plan: Plan, base: Mapping[str, Tensor] | Measure, seed: int, exempt: Exempt
) -> list[Fault]:
    """Faults for tensors that the noise names or needs and that are missing."""
    faults = wrong_whole("seed", seed)
    noisy = noisy_weights(plan, exempt, vectors=noise.vectors)
    relative, sigmas = relative_size(noise), given_sigma(noise)
    if isinstance(relative, Mapping):
        faults += [*_unmatched(relative, noisy), *_new_alone(relative, noisy)]
    if isinstance(sigmas, Mapping):
        remedy = "give one for every tensor, 0 for none"
        faults += [
            Fault("noise.size_missing", name, "the noise has no σ̄ for it", remedy)
            for name, entry in noisy.items()
            if name not in sigmas and not entry.new and has_copies(entry)
            if not isinstance(noise, PairedNoise) or pairing(entry) is not None
        ]
        faults += [fault for name, sigma in sigmas.items() for fault in _wrong_sigma(name, sigma, plan)]
    if sigmas is None and not callable(base):  # its sizes are measured
        if isinstance(noise, (NewUnits, SplitNoise)):
            noisy = {name: entry for name, entry in noisy.items() if entry.new or entry.padded}
        faults += _not_in_base(base, noisy, plan)
    return faults


def refuse_unparted(found: Mapping[str, ResolvedNoise], plan: Plan) -> None:
    """Raise where noise leaves the copies of experts with one score: it is zero, or not in their router, or they have no router."""
    if not plan.parts_tokens:
        return
    routers = {name: found.get(name) for name, entry in plan.tensors.items() if scores_experts(name, entry)}
    tied = [
        name for name, one in routers.items() if one is None or one.apart is None or not any(each(one.std))
    ]
    if not routers:
        tied = [next(name for name, entry in plan.tensors.items() if entry.chosen is not None)]
    remedy = "write noise=mu.NewUnits(), and let the router train"
    raise_faults(
        "this noise does not part the copies of experts", [equal_scores(name, remedy) for name in tied]
    )


def _not_in_base(base: Mapping[str, Tensor], noisy: Mapping[str, TensorPlan], plan: Plan) -> list[Fault]:
    """Faults for tensors of the base that are needed to size the noise, and that were not passed."""
    what, remedy = (
        "its norm is needed, and the base does not hold it",
        "pass the base's tensors: dict(model.named_parameters())",
    )
    needed = [source for name in noisy for source in plan[measured(name, plan)].sources]
    return [Fault("noise.norm_missing", name, what, remedy) for name in needed if name not in base]


def _unmatched(t: Mapping[str, float], noisy: Mapping[str, TensorPlan]) -> list[Fault]:
    """Faults for patterns that match no weight that gets noise."""
    what, remedy = "it matches no weight that gets noise", f"take one of {', '.join(list(noisy)[:3])}"
    return [
        Fault("noise.pattern_matches_nothing", f"t, {pattern}", what, remedy)
        for pattern in t
        if not any(fnmatchcase(name, pattern) for name in noisy)
    ]


def _new_alone(t: Mapping[str, float], noisy: Mapping[str, TensorPlan]) -> list[Fault]:
    """Faults for a size that is named for new tensors alone: t is relative to a weight, and theirs is zero."""
    what = "it names new weights alone; their noise has the size of the weight that each of them is like"
    remedy = "write 0 to leave them asleep, or a pattern that names the same weight of the base's blocks too"
    faults = []
    for pattern, size in t.items():
        named = [entry for name, entry in noisy.items() if fnmatchcase(name, pattern)]
        if size and named and all(entry.new for entry in named) and not all(e.new for e in noisy.values()):
            faults.append(Fault("noise.new_weights_alone", f"t, {pattern}", what, remedy))
    return faults


def _wrong_sigma(name: str, sigma: Sigma, plan: Plan) -> Iterator[Fault]:
    """A fault if a σ̄ that is given for one tensor does not fit the plan."""
    if name not in plan:
        what = "it has a σ̄, but no tensor of the plan has such a name"
        yield Fault("noise.unknown_tensor", name, what, "leave it out")
    elif plan[name].new and plan[name].quiet and any(each(sigma)):
        what = "it is new and writes into the stream, so that noise in it would change the output"
        yield Fault("noise.in_new_writer", name, what, "leave it out")
    elif isinstance(sigma, tuple) and (len(sigma),) != plan[name].wide_shape[:1]:
        what = f"{len(sigma)} sizes for {plan[name].wide_shape[0]} matrices"
        yield Fault("noise.other_number_of_sizes", name, what, "write one for each, or one number for all")
