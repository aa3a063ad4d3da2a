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
import multiprocessing
import os
import random
import resource
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from harness.evidence import is_of, key_of
from harness.family_configs import EXACT
from harness.program import Outcome, option, run

SECONDS, MEMORY, WORKERS, STEPS = 60, 6 << 30, 2, 5
RESULT = Path(__file__).with_name("families_wide.md")
DATA = RESULT.with_suffix(".json")


def attempt(model_type: str, k: int = 2) -> dict[str, Any]:
    """One type, in this process: exact with figures, refused or not tried with a reason, or broken."""
    import torch

    torch.set_num_threads(1)
    from mupscale.errors import MupscaleError
    from mupscale.families.goal import Goal
    from mupscale.families.grown import check_growth
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


def _answer(model_type: str, pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    with Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
        pipe.send(attempt(model_type))


def _results(types: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every type with its verdict, each from a child with limits, a few children at a time.

    Children are forked from this process, which has imported everything and has no threads.
    """
    rest, running = list(types), dict[Connection, tuple[str, Any, float]]()
    context = multiprocessing.get_context("fork")
    while rest or running:
        while rest and len(running) < WORKERS:
            ours, theirs = context.Pipe(duplex=False)
            name = rest.pop(0)
            child = context.Process(target=_answer, args=(name, theirs))
            child.start()
            theirs.close()
            running[ours] = (name, child, time.monotonic() + 5 * SECONDS)
        ready = wait(list(running), timeout=1.0)
        for pipe, (name, child, deadline) in list(running.items()):
            if pipe not in ready and time.monotonic() < deadline:
                continue
            try:
                found = (
                    pipe.recv()
                    if pipe in ready
                    else {"verdict": "not tried", "why": f"took longer than {5 * SECONDS} s"}
                )
            except EOFError:
                child.join()
                limits = f"by a limit of {SECONDS} s or {MEMORY >> 30} GiB or a crash"
                found = {
                    "verdict": "not tried",
                    "why": f"its process ended with code {child.exitcode}, {limits}",
                }
            child.kill()
            child.join()
            pipe.close()
            del running[pipe]
            yield name, found


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
    for name, found in _results(rest):
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
