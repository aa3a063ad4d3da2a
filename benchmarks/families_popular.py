"""The much-used model types of `harness/popular_types.py`, each in a process with limits, by `families.py --popular`.

A type is planned by `-k 2` and proved by AdamW steps, then grown at its own size, saved, loaded again in the stock
class and stepped there with the carried optimizer. What `-k 2` refuses is tried with `-k ffn=2` and counted apart. One
line per type is stored in families_popular.jsonl, so a run goes on where it stopped; a changed configuration is measured again.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from harness.family_configs import Case
from harness.limited import HANG, limited
from harness.popular_types import POPULAR
from mupscale.errors import MupscaleError
from mupscale.families.losses import batch_for, loss_for
from mupscale.families.models import config_from, factory, fresh, model_class, not_stored, quiet
from mupscale.families.plan import family_plan
from mupscale.families.prove import prove
from mupscale.families.record import FamilyPlan
from mupscale.plans.float64 import cast_, lifted_casts
from mupscale.plans.identity import Loss
from mupscale.runs.run import Run
from mupscale.training.widen import widen

STORED = Path(__file__).with_name("families_popular.jsonl")
SECONDS, MEMORY = 60, 3 << 30
"""What one type may take. Whoever waits longer for an answer takes the tool for broken; small copies need below 1 GiB."""
STEPS = 5
BOUND = 1e-10
EXACT = 98
"""The fewest exact types, with all their widths or with those of their feed-forward layers."""
Line = dict[str, Any]


def stepped(family: FamilyPlan, steps: int = 2) -> float:
    """The largest relative error of losses: grown at the configuration's own size, reloaded in the stock class, stepped."""
    base_config, wide_config = config_from(family.base_config), config_from(family.wide_config)
    cls = model_class(base_config, family.architecture)
    with lifted_casts():
        base = cast_(factory(cls)(base_config), torch.float64)
        _restore_(base, fresh(base_config, cls))
        start = Run(base, torch.optim.AdamW(base.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.0))
        batch = batch_for(base, base_config)
        with torch.no_grad():
            other = cast_(factory(cls)(wide_config), torch.float64)
            loss = loss_for(base, other, batch)
        _steps(start, loss, 1)
        wide = widen(start, lambda: factory(cls)(wide_config), plan=family.plan, loss=loss)
        with tempfile.TemporaryDirectory() as folder, quiet():
            stock: Any = wide.model
            stock.save_pretrained(folder)
            options: dict[str, Any] = {"dtype": torch.float64, "attn_implementation": "eager"}
            if any(".experts." in name for name in family.plan.tensors):
                options["experts_implementation"] = "eager"
            again = cls.from_pretrained(folder, local_files_only=True, **options)
        for one, its in zip(again.modules(), wide.model.modules(), strict=True):
            one.training = its.training
        for loaded, built in zip(again.parameters(), wide.model.parameters(), strict=True):
            loaded.requires_grad = (
                built.requires_grad
            )  # Whisper's table of positions is fixed when built, not when loaded
        end = Run(again, _moved(wide, again))
        losses = [_steps(run, loss, steps) for run in (start, wide, end)]
    return max(abs(a - b) / abs(a) for found in losses[1:] for a, b in zip(losses[0], found, strict=True))


@torch.no_grad()
def _restore_(model: torch.nn.Module, own: torch.nn.Module) -> None:
    """Give a model with random weights back what no checkpoint stores: loading computes it, such as sinusoids."""
    computed = dict(own.named_parameters())
    for name in not_stored(model):
        if name in computed:
            model.get_parameter(name).copy_(computed[name])


def _steps(run: Run, loss: Loss, steps: int) -> list[float]:
    """The losses before each step and after the last."""
    found = []
    for _ in range(steps):
        run.optimizers[0].zero_grad()
        value = loss(run.model)
        value.backward()  # type: ignore[no-untyped-call]
        run.optimizers[0].step()
        found.append(float(value.detach()))
    with torch.no_grad():
        return [*found, float(loss(run.model))]


def _moved(wide: Run, again: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the wide run, with its state, on the parameters of the same names of another model."""
    names = {id(p): name for name, p in wide.model.named_parameters()}
    found = dict(again.named_parameters())
    old = wide.optimizers[0]
    groups = [{**g, "params": [found[names[id(p)]] for p in g["params"]]} for g in old.param_groups]
    moved = torch.optim.AdamW(groups)
    moved.load_state_dict(copy.deepcopy(old.state_dict()))
    return moved


def attempt(case: Case) -> Line:
    """One type: exact, ffn_only with the reason for the rest, or refused with the reason."""
    torch.set_num_threads(1)
    raw = {"model_type": case.model_type, "architectures": [case.architecture], **case.fields}
    said = ""
    for verdict, multipliers in (("exact", "2"), ("ffn_only", "ffn=2")):
        try:
            family = prove(family_plan(raw, multipliers), STEPS)
            evidence = family.evidence
            error = max(evidence.worst_gradient, evidence.worst_step, stepped(family))
        except MupscaleError as refusal:
            said = said or " ".join(str(refusal).split())
            continue
        if error > BOUND:
            return {"verdict": "crashed", "why": f"accepted, and off by {error:.1e}"}
        return {
            "verdict": verdict,
            "worst": error,
            "control": evidence.control,
            "trials": evidence.trials,
            "why": said,
        }
    return {"verdict": "refused", "why": said}


def measured(case: Case) -> Line:
    """One type in a process of its own, with the CPU seconds that it took."""
    outcome = limited(lambda: _silently(case), SECONDS, MEMORY)
    if outcome.done:
        line = dict(outcome.value)
    elif outcome.value == HANG:
        line = {"verdict": "slow", "why": f"more than {SECONDS} CPU seconds"}
    else:
        line = {"verdict": "crashed", "why": str(outcome.value)}
    return {"name": case.name, "key": _key(case), **line, "seconds": round(outcome.seconds, 1)}


def _silently(case: Case) -> Line:
    with Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), 2)
        return attempt(case)


def _key(case: Case) -> str:
    told = json.dumps([case.model_type, case.architecture, case.fields], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def in_part(name: str, part: str) -> bool:
    """Whether a type is in part "i/n", i from 0: types are dealt to parts by the hash of their name.

    >>> [in_part("llama", f"{i}/3") for i in range(3)].count(True)
    1
    """
    i, n = map(int, part.split("/"))
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % n == i


def stored() -> dict[str, Line]:
    """The stored lines of types whose configurations are still the same, by name."""
    keys = {case.name: _key(case) for case in POPULAR}
    lines = map(json.loads, STORED.read_text(encoding="utf-8").splitlines() if STORED.exists() else ())
    return {line["name"]: line for line in lines if keys.get(line["name"]) == line["key"]}


def summary(lines: Iterable[Line]) -> str:
    counts = Counter(line["verdict"] for line in lines)
    told = " ".join(f"{word}={counts[word]}" for word in ("exact", "ffn_only", "refused", "crashed", "slow"))
    return f"types={sum(counts.values())} {told}"


def popular(only: list[str] | None, part: str | None, again: bool) -> int:
    """Measure what is not stored; with a part or names, measure those and compare them with what is stored."""
    import transformers.masking_utils
    import transformers.modeling_utils  # noqa: F401 - imported once, before children are forked

    before = stored()
    chosen = [c for c in POPULAR if (not only or c.name in only) and (part is None or in_part(c.name, part))]
    lines = {} if again or part is not None or only else dict(before)
    worse = []
    for case in chosen:
        if case.name in lines:
            continue
        line = lines[case.name] = measured(case)
        print(
            f"{line['name']:20} {line['verdict']:9} {line['seconds']:5.1f} s  {line['why'][:230]}", flush=True
        )
        if part is None:
            before[case.name] = line
            text = "".join(json.dumps(before[c.name]) + "\n" for c in POPULAR if c.name in before)
            STORED.write_text(text, encoding="utf-8")
        elif line["verdict"] != before.get(case.name, line)["verdict"]:
            worse.append(f"{case.name} was {before[case.name]['verdict']} and is {line['verdict']}")
    print(summary(lines.values()))
    for told in worse:
        print(told)
    failed = [line["name"] for line in lines.values() if line["verdict"] in ("crashed", "slow")]
    whole = part is None and not only
    few = whole and sum(line["verdict"] in ("exact", "ffn_only") for line in lines.values()) < EXACT
    return int(bool(worse or failed or few))
