"""The job that writes the grown checkpoint of an engine: noise in its size, a record of growth, files and moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..jobs.identity import make_job
from ..jobs.job import Move
from ..jobs.norms import measured_in
from ..jobs.worker import run_job
from ..noise.kinds import Noise
from ..noise.resolve import norms_wanted, resolve_noise, unused_seed
from ..noise.resolved import NoisePlan, refuse_in_parts
from ..plans.plan import Plan
from ..runs.growth_record import FORMAT, earlier_growths, earlier_plan
from ..runs.provenance import reference_of
from ..storage.location import Location, absolute
from ..version import __version__
from .engine_state import WideFiles


def write_grown(
    base: Location,
    out: Location | str,
    plan: Plan,
    noise: Noise | None,
    seed: int,
    *,
    weights: Sequence[Move],
    make: Callable[[NoisePlan | None], WideFiles],
    record: Location | None = None,
) -> dict[str, str]:
    """Write what `make` returns for the noise, and return what was not carried. `record` is the folder that says whether the
    base was grown; norms are measured on `weights`, where they lie."""
    told = base if record is None else record
    early, history = earlier_plan(told), earlier_growths(told)
    resolved = None
    if noise is not None:
        norms = measured_in(base, weights, {}, list(norms_wanted(noise, plan=plan, since=early)))
        resolved = resolve_noise(
            lambda name, what: norms[name, what],
            noise,
            plan=plan,
            seed=unused_seed(seed, early, history.seeds),
            since=early,
        )
        refuse_in_parts(resolved)
    wide = make(resolved)
    about: dict[str, Any] = {
        "format": FORMAT,
        "version": __version__,
        "torch": str(torch.__version__),
        "plan_hash": plan.hash,
        "plan": plan.as_json(),
        "since_reference": (plan if early is None else early.then(plan)).as_json(),
        "reference": reference_of(early),
        "noise": None if resolved is None else {"kind": type(noise).__name__, **resolved.as_json()},
        "seed": seed,
        "not_carried": wide.not_carried,
        "grown_from": history.as_json(),
    }
    run_job(make_job(base, absolute(out), wide.files, wide.moves, texts=wide.texts, about=about))
    return wide.not_carried
