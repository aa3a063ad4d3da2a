"""Lightning: a checkpoint in one file, and how it grows."""

from __future__ import annotations

from pathlib import Path

from ...storage.location import Location
from ..format import Asked, Format
from ..snapshot import Snapshot


def _is_at(place: Location) -> bool:
    return isinstance(place, Path) and place.is_file()


def _grow(asked: Asked) -> dict[str, str]:
    from .grow import grow_lightning_checkpoint

    base, out = Path(str(asked.base)), Path(str(asked.out))
    grow_lightning_checkpoint(
        base,
        out,
        plan=asked.plan,
        noise=asked.noise,
        seed=asked.seed,
        optimizer_classes=asked.optimizer_class,
    )
    return {}


def _read(place: Location) -> Snapshot:
    from .snapshot import lightning_snapshot

    return lightning_snapshot(place)


FORMAT = Format("Lightning", _is_at, _grow, read=_read)
