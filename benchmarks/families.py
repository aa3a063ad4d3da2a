"""Stock model types grown exactly: forward, reload, gradients, and AdamW steps with state carried over.

python benchmarks/families.py            every configuration of `family_configs.py`, k = 2 and 3
python benchmarks/families.py --quick    the same at k = 2 with fewer steps
python benchmarks/families.py --wide     every model type of the installed transformers; see `families_wide.py`.
                                         Goes on where it stopped, with types that are stored of other code
python benchmarks/families.py --popular  the 115 much-used types of `popular_types.py`; see `families_popular.py`.
                                         Goes on where it stopped; --again begins anew, --part 0/30 measures one part

All in float64 with the models' own casts lifted. Prints a row a configuration and last
`exact=A/B types=T refused=R worst=E`; fails when that misses its bounds.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers.utils.logging import disable_progress_bar

from harness.family_configs import EXACT, INEXACT, Case
from mupscale.errors import MupscaleError
from mupscale.families.losses import batch_for, loss_for
from mupscale.families.models import config_from, factory, model_class, quiet
from mupscale.families.plan import family_plan
from mupscale.families.prove import prove
from mupscale.families.record import FamilyPlan
from mupscale.plans.float64 import cast_, lifted_casts
from mupscale.training.widen import widen

BOUND = 1e-10
TYPES = 33


def plan_of(case: Case, k: int) -> FamilyPlan:
    raw = {"model_type": case.model_type, "architectures": [case.architecture], **case.fields}
    return family_plan(raw, case.multipliers.format(k=k))


def reloaded(family: FamilyPlan) -> tuple[float, float]:
    """Relative error of outputs at the configuration's own size: live, and after saving and loading again."""
    base_config, wide_config = config_from(family.base_config), config_from(family.wide_config)
    cls = model_class(base_config, family.architecture)
    with lifted_casts(), torch.no_grad():
        base = cast_(factory(cls)(base_config), torch.float64)
        wide = widen(base, lambda: factory(cls)(wide_config), plan=family.plan).model
        loss = loss_for(base, wide, batch_for(base, base_config))
        value = float(loss(base))
        forward = abs(float(loss(wide)) - value) / abs(value)
        with tempfile.TemporaryDirectory() as folder, quiet():
            stock: Any = wide
            stock.save_pretrained(folder)
            options: dict[str, Any] = {"dtype": torch.float64, "attn_implementation": "eager"}
            if any(".experts." in name for name in family.plan.tensors):
                options["experts_implementation"] = "eager"
            again = cls.from_pretrained(folder, local_files_only=True, **options)
            for one, other in zip(again.modules(), wide.modules(), strict=True):
                one.training = other.training
        loaded = abs(float(loss(again)) - value) / abs(value)
    return forward, loaded


def measure(case: Case, k: int, steps: int) -> float:
    """Grow one configuration, print its row, return its worst error."""
    started = time.monotonic()
    family = prove(plan_of(case, k), steps)
    forward, loaded = reloaded(family)
    e = family.evidence
    worst = max(e.worst_gradient, e.worst_step, forward, loaded)
    print(
        f"{case.name:26} k={k} forward {forward:.0e} reload {loaded:.0e} gradient {e.worst_gradient:.0e} "
        f"{steps} steps {e.worst_step:.0e} (control {e.control:.0e}) trials {e.trials} by {e.source} "
        f"[{time.monotonic() - started:.1f} s]",
        flush=True,
    )
    return worst


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--popular", action="store_true")
    parser.add_argument("--part", help="with --popular: part i/n of the types, by a hash of their names")
    parser.add_argument("--again", action="store_true", help="with --popular: measure what is stored too")
    parser.add_argument("--only", help="part of a name; with --wide or --popular, types separated by commas")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    if chosen.wide:
        from benchmarks.families_wide import cast_the_net

        sys.exit(cast_the_net(chosen.only.split(",") if chosen.only else None))
    if chosen.popular:
        from benchmarks.families_popular import popular

        sys.exit(popular(chosen.only.split(",") if chosen.only else None, chosen.part, chosen.again))
    widths = (2,) if chosen.quick else (2, 3)
    exact, total, worst, types, faults = 0, 0, 0.0, set(), []
    for case in EXACT:
        for k in widths:
            if chosen.only and chosen.only not in case.name:
                continue
            total += 1
            try:
                error = measure(case, k, 3 if chosen.quick else 5)
            except MupscaleError as refusal:
                print(f"{case.name:26} k={k} REFUSED {refusal}", flush=True)
                continue
            worst = max(worst, error)
            if error <= BOUND:
                exact += 1
                types.add(case.model_type)
    refused = 0
    for case in INEXACT:
        if chosen.only and chosen.only not in case.name:
            continue
        try:
            plan_of(case, 2)
            faults.append(f"{case.name} is not exact and was accepted")
        except MupscaleError as refusal:
            refused += 1
            reason = " ".join(str(refusal).split())
            print(f"{case.name:26} refused: {reason[:150]}")
            if case.reason not in reason:
                faults.append(f"{case.name} was refused for another reason than {case.reason!r}")
    print(f"exact={exact}/{total} types={len(types)} refused={refused} worst={worst:.1e}")
    if not chosen.only and (len(types) < TYPES or exact < total):
        faults.append(f"{len(types)} types, {exact} of {total} exact")
    if worst > BOUND or faults:
        sys.exit("; ".join(faults) or f"worst error {worst:.1e}")


if __name__ == "__main__":
    main()
