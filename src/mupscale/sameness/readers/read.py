"""A snapshot of whatever lies at a place."""

from __future__ import annotations

from ...errors import Fault, MupscaleError
from ...files.directory import CONFIG
from ...files.elsewhere import DCP_METADATA
from ...files.strict import os_errors, printable
from ...formats.format import format_at
from ...storage.location import Location, location
from ...storage.looking import exists
from ..snapshot import Snapshot


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
        from .distributed import megatron_snapshot
        from .others import lightning_snapshot, universal_snapshot

        readers = {
            "Megatron": megatron_snapshot,
            "DeepSpeed": universal_snapshot,
            "Lightning": lightning_snapshot,
        }
        if other.name not in readers:
            what = f"a checkpoint of {other.name}, whose content is not compared"
            fault = Fault("same.format_not_read", printable(str(place)), what)
            raise MupscaleError("these checkpoints cannot be compared", [fault])
        return readers[other.name](place)
    if not plain and distributed:
        from .distributed import dcp_snapshot

        return dcp_snapshot(place)
    from .trainer import directory_snapshot

    return directory_snapshot(place)
