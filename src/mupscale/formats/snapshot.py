"""What one checkpoint holds, by the model's names: tensors that are read when they are compared, and values.

Every format makes snapshots of its files with the `read` of its `FORMAT`; the room `sameness` compares two. Knows no format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import Fault
from ..files.dcp.table import ChunkedTensor
from ..files.places import Place
from ..models.names import strip_wrappers
from ..storage.location import Location

STEP = "step"
MASTERS = frozenset({"fp32", "fp32_param", "param", "master_param", "master_weight", "master_weights"})
"""Names under which optimizers keep float32 copies of the weights."""
UNNAMED = "parameter "
"""What stands before a position where an optimizer's tensors have no names."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a stored tensor: `count` of them, every `step`-th from `start` on. A tensor without dimensions has one."""

    folder: Location
    stored: Place | ChunkedTensor
    start: int
    count: int
    step: int = 1
    layer: int | None = None
    """Which layer, where the stored tensor has those of several, one behind the other."""


@dataclass(frozen=True)
class Filed:
    """A tensor in files, made of rows of stored tensors."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Rows, ...]

    @staticmethod
    def of(folder: Location, stored: Place | ChunkedTensor) -> Filed:
        count = stored.shape[0] if stored.shape else 1
        return Filed(stored.dtype, stored.shape, (Rows(folder, stored, 0, count),))

    def layer(self, number: int) -> Filed:
        """One layer of a whole tensor that stacks several; the tensor has a second dimension.

        >>> Filed.of(None, Place("a", 0, "F32", (2, 5, 3))).layer(1).shape
        (5, 3)
        """
        [whole] = self.parts
        part = replace(whole, start=0, count=self.shape[1] if len(self.shape) > 1 else 1, layer=number)
        return Filed(self.dtype, self.shape[1:], (part,))

    def rows(self, start: int, count: int, step: int = 1) -> Filed:
        """Some rows, every `step`-th from `start` on. They lie in one stored tensor, unless `step` is 1.

        >>> Filed.of(None, Place("a", 0, "F32", (6, 3))).rows(1, 2, 2).shape
        (2, 3)
        """
        found, at = [], 0
        for part in self.parts:
            low, high = max(start, at), min(start + (count - 1) * step + 1, at + part.count)
            if low < high:
                many = -(-(high - low) // step)
                found.append(
                    replace(
                        part, start=part.start + (low - at) * part.step, count=many, step=part.step * step
                    )
                )
            at += part.count
        return Filed(self.dtype, (count, *self.shape[1:]), tuple(found))


def joined(parts: Sequence[Filed]) -> Filed | None:
    """Several tensors as one, with the rows of one below those of the other; None where they do not fit.

    >>> parts = [Filed.of(None, Place("a", 0, "F32", (2, 3))), Filed.of(None, Place("b", 0, "F32", (4, 3)))]
    >>> joined(parts).shape
    (6, 3)
    """
    first = parts[0]
    if not first.shape or len({(part.dtype, part.shape[1:], len(part.shape)) for part in parts}) != 1:
        return None
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    return Filed(first.dtype, shape, tuple(rows for part in parts for rows in part.parts))


@dataclass(frozen=True)
class Made:
    """How a tensor is made from those of a snapshot; None where they do not fit."""

    sources: tuple[str, ...]
    make: Callable[[Sequence[Filed]], Filed | None]

    def of(self, held: Mapping[str, Filed]) -> Filed | None:
        """The tensor, if all of its sources are there and fit."""
        return (
            self.make([held[name] for name in self.sources]) if all(n in held for n in self.sources) else None
        )


@dataclass(frozen=True)
class Heads:
    """What the names and shapes of a model's tensors do not say."""

    size: int
    queries: int
    """How many heads have queries."""
    keys: int
    """How many have keys and values."""
    kind: str = ""
    """The model's type, as its `config.json` says it."""


def heads_in(config: Mapping[str, Any]) -> Heads | None:
    """The heads of a `config.json`; None where it does not say.

    >>> heads_in({"hidden_size": 64, "num_attention_heads": 8, "model_type": "llama"})
    Heads(size=8, queries=8, keys=8, kind='llama')
    """
    queries, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    keys = config.get("num_key_value_heads") or queries
    if not isinstance(queries, int) or not isinstance(keys, int) or queries < 1 or keys < 1 or queries % keys:
        return None
    size = config.get("head_dim") or (hidden // queries if isinstance(hidden, int) else None)
    if not isinstance(size, int) or size < 1:
        return None
    return Heads(size, queries, keys, str(config.get("model_type", "")))


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
    config: Mapping[str, Any] | None = None
    """The model's `config.json`, of a Hugging Face directory."""
    heads: Heads | None = None
    notes: list[str] = field(default_factory=list)
    """What was assumed."""
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

        return replace(
            self,
            weights=of(self.weights),
            masters=of(self.masters),
            moments=of(self.moments),
            steps=of(self.steps),
            settings=of(self.settings),
        )

    def remade(self, made: Mapping[str, Made]) -> Snapshot:
        """The same checkpoint with other tensors in the place of those that they are made from.

        Steps and settings are kept where all sources have the same.
        """
        used = {source for how in made.values() for source in how.sources}

        def tensors(held: Mapping[str, Filed]) -> dict[str, Filed]:
            new = {name: how.of(held) for name, how in made.items()}
            rest = {name: tensor for name, tensor in held.items() if name not in used}
            return rest | {name: tensor for name, tensor in new.items() if tensor is not None}

        def values(held: Mapping[str, Any]) -> dict[str, Any]:
            found = {name: value for name, value in held.items() if name not in used}
            for name, how in made.items():
                own = [held.get(source) for source in how.sources]
                if own[0] is not None and all(value == own[0] for value in own):
                    found[name] = own[0]
            return found

        slots: dict[str, dict[str, Filed]] = {}
        for name, state in self.moments.items():
            for slot, tensor in state.items():
                slots.setdefault(slot, {})[name] = tensor
        moments: dict[str, dict[str, Filed]] = {}
        for slot, held in slots.items():
            for name, tensor in tensors(held).items():
                moments.setdefault(name, {})[slot] = tensor
        return replace(
            self,
            weights=tensors(self.weights),
            masters=tensors(self.masters),
            moments=moments,
            steps=values(self.steps),
            settings=values(self.settings),
        )

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
    if isinstance(value, Mapping) and (value or not where):
        for key, inner in value.items():
            yield from flat(inner, f"{where}.{key}" if where else str(key))
    else:
        yield where, value
