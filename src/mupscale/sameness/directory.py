"""A Hugging Face directory, with the optimizer, the schedule and the random states that a Trainer left next to the weights.

The groups of `optimizer.pt` are named as the stock Trainer makes them. Where that does not fit, its tensors keep their positions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..checkpoints.state.trainer_state import trainer_order
from ..errors import Fault, MupscaleError
from ..files.directory import OPTIMIZER, Directory, read_directory
from ..files.elsewhere import is_universal
from ..files.opened import open_file
from ..files.pickles.torch_file import read_tree
from ..files.pickles.torch_settings import read_settings
from ..files.strict import parse_json, printable, read_regular
from ..formats.deepspeed.snapshot import add_universal
from ..formats.positions import positional
from ..formats.snapshot import STEP, Filed, Snapshot, flat, heads_in
from ..optimizers.read import parts
from ..storage.location import Location

_STATE, _SCHEDULE, _SCALER, _RANDOM = "trainer_state.json", "scheduler.pt", "scaler.pt", "rng_state"
_BLOCK = 1 << 20


def directory_snapshot(path: Location) -> Snapshot:
    """What a Hugging Face directory holds."""
    directory = read_directory(path)
    found = Snapshot(
        path, "Hugging Face directory", config=directory.config, heads=heads_in(directory.config)
    )
    found.weights = {name: Filed.of(path, place) for name, place in directory.tensors.items()}
    if is_universal(path):
        add_universal(found, weights=False)
    if OPTIMIZER in directory.trainer:
        found.kind = "Trainer checkpoint"
        _optimizer(found, directory)
    if _SCHEDULE in directory.trainer and not found.schedule:
        found.schedule = dict(flat(read_settings(path / _SCHEDULE)))
    if _SCALER in directory.trainer:
        found.counters |= dict(flat(read_settings(path / _SCALER), "scaler"))
    if _STATE in directory.trainer:
        trainer_state = parse_json(read_regular(path / _STATE), _STATE, infinity=True)
        if isinstance(trainer_state, dict) and "global_step" in trainer_state:
            found.counters[STEP] = trainer_state["global_step"]
    for name in directory.trainer:
        if name.startswith(_RANDOM):
            found.random[name] = _digest(path / name)
    return found


def _optimizer(found: Snapshot, directory: Directory) -> None:
    groups, state = parts(read_tree(directory.path / OPTIMIZER), OPTIMIZER)
    positional(found, directory.path, groups, state, _named(directory, groups, found.unknown))


def _named(
    directory: Directory, groups: Sequence[Mapping[str, Any]], unknown: list[Fault]
) -> list[list[str]] | None:
    """The names of the tensors of every group; None where they are not known."""
    sizes = [len(group["params"]) for group in groups]
    stored = [list(map(str, group.get("param_names", ()))) for group in groups]
    if [len(of) for of in stored] == sizes:
        return stored
    from ..families.models import config_from, model_class, on_meta

    try:
        config = config_from(directory.config)
        order = trainer_order(on_meta(config, model_class(config)), {})
    except (MupscaleError, ImportError) as error:
        why = error.claim if isinstance(error, MupscaleError) else str(error)
    else:
        if len(groups) == 1:
            order = [[name for of in order for name in of]] if not all(order) else order
        if [len(of) for of in order] == sizes:
            return order
        why = f"groups of {sizes} tensors, and the Trainer makes groups of {[len(of) for of in order]}"
    what = f"{printable(why)}: its tensors are known by position only"
    unknown.append(Fault("same.state_unnamed", OPTIMIZER, what, "save param_names in every group"))
    return None


def _digest(path: Location) -> str:
    """What a file holds, as a digest of its bytes."""
    made = hashlib.sha256()
    with open_file(path) as file:
        for at in range(0, file.size, _BLOCK):
            made.update(file.read(at, _BLOCK))
    return made.hexdigest()
