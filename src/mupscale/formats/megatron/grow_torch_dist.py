"""A torch_dist checkpoint of Megatron at the wide end: files and moves, weights and moments each in their units.

A wide tensor has one chunk for every layer, which any number of ranks can load. Knows: what Megatron reads from where. Does
not know: exponents, how bytes are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...errors import Fault, MupscaleError
from ...files.dcp.chunks import read_value
from ...files.dcp.table import Chunk, ChunkedTensor, FileNames, chunked
from ...files.elsewhere import DCP_METADATA, MEGATRON_CONFIG, MEGATRON_LATEST
from ...files.opened import open_file
from ...files.pickles.torch_file import Room
from ...files.strict import os_errors, printable, raise_few
from ...jobs.job import Text
from ...optimizers.named import NamedOptimizer
from ...storage.location import Location
from ...tensors.making import Making
from ..common import Growing, NamedState, WideFiles, fixed_file, plain_file
from .groups import (
    GROUPS,
    NAMES,
    OPTIMIZER,
    TAKEN,
    group_faults,
    groups_in,
    members_of,
    settings_of_groups,
    warming,
    wide_groups,
)
from .parts import CLAIM, COPIES, STATE, Parts, Spot, state_parts
from .torch_dist import COMMON, TorchDist, lay_out_chunks, metadata_bytes

_SCHEDULE, _ARGUMENTS = "opt_param_scheduler", "args"
Values = dict[str, tuple[str, int, int]]


@dataclass(frozen=True)
class _Layer:
    """One layer of a wide tensor that is to be stored, or all of one without layers."""

    label: str
    parts: Parts
    making: Making
    dtype: str


Stacks = dict[str, dict[int | None, _Layer]]


def wide_torch_dist(
    checkpoint: TorchDist, growing: Growing, spots: Mapping[str, Spot], weights: Mapping[str, Parts]
) -> WideFiles:
    """Everything that writes the wide checkpoint."""
    out, stored = WideFiles(), checkpoint.stored.tensors
    stacks: Stacks = {}

    def add(spot: Spot, label: str, parts: Parts, making: Making) -> None:
        stacks.setdefault(spot.key, {})[spot.layer] = _Layer(label, parts, making, stored[spot.key].dtype)

    for name, spot in spots.items():
        making = growing.making(name)
        for own in (spot, *map(spot.state, COPIES)):
            if own.key in stored:
                add(own, name if own is spot else f"{name}: copy", weights[name], making)
    rest = {key: value for key, value in checkpoint.common.items() if key not in (OPTIMIZER, _ARGUMENTS)}
    common = out.plain(rest, COMMON)
    if _ARGUMENTS in checkpoint.common:
        out.not_carried[f"{COMMON}: {_ARGUMENTS}"] = "they are those of the base, with its sizes"
    if (tree := checkpoint.common.get(OPTIMIZER)) is not None:
        schedule = checkpoint.common.get(_SCHEDULE) or {}
        groups, carried = _carried(checkpoint, growing, spots, schedule, out)
        out.not_carried.update({f"{COMMON}: {key}": why for key, why in warming(schedule).items()})
        common[OPTIMIZER] = _regrouped(tree, groups, out)
        for name, state in carried.state.items():
            for key, value in state.items():
                add(spots[name].state(key), f"{name}: {key}", value.source, value.making)
    elif lost := [key for key in stored if key.startswith(STATE)]:
        raise MupscaleError(
            CLAIM,
            [
                Fault(
                    "megatron.state_without_optimizer",
                    printable(lost[0]),
                    f"state without an optimizer in {COMMON}",
                )
            ],
        )
    _write(out, checkpoint, stacks, common)
    return out


def _carried(
    checkpoint: TorchDist,
    growing: Growing,
    spots: Mapping[str, Spot],
    schedule: Mapping[str, Any],
    out: WideFiles,
) -> tuple[list[dict[str, Any]], NamedOptimizer]:
    """The wide groups as they are saved, and groups and state in new units."""
    plan, groups = growing.plan, groups_in(checkpoint.common[OPTIMIZER])
    raise_few(CLAIM, group_faults(groups, schedule))
    members, faults = members_of(groups, plan, growing.names)
    raise_few(CLAIM, faults)
    if growing.names is None and not all(NAMES in group for group in groups):
        out.not_carried[f"{COMMON}: {GROUPS}"] = TAKEN
    named = NamedState(settings_of_groups(groups), members, state_parts(checkpoint, plan, spots), COMMON)
    carried = named.carried(growing, CLAIM)
    return wide_groups(carried.groups, groups, schedule, plan), carried


def _regrouped(tree: Mapping[str, Any], groups: list[dict[str, Any]], out: WideFiles) -> dict[str, Any]:
    """The optimizer's entry of `common.pt` with other groups, without what is no plain value."""
    key = GROUPS if GROUPS in tree else OPTIMIZER
    rest = {name: value for name, value in tree.items() if name != key}
    made = groups if key == GROUPS else _regrouped(tree[OPTIMIZER], groups, out)
    return {**out.plain(rest, f"{COMMON}: {OPTIMIZER}"), key: made}


def _write(out: WideFiles, checkpoint: TorchDist, stacks: Stacks, common: Mapping[str, Any]) -> None:
    """A file for every stored tensor, with an archive for every layer, and the files that say where they are."""
    folder = f"{checkpoint.tag}/" if checkpoint.tag else ""
    names, tensors = FileNames(), dict[str, ChunkedTensor]()
    for number, (key, layers) in enumerate(stacks.items()):
        file, stacked = f"__0_{number}.distcp", None not in layers
        found = [layers[layer] for layer in sorted(layers, key=lambda layer: layer or 0)]
        shape = found[0].making.wide_shape
        room = Room(found[0].dtype, (1, *shape) if stacked else shape)
        laid, places, archives = lay_out_chunks(folder + file, [room] * len(found))
        out.files.append(laid)
        for layer, place in zip(found, places, strict=True):
            out.moves.append(layer.parts.move(layer.label, layer.making, replace(place, shape=shape)))
        starts = [((at,) if stacked else ()) + (0,) * len(shape) for at in range(len(found))]
        chunks = [Chunk(a, room.shape, file, *where) for a, where in zip(starts, archives, strict=True)]
        tensors[key] = chunked(room.dtype, (len(found), *shape) if stacked else shape, chunks, names)
    values = kept_values(out, checkpoint.path, checkpoint.stored.values, folder, f"__0_{len(stacks)}.distcp")
    out.files.append(fixed_file(folder + DCP_METADATA, metadata_bytes(tensors, values)))
    out.files.append(plain_file(folder + COMMON, common))
    out.texts.append(Text(folder + MEGATRON_CONFIG, checkpoint.config))
    if checkpoint.tag:
        out.texts.append(Text(MEGATRON_LATEST, checkpoint.tag.removeprefix("iter_").lstrip("0") or "0"))


def kept_values(
    out: WideFiles,
    path: Location,
    stored: Mapping[str, tuple[str, int, int]],
    folder: str,
    file: str,
    fresh: Mapping[str, bytes] | None = None,
) -> Values:
    """What was saved without being a tensor, and archives of new values, in a file of their own; objects are left behind."""
    raw, values = bytearray(), Values()
    for name, (source, offset, length) in stored.items():
        try:
            read_value(path, (source, offset, length))
        except MupscaleError:
            out.not_carried[printable(name)] = "it holds objects, and code is not run"
            continue
        values[name] = (file, len(raw), length)
        with open_file(path / source) as opened, os_errors(path / source):
            raw += opened.read(offset, length)
    for name, archive in (fresh or {}).items():
        values[name] = (file, len(raw), len(archive))
        raw += archive
    if values:
        out.files.append(fixed_file(folder + file, bytes(raw)))
    return values
