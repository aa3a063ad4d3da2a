"""What one checkpoint holds, by the model's names: tensors that are read when they are compared, and values.

Knows no format; `readers/` makes snapshots, `compare.py` compares two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import Fault
from ..files.dcp.table import ChunkedTensor
from ..files.places import Place
from ..models.names import strip_wrappers
from ..sharded.source import FiledTensor
from ..storage.location import Location
from ..tensors.parts import Rectangle

STEP = "step"
MASTERS = frozenset({"fp32", "fp32_param", "param", "master_param", "master_weight", "master_weights"})
"""Names under which optimizers keep float32 copies of the weights."""
UNNAMED = "parameter "
"""What stands before a position where an optimizer's tensors have no names."""


@dataclass(frozen=True)
class Filed:
    """A tensor in the files of a folder."""

    folder: Location
    tensor: FiledTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    @staticmethod
    def of(folder: Location, stored: Place | ChunkedTensor) -> Filed:
        pieces = ((Rectangle((0,) * len(stored.shape), stored.shape), stored),)
        return Filed(folder, FiledTensor(stored.dtype, stored.shape, pieces))


def joined(parts: Sequence[Filed], dim: int = 0) -> Filed | None:
    """Several tensors as one, one behind the other along a dimension; None where they do not fit.

    >>> parts = [Filed.of(None, Place("a", 0, "F32", (2, 3))), Filed.of(None, Place("b", 0, "F32", (4, 3)))]
    >>> joined(parts).shape
    (6, 3)
    """
    first = parts[0]
    rest = {(p.folder, p.dtype, len(p.shape), p.shape[:dim], p.shape[dim + 1 :]) for p in parts}
    if len(rest) != 1 or dim >= len(first.shape):
        return None
    pieces: list[tuple[Rectangle, Place | ChunkedTensor]] = []
    at = 0
    for part in parts:
        for rectangle, where in part.tensor.pieces:
            start = [*rectangle.start]
            start[dim] += at
            pieces.append((Rectangle(tuple(start), rectangle.shape), where))
        at += part.shape[dim]
    shape = (*first.shape[:dim], at, *first.shape[dim + 1 :])
    return Filed(first.folder, FiledTensor(first.dtype, shape, tuple(pieces)))


@dataclass(frozen=True)
class Unread:
    """A value that is not read, because that would run code: equal bytes are all that can be said of it."""

    digest: str


@dataclass
class Snapshot:
    """One checkpoint. What it does not hold is empty."""

    path: Location
    kind: str
    """The format, as messages say it."""
    weights: dict[str, Filed] = field(default_factory=dict)
    masters: dict[str, Filed] = field(default_factory=dict)
    """Copies of the weights in a finer dtype, from which training goes on."""
    moments: dict[str, dict[str, Filed]] = field(default_factory=dict)
    """By name and slot, such as `exp_avg`."""
    steps: dict[str, float] = field(default_factory=dict)
    """How many steps the optimizer counts for a tensor."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the group of every tensor says; by "group 0", … where the members of groups are not stored."""
    schedule: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    """What the job counts, such as its step, and other values."""
    random: dict[str, Any] = field(default_factory=dict)
    stacked: bool = False
    """Whether one tensor holds the layers of a block."""
    unknown: list[Fault] = field(default_factory=list)
    """What could not be read."""

    @property
    def names(self) -> set[str]:
        """The names of its tensors."""
        return {*self.weights, *self.masters, *self.moments}

    def renamed(self, new: Mapping[str, str]) -> Snapshot:
        """The same checkpoint with other names for its tensors."""

        def of(held: Mapping[str, Any]) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for name, value in held.items():
                found.setdefault(new.get(name, name), value)
            return found

        mine = {key: of(getattr(self, key)) for key in ("weights", "masters", "moments", "steps", "settings")}
        return Snapshot(**{**vars(self), **mine})

    def add_state(self, name: str, slot: str, value: Any) -> None:
        """A tensor or a number of the optimizer's state."""
        if isinstance(value, Filed) and slot in MASTERS:
            self.masters[name] = value
        elif isinstance(value, Filed):
            self.moments.setdefault(name, {})[slot] = value
        elif slot == STEP:
            self.steps[name] = float(value)
        else:
            self.settings.setdefault(name, {})[f"state: {slot}"] = value

    def add_group(self, names: Sequence[str], group: Mapping[str, Any]) -> None:
        """The settings of a group, for each of its tensors."""
        own = {key: value for key, value in group.items() if key not in ("params", "param_names", STEP)}
        for name in names:
            self.settings.setdefault(name, {}).update(own)
            if isinstance(group.get(STEP), int | float):
                self.steps.setdefault(name, float(group[STEP]))


def plain_name(name: str) -> str:
    """A name without what wrappers put into it or before it.

    >>> plain_name("module._orig_mod.layers.0.weight")
    'layers.0.weight'
    """
    name = strip_wrappers(name)
    while name.startswith("module."):
        name = strip_wrappers(name.removeprefix("module."))
    return name


def flat(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """The values inside dicts, by their path.

    >>> dict(flat({"a": {"b": 1}, "c": [2, 3]}))
    {'a.b': 1, 'c': [2, 3]}
    """
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{where}.{key}" if where else str(key))
    else:
        yield where, value
