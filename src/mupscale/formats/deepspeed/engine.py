"""A DeepSpeed engine that loads a grown universal checkpoint: the groups of its optimizer, and the settings of each.

DeepSpeed itself is not imported.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import Fault, MupscaleError, raise_faults
from ...files.pickles.torch_settings import universal_settings
from ...storage.location import Location, location
from .universal import STEP


def load_universal_(engine: Any, wide: Location | str) -> Any:
    """Load a grown checkpoint into a DeepSpeed engine whose optimizer was built from `groups_for(model, wide)`.

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
    >>> from torch import nn
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
    inner, saved = engine.optimizer.optimizer, universal_settings(location(wide))["param_groups"]
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
        remedy = "build its optimizer from mu.trainers.groups_for(model, wide)"
        faults.append(Fault("deepspeed.groups_differ", type(inner).__name__, what, remedy))
    raise_faults("this engine cannot load the checkpoint", faults)
    _, kept = engine.load_checkpoint(str(wide))
    for group, settings in zip(inner.param_groups, saved, strict=True):
        group.update({key: value for key, value in settings.items() if key != "params"})
    for state in inner.state.values():
        if isinstance(state.get(STEP), torch.Tensor):
            state[STEP] = state[STEP].clone()
    return kept
