"""The state dict of a torch optimizer, whose tensors have positions in the place of names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import Fault
from ..files.pickles.torch_file import read_tensor
from ..files.places import Place
from ..files.strict import printable
from ..storage.location import Location
from .snapshot import UNNAMED, Filed, Snapshot


def positional(
    found: Snapshot,
    folder: Location,
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Any, Mapping[str, Any]],
    names: Sequence[Sequence[str]] | None,
) -> None:
    """Add the groups and the state of an optimizer's state dict with positions; without names they are named by position."""
    for at, group in enumerate(groups):
        keys = group["params"]
        named = [f"{UNNAMED}{key}" for key in keys] if names is None else names[at]
        found.add_group(named, group)
        for key, name in zip(keys, named, strict=True):
            for slot, value in state.get(key, {}).items():
                if isinstance(value, Place):
                    value = Filed.of(folder, value) if value.shape else read_tensor(folder, value).item()
                if isinstance(value, Filed | int | float):
                    found.add_state(name, slot, value)
                elif value is not None:
                    what = f"a {type(value).__name__} under {printable(slot)}, which is not read"
                    found.unknown.append(Fault("same.state_not_read", printable(name), what))
