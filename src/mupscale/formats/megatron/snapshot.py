"""The snapshot of a checkpoint of Megatron, torch_dist or fsdp_dtensor: one tensor for each layer, gate and up in one, plain norms.

decoder.layers.mlp.linear_fc2.weight (2, 32, 96)  ->  decoder.layers.0.mlp.linear_fc2.weight (32, 96) and …1…
decoder.layers.0.mlp.linear_fc1.weight_w, …_v     ->  decoder.layers.0.mlp.linear_fc1.weight
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...storage.location import Location
from ..dcp_snapshot import add_values, is_random, number_or_filed, value
from ..snapshot import STEP, Filed, Heads, Made, Snapshot, flat, joined
from .fsdp_dtensor import HALVES, is_fsdp_dtensor, read_fsdp_dtensor
from .groups import NAMES, default_members, groups_in, with_rates
from .parts import STATE, plain_spelling
from .torch_dist import read_torch_dist

_STACKED = re.compile(r"(.*\blayers)\.(?!\d)(.*)")
_BY_RULE = "groups do not name their tensors; taken as Megatron groups them by default: biases and vectors where wd_mult is 0"


def megatron_snapshot(path: Location) -> Snapshot:
    """What a checkpoint of Megatron holds."""
    return _fsdp_snapshot(path) if is_fsdp_dtensor(path) else _torch_dist_snapshot(path)


def _torch_dist_snapshot(path: Location) -> Snapshot:
    checkpoint = read_torch_dist(path)
    found = Snapshot(
        checkpoint.path, "Megatron torch_dist checkpoint", heads=_heads(checkpoint.common.get("args"))
    )
    for key, tensor in checkpoint.stored.tensors.items():
        slot, _, name = key.removeprefix(STATE).partition(".")
        if key.startswith(STATE) and name:
            held = number_or_filed(checkpoint.path, tensor)
            for own, part in (_layers(name, held) if isinstance(held, Filed) else {name: held}).items():
                found.add_state(own, slot, part)
        elif is_random(key):
            found.random[key] = Filed.of(checkpoint.path, tensor)
        else:
            found.weights |= _layers(key, Filed.of(checkpoint.path, tensor))
    optimizer = checkpoint.common.get("optimizer")
    inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else None
    state = inner.get("state") if isinstance(inner, dict) else None
    if isinstance(state, dict) and "common_step" in state:
        found.steps = dict.fromkeys(found.moments, float(state["common_step"]))
    found.schedule = dict(flat(checkpoint.common.get("opt_param_scheduler") or {}))
    _add_groups(found, groups_in(optimizer) or ())
    if "iteration" in checkpoint.common:
        found.counters[STEP] = checkpoint.common["iteration"]
    add_values(
        found, {key: value(checkpoint.stored, key) for key in checkpoint.stored.values if is_random(key)}
    )
    return found


def _layers(key: str, tensor: Filed) -> dict[str, Filed]:
    """A stored tensor by name: layer by layer, if it has those of several."""
    stacked = _STACKED.fullmatch(key)
    if stacked is None or not tensor.shape:
        return {plain_spelling(key): tensor}
    names = (f"{stacked[1]}.{layer}.{stacked[2]}" for layer in range(tensor.shape[0]))
    return {plain_spelling(name): tensor.layer(layer) for layer, name in enumerate(names)}


def _add_groups(found: Snapshot, groups: Any) -> None:
    """The settings of groups, for the tensors that they name or that Megatron's own rule puts into them."""
    named = [group.get(NAMES) for group in groups]
    if not all(isinstance(names, list) for names in named):
        members, faults = default_members(groups, {n: len(t.shape) for n, t in found.weights.items()})
        named = [[f"group {at}"] for at in range(len(groups))] if faults else members
        found.notes += [] if faults else [_BY_RULE]
    for names, group in zip(named, groups, strict=True):
        found.add_group(list(map(str, names)), with_rates(group, found.schedule))


def _heads(args: Any) -> Heads | None:
    """The heads of a job's arguments; None where they do not say."""
    arguments: Mapping[str, Any] = vars(args) if hasattr(args, "__dict__") else {}
    queries, size = arguments.get("num_attention_heads"), arguments.get("kv_channels")
    keys = arguments.get("num_query_groups") if arguments.get("group_query_attention") else queries
    if not all(isinstance(n, int) and n > 0 for n in (queries, size, keys)):
        return None
    return Heads(size, queries, keys)  # type: ignore[arg-type]


def _fsdp_snapshot(path: Location) -> Snapshot:
    checkpoint = read_fsdp_dtensor(path)
    args = value(checkpoint.stored, "args") if "args" in checkpoint.stored.values else None
    found = Snapshot(checkpoint.path, "Megatron fsdp_dtensor checkpoint", heads=_heads(args))
    for key, tensor in checkpoint.stored.tensors.items():
        if (name := checkpoint.owner(key)) is not None:
            found.add_state(name, key.rpartition(".")[2], number_or_filed(checkpoint.path, tensor))
        elif key.startswith(checkpoint.model):
            found.weights[key.removeprefix(checkpoint.model)] = Filed.of(checkpoint.path, tensor)
        elif is_random(key):
            found.random[key] = Filed.of(checkpoint.path, tensor)
    whole = [name.removesuffix(HALVES[0]) for name in found.weights if name.endswith(HALVES[0])]
    found = found.remade({name: Made(tuple(name + half for half in HALVES), joined) for name in whole})
    for name, settings in checkpoint.settings().items():
        found.add_group([name], with_rates(settings, checkpoint.schedule))
    found.schedule = dict(checkpoint.schedule)
    if "iteration" in checkpoint.stored.values:
        found.counters[STEP] = value(checkpoint.stored, "iteration")
    return found.renamed({name: plain_spelling(name) for name in found.names | found.steps.keys()})
