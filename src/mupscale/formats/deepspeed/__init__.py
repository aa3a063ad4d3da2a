"""DeepSpeed: its universal checkpoint, how it grows, and an engine that loads it."""

from __future__ import annotations

from ...storage.location import Location
from ..format import Asked, Format
from ..snapshot import Snapshot


def _is_at(place: Location) -> bool:
    from ...files.elsewhere import is_universal

    return is_universal(place)


def _grow(asked: Asked) -> dict[str, str]:
    from .grow import grow_universal_checkpoint

    return grow_universal_checkpoint(asked.base, asked.out, **asked.settings)


def _read(place: Location) -> Snapshot:
    from .snapshot import universal_snapshot

    return universal_snapshot(place)


FORMAT = Format("DeepSpeed", _is_at, _grow, read=_read)
