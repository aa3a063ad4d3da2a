"""Noise for a run that is wide already: a second dose, or the first one of a run that was widened exactly."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from ...arguments import wrong_whole
from ...errors import MupscaleError, raise_faults
from ...models.clone import copied
from ...models.names import named_tensors, unwrap
from ...noise.kinds import LaterNoise, Noise, wrong_noise
from ...noise.measures import Statistic, statistic
from ...noise.resolve import copied_norm, resolve_noise, unused_seed
from ...noise.where import exempt_of
from ...plans.direction import Direction
from ...plans.ends import check_end, identity_plan
from ...plans.more_experts import scores_experts
from ...runs.provenance import Growth
from ...runs.run import Run
from .carry import carry
from .left_behind import hand_over_


def add_noise(wide: Run, noise: Noise, *, seed: int = 0) -> Run:
    """Part the copies of a run's last growth with noise; optimizer state and schedulers are kept.

    Averages and master copies of the weights get the same noise.

    Args:
        wide: A run that has grown by copies. It is not changed.
        noise: `SignalNoise`, relative to the weights as they are now, or `MupNoise`.
        seed: The number on which the noise depends. If its numbers are in the weights already, by the provenance, others are drawn.

    Returns:
        A new run with the noise in its weights and in its provenance.

    Raises:
        MupscaleError: If the run has no plan, or the kind of noise is one that only `upscale` can add.

    >>> import torch, mupscale as mu
    >>> make = lambda n: torch.nn.Sequential(torch.nn.Linear(3, n), torch.nn.Tanh(), torch.nn.Linear(n, 1))
    >>> exact = mu.grow(make(4), lambda: make(8))
    >>> noisy = mu.add_noise(exact, mu.SignalNoise(0.05))
    >>> bool((exact.model[0].weight == noisy.model[0].weight).any())
    False
    """
    raise_faults("no noise can be added", [*wrong_noise(noise), *wrong_whole("seed", seed)])
    if not isinstance(noise, LaterNoise):
        kind = type(noise).__name__
        raise MupscaleError(
            f"{kind} keeps outputs only while copies are equal and new units are zero, so it is added at growth: "
            f"mu.upscale(…, {kind}(…)); write SignalNoise or MupNoise here",
            code="noise.only_at_growth",
        )
    if wide.plan is None:
        raise MupscaleError(
            "add_noise parts the copies of a growth, and this run has no plan of one; grow it first, or write mu.Run(…, plan=plan)",
            code="plan.not_given",
        )
    # What repeats a block wakes at growth alone: by now that block may have been trained further. Copies of experts were parted
    # at growth too, by vectors in their router, which are far longer than what noise should be relative to.
    entries = wide.plan.tensors.items()
    routers = frozenset(name for name, entry in entries if scores_experts(name, entry))
    awake = {
        name: replace(entry, repeats=False, chosen=None)
        for name, entry in entries
        if entry.repeats or entry.chosen is not None
    }
    plan, model = wide.plan.with_tensors(awake), unwrap(wide.model)
    check_end(plan, model, "wide")
    tensors = {name: tensor for name, _, tensor in named_tensors(model)}
    exempt = exempt_of(model, plan, "wide")
    exempt = replace(exempt, frozen=exempt.frozen | routers)

    def measure(name: str, what: Statistic) -> Tensor:
        if what == "mean":
            # Only upscale wakes new words: here they may have been trained already.
            return torch.zeros(prod(plan[name].base_shape[1:]), device="cpu")
        # The norm of a base whose copies would have the norm that the wide weight has now.
        norm: Tensor = statistic(tensors[name], what) / copied_norm(plan[name])
        return norm

    since = wide.earlier[-1][1] if wide.earlier else None
    drawn = unused_seed(seed, since, wide.provenance.seeds)
    resolved = resolve_noise(measure, noise, plan=plan, seed=drawn, since=since, exempt=exempt)
    direction = Direction(identity_plan(model), noise=resolved)
    noisy = carry(wide, copied(model), lambda: copied(model), direction)
    hand_over_(wide, noisy, direction, {})
    history = wide.provenance
    if (
        not history.growths or history.growths[-1].plan != wide.plan.hash
    ):  # a run made by hand: Run(…, plan=plan)
        history = history.grown(Growth.by(wide.plan, since, mupscale=None, torch=None))
    dose = {"kind": type(noise).__name__, **resolved.as_json()}
    history = history.noting(added_noise=(*history.growths[-1].added_noise, dose))
    return replace(noisy, plan=wide.plan, since=wide.since, earlier=wide.earlier, provenance=history)
