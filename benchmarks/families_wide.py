"""The wide net: types of the installed transformers that nobody chose, each in a process with limits.

At least 100 types are drawn by a stored seed from all that are neither in `popular_types.py` nor among the first 168 of
families_wide.json. The default configuration of each is planned by `-k 2` as `mupscale` does it: shrunk, searched, proved by
AdamW steps, and what is refused gets the remedies that the refusal names and was tried with. What is accepted is also grown at the
size of the small copy, saved, loaded again in the stock class, and gives the base's loss or is `silent`. Types that transformers
alone does not build, and parts of other types, are listed with the reason and do not count. The result is families_wide.md.

    python benchmarks/families_wide.py                    what is not stored for this code; it goes on where it stopped
    python benchmarks/families_wide.py --only bert,llama  these, whatever is stored
    python benchmarks/families_wide.py --refused          drawn types that are stored and not exact

The last line is `drawn=D exact=E share=S refused=R remedied=M by_nature=N slow=L silent=Q crashed=C worst=W not_built=B`; the exit
code is 1 when anything is silent or crashed, or the share of exact types is below 0.6.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from harness.evidence import is_of, key_of
from harness.limited import HANG, limited, silent
from harness.popular_types import POPULAR
from harness.program import Outcome, option, run

SECONDS, MEMORY, STEPS = 60, 6 << 30, 5
SEED, LEAST, SHARE, BOUND = 20261119, 100, 0.6, 1e-10
NOT_BUILT = "does not build"
RESULT = Path(__file__).with_name("families_wide.md")
DATA = RESULT.with_suffix(".json")
Row = dict[str, Any]


def attempt(model_type: str) -> Row:
    """One type, in this process: exact with figures, refused with the code and what was tried instead, or silent."""
    from mupscale.errors import MupscaleError
    from mupscale.families.config.multipliers import TOWERS
    from mupscale.families.models import as_data, config_from
    from mupscale.families.process import answer
    from mupscale.families.record import FamilyPlan

    if why := unbuilt(model_type):
        return {"verdict": NOT_BUILT, "why": why}
    raw = as_data(config_from({"model_type": model_type}))
    request: Row = dict.fromkeys(("to", "architecture", "export", "stored", "declared"))
    request |= {"config": raw, "multipliers": "2", "by": "copies", "centred": False, "steps": STEPS}
    try:
        family = FamilyPlan.of_json(answer(request))
    except MupscaleError as refusal:
        ways = [f.remedy for f in refusal.faults if f.code.startswith("goal.") and "-k" in f.remedy]
        for tower in TOWERS if not ways and all(f"{t}_config" in raw for t in TOWERS) else ():
            try:
                answer({**request, "multipliers": f"{tower}=2"})
            except MupscaleError:
                continue
            ways.append(f"-k {tower}=2 is exact, and is not named")
        return {"verdict": "refused", "code": refusal.code, "ways": ways, "why": _line(refusal)}
    error, evidence = loaded_again(family), family.evidence
    return {
        "verdict": "exact" if error <= BOUND else "silent",
        "why": f"{family.architecture}, {evidence.trials} trials",
        "worst": max(evidence.worst_gradient, evidence.worst_step, error),
        "control": evidence.control,
    }


def unbuilt(model_type: str) -> str:
    """Why transformers alone builds no model of the default configuration; empty if it does."""
    import torch
    from transformers import CONFIG_MAPPING

    from mupscale.errors import MupscaleError
    from mupscale.families.models import model_class, on_meta

    torch.set_num_threads(1)
    try:
        config = CONFIG_MAPPING[model_type]()
        config = CONFIG_MAPPING[model_type].from_dict(config.to_dict())
        on_meta(config, model_class(config))
    except MupscaleError as refusal:
        return "" if refusal.code == "family.class_of_other_type" else _line(refusal)
    except Exception as error:
        return _line(error)
    return ""


def loaded_again(family: Any) -> float:
    """How far the loss of the small copy moves when it is grown, saved, and loaded again by the stock class."""
    import torch

    from harness.popular import reloaded
    from mupscale.families.prove import small_copy
    from mupscale.models.float64 import cast_, lifted_casts
    from mupscale.plans.direction import Direction
    from mupscale.plans.wide_model import fill_model_
    from mupscale.tensors.differences import loss_gap
    from mupscale.tensors.random_states import forked

    copied = small_copy(family, 1)
    wide = cast_(fill_model_(copied.wide(), copied.base, Direction(copied.plan)), torch.float64)
    found = []
    with lifted_casts(), torch.no_grad():
        # Loading computes what no checkpoint stores, such as angles, in float32: both ends are loaded again.
        for model in (copied.base, wide):
            again = reloaded(model, family)
            with forked(again, seed=0):  # ViLT draws which patches of an image it reads, even in eval mode
                found.append(float(copied.losses[0](again)))
    return loss_gap(*found)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]


def measured(model_type: str, seconds: int = SECONDS) -> Row:
    """A type with its verdict, from a process with limits."""
    outcome = limited(silent(lambda: attempt(model_type)), seconds, MEMORY)
    took = {"seconds": round(outcome.seconds, 1)}
    if outcome.done:
        return {**outcome.value, **took}
    if outcome.value in (HANG, "memory"):
        return {"verdict": "slow", "why": f"over {seconds} CPU seconds or {MEMORY >> 30} GiB", **took}
    return {"verdict": "crashed", "why": str(outcome.value), **took}


def pool(types: list[str], results: dict[str, Row]) -> list[str]:
    """The types that may be drawn, in the order in which they are; what is drawn already stays among them."""
    taken = {case.model_type for case in POPULAR} | {n for n, row in results.items() if "drawn" not in row}
    order = {name: hashlib.sha256(f"{SEED}/{name}".encode()).digest() for name in types if name not in taken}
    return sorted(order, key=order.__getitem__)


def measure(chosen: argparse.Namespace) -> Outcome:
    """Draw and try types, going on where earlier runs stopped."""
    import torch
    import transformers.masking_utils
    import transformers.modeling_utils  # noqa: F401 - imported once, before children are forked
    from transformers import CONFIG_MAPPING

    import mupscale.families.prove  # noqa: F401

    torch.set_num_threads(1)
    results: dict[str, Row] = json.loads(DATA.read_text()) if DATA.exists() else {}
    drawn = pool(list(CONFIG_MAPPING.keys()), results)
    again = {n for n in drawn if results.get(n, {}).get("verdict") not in (None, "exact", NOT_BUILT)}
    key, built = key_of("families_wide"), 0
    names = chosen.only.split(",") if chosen.only else drawn
    for name in names:
        if not chosen.only and built >= LEAST:
            break
        known = results.get(name, {})
        wanted = chosen.only or (name in again if chosen.refused else not is_of(key, known))
        if wanted:
            known = {
                **measured(name, chosen.seconds),
                "key": key,
                **({"drawn": SEED} if name in drawn else {}),
            }
            results[name] = known
            print(
                f"{name:32} {known['verdict']:10} {known['seconds']:5.1f} s {known['why'][:200]}", flush=True
            )
            DATA.write_text(json.dumps(dict(sorted(results.items())), indent=0) + "\n", encoding="utf-8")
            RESULT.write_text(page(results), encoding="utf-8")
        built += known.get("verdict", NOT_BUILT) != NOT_BUILT
    return Outcome(summary(results), [] if chosen.only else faults(results))


def in_draw(results: dict[str, Row]) -> dict[str, Row]:
    """The rows that were drawn."""
    return {name: row for name, row in results.items() if "drawn" in row}


def faults(results: dict[str, Row]) -> list[str]:
    """What the drawn rows do not show as they must."""
    rows = {n: row for n, row in in_draw(results).items() if row["verdict"] != NOT_BUILT}
    found = [f"{n}: {row['why']}" for n, row in rows.items() if row["verdict"] in ("silent", "crashed")]
    exact = sum(row["verdict"] == "exact" for row in rows.values())
    if len(rows) < LEAST or exact < SHARE * len(rows):
        found.append(f"{exact} of {len(rows)} types are exact, expected {SHARE} of at least {LEAST}")
    return found


def summary(results: dict[str, Row]) -> str:
    rows = in_draw(results).values()
    count = Counter(row["verdict"] for row in rows)
    total = sum(count.values()) - count[NOT_BUILT]
    refused = [row for row in rows if row["verdict"] == "refused"]
    worst = max((row["worst"] for row in rows if row["verdict"] == "exact"), default=0.0)
    return (
        f"drawn={total} exact={count['exact']} share={count['exact'] / max(total, 1):.2f} refused={count['refused']} "
        f"remedied={sum(bool(row['ways']) for row in refused)} by_nature={sum('by nature' in row['why'] for row in refused)} "
        f"slow={count['slow']} silent={count['silent']} crashed={count['crashed']} worst={worst:.1e} "
        f"not_built={count[NOT_BUILT]}"
    )


def page(results: dict[str, Row]) -> str:
    import transformers

    rows = in_draw(results)
    lines = [
        "# Model types of transformers that nobody chose, at their default configuration, k = 2",
        "",
        f"`python benchmarks/families_wide.py`, transformers {transformers.__version__}: types drawn by the seed {SEED}, neither among the "
        f"much-used ones nor among those below. Each type: shrunk copy, search, gradient identity on every tensor, {STEPS} AdamW steps "
        "with state carried over, a reload by the stock class, float64.",
        "",
        f"`{summary(results)}`",
    ]
    causes = Counter(row["code"] for row in rows.values() if row["verdict"] == "refused")
    lines += [
        "",
        "| refused because | types |",
        "|---|---|",
        *(f"| {c} | {n} |" for c, n in causes.most_common()),
    ]
    for verdict in ("silent", "crashed", "exact", "refused", "slow", NOT_BUILT):
        lines += _table(f"{verdict}, drawn", {n: row for n, row in rows.items() if row["verdict"] == verdict})
    earlier = {n: row for n, row in results.items() if n not in rows}
    for verdict in dict.fromkeys(row["verdict"] for row in earlier.values()):
        lines += _table(
            f"{verdict}, earlier", {n: row for n, row in earlier.items() if row["verdict"] == verdict}
        )
    return "\n".join(lines) + "\n"


def _table(title: str, rows: dict[str, Row]) -> list[str]:
    """A table of types, each with the reason, what works instead, and the worst error."""
    if not rows:
        return []
    lines = ["", f"## {title} ({len(rows)})", "", "| type | | instead | worst |", "|---|---|---|---|"]
    for name, row in rows.items():
        instead = "; ".join(row.get("ways", ())) or ("by nature" if "by nature" in row["why"] else "")
        worst = format(row["worst"], ".0e") if "worst" in row else ""
        lines.append(f"| {name} | {row['why'].replace('|', '/')} | {instead} | {worst} |")
    return lines


if __name__ == "__main__":
    only = option("--only", help="types, separated by commas")
    refused = option("--refused", action="store_true", help="drawn types that are stored and not exact")
    seconds = option("--seconds", type=int, default=SECONDS, help="CPU seconds that a type may take")
    sys.exit(run(measure, only, refused, seconds, doc=__doc__))
