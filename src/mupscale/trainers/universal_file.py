"""A universal checkpoint of DeepSpeed in, a wider one out: streamed, with the state of its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..checkpoints.about import FORMAT
from ..checkpoints.grow import earlier_plan
from ..checkpoints.norms import measured_in
from ..checkpoints.universal import WideUniversal, weight_sources, wide_universal
from ..files.universal import Universal, read_universal
from ..jobs.identity import make_job
from ..jobs.job import Move
from ..jobs.worker import run_job
from ..plans.fits import expect_proved
from ..plans.plan import Plan
from ..rules.optimizers import OptimizerRule
from ..storage.location import Location, absolute
from ..training.noise_kinds import Noise
from ..training.noise_plan import NoisePlan
from ..training.noises import resolve_noise
from ..training.norms_wanted import norms_wanted
from ..version import __version__


def grow_universal_checkpoint(
    base: Location | str,
    out: Location | str,
    *,
    plan: Plan,
    noise: Noise | None = None,
    seed: int = 0,
    optimizer_class: str | None = None,
    unproved: bool = False,
    rules: Mapping[str, OptimizerRule] | None = None,
    workers: int = 1,
) -> dict[str, str]:
    """Write the universal checkpoint from which a wide DeepSpeed engine goes on; returns what was not carried, with reasons.

    `base` is the directory that holds `latest_universal`. Weights, first and second moments are grown tensor by tensor, each in
    its units. The groups of the result are those that units ask for: build the wide optimizer from
    `mu.trainers.groups_for(model, torch.load("out/<tag>/zero/optimizer_state.pt"))`, because an engine with other groups
    would load a part of the checkpoint without a word. The optimizer is told from what it keeps, unless `optimizer_class`
    names it ("torch.optim.AdamW"). Without `noise` the result trains exactly like the base. Run it again to resume.
    """
    expect_proved(plan, unproved)
    universal = read_universal(base)
    early = earlier_plan(universal.path)
    resolved = None if noise is None else _resolved(universal, plan, early, noise, seed)
    wide = wide_universal(universal, plan, noise=resolved, optimizer=optimizer_class, rules=rules)
    about = _about(plan, early, noise, resolved, wide)
    job = make_job(universal.path, absolute(out), wide.files, wide.moves, texts=wide.texts, about=about)
    run_job(job, workers)
    return wide.not_carried


def _resolved(universal: Universal, plan: Plan, early: Plan | None, noise: Noise, seed: int) -> NoisePlan:
    """The noise with its size for every tensor; norms are measured on the float32 weights where they lie."""
    places = weight_sources(universal, plan)
    moves = [Move(name, plan[name].making(), (place,), place) for name, place in places.items()]
    wanted = list(norms_wanted(noise, plan=plan, since=early))
    norms = measured_in(universal.path, moves, {}, wanted)
    return resolve_noise(lambda name, what: norms[name, what], noise, plan=plan, seed=seed, since=early)


def _about(
    plan: Plan, early: Plan | None, noise: Noise | None, resolved: NoisePlan | None, wide: WideUniversal
) -> dict[str, Any]:
    since = plan if early is None else early.then(plan)
    told = None if resolved is None else {"kind": type(noise).__name__, **resolved.as_json()}
    return {
        "format": FORMAT,
        "version": __version__,
        "torch": str(torch.__version__),
        "plan_hash": plan.hash,
        "plan": plan.as_json(),
        "since_reference": since.as_json(),
        "noise": told,
        "not_carried": wide.not_carried,
    }
