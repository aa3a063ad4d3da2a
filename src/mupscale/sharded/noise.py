"""Noise for a job on many ranks: sizes are the same on all ranks, norms are measured once and shared.

Each base tensor is measured by one rank with the same arithmetic as in one process, so σ̄ has the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import Fault, MupscaleError, raise_faults
from ..jobs.bytes.blocks import StoredBase
from ..jobs.norms.measured import measured_by
from ..noise.checks import refuse_unparted
from ..noise.kinds import Noise
from ..noise.measures import Statistic, Wanted, statistic
from ..noise.resolve import norms_wanted, resolve_noise, unused_seed
from ..noise.resolved import NoisePlan
from ..noise.where import Exempt
from ..plans.plan import Plan
from .agreement import AllOrNone, sum_over_ranks
from .source import AnySource
from .waiting import Ranks, several


def shared_noise(
    noise: Noise | NoisePlan | None,
    plan: Plan,
    source: AnySource,
    seed: int,
    since: Plan | None,
    together: AllOrNone,
    group: Ranks,
    exempt: Exempt,
) -> NoisePlan | None:
    """Resolve noise to the same values on every rank. Sizes that follow a norm of the base cost two more collectives:
    those of signal-normalised noise, and of any noise that wakes new tensors."""
    if noise is None:
        return None
    if isinstance(noise, NoisePlan):
        _check_plan(noise, plan, seed)
        refuse_unparted(noise.tensors, plan)
        return noise
    wanted = norms_wanted(noise, plan=plan, since=since, exempt=exempt)
    norms = _measured(wanted, plan, source, together, group) if wanted else {}
    return resolve_noise(
        lambda name, what: norms[name, what],
        noise,
        plan=plan,
        seed=unused_seed(seed, since, source.provenance.seeds),
        since=since,
        exempt=exempt,
    )


def noise_identity(noise: Noise | NoisePlan | None) -> str:
    """Noise as a text that is the same for equal noise."""
    if noise is None:
        return "none"
    return f"{type(noise).__name__} {json.dumps(asdict(noise), sort_keys=True, default=dict)}"


def _check_plan(noise: NoisePlan, plan: Plan, seed: int) -> None:
    what = "it has noise, and the plan has no such parameter"
    parameters = {name for name, entry in plan.tensors.items() if entry.kind == "parameter"}
    faults = [
        Fault("noise.unknown_tensor", name, what, "resolve the noise for this plan")
        for name, one in noise.tensors.items()
        if one.sigma is not None and name not in parameters
    ]
    if seed not in (0, noise.seed):
        faults.append(
            Fault(
                "noise.other_seed",
                "seed",
                f"{seed} here, {noise.seed} in the resolved noise",
                "leave seed= out",
            )
        )
    raise_faults("this noise was resolved for something else", faults)


def _measured(
    wanted: dict[Wanted, int], plan: Plan, source: AnySource, together: AllOrNone, group: Ranks
) -> dict[Wanted, Tensor]:
    if several(group):
        together.check()
    rank, world = (dist.get_rank(group), dist.get_world_size(group)) if several(group) else (0, 1)
    owners = _owners([prod(plan[name].base_shape) for name, _ in wanted], world)
    values = torch.zeros(sum(wanted.values()), dtype=torch.float64, device="cpu")
    failure: Exception | None = None
    at = 0
    for ((name, what), count), owner in zip(wanted.items(), owners, strict=True):
        stored = source.weights[name]
        whole = source.whole(stored)  # on every rank, because it may take every rank
        if owner == rank and failure is None:
            try:
                found = (
                    statistic(whole.cpu(), what) if whole is not None else _in_place(name, plan, source, what)
                )
                values[at : at + count] = found
            except Exception as error:
                failure = error
        at += count
    if failure is not None:
        values.fill_(float("nan"))
    values = sum_over_ranks(values, group)
    if failure is not None:
        raise failure
    if bool(values.isnan().any()):
        together.check()  # the rank that failed says why
        raise MupscaleError(
            "a norm of the base is not a number; its weights are not finite", code="noise.norm_not_finite"
        )
    parts = torch.split(values, list(wanted.values()))
    return {key: part[0] if key[1] == "norm" else part for key, part in zip(wanted, parts, strict=True)}


def _in_place(name: str, plan: Plan, source: AnySource, what: Statistic) -> Tensor:
    """A statistic of a base tensor, read a few rows at a time."""
    stored = source.weights[name]
    dtype, shape = source.kind_of(stored)
    base = StoredBase(dtype, (0,) * len(shape), shape, partial(source.read, stored))
    return measured_by([base], plan[name].base_shape, what)


def _owners(sizes: Sequence[int], world: int) -> list[int]:
    """Which rank measures which tensor: the largest first, each assigned to the rank with the least work."""
    load, owners = [0] * world, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[index] = load.index(min(load))
        load[owners[index]] += sizes[index]
    return owners
