"""A DeepSpeed engine that loads a grown universal checkpoint: the groups of its optimizer, and the settings of each.

DeepSpeed itself is not imported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...errors import Fault, MupscaleError, raise_faults
from ...files.elsewhere import tag_in
from ...files.pickles.torch_settings import read_settings
from ...storage.location import Location, location
from ...training.grow.state_dicts import groups_for
from .universal import SETTINGS, STEP


def universal_groups(wide: Location | str, model: nn.Module) -> list[dict[str, Any]]:
    """Make the parameter groups of the wide model in the order and with the settings of a grown DeepSpeed checkpoint.

    ZeRO 1 and 2 load group by group, and leave out without a word what the engine has more groups for.

    Args:
        wide: The checkpoint that `grow_checkpoint` wrote.
        model: The wide model.

    Returns:
        The groups, to build the optimizer from.

    Raises:
        MupscaleError: If the checkpoint has no groups with names, or the model lacks one of the parameters.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "latest_universal").write_text("step1")
    ...     Path(folder, "step1", "zero").mkdir(parents=True)
    ...     groups = [{"lr": 0.1, "param_names": ["weight"]}, {"lr": 0.2, "param_names": ["bias"]}]
    ...     torch.save({"param_groups": groups}, f"{folder}/step1/zero/optimizer_state.pt")
    ...     [group["lr"] for group in universal_groups(folder, nn.Linear(2, 2))]
    [0.1, 0.2]
    """
    return groups_for(model, _saved(wide))


def load_universal_(engine: Any, wide: Location | str) -> Any:
    """Load a grown checkpoint into a DeepSpeed engine whose optimizer was built from `universal_groups`.

    `engine.load_checkpoint` alone is enough for ZeRO 1 and 2, with the right groups. In ZeRO 3 it leaves every group the
    settings of the first and one tensor that counts steps for all: here each gets its own.

    Args:
        engine: What `deepspeed.initialize` returns first.
        wide: The checkpoint that `grow_checkpoint` wrote.

    Returns:
        What the user had saved with the checkpoint.

    Raises:
        MupscaleError: If it is no engine, its config does not enable universal checkpoints, or its groups are others.

    >>> import mupscale as mu
    >>> try:
    ...     load_universal_(nn.Linear(2, 2), "./wide")
    ... except mu.MupscaleError as error:
    ...     print(error.code)
    deepspeed.not_an_engine
    """
    if not hasattr(engine, "load_universal_checkpoint"):
        what = f"a {type(engine).__name__}, expected what deepspeed.initialize returns first"
        raise MupscaleError(
            "this is not a DeepSpeed engine",
            [Fault("deepspeed.not_an_engine", "engine", what, "write load_universal_(engine, wide)")],
        )
    inner, saved = engine.optimizer.optimizer, _saved(wide)["param_groups"]
    faults = []
    if not engine.load_universal_checkpoint():
        what = "its config does not say that the checkpoint is a universal one"
        faults.append(
            Fault(
                "deepspeed.universal_not_enabled",
                "engine",
                what,
                'write "checkpoint": {"load_universal": true} into it',
            )
        )
    if [g.get("param_names") for g in inner.param_groups] != [g["param_names"] for g in saved]:
        what = f"it has {len(inner.param_groups)} groups, which are not the {len(saved)} of the checkpoint"
        remedy = "build its optimizer from mu.trainers.universal_groups(wide, model)"
        faults.append(Fault("deepspeed.groups_differ", type(inner).__name__, what, remedy))
    raise_faults("this engine cannot load the checkpoint", faults)
    _, kept = engine.load_checkpoint(str(wide))
    for group, settings in zip(inner.param_groups, saved, strict=True):
        group.update({key: value for key, value in settings.items() if key != "params"})
    for state in inner.state.values():
        if isinstance(state.get(STEP), torch.Tensor):
            state[STEP] = state[STEP].clone()
    return kept


def _saved(directory: Location | str) -> dict[str, Any]:
    """The groups of a checkpoint that was written here, which holds plain values only."""
    folder = location(directory)
    read: dict[str, Any] = read_settings(folder / tag_in(folder) / "zero" / SETTINGS)
    return read
