"""A snapshot of whatever lies at a place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import Fault, MupscaleError
from ..files.dcp.metadata import read_dcp
from ..files.directory import CONFIG
from ..files.elsewhere import DCP_METADATA
from ..files.strict import os_errors, parse_json, printable, read_regular
from ..formats.format import format_at
from ..formats.snapshot import Snapshot, heads_in
from ..storage.location import Location, location
from ..storage.looking import exists


def read_snapshot(path: Location | str) -> Snapshot:
    """What a checkpoint holds; its format is known from its files.

    >>> import tempfile, torch, mupscale as mu
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"state_dict": torch.nn.Linear(2, 3).state_dict()}, f"{folder}/a.ckpt")
    ...     found = read_snapshot(f"{folder}/a.ckpt")
    >>> found.kind, found.weights["weight"].shape
    ('Lightning checkpoint', (3, 2))
    """
    place = location(path)
    with os_errors(place):
        plain = exists(place / CONFIG)
        other = None if plain else format_at(place)
        distributed = exists(place / DCP_METADATA)
    if other is not None:
        if other.read is None:
            what = f"a checkpoint of {other.name}, whose content is not compared"
            fault = Fault("same.format_not_read", printable(str(place)), what)
            raise MupscaleError("these checkpoints cannot be compared", [fault])
        return other.read(place)
    if not plain and distributed:
        from ..formats.dcp_snapshot import dcp_snapshot
        from ..formats.megatron.fsdp_dtensor import is_of_fsdp
        from ..formats.megatron.snapshot import megatron_snapshot

        stored = read_dcp(place)
        return megatron_snapshot(place) if is_of_fsdp(stored) else dcp_snapshot(stored)
    from .directory import directory_snapshot

    return directory_snapshot(place)


def config_at(path: Location | Path | str) -> dict[str, Any]:
    """A `config.json` that tells the heads of its model, or the one in a folder."""
    place = location(path)
    with os_errors(place):
        file = place / CONFIG if exists(place / CONFIG) else place
        config = parse_json(read_regular(file), CONFIG)
    if not isinstance(config, dict) or heads_in(config) is None:
        what = "it does not tell how many heads the model has, and of what size"
        fault = Fault("same.config_without_heads", printable(str(file)), what, "name another config.json")
        raise MupscaleError("these checkpoints cannot be compared", [fault])
    return config
