"""A checkpoint of Megatron in its format `torch_dist`: tensors in chunks, and what is not a tensor next to them.

    latest_checkpointed_iteration.txt              a number; the folder below is named after it
    iter_0000005/
        metadata.json                              the format
        .metadata, __0_0.distcp, …                 as torch.distributed.checkpoint writes them
        common.pt                                  groups, schedule, counters, arguments

The folder alone is a checkpoint as well. No pickle is executed: objects in `common.pt` become inert records.
Knows: the directory, read and written. Does not know: plans, units.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import Fault, MupscaleError
from ...files.dcp.metadata import read_dcp
from ...files.dcp.table import ChunkedTensor, DcpDirectory
from ...files.elsewhere import DCP_METADATA, MEGATRON_CONFIG, MEGATRON_FORMAT, MEGATRON_LATEST, MEGATRON_SMALL
from ...files.pickles.torch_file import Room, lay_out
from ...files.pickles.torch_settings import read_settings
from ...files.places import OutFile, Place, torch_dtype
from ...files.strict import parse_json, printable, read_regular
from ...storage.location import Location, location
from ...storage.looking import exists

COMMON = "common.pt"
CLAIM = "this is not a torch_dist checkpoint of Megatron"
_DIGITS = 12  # of an iteration


@dataclass(frozen=True)
class TorchDist:
    """The content of a checkpoint."""

    path: Location
    """The folder that holds the tensors."""
    tag: str
    """The name of that folder below the one that was named; "" if that one holds the tensors itself."""
    config: str
    """The text of `metadata.json`."""
    stored: DcpDirectory
    common: Mapping[str, Any]


def read_torch_dist(path: Location | str) -> TorchDist:
    """Read everything about a checkpoint except its tensors."""
    named = location(path)
    tag = iteration_of(named)
    folder = named / tag if tag else named
    where = printable(str(folder))
    if not exists(folder / MEGATRON_CONFIG):
        raise MupscaleError(
            CLAIM,
            [Fault("megatron.no_metadata", where, f"it has neither {MEGATRON_CONFIG} nor {DCP_METADATA}")],
        )
    raw = read_regular(folder / MEGATRON_CONFIG, MEGATRON_SMALL)
    config = parse_json(raw, f"{where}/{MEGATRON_CONFIG}")
    format_name = config.get(MEGATRON_FORMAT) if isinstance(config, dict) else None
    if format_name != "torch_dist":
        what = f"its format is {printable(str(format_name))}, expected torch_dist"
        raise MupscaleError(
            CLAIM,
            [
                Fault(
                    "megatron.other_format",
                    f"{where}/{MEGATRON_CONFIG}",
                    what,
                    "save it with --ckpt-format torch_dist",
                )
            ],
        )
    common = read_settings(folder / COMMON)
    if not isinstance(common, dict):
        raise MupscaleError(
            CLAIM, [Fault("megatron.settings_not_dict", f"{where}/{COMMON}", "it does not hold a dict")]
        )
    return TorchDist(folder, tag, raw.decode(), read_dcp(folder), common)


def iteration_of(path: Location) -> str:
    """The folder of the latest iteration below this one; "" where no file names one."""
    if not exists(path / MEGATRON_LATEST):
        return ""
    latest = read_regular(path / MEGATRON_LATEST, MEGATRON_SMALL).decode(errors="replace").strip()
    if latest == "release":
        return latest
    if not (latest.isascii() and latest.isdigit() and len(latest) <= _DIGITS):
        what = f"it says {printable(latest[:80])}, expected a number"
        raise MupscaleError(
            "this is not a checkpoint of Megatron",
            [Fault("megatron.iteration_not_number", MEGATRON_LATEST, what)],
        )
    return f"iter_{int(latest):07d}"


def lay_out_chunks(file: str, rooms: Sequence[Room]) -> tuple[OutFile, list[Place], list[tuple[int, int]]]:
    """A file of archives, one for each tensor: the file, where each tensor lies, and where its archive does.

    >>> file, places, archives = lay_out_chunks("__0_0.distcp", [Room("F32", (1, 4)), Room("F32", (1, 4))])
    >>> file.size == sum(length for _, length in archives), archives[1][0] == archives[0][1] < places[1].offset
    (True, True)
    """
    size = 0
    fixed: list[tuple[int, bytes]] = []
    places: list[Place] = []
    archives: list[tuple[int, int]] = []
    for room in rooms:
        laid, place = lay_out(file, room)
        fixed += [(size + at, raw) for at, raw in laid.chunks]
        places.append(Place(file, size + place.offset, room.dtype, room.shape))
        archives.append((size, laid.size))
        size += laid.size
    return OutFile(file, size, tuple(fixed)), places, archives


def metadata_bytes(tensors: Mapping[str, ChunkedTensor], values: Mapping[str, tuple[str, int, int]]) -> bytes:
    """The `.metadata` of a directory with these tensors and values; its file names are relative to it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for name, tensor in tensors.items():
        chunks = tensor.chunks
        described[name] = TensorStorageMetadata(
            TensorProperties(torch_dtype(tensor.dtype)),
            torch.Size(tensor.shape),
            [ChunkStorageMetadata(torch.Size(c.start), torch.Size(c.shape)) for c in chunks],
        )
        stored |= {MetadataIndex(name, c.start): _StorageInfo(c.file, c.offset, c.length) for c in chunks}
    for name, where in values.items():
        described[name] = BytesStorageMetadata()
        stored[MetadataIndex(name)] = _StorageInfo(*where)
    return pickle.dumps(Metadata(described, None, stored))
