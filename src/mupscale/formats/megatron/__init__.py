"""Megatron: its formats torch_dist and fsdp_dtensor, how both grow, and overrides for a wide job."""

from __future__ import annotations

from ...files.elsewhere import megatron_faults
from ...storage.location import Location
from ..format import Asked, Format
from ..snapshot import Snapshot


def _is_at(place: Location) -> bool:
    return bool(megatron_faults(place))


def _grow(asked: Asked) -> dict[str, str]:
    from .grow import grow_megatron_checkpoint

    return grow_megatron_checkpoint(asked.base, asked.out, **asked.settings)


def _read(place: Location) -> Snapshot:
    from .snapshot import megatron_snapshot

    return megatron_snapshot(place)


FORMAT = Format("Megatron", _is_at, _grow, read=_read)
