"""The snapshot of a universal checkpoint of DeepSpeed."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from ...storage.location import Location
from ..snapshot import STEP, Filed, Snapshot, flat
from .universal import WEIGHT, read_universal

_GROUPS, _SHAPES = "param_groups", "param_shapes"


def universal_snapshot(path: Location) -> Snapshot:
    """What a universal checkpoint of DeepSpeed holds; its weights are float32."""
    found = Snapshot(path, "DeepSpeed universal checkpoint")
    add_universal(found, weights=True)
    return found


def add_universal(found: Snapshot, weights: bool) -> None:
    """Add a universal checkpoint to a snapshot: its float32 copies as the weights, or as masters of weights that are there."""
    universal = read_universal(found.path)
    model = next(iter(universal.models.values()))
    lists = model.get(_SHAPES)
    shapes: list[dict[str, Any]] = (
        [of for of in lists if isinstance(of, dict)] if isinstance(lists, list) else []
    )
    shape_of = {name: shape for of in shapes for name, shape in of.items()}
    for name, files in universal.parameters.items():
        for slot, file in files.items():
            # ZeRO 3 writes a tensor without its shape.
            shape = shape_of.get(name, ())
            whole = isinstance(shape, tuple) and prod(shape) == prod(file.place.shape) and shape
            filed = Filed.of(found.path, replace(file.place, shape=tuple(shape)) if whole else file.place)
            if slot != WEIGHT:
                found.add_state(name, slot, filed)
            else:
                (found.weights if weights else found.masters)[name] = filed
        if name in universal.steps:
            found.steps[name] = float(universal.steps[name])
    groups = universal.settings.get(_GROUPS) or []
    members = [list(of) for of in shapes]
    if len(groups) == 1:
        members = [[name for of in members for name in of]]
    for at, group in enumerate(groups):
        found.add_group(members[at] if len(members) == len(groups) else [f"group {at}"], group)
    found.schedule |= dict(flat(model.get("lr_scheduler") or universal.schedule or {}))
    if "global_steps" in model:
        found.counters[STEP] = model["global_steps"]
