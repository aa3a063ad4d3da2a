"""A checkpoint of Megatron-FSDP in its format `fsdp_dtensor`: a plain directory of torch.distributed.checkpoint.

    latest_checkpointed_iteration.txt                                  a number; the folder below is named after it
    iter_0000005/.metadata, __0_0.distcp, …
        model.module.decoder.layers.0.mlp.linear_fc2.weight            one tensor for each layer
        model.module.decoder.layers.0.mlp.linear_fc1.weight_w, …_v     gated units: the two halves
        optimizer.state.module.module.decoder….weight.exp_avg          state by name
        optimizer.param_to_group_meta.module.module.….weight.max_lr    what the group of a tensor says, value by value
        opt_param_scheduler.num_steps, iteration, …                    values

How many `module.` stand before a name depends on the wrappers of the job. Knows: the directory. Does not know: plans, units.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import Fault
from ...files.dcp.chunks import read_value
from ...files.dcp.metadata import read_dcp
from ...files.dcp.table import DcpDirectory
from ...files.elsewhere import DCP_METADATA, MEGATRON_CONFIG
from ...files.strict import printable, raise_few
from ...storage.location import Location, location
from ...storage.looking import exists
from .torch_dist import iteration_of

CLAIM = "this is not an fsdp_dtensor checkpoint of Megatron"
HALVES = ("_w", "_v")
"""Endings of the halves of a gated unit's first matrix or bias: gate and up."""
_MODEL, _STATE, _META = "model.", "optimizer.state.", "optimizer.param_to_group_meta."
_SCHEDULE = "opt_param_scheduler."
_SEVERAL = re.compile(r"optimizer\.\d+\.")
_WRAPPERS = re.compile(r"(?:module\.)*")


@dataclass(frozen=True)
class FsdpDtensor:
    """The content of a checkpoint."""

    path: Location
    """The folder that holds the tensors."""
    tag: str
    """The name of that folder below the one that was named; "" if that one holds the tensors itself."""
    stored: DcpDirectory
    model: str
    """What stands before the name of a weight."""
    state: str
    """What stands before the name of a tensor with state; the key of the state follows."""
    meta: str
    """What stands before the name of a tensor with settings; the key of the setting follows."""
    schedule: Mapping[str, Any]

    def owner(self, key: str) -> str | None:
        """The name of the tensor whose state this is; None for other entries."""
        return key.removeprefix(self.state).rpartition(".")[0] if key.startswith(self.state) else None

    @property
    def others(self) -> set[str]:
        """Entries with tensors that are neither weights nor state, such as `rng_state`."""
        odd = [
            key for key in self.stored.tensors if not key.startswith(self.model) and self.owner(key) is None
        ]
        return {key.partition(".")[0] for key in odd}

    def settings(self) -> dict[str, dict[str, Any]]:
        """The settings of every tensor's group."""
        found: dict[str, dict[str, Any]] = {}
        for key, where in self.stored.values.items():
            if key.startswith(self.meta):
                name, _, setting = key.removeprefix(self.meta).rpartition(".")
                found.setdefault(name, {})[setting] = read_value(self.path, where)
        return found


def is_fsdp_dtensor(path: Location | str) -> bool:
    """Whether a folder, or the iteration that it names, is a directory of torch.distributed.checkpoint and nothing else."""
    folder = location(path) / iteration_of(location(path))
    return exists(folder / DCP_METADATA) and not exists(folder / MEGATRON_CONFIG)


def is_of_fsdp(stored: DcpDirectory) -> bool:
    """Whether a directory has entries that no other trainer writes: settings tensor by tensor, or layers of a wrapped GPTModel."""
    model = _MODEL + "module."
    return any(key.startswith(_META) for key in stored.values) or any(
        key.startswith(model) and "decoder.layers." in key for key in stored.tensors
    )


def read_fsdp_dtensor(path: Location | str) -> FsdpDtensor:
    """Read everything about a checkpoint except its tensors and the settings of its groups."""
    tag = iteration_of(location(path))
    folder = location(path) / tag if tag else location(path)
    stored = read_dcp(folder)
    faults: list[Fault] = []
    keys = [*stored.tensors, *stored.values]
    model, state, meta = (_before(kind, keys, faults) for kind in (_MODEL, _STATE, _META))
    if not any(key.startswith(model) for key in stored.tensors):
        what = f"no tensor has a name that begins with {_MODEL}"
        faults.append(
            Fault(
                "megatron.no_model_tensors",
                printable(str(folder)),
                what,
                "name a checkpoint that Megatron wrote",
            )
        )
    if odd := [key for key in keys if _SEVERAL.match(key)]:
        what = "it belongs to one of several optimizers, which are not read"
        faults.append(
            Fault("megatron.several_optimizers", printable(odd[0]), what, "save a job with one optimizer")
        )
    raise_few(CLAIM, faults)
    schedule = {
        key.removeprefix(_SCHEDULE): read_value(folder, where)
        for key, where in stored.values.items()
        if key.startswith(_SCHEDULE)
    }
    return FsdpDtensor(folder, tag, stored, model, state, meta, schedule)


def _before(kind: str, keys: list[str], faults: list[Fault]) -> str:
    """A kind of entry with the wrappers that all of its names begin with."""
    found = {_wrappers(key.removeprefix(kind)) for key in keys if key.startswith(kind)}
    if len(found) > 1:
        what = f"names behind different wrappers: {sorted(found)}"
        faults.append(Fault("megatron.different_wrappers", kind, what, "save one model in one checkpoint"))
    return kind + max(found, default="")


def _wrappers(name: str) -> str:
    match = _WRAPPERS.match(name)
    return match[0] if match else ""
