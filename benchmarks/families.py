"""Stock model types grown exactly: forward, reload, gradients, and AdamW steps with state carried over.

    python benchmarks/families.py            every configuration of `harness/family_configs.py`, k = 2 and 3
    python benchmarks/families.py --quick    one configuration of each type at k = 2, with fewer steps

All in float64 with the models' own casts lifted. `families_popular.py` measures the 115 types that are used most,
`families_wide.py` types that are drawn at random.

The last line is `exact=A/B types=T refused=R worst=E`; the exit code is 1 when that misses its bounds.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from transformers.utils.logging import disable_progress_bar

from harness.family_configs import EXACT, INEXACT, Case
from harness.popular import reloaded
from harness.program import Outcome, UsageError, option, run
from mupscale.cli.printing.sizes import copied_sizes, in_words
from mupscale.errors import MupscaleError
from mupscale.families.config.goal import Way
from mupscale.families.copy.losses import batch_for, loss_for
from mupscale.families.models import config_from, factory, model_class
from mupscale.families.plan import family_plan
from mupscale.families.prove import prove
from mupscale.families.record import FamilyPlan
from mupscale.models.float64 import cast_, lifted_casts
from mupscale.training.grow.grow import grow

BOUND = 1e-10
TYPES = 33


def plan_of(case: Case, k: int, by: Way = "copies") -> FamilyPlan:
    raw = {"model_type": case.model_type, "architectures": [case.architecture], **case.fields}
    return family_plan(raw, case.multipliers.format(k=k), by=by)


def live_and_reloaded(family: FamilyPlan) -> tuple[float, float]:
    """Relative error of outputs at the configuration's own size: live, and after saving and loading again."""
    base_config, wide_config = config_from(family.base_config), config_from(family.wide_config)
    cls = model_class(base_config, family.architecture)
    with lifted_casts(), torch.no_grad():
        base = cast_(factory(cls)(base_config), torch.float64)
        wide = grow(base, lambda: factory(cls)(wide_config), plan=family.plan).model
        loss = loss_for(base, wide, batch_for(base, base_config))
        value = float(loss(base))
        forward = abs(float(loss(wide)) - value) / abs(value)
        loaded = abs(float(loss(reloaded(wide, family))) - value) / abs(value)
    return forward, loaded


def grown(case: Case, k: int, steps: int, by: Way = "copies") -> float:
    """Grow one configuration, print its row, return its worst error; by units that of waking counts too."""
    started = time.monotonic()
    family = prove(plan_of(case, k, by), steps)
    forward, loaded = live_and_reloaded(family)
    e = family.evidence
    worst = max(e.worst_gradient, e.worst_step, forward, loaded, e.jump or 0.0)
    copies = in_words(copied_sizes(family.plan), family.base_config, family.wide_config) or "none"
    awake = "" if e.jump is None else f"awake {e.jump:.0e} copies {copies} "
    print(
        f"{case.name:26} k={k} forward {forward:.0e} reload {loaded:.0e} gradient {e.worst_gradient:.0e} "
        f"{steps} steps {e.worst_step:.0e} {awake}(control {e.control:.0e}) trials {e.trials} by {e.source} "
        f"[{time.monotonic() - started:.1f} s]",
        flush=True,
    )
    return worst


def refused(case: Case) -> str | None:
    """What is wrong with the refusal of a configuration that cannot be exact, or nothing."""
    try:
        plan_of(case, 2)
    except MupscaleError as refusal:
        reason = " ".join(str(refusal).split())
        print(f"{case.name:26} refused: {reason[:150]}")
        if case.reason in reason:
            return None
        return f"{case.name} was refused for another reason than {case.reason!r}"
    return f"{case.name} is not exact and was accepted"


def measure(chosen: argparse.Namespace) -> Outcome:
    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    if not any(chosen.only in case.name for case in (*EXACT, *INEXACT)):
        raise UsageError(f"no configuration has {chosen.only!r} in its name")
    cases = [case for case in EXACT if chosen.only in case.name]
    if chosen.quick and not chosen.only:
        cases = list({case.model_type: case for case in cases}.values())
    total, errors, types = 0, [], set()
    for case in cases:
        for k in (2,) if chosen.quick else (2, 3):
            total += 1
            try:
                errors.append(grown(case, k, 3 if chosen.quick else 5, chosen.by))
            except MupscaleError as refusal:
                print(f"{case.name:26} k={k} REFUSED {refusal}", flush=True)
                continue
            if errors[-1] <= BOUND:
                types.add(case.model_type)
    wrong = [refused(case) for case in INEXACT if chosen.only in case.name]
    failed = [fault for fault in wrong if fault]
    exact, worst = sum(error <= BOUND for error in errors), max(errors, default=0.0)
    if not worst <= BOUND:
        failed.append(f"the worst error is {worst:.1e}, allowed {BOUND:.0e}")
    if not chosen.only and (len(types) < TYPES or exact < total):
        failed.append(f"{len(types)} types, {exact} of {total} exact")
    line = f"exact={exact}/{total} types={len(types)} refused={wrong.count(None)} worst={worst:.1e}"
    return Outcome(line, failed)


if __name__ == "__main__":
    quick = option(
        "--quick", action="store_true", help="one configuration of each type, k = 2 alone, fewer steps"
    )
    only = option("--only", default="", help="part of a name in harness/family_configs.py")
    by = option("--by", choices=("copies", "units"), default="copies", help="how widths grow")
    sys.exit(run(measure, quick, only, by, doc=__doc__))
