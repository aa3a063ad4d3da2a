"""Directories of torch.distributed.checkpoint: those of torch's own functions, of torchtitan, and of Megatron.

model.layers.0.weight                      a weight
optim.state.layers.0.weight.exp_avg        state of it; Megatron's torch_dist: optimizer.state.exp_avg.layers.0.weight
optim.param_groups.0.lr, ….0.params        groups by number, or flat: optim.param_groups.layers.0.weight.lr
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from ...errors import Fault, MupscaleError
from ...files.dcp.chunks import read_value
from ...files.dcp.metadata import read_dcp
from ...files.dcp.table import ChunkedTensor, DcpDirectory
from ...files.opened import open_file
from ...files.places import is_dtype
from ...files.strict import printable
from ...formats.megatron.fsdp_dtensor import is_fsdp_dtensor, read_fsdp_dtensor
from ...formats.megatron.groups import groups_in
from ...formats.megatron.parts import STATE
from ...formats.megatron.torch_dist import read_torch_dist
from ...models.names import strip_wrappers
from ...rules.optimizers import RULES
from ...sharded.source import Source
from ...storage.location import Location
from ..snapshot import MASTERS, STEP, Filed, Snapshot, Unread, flat

_STEPS = ("step", "global_step", "iteration", "train_state.step")
_CUT = re.compile(r"(?:^|(?<=\.))state\.")
_GROUPS = re.compile(r"(?:^|.*\.)param_groups\.(.+)\.([^.]+)")
_TOP = re.compile(r"^(?:lr_)?sched\w*\.")


def dcp_snapshot(path: Location) -> Snapshot:
    """What a directory of torch.distributed.checkpoint holds."""
    stored = read_dcp(path)
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
            found.add_state(*owners[key], _number_or_filed(path, tensor))
        elif _is_random(key):
            found.random[key] = Filed.of(path, tensor)
        else:
            found.weights[strip_wrappers(key).removeprefix(prefix)] = Filed.of(path, tensor)
    rest = {key: _value(stored, key) for key in stored.values if key not in owners}
    for key in owners.keys() & stored.values.keys():
        found.add_state(*owners[key], _value(stored, key))
    _values(found, rest)
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


def _number_or_filed(path: Location, tensor: ChunkedTensor) -> Any:
    filed = Filed.of(path, tensor)
    if tensor.shape:
        return filed
    source = Source(path, "", {})
    try:
        return source.number(filed.tensor).item()
    finally:
        source.close()


def _is_random(key: str) -> bool:
    return any(part.startswith(("rng", "random")) for part in key.split(".")[:2])


def _value(stored: DcpDirectory, key: str) -> Any:
    """A value; of one that torch's reader refuses, a digest."""
    file, offset, length = stored.values[key]
    try:
        return read_value(stored.path, (file, offset, length))
    except MupscaleError:
        with open_file(stored.path / file) as opened:
            return Unread(hashlib.sha256(opened.read(offset, length)).hexdigest())


def _values(found: Snapshot, values: Mapping[str, Any]) -> None:
    """Sort values: settings of groups, the schedule, random states, and counters."""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        of = _GROUPS.fullmatch(strip_wrappers(key))
        if of:
            groups.setdefault(of[1], {})[of[2]] = value
        elif _is_random(key):
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


def megatron_snapshot(path: Location) -> Snapshot:
    """What a checkpoint of Megatron holds: torch_dist, or fsdp_dtensor."""
    if is_fsdp_dtensor(path):
        return _fsdp_snapshot(path)
    told = read_torch_dist(path)
    found = Snapshot(told.path, "Megatron torch_dist checkpoint", stacked=True)
    for key, tensor in told.stored.tensors.items():
        slot, _, name = key.removeprefix(STATE).partition(".")
        if key.startswith(STATE) and name:
            found.add_state(name, slot, _number_or_filed(told.path, tensor))
        elif _is_random(key):
            found.random[key] = Filed.of(told.path, tensor)
        else:
            found.weights[key] = Filed.of(told.path, tensor)
    optimizer = told.common.get("optimizer")
    inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else None
    state = inner.get("state") if isinstance(inner, dict) else None
    if isinstance(state, dict) and "common_step" in state:
        found.steps = dict.fromkeys(found.moments, float(state["common_step"]))
    for at, group in enumerate(groups_in(optimizer) or ()):
        found.add_group(list(map(str, group.get("param_names") or [f"group {at}"])), group)
    found.schedule = dict(flat(told.common.get("opt_param_scheduler") or {}))
    if "iteration" in told.common:
        found.counters[STEP] = told.common["iteration"]
    _values(found, {key: _value(told.stored, key) for key in told.stored.values if _is_random(key)})
    return found


def _fsdp_snapshot(path: Location) -> Snapshot:
    told = read_fsdp_dtensor(path)
    found = Snapshot(told.path, "Megatron fsdp_dtensor checkpoint")
    for key, tensor in told.stored.tensors.items():
        if (name := told.owner(key)) is not None:
            found.add_state(name, key.rpartition(".")[2], _number_or_filed(told.path, tensor))
        elif key.startswith(told.model):
            found.weights[key.removeprefix(told.model)] = Filed.of(told.path, tensor)
        elif _is_random(key):
            found.random[key] = Filed.of(told.path, tensor)
    for name, settings in told.settings().items():
        found.add_group([name], settings)
    found.schedule = dict(told.schedule)
    if "iteration" in told.stored.values:
        found.counters[STEP] = _value(told.stored, "iteration")
    return found
