"""The snapshot of a checkpoint of Lightning."""

from __future__ import annotations

from typing import Any

from ...errors import Fault, MupscaleError
from ...files.pickles.torch_file import map_leaves, read_tensor, read_tree
from ...files.places import Place
from ...files.strict import printable
from ...optimizers.read import parts
from ...storage.location import Location
from ..positions import positional
from ..snapshot import STEP, Filed, Snapshot, flat


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
    for number, optimizer in enumerate(states):
        groups, state = parts(optimizer, f"optimizer {number}")
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
