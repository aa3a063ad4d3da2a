"""The snapshot of a directory of torch.distributed.checkpoint, as torch's own functions and torchtitan write them.

model.layers.0.weight                      a weight
optim.state.layers.0.weight.exp_avg        state of it
optim.param_groups.0.lr, ….0.params        groups by number, or flat: optim.param_groups.layers.0.weight.lr
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from ..errors import Fault, MupscaleError
from ..files.dcp.chunks import chunk_place, read_value
from ..files.dcp.table import ChunkedTensor, DcpDirectory
from ..files.opened import open_file
from ..files.pickles.torch_file import read_tensor
from ..files.places import is_dtype
from ..files.strict import printable
from ..models.names import strip_wrappers
from ..rules.optimizers import RULES
from ..storage.location import Location
from .snapshot import MASTERS, STEP, Filed, Snapshot, Unread

_STEPS = ("step", "global_step", "iteration", "train_state.step")
_CUT = re.compile(r"(?:^|(?<=\.))state\.")
_GROUPS = re.compile(r"(?:^|.*\.)param_groups\.(.+)\.([^.]+)")
_TOP = re.compile(r"^(?:lr_)?sched\w*\.")


def dcp_snapshot(stored: DcpDirectory) -> Snapshot:
    """What a directory of torch.distributed.checkpoint holds."""
    path = stored.path
    found = Snapshot(path, "DCP directory")
    slots = {slot for rule in RULES.values() for slot in rule.state} | MASTERS | {STEP}
    owners = _states(stored, slots)
    names = {name for name, _ in owners.values()}
    prefix = _prefix([key for key in stored.tensors if key not in owners], names)
    for key, tensor in stored.tensors.items():
        if not is_dtype(tensor.dtype):
            what = f"a tensor of {tensor.dtype}, which is not read"
            found.unknown.append(Fault("same.dtype_not_read", printable(key), what))
        elif key in owners:
            found.add_state(*owners[key], number_or_filed(path, tensor))
        elif is_random(key):
            found.random[key] = Filed.of(path, tensor)
        else:
            found.weights[strip_wrappers(key).removeprefix(prefix)] = Filed.of(path, tensor)
    rest = {key: value(stored, key) for key in stored.values if key not in owners}
    for key in owners.keys() & stored.values.keys():
        found.add_state(*owners[key], value(stored, key))
    add_values(found, rest)
    return found


def _states(stored: DcpDirectory, slots: set[str]) -> dict[str, tuple[str, str]]:
    """Key -> the tensor that the state belongs to, and its slot."""
    found = {}
    for key in (*stored.tensors, *stored.values):
        path, _, slot = strip_wrappers(key).rpartition(".")
        cut = _CUT.search(f"{path}.")
        if cut and slot in slots and path[cut.end() :]:
            found[key] = path[cut.end() :], slot
    return found


def _prefix(keys: list[str], names: set[str]) -> str:
    """What stands before the names of the weights where the state has the same names without it."""
    plain = {strip_wrappers(key) for key in keys}
    first = next(iter(sorted(names)), None)
    fitting = {
        key[: -len(first)]
        for key in plain
        if first is not None and (key == first or key.endswith(f".{first}"))
    }
    whole = sorted(p for p in fitting if all(p + name in plain for name in names))
    return whole[0] if len(whole) == 1 else ""


def number_or_filed(path: Location, tensor: ChunkedTensor) -> Any:
    """A number, where a tensor has no dimensions."""
    if tensor.shape:
        return Filed.of(path, tensor)
    [chunk] = tensor.chunks
    return read_tensor(path, chunk_place(path, chunk, tensor.dtype)).item()


def is_random(key: str) -> bool:
    """Whether an entry is the state of a generator of random numbers."""
    return any(part.startswith(("rng", "random")) for part in key.split(".")[:2])


def value(stored: DcpDirectory, key: str) -> Any:
    """A value; of one that torch's reader refuses, a digest."""
    file, offset, length = stored.values[key]
    try:
        return read_value(stored.path, (file, offset, length))
    except MupscaleError:
        with open_file(stored.path / file) as opened:
            return Unread(hashlib.sha256(opened.read(offset, length)).hexdigest())


def add_values(found: Snapshot, values: Mapping[str, Any]) -> None:
    """Add values: settings of groups, the schedule, random states, and counters."""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        of = _GROUPS.fullmatch(strip_wrappers(key))
        if of:
            groups.setdefault(of[1], {})[of[2]] = value
        elif is_random(key):
            found.random[key] = value
        elif top := _TOP.match(key):
            found.schedule[key.removeprefix(top[0])] = value
        else:
            found.counters[STEP if key in _STEPS else key] = value
    for name, group in groups.items():
        listed = group.get("params")
        found.add_group(
            [strip_wrappers(str(n)) for n in listed] if isinstance(listed, list) else [name], group
        )
