"""`mupscale plan`: what would grow, its size and cost, and what happens to hyperparameters.

Reads headers and the configuration; writes nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from ..checkpoints.about import factors
from ..checkpoints.base import Base
from ..checkpoints.grow_directory import plan_growth
from ..checkpoints.request import Request
from ..checkpoints.state.optimizer_state import has_state, state_bytes
from ..families.record import JUMP, FamilyPlan
from ..files.directory import Directory
from ..files.floats import FLOATS, TORCH_NAMES
from ..files.places import item_size
from ..plans.more_experts import ADMITTED_BY_BIAS
from ..plans.plan import Plan
from ..storage.location import Location, Url
from ..text import columns, duration, size
from .printing.sizes import copied_sizes, in_words, mean_sizes
from .printing.stored_names import stored_names
from .printing.working import working

_TRAINING = 16  # bytes per parameter: weight, gradient and two moments in float32, or bf16 with fp32 masters


def run(chosen: argparse.Namespace, request: Request) -> int:
    base = Base(chosen.base, weights_needed=False)
    directory, early = base.directory, base.early
    working(f"planning on a small copy of {directory.path}", chosen)
    family = plan_growth(base, request, chosen.architecture)
    print(describe(directory, family, request))
    print("\n" + cost(directory, family, request, _beside(chosen.base)))
    print("\n" + hyperparameters(family.plan if early is None else early.then(family.plan)))
    if chosen.tensors:
        print(f"\n{family.plan}")
    print("\n" + evidence(family))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(family.as_json(), indent=1) + "\n")
        print(f"\nwritten to {chosen.json}")
    return 0


def _beside(base: Location) -> Path:
    """The folder whose disk a result is most likely written to."""
    return Path.cwd() if isinstance(base, Url) else base.absolute().parent


def changes(base: Mapping[str, Any], wide: Mapping[str, Any], path: str = "") -> list[tuple[str, str, str]]:
    """The fields of the configuration that differ.

    >>> changes({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 4}})
    [('b.c', '2', '4')]
    """
    found = []
    for key in [*base, *(key for key in wide if key not in base)]:
        old, new = base.get(key), wide.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += changes(old, new, f"{path}{key}.")
        elif old != new:
            found.append((f"{path}{key}", json.dumps(old), json.dumps(new)))
    return found


def describe(directory: Directory, family: FamilyPlan, request: Request) -> str:
    """Both ends side by side."""
    plan = family.plan
    ends = [plan.parameters("base"), plan.parameters("wide")]
    into = "" if family.wide_architecture == family.architecture else f" -> {family.wide_architecture}"
    head = f"{directory.path}: {family.model_type}, {family.architecture}{into}, {request.goal}"
    rows: list[tuple[str, ...]] = [("", "base", "wide", "")]
    shown = changes(family.base_config, family.wide_config)
    if into:  # another class writes its defaults; its multipliers are what is new
        shown = [row for row in shown if row[1] != "null" or _is_number(row[2])]
    rows += [(name, old, new, "") for name, old, new in shown]
    rows.append(("parameters", *(f"{n:,}" for n in ends), f"x{ends[1] / max(1, ends[0]):.2f}"))
    kinds = ", ".join(sorted(_dtypes(directory))) + (f" -> {request.dtype}" if request.dtype else "")
    rows.append(("weights", *map(size, _weights(directory, plan, request)), kinds))
    rows.append(("to train, AdamW", *(size(_TRAINING * n) for n in ends), f"{_TRAINING} bytes per parameter"))
    return "\n".join(
        [
            head,
            columns(rows, right=(1, 2)),
            *_new_parts(family),
            *_new_experts(family),
            *stored_names(directory, family),
        ]
    )


def _new_parts(family: FamilyPlan) -> list[str]:
    """Which blocks and words are new, where there are some."""
    lines = []
    if family.new_blocks:
        numbers = ", ".join(map(str, family.new_blocks))
        lines.append(
            f"new blocks: {numbers}; they sleep, and the training of the base continues, until they are woken"
        )
    if family.new_words is not None:
        first, end = family.new_words
        lines.append(
            f"new words: ids {first} to {end - 1}, rows of zeros that noise makes the mean word; the tokenizer's files stay as "
            "they are"
        )
    return lines


def _new_experts(family: FamilyPlan) -> list[str]:
    """What the new experts are, where a dense model gets some."""
    experts = family.goal.to.experts
    if experts is None:
        return []
    from ..families.types.into import experts_are_copies

    if experts_are_copies(experts):
        return [
            f"experts: {experts.number} copies of the dense layer in every block, all of which every token goes to; the training of "
            "the base continues until noise parts them"
        ]
    return [
        f"new experts: {experts.number} of width {experts.ffn} in every block, {experts.top_k} for a token, next to the dense "
        "layer, which every token goes to; they sleep, and the training of the base continues, until noise wakes them"
    ]


def _is_number(text: str) -> bool:
    """Whether a value of a configuration, as JSON, is a number other than zero.

    >>> _is_number("2.0"), _is_number("null"), _is_number("0"), _is_number("true")
    (True, False, False, False)
    """
    value = json.loads(text)
    return type(value) in (int, float) and value != 0


def _dtypes(directory: Directory) -> set[str]:
    if not directory.weights:
        return {_dtype_of(directory.config)}
    return {place.dtype for place in directory.tensors.values() if place.dtype in FLOATS}


def _dtype_of(config: Mapping[str, Any]) -> str:
    """The dtype that a configuration names, or that of transformers' default."""
    return TORCH_NAMES.get(str(config.get("dtype") or config.get("torch_dtype")), "F32")


def _weights(directory: Directory, plan: Plan, request: Request) -> tuple[int, int]:
    base = sum(place.bytes for place in directory.tensors.values())
    if not directory.weights:
        base = plan.parameters("base") * item_size(_dtype_of(directory.config))
    ratio = plan.parameters("wide") / max(1, plan.parameters("base"))
    if request.dtype is None:
        return base, round(base * ratio)
    return base, plan.parameters("wide") * item_size(request.dtype)


def cost(directory: Directory, family: FamilyPlan, request: Request, where: Path) -> str:
    """Disk, time and memory of the growth itself."""
    wide = _weights(directory, family.plan, request)[1]
    state = 0
    if has_state(directory, request):
        grown = family.plan.parameters("wide") / max(1, family.plan.parameters("base"))
        state = round(state_bytes(directory) * grown)
    from ..machine import disk_speed

    free, speed = shutil.disk_usage(where).free, disk_speed(where)
    rows = [
        (
            "disk",
            f"{size(wide + state)}{' with the optimizer state' if state else ''}, {size(free)} free here",
        ),
        (
            "time",
            f"{duration((wide + state) / speed)} at {size(speed)}/s, as measured on this disk just now; noise takes two to four times as long",
        ),
        ("memory", "under 500 MiB with two workers, half of it torch, independent of the model's size"),
    ]
    return "cost of growing\n" + columns(rows)


def hyperparameters(plan: Plan) -> str:
    """What AdamW's constants are multiplied by, tensor by tensor; `mu.trainers.optimizer_in_units` does it."""
    rows = [("lr x", "eps x", "decay x", "tensors")]
    for group in factors(plan):
        names = ", ".join(group["tensors"][:3]) + (
            f" and {len(group['tensors']) - 3} more" if len(group["tensors"]) > 3 else ""
        )
        rows.append((group["lr"], group["eps"], group["weight_decay"], names))
    return "constants of AdamW, since the reference (mu.trainers.optimizer_in_units sets them)\n" + columns(
        rows, right=(0, 1, 2)
    )


def woken(directory: Directory, family: FamilyPlan) -> str:
    """What waking does to the loss, and which sizes grow by copies, or carry the mean, although units were asked for."""
    configs = family.base_config, family.wide_config
    jump, sizes = family.evidence.jump, in_words(copied_sizes(family.plan), *configs)
    means = in_words(mean_sizes(family.plan), *configs)
    by = f"; by copies, where zeros are not possible: {sizes}" if sizes else ""
    if family.plan.parts_tokens:
        return (
            f"copies of experts part along a plane, and each token goes to as few as before: on the small copy {kept_share(family)} of "
            f"tokens keep their experts, and the loss moves by {jump or 0.0:.0e}\n"
        )
    if jump is not None and jump > JUMP:
        return f"waking would move the loss by {jump:.0e} on the small copy, so upscale refuses it; grow leaves it asleep{by}\n"
    text = (
        f"new units wake, and the loss is the base's: it moves by {jump or 0.0:.0e} on the small copy{by}\n"
    )
    if any(entry.pad for entry in family.plan.tensors.values()):
        text += f"new experts sleep: {ADMITTED_BY_BIAS}\n"
    if means:
        text += (
            f"new channels carry the mean of the others, which LayerNorm subtracts: {means}. Outputs are the base's, and "
            f"training is not. The means cost {size(_read_for_means(directory, family.plan))} that each writer may read again\n"
        )
    return text


def kept_share(family: FamilyPlan) -> str:
    """The share of the small copy's tokens that keep their experts, in words."""
    kept = family.evidence.kept
    return "an unknown share" if kept is None else f"{kept:.1%}"


def _read_for_means(directory: Directory, plan: Plan) -> int:
    """Bytes of the base whose tensors are read a second time, for the means that their new channels carry."""
    entries = sum(prod(entry.base_shape) for entry in plan.tensors.values() if entry.mean)
    held = sum(place.bytes for place in directory.tensors.values())
    return round(held * entries / max(1, plan.parameters("base")))


def evidence(family: FamilyPlan) -> str:
    """The evidence for the plan."""
    seen = family.evidence
    how = "the registry and the search" if seen.source == "row" else "the search alone"
    steps = f"; {seen.steps} AdamW steps to {seen.worst_step:.0e}, with the base's rates and eps {seen.control:.0e}"
    if family.plan.parts_tokens:
        steps = f"; copies far apart on a trained copy {seen.worst_step:.0e}, equal scores {seen.control:.0e}"
    elif family.plan.carries_mean:
        steps = f"; on a trained copy the loss and pulled-back gradients to {seen.worst_step:.0e}, with zeros for means {seen.control:.0e}"
    alone = family.plan.carries_mean or family.plan.parts_tokens
    lines = [
        f"found by {how}, {seen.trials} tried on a copy of {seen.parameters:,} parameters in float64:",
        f"  gradients agree to {seen.worst_gradient:.0e}{steps if seen.steps or alone else ''}",
    ]
    return "\n".join([*lines, *(f"  note: {note}" for note in family.notes)])
