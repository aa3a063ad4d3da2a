"""DeepSpeed: its universal checkpoint, how it grows, and an engine that loads it."""

from __future__ import annotations

from ...storage.location import Location
from ..format import Asked, Format


def _is_at(place: Location) -> bool:
    from .universal import is_universal

    return is_universal(place)


def _grow(asked: Asked) -> dict[str, str]:
    from .grow import grow_universal_checkpoint

    return grow_universal_checkpoint(
        asked.base,
        asked.out,
        plan=asked.plan,
        noise=asked.noise,
        seed=asked.seed,
        optimizer_class=asked.optimizer_class,
    )


FORMAT = Format("DeepSpeed", _is_at, _grow)
