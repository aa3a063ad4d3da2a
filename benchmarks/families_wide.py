"""The wide net: every model type of the installed transformers, each in a process with limits.

The default configuration of a type is shrunk, planned and proved by real AdamW steps. Listed are exact types,
refused ones with the reason, and those not tried with the reason. A plan that is accepted and then fails its proof
is a failure of this benchmark. The result is families_wide.md.

    python benchmarks/families_wide.py                    goes on where it stopped; delete families_wide.json to begin anew
    python benchmarks/families_wide.py --only bert,llama

The last line is `types=T exact=E refused=R not_tried=N broken=B held_out=H worst=W`; the exit code is 1 when a plan was
accepted and did not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from harness.evidence import is_of, key_of
from harness.family_configs import EXACT
from harness.limited import limited, silent
from harness.program import Outcome, option, run

SECONDS, MEMORY, STEPS = 60, 6 << 30, 5
RESULT = Path(__file__).with_name("families_wide.md")
DATA = RESULT.with_suffix(".json")


def attempt(model_type: str, k: int = 2) -> dict[str, Any]:
    """One type, in this process: exact with figures, refused or not tried with a reason, or broken."""
    import torch

    torch.set_num_threads(1)
    from mupscale.errors import MupscaleError
    from mupscale.families.config.goal import Goal
    from mupscale.families.config.grown import check_growth
    from mupscale.families.models import as_data, config_from, model_class, on_meta
    from mupscale.families.plan import family_plan
    from mupscale.families.prove import prove

    try:
        config = config_from({"model_type": model_type})
        raw = as_data(config)
        config = config_from(raw)
        on_meta(config, model_class(config))
    except Exception as error:
        return {"verdict": "not tried", "why": f"its default configuration does not build: {_line(error)}"}
    try:
        check_growth(raw, Goal.parse(k))
        family = family_plan(raw, k)
    except MupscaleError as refusal:
        verdict = "not tried" if refusal.claim.startswith("no batch is known") else "refused"
        return {"verdict": verdict, "why": _line(refusal)}
    except Exception as error:
        return {"verdict": "refused", "why": f"model code: {type(error).__name__} {_line(error)}"}
    try:
        evidence = prove(family, STEPS).evidence
    except Exception as error:
        return {"verdict": "BROKEN", "why": _line(error)}
    return {
        "verdict": "exact",
        "why": f"{family.architecture}, {evidence.trials} trials",
        "worst": max(evidence.worst_gradient, evidence.worst_step),
        "control": evidence.control,
    }


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def measured(model_type: str) -> dict[str, Any]:
    """A type with its verdict, from a process with limits."""
    outcome = limited(silent(lambda: attempt(model_type)), SECONDS, MEMORY)
    if outcome.done:
        return dict(outcome.value)
    limits = f"with limits of {SECONDS} CPU seconds and {MEMORY >> 30} GiB"
    return {"verdict": "not tried", "why": f"its process ended ({outcome.value}), {limits}"}


def measure(chosen: argparse.Namespace) -> Outcome:
    """Try every type (or those named), going on where earlier runs stopped."""
    import torch
    import transformers.masking_utils
    import transformers.modeling_utils  # noqa: F401 - imported once, before children are forked
    from transformers import CONFIG_MAPPING

    import mupscale.families.prove  # noqa: F401

    torch.set_num_threads(1)
    only = chosen.only.split(",") if chosen.only else None
    known = {case.model_type for case in EXACT}
    results: dict[str, dict[str, Any]] = json.loads(DATA.read_text()) if DATA.exists() else {}
    types = sorted(CONFIG_MAPPING.keys())
    key = key_of("families_wide")
    rest = [name for name in only or types if not is_of(key, results.get(name, {}))]
    if not only:
        random.Random(0).shuffle(rest)
    for name in rest:
        found = measured(name)
        results[name] = {**found, "key": key}
        print(f"{name:32} {found['verdict']:10} {found['why'][:200]}", flush=True)
        DATA.write_text(json.dumps(dict(sorted(results.items())), indent=0) + "\n", encoding="utf-8")
        RESULT.write_text(page(results, known, len(types)), encoding="utf-8")
    broken = [f"{name}: {r['why']}" for name, r in results.items() if r["verdict"] == "BROKEN"]
    return Outcome(summary(results, known), broken)


def summary(results: dict[str, dict[str, Any]], known: set[str]) -> str:
    counts = {
        v: sum(r["verdict"] == v for r in results.values())
        for v in ("exact", "refused", "not tried", "BROKEN")
    }
    held_out = [r for name, r in results.items() if name not in known and r["verdict"] != "not tried"]
    rate = sum(r["verdict"] == "exact" for r in held_out)
    worst = max((r["worst"] for r in results.values() if r["verdict"] == "exact"), default=0.0)
    return (
        f"types={len(results)} exact={counts['exact']} refused={counts['refused']} not_tried={counts['not tried']} "
        f"broken={counts['BROKEN']} held_out={rate}/{len(held_out)} worst={worst:.1e}"
    )


def page(results: dict[str, dict[str, Any]], known: set[str], total: int) -> str:
    import transformers

    lines = [
        "# Every model type of transformers, at its default configuration, k = 2",
        "",
        f"`python benchmarks/families_wide.py`, transformers {transformers.__version__}: {len(results)} of {total} types so far. Each type: shrunk "
        f"copy, search, gradient identity on every tensor, {STEPS} AdamW steps with state carried over, float64.",
        "",
        f"`{summary(results, known)}`",
        "",
        "*held_out* leaves out the types of `family_configs.py`, on which the search was made.",
    ]
    for verdict in ("BROKEN", "exact", "refused", "not tried"):
        rows = [(n, r) for n, r in results.items() if r["verdict"] == verdict]
        if rows:
            lines += ["", f"## {verdict} ({len(rows)})", "", "| type | | worst |", "|---|---|---|"]
            lines += [
                f"| {n} | {r['why'].replace('|', '/')} | {format(r['worst'], '.0e') if 'worst' in r else ''} |"
                for n, r in rows
            ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(run(measure, option("--only", help="types, separated by commas"), doc=__doc__))
