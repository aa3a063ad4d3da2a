"""The much-used model types of `popular_types.py`, each grown in a process with limits: how, and what its line must show.

A type is planned by `-k 2` and proved by AdamW steps, then grown at its own size, saved, loaded again in the stock
class and stepped there with the carried optimizer. What `-k 2` refuses is tried with `-k ffn=2` and counted apart. Types
with a text and a vision tower are also grown by `-k text=2` and `-k vision=2`. One line per type is stored in
benchmarks/families_popular.jsonl, so a run continues where it stopped; a changed configuration is measured again. `faults`
says what the lines must show.
"""

from __future__ import annotations

import copy
import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

import torch

from harness.evidence import key_of
from harness.family_configs import Case
from harness.limited import HANG, limited, silent
from harness.popular_types import POPULAR
from harness.runs import step
from mupscale.checkpoints.grow_directory import refuse_jump
from mupscale.errors import MupscaleError
from mupscale.families.config.goal import Way
from mupscale.families.config.multipliers import TOWERS
from mupscale.families.copy.losses import batch_for, loss_for
from mupscale.families.models import config_from, factory, fresh, model_class, not_stored, quiet
from mupscale.families.plan import family_plan
from mupscale.families.prove import prove
from mupscale.families.record import JUMP, Evidence, FamilyPlan
from mupscale.models.float64 import cast_, lifted_casts
from mupscale.proofs.identity import Loss
from mupscale.runs.run import Run
from mupscale.training.grow.grow import grow

STORED = Path(__file__).parents[1] / "benchmarks" / "families_popular.jsonl"
STORED_UNITS = STORED.with_name("families_popular_units.jsonl")
VERDICTS: Mapping[Way, tuple[str, ...]] = {
    "copies": ("exact", "ffn_only", "refused", "crashed", "slow"),
    "units": ("units", "mixed", "copies", "refused", "jumps", "crashed", "slow", "silent"),
}
UNITS_GROW = ("units", "mixed")
SECONDS, MEMORY = 60, 3 << 30
"""What one type may take. Whoever waits longer for an answer takes the tool for broken; small copies need below 1 GiB."""
UNITS_SECONDS = 180
"""What one type may take by new units: a search that fails is followed by another, with more spaces by copies."""
STEPS = 5
BOUND = 1e-10
CONTROL = 1e-6
"""What the control, steps with units left unscaled, must be off by: far above the rounding of float64."""
EXACT = 105
"""The fewest types that grow exactly in all their widths."""
UNITS = 95
"""The fewest types that grow by new units, in every width or in some of them beside copies."""
REMEDIES = ("by nature", "write -k ")
"""What a refusal says: that nothing helps, or what to type instead."""
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
        wide = grow(start, lambda: factory(cls)(wide_config), plan=family.plan, loss=loss)
        again = reloaded(wide.model, family)
        for loaded, built in zip(again.parameters(), wide.model.parameters(), strict=True):
            loaded.requires_grad = (
                built.requires_grad
            )  # Whisper's table of positions is fixed when built, not when loaded
        end = Run(again, _moved(wide, again))
        losses = [_steps(run, loss, steps) for run in (start, wide, end)]
    return max(abs(a - b) / abs(a) for found in losses[1:] for a, b in zip(losses[0], found, strict=True))


def reloaded(model: Any, family: FamilyPlan) -> Any:
    """A wide model, saved and loaded again by the stock class."""
    options: dict[str, Any] = {"dtype": torch.float64, "attn_implementation": "eager"}
    if any(".experts." in name for name in family.plan.tensors):
        options["experts_implementation"] = "eager"
    with tempfile.TemporaryDirectory() as folder, quiet():
        model.save_pretrained(folder)
        again = type(model).from_pretrained(folder, local_files_only=True, **options)
    for one, its in zip(again.modules(), model.modules(), strict=True):
        one.training = its.training
    return again


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
        value = loss(run.model)
        step(run, value)
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
            error, evidence = _grown(raw, multipliers)
        except MupscaleError as refusal:
            said = said or " ".join(str(refusal).split())
            continue
        if error > BOUND:
            return {"verdict": "crashed", "why": f"accepted, and off by {error:.1e}"}
        towers = {tower: _grown(raw, f"{tower}=2")[0] for tower in towers_of(case)}
        return {
            "verdict": verdict,
            "worst": error,
            "control": evidence.control,
            "trials": evidence.trials,
            **({"towers": towers} if towers else {}),
            "why": said,
        }
    return {"verdict": "refused", "why": said}


def by_units(case: Case) -> Line:
    """One type by new units: which sizes grow by units and which by copies, the worst error asleep, the jump awake."""
    torch.set_num_threads(1)
    raw = {"model_type": case.model_type, "architectures": [case.architecture], **case.fields}
    try:
        family = prove(family_plan(raw, 2, by="units"), STEPS)
        worst = max(family.evidence.worst_gradient, family.evidence.worst_step, stepped(family))
        if worst <= BOUND:
            refuse_jump(family)
    except MupscaleError as refusal:
        why = " ".join(str(refusal).split())
        return {"verdict": "refused", "code": refusal.code, "why": why, "tried": _tried(raw)}
    ways: dict[str, dict[str, None]] = {"units": {}, "copies": {}}
    for axis in (axis for entry in family.plan.tensors.values() for axis in entry.axes if axis.grows):
        ways["units" if axis.padded else "copies"][f"{axis.base}->{axis.wide}"] = None
    jump = family.evidence.jump
    exact = worst <= BOUND and jump is not None and jump <= JUMP
    verdict = "mixed" if all(ways.values()) else "units" if ways["units"] else "copies"
    found = {way: list(sizes) for way, sizes in ways.items()}
    seen = {
        "worst": worst,
        "jump": jump,
        "control": family.evidence.control,
        "trials": family.evidence.trials,
    }
    return {
        "verdict": verdict if exact else "jumps" if worst <= BOUND else "silent",
        **found,
        **seen,
        "why": "",
    }


def _tried(raw: Mapping[str, Any]) -> dict[str, float]:
    """What grows by copies where new units are refused: `-k 2`, or else `-k ffn=2`, with its largest error."""
    for multipliers in ("2", "ffn=2"):
        with suppress(MupscaleError):
            return {multipliers: _grown(raw, multipliers)[0]}
    return {}


def _grown(raw: Mapping[str, Any], multipliers: str) -> tuple[float, Evidence]:
    """The largest error of a configuration that was planned, proved, grown, reloaded and stepped."""
    family = prove(family_plan(raw, multipliers), STEPS)
    evidence = family.evidence
    return max(evidence.worst_gradient, evidence.worst_step, stepped(family)), evidence


def towers_of(case: Case) -> tuple[str, ...]:
    """The towers of a type that has a text and a vision tower; none of any other."""
    return TOWERS if all(f"{tower}_config" in case.fields for tower in TOWERS) else ()


def measured(case: Case, by: Way = "copies") -> Line:
    """One type in a process of its own, with the CPU seconds that it took."""
    seconds = SECONDS if by == "copies" else UNITS_SECONDS
    outcome = limited(silent(lambda: attempt(case) if by == "copies" else by_units(case)), seconds, MEMORY)
    if outcome.done:
        line = dict(outcome.value)
    elif outcome.value == HANG:
        line = {"verdict": "slow", "why": f"more than {seconds} CPU seconds"}
    else:
        line = {"verdict": "crashed", "why": str(outcome.value)}
    key = f"{key_of('families_popular')}-{_configuration(case)}"
    return {"name": case.name, "key": key, **line, "seconds": round(outcome.seconds, 1)}


def _configuration(case: Case) -> str:
    fields = json.dumps([case.model_type, case.architecture, case.fields], sort_keys=True)
    return hashlib.sha256(fields.encode()).hexdigest()[:16]


def in_part(name: str, part: str) -> bool:
    """Whether a type is in part "i/n", i from 0: types are dealt to parts by the hash of their name.

    >>> [in_part("llama", f"{i}/3") for i in range(3)].count(True)
    1
    """
    i, n = map(int, part.split("/"))
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % n == i


def stored(file: Path = STORED) -> dict[str, Line]:
    """The stored lines of types whose configurations are still the same, by name; they may be of earlier code."""
    keys = {case.name: _configuration(case) for case in POPULAR}
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines() if file.exists() else ())
    return {line["name"]: line for line in lines if keys.get(line["name"]) == line["key"].rpartition("-")[2]}


def summary(lines: Iterable[Line], by: Way = "copies") -> str:
    counts = Counter(line["verdict"] for line in lines)
    told = " ".join(f"{word}={counts[word]}" for word in VERDICTS[by])
    return f"types={sum(counts.values())} {told}"


def faults(lines: Mapping[str, Line], by: Way = "copies") -> list[str]:
    """What the lines of all types do not show as they must, one sentence each."""
    cases = {case.name: case for case in POPULAR}
    found = [f"{name}: not measured" for name in cases if name not in lines]
    found += [f"{name}: not a type of the list" for name in lines if name not in cases]
    for name, line in lines.items():
        towers = towers_of(cases[name]) if name in cases else ()
        found += [
            f"{name}: {what}" for what in (wrong(line, towers) if by == "copies" else wrong_units(line))
        ]
    good, least, what = (
        (("exact",), EXACT, "exact") if by == "copies" else (UNITS_GROW, UNITS, "grown by units")
    )
    if (count := sum(line["verdict"] in good for line in lines.values())) < least:
        found.append(f"{count} types are {what}, expected {least}")
    return found


def wrong_units(line: Line) -> Iterator[str]:
    """What a line of new units does not show as it must."""
    verdict, why = line["verdict"], line["why"]
    if verdict == "refused":
        if not why:
            yield "refused without a reason"
        if not all(error <= BOUND for error in line.get("tried", {}).values()):
            yield f"what was tried by copies is off: {line['tried']}"
        if not line.get("tried") and REMEDIES[0] not in why:
            yield f"refused, not by nature, and nothing by copies is exact: {why}"
    elif verdict not in (*UNITS_GROW, "copies"):
        yield f"{verdict}: {why}"
    else:
        if not line.get("worst", inf) <= BOUND:
            yield f"asleep off by {line.get('worst')}, expected at most {BOUND}"
        if not line.get("jump", inf) <= BOUND:
            yield f"the loss moves by {line.get('jump')} when it wakes, expected at most {BOUND}"
        if not line.get("control", 0.0) > CONTROL:
            yield f"the control is off by {line.get('control')} only, so the proof shows nothing"


def wrong(line: Line, towers: tuple[str, ...]) -> Iterator[str]:
    verdict, why = line["verdict"], line["why"]
    if verdict not in ("exact", "ffn_only", "refused"):
        yield f"{verdict}: {why}"
        return
    if not line["seconds"] <= SECONDS:
        yield f"{line['seconds']} CPU seconds, expected at most {SECONDS}"
    if verdict != "exact" and not why:
        yield "no reason why it does not grow in all widths"
    if verdict == "refused":
        if not any(word in why for word in REMEDIES):
            yield f"refused without a remedy, and not by nature: {why}"
        return
    if verdict == "exact" and why:
        yield f"exact, and yet refused: {why}"
    if not line.get("worst", inf) <= BOUND:
        yield f"off by {line.get('worst')}, expected at most {BOUND}"
    if not line.get("control", 0.0) > CONTROL:
        yield f"the control is off by {line.get('control')} only, so the proof shows nothing"
    for tower in towers:
        if verdict == "exact" and not line.get("towers", {}).get(tower, inf) <= BOUND:
            yield f"its {tower} tower is off by {line.get('towers', {}).get(tower)}"
