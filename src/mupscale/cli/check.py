"""`mupscale check`: is this directory the result of growing that base? Checked level by level.

Exit status 0 only if every level asked for holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from math import isclose
from typing import Any

from ..checkpoints.about import KEYS
from ..checkpoints.base import Base
from ..checkpoints.growth_job import noise_record, wide_config
from ..checkpoints.request import Request
from ..checkpoints.resume import job_again, unfinished
from ..errors import Fault, MupscaleError
from ..families.loaded import check_memory, compare_models
from ..families.process import plan_in_process
from ..families.record import FamilyPlan
from ..files.directory import Directory, read_directory
from ..jobs.progress import shown_progress
from ..jobs.verify_bytes import changed_ends, check_alone, check_bytes
from ..plans.plan import Plan
from ..proofs.rounding import stored_tolerance
from ..runs.growth_record import NAME, read_about
from ..storage.location import Location, absolute
from .plan import changes
from .printing.next_steps import same_command
from .printing.working import working

_SHOWN = 20  # faults per level; a wrong plan has one per tensor
_MEASURED = 1e-3  # relative; to how much norms are measured


def run(chosen: argparse.Namespace) -> int:
    if chosen.base is None:
        return _alone(chosen)
    about = _record(chosen)
    missing = [key for key in KEYS if key not in about]
    if missing:
        raise MupscaleError(
            f"{chosen.wide}/{NAME} has no {', '.join(missing)}, so it cannot be checked against its base; restore the file, "
            "or grow the base again",
            code="growth.record_incomplete",
        )
    base = Base(chosen.base)
    directory = base.directory
    held, family = True, None
    levels: list[dict[str, Any]] = []
    for level in chosen.levels or ("bytes", "layout", *(["noise"] if about["noise"] is not None else [])):
        if level == "bytes":
            summary, faults = _bytes(base, chosen.wide, about, chosen.threads, chosen.quiet)
        elif level == "layout":
            working("planning again on a small copy", chosen)
            family = _family(directory, about)
            summary, faults = _layout(family, about)
        elif level == "noise":
            if about["noise"] is None:
                levels.append(_left_out(level, "the result has none"))
                continue
            working("measuring the base again", chosen)
            family = family or _family(directory, about)
            summary, faults = _noise(base, family, about, chosen.threads)
        elif (why := _no_comparison(about)) is not None:
            levels.append(_left_out(level, why))
            continue
        else:
            working("loading both models", chosen)
            summary, faults = _model(directory, chosen.wide, about)
        held = held and not faults
        levels.append(_print(level, summary, faults))
    chosen.found = {"levels": levels}
    return 0 if held else 1


def _record(chosen: argparse.Namespace) -> dict[str, Any]:
    """The record of the result; raises where there is none, and says so where its growth was not finished."""
    about = read_about(chosen.wide)
    if about is not None:
        return about
    found = unfinished(absolute(chosen.wide))
    if found is None:
        raise MupscaleError(
            f"{chosen.wide} holds no {NAME}; name a directory that mupscale grow or mupscale upscale wrote",
            code="growth.record_missing",
        )
    place, begun = found
    again = "run the command that began it again"
    if begun is not None:
        again += f": {same_command(begun[0] if chosen.base is None else chosen.base, chosen.wide, begun[1])}"
    what = f"{place.name} beside it holds a growth that was not finished"
    raise MupscaleError(
        "there is nothing to check yet", [Fault("growth.unfinished", str(chosen.wide), what, again)]
    )


def _left_out(level: str, why: str) -> dict[str, Any]:
    print(f"{level:7} not applicable: {why}", flush=True)
    return {"level": level, "holds": None, "found": why}


def _print(level: str, summary: str, faults: list[Fault]) -> dict[str, Any]:
    """Print a level, and return it for `--json`."""
    print(f"{level:7} {'holds' if not faults else 'FAILS'}: {summary}", flush=True)
    for fault in faults[:_SHOWN]:
        print(f"        {fault.where} [{fault.code}]: {fault.what}")
    if len(faults) > _SHOWN:
        print(f"        … and {len(faults) - _SHOWN} more")
    return {
        "level": level,
        "holds": not faults,
        "found": summary,
        "faults": [{"code": fault.code, "where": fault.where, "what": fault.what} for fault in faults],
    }


def _alone(chosen: argparse.Namespace) -> int:
    """The files of a grown directory against the fingerprints that were stored when they were written."""
    _record(chosen)
    with shown_progress("reading", chosen.quiet) as report:
        faults = check_alone(chosen.wide, report, chosen.threads)
    files = _print(
        "files",
        "every file by the fingerprint or digest stored when it was written; the base was not read",
        faults,
    )
    chosen.found = {"levels": [files]}
    return 0 if not faults else 1


def _bytes(
    base: Base, wide: Location, about: dict[str, Any], workers: int, quiet: bool
) -> tuple[str, list[Fault]]:
    other = "the base is not the one that was grown; the result was compared with its own record"
    if changed := changed_ends(base.path, wide):
        return other, [*changed, *check_alone(wide, threads=workers)]
    try:
        job = job_again(base, wide, about)
    except MupscaleError as error:
        return "the record of growth cannot be followed", list(error.faults) or [
            Fault(error.code, NAME, error.claim)
        ]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        # The record is untrusted input: any malformed entry means that it does not lead back to this base.
        return "the record of growth cannot be followed", [
            Fault("growth.record_malformed", NAME, f"{type(error).__name__}: {error}")
        ]
    with shown_progress("comparing", quiet) as report:
        faults = check_bytes(job, report=report, threads=workers)
    if any(fault.code == "job.other_base" for fault in faults):
        return other, faults
    total = sum(file.size for file in job.files)
    summary = f"{len(job.moves)} tensors and {len(job.carried) + len(job.texts)} other files, {total:,} bytes compared"
    return summary, faults


def _family(directory: Directory, about: dict[str, Any]) -> FamilyPlan:
    """The plan that growing the base finds now."""
    request = Request.from_json(about["request"])
    return plan_in_process(
        directory.config,
        request.goal.k_text,
        to=request.goal.to_text,
        by=request.goal.by,
        architecture=about["base_architecture"],
        export=request.export,
        stored=list(directory.tensors),
        declared=request.declared,
        centred=request.centred,
    )


def _layout(family: FamilyPlan, about: dict[str, Any]) -> tuple[str, list[Fault]]:
    request = Request.from_json(about["request"])
    seen = family.evidence
    summary = (
        f"gradients of a small copy agree to {seen.worst_gradient:.0e}, {seen.steps} AdamW steps to "
        f"{seen.worst_step:.0e} (with the base's rates and eps {seen.control:.0e})"
    )
    if family.plan.parts_tokens:
        summary = (
            f"with copies of experts far apart, loss and summed gradients of a small copy agree to "
            f"{max(seen.worst_gradient, seen.worst_step):.0e} (with equal scores the loss is off by {seen.control:.0e})"
        )
    elif family.plan.carries_mean:
        summary = (
            f"loss and pulled-back gradients of a small copy agree to {max(seen.worst_gradient, seen.worst_step):.0e} (with "
            f"zeros for means the loss is off by {seen.control:.0e})"
        )
    want = wide_config(family.wide_config, request.dtype)
    faults = [
        Fault("growth.config_differs", f"config.json: {name}", f"{new} in the record, {old} by the base")
        for name, old, new in changes(want, about["config"])
    ]
    if family.plan.hash != about["plan_hash"]:
        old = Plan.of_json(about["plan"])
        odd = [
            name
            for name in {*old.tensors, *family.plan.tensors}
            if old.tensors.get(name) != family.plan.tensors.get(name)
        ]
        faults += [
            Fault("growth.plan_differs", name, "the plan of the record is not the one found now")
            for name in sorted(odd)
        ]
        faults = faults or [
            Fault("growth.plan_differs", "plan", "the record's plan is not the one found now")
        ]
    return summary, faults


def _noise(base: Base, family: FamilyPlan, about: dict[str, Any], threads: int) -> tuple[str, list[Fault]]:
    """The sizes of the noise against those that its request and the base give now."""
    stored = about["noise"]
    found = noise_record(
        base, family, Request.from_json(about["request"]), stored.get("auto"), threads=threads
    )
    faults = [
        Fault("growth.noise_differs", where, f"{old} in the record, {new} by the base")
        for where, old, new in _unequal(stored, found)
    ]
    sized = {*found["sigmas"], *found.get("woken", ())}
    return f"the noise of {len(sized)} tensors has the sizes that the base gives", faults


def _unequal(stored: Any, found: Any, where: str = "noise") -> Iterator[tuple[str, Any, Any]]:
    """Where two records differ by more than norms are measured to, with what each says."""
    if isinstance(stored, Mapping) and isinstance(found, Mapping):
        for key in sorted({*stored, *found}):
            yield from _unequal(stored.get(key, "nothing"), found.get(key, "nothing"), f"{where}: {key}")
    elif isinstance(stored, (list, tuple)) and isinstance(found, (list, tuple)) and len(stored) == len(found):
        for old, new in zip(stored, found, strict=True):
            yield from _unequal(old, new, where)
    elif isinstance(stored, float) and isinstance(found, float):
        if not isclose(stored, found, rel_tol=_MEASURED):
            yield where, f"{stored:.4g}", f"{found:.4g}"
    elif stored != found:
        yield where, stored, found


def _no_comparison(about: dict[str, Any]) -> str | None:
    """Why the outputs and gradients of a result need not equal its base's, or None if they must."""
    if about["noise"] is not None:
        return "noise has moved the model away from its base; to compare them, grow the base without noise"
    if about["spelling"]["absent"]:
        return f"from_pretrained draws {', '.join(about['spelling']['absent'][:4])} at random, as the base does not store it"
    return None


def _model(directory: Directory, wide: Location, about: dict[str, Any]) -> tuple[str, list[Fault]]:
    # Weights and gradients of both, in float64.
    check_memory(16 * sum(about["parameters"].values()), "the model level")
    classes = (about["base_architecture"], about["architecture"])
    found = compare_models(directory.path, wide, about["plan"], classes)
    errors = {name: float(error) for name, error in found["errors"].items()}
    worst = max(errors.values(), default=0.0)
    stored = {place.dtype for place in read_directory(wide).tensors.values()}
    tolerance = stored_tolerance(Plan.of_json(about["plan"]), stored)
    faults = [
        Fault("growth.gradient_differs", name, f"its gradient is off by {error:.1e}")
        for name, error in errors.items()
        if not error <= tolerance
    ]
    if not found["gap"] <= tolerance:
        faults.insert(
            0, Fault("growth.outputs_differ", "outputs", f"they differ by {found['gap']:.1e} (relative)")
        )
    summary = (
        f"outputs agree to {found['gap']:.0e}, gradients of {len(errors)} tensors to {worst:.0e}, in float64"
    )
    return summary, faults
