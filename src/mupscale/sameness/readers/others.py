"""Checkpoints of DeepSpeed (universal) and of Lightning.

Knows which entry of these files is what. Does not know directories of Hugging Face.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from ...errors import Fault, MupscaleError
from ...files.pickles.torch_file import map_leaves, read_tensor, read_tree
from ...files.places import Place
from ...files.strict import printable
from ...formats.deepspeed.universal import WEIGHT, read_universal
from ...optimizers.read import parts
from ...storage.location import Location
from ..snapshot import STEP, Filed, Snapshot, flat
from .positions import positional

_GROUPS, _SHAPES = "param_groups", "param_shapes"


def universal_snapshot(path: Location) -> Snapshot:
    """What a universal checkpoint of DeepSpeed holds; its weights are float32."""
    found = Snapshot(path, "DeepSpeed universal checkpoint")
    add_universal(found, weights=True)
    return found


def add_universal(found: Snapshot, weights: bool) -> None:
    """Add a universal checkpoint to a snapshot: its float32 copies as the weights, or as masters of weights that are there."""
    universal = read_universal(found.path)
    told = next(iter(universal.models.values()))
    lists = told.get(_SHAPES)
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
    found.schedule |= dict(flat(told.get("lr_scheduler") or universal.schedule or {}))
    if "global_steps" in told:
        found.counters[STEP] = told["global_steps"]


def lightning_snapshot(path: Location) -> Snapshot:
    """What a checkpoint of Lightning holds."""
    tree, folder = read_tree(path), path.parent
    if not isinstance(tree, dict) or not isinstance(tree.get("state_dict"), dict):
        raise MupscaleError(
            f"{printable(str(path))} is not a checkpoint of Lightning; expected state_dict",
            code="lightning.not_a_checkpoint",
        )
    found = Snapshot(path, "Lightning checkpoint")
    found.weights = {
        str(n): Filed.of(folder, p) for n, p in tree["state_dict"].items() if isinstance(p, Place)
    }
    states = tree.get("optimizer_states") or []
    for number, told in enumerate(states):
        groups, state = parts(told, f"optimizer {number}")
        named = [list(map(str, group.get("param_names", ()))) for group in groups]
        kept = [len(of) for of in named] == [len(group["params"]) for group in groups]
        if not kept and len(states) == 1:
            named, kept = _in_order(found, groups, state)
        positional(found, folder, groups, state, named if kept else None)
        if not kept:
            what = "its groups hold no names: its tensors are known by position only"
            found.unknown.append(
                Fault("same.state_unnamed", f"optimizer {number}", what, "save param_names in every group")
            )
    plain = map_leaves(
        tree.get("lr_schedulers") or [], "", Place, lambda _, place: read_tensor(folder, place).tolist()
    )
    for at, schedule in enumerate(plain):
        found.schedule |= dict(flat(schedule, "" if len(plain) == 1 else str(at)))
    if "global_step" in tree:
        found.counters[STEP] = tree["global_step"]
    return found


def _in_order(found: Snapshot, groups: Any, state: Any) -> tuple[list[list[str]], bool]:
    """Names for the one group of an optimizer that was made from `self.parameters()`: the state dict has their order.

    Only where there are as many tensors as positions, each of the shape of its state.
    """
    named, keys = list(found.weights), [key for group in groups for key in group["params"]]
    shapes = [
        [v.shape for v in state.get(key, {}).values() if isinstance(v, Place) and v.shape] for key in keys
    ]
    fits = len(groups) == 1 and len(named) == len(keys)
    kept = fits and all({*of} <= {found.weights[n].shape} for n, of in zip(named, shapes, strict=True))
    return [named], kept
