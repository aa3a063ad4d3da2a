"""State of several tensors that become one: gate and up, which classes with experts hold in one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import Fault
from ..plans.direction import Direction
from ..plans.tensor_plan import TensorPlan
from ..tensors.making import Join
from .named import NamedOptimizer
from .quantised import Coded

_AFRESH = "take the weights alone, without optimizers, and start its state afresh"
_ALIKE = "group and train its sources alike, or grow the weights alone"


@dataclass(frozen=True)
class Joined:
    """One state of several tensors, to be joined as the tensors are; a tensor that has none is left out."""

    parts: tuple[Any, ...]
    join: Join
    whole: bool = True
    """Whether every tensor has this state."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the joined tensor; () for numbers."""
        shapes = [tuple(getattr(part, "shape", ())) for part in self.parts]
        if not all(shapes):
            return ()
        first = list(self.join.part(shapes[0]))
        first[self.join.dim] = sum(self.join.part(shape)[self.join.dim] for shape in shapes)
        return tuple(first)

    @property
    def dtype(self) -> Any:
        return self.parts[0].dtype

    def number(self) -> Any:
        """The one number that all tensors have, or None where they differ."""
        same = all(float(part) == float(self.parts[0]) for part in self.parts)
        return self.parts[0] if same else None

    def faults(self, expected: tuple[int, ...], name: str, key: str) -> list[Fault]:
        """A fault if the parts, the states `key` of the sources of a tensor, do not join to a state of this shape."""
        if not self.whole:
            why = "not all of its sources have it"
        elif any(isinstance(part, Coded) for part in self.parts):
            why = "it is quantised, and blocks of codes are not joined"
        elif not self.shape and self.number() is None:
            why = "it is not the same number for all of its sources"
        elif self.shape not in ((), expected):
            why = f"the parts join to {self.shape}, expected {expected}"
        else:
            return []
        what = f"its state {key!r} cannot be joined: {why}"
        return [Fault("state.cannot_be_joined", name, what, _AFRESH)]


def state_of(entry: TensorPlan, state: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The state that a wide tensor starts from: that of its source, or what several sources have, joined; None for none."""
    held = [state[source] for source in entry.sources if source in state]
    if not held or entry.join is None:
        return held[0] if held else None
    keys = dict.fromkeys(key for of in held for key in of)
    found = {key: [of[key] for of in held if key in of] for key in keys}
    return {
        key: Joined(tuple(parts), entry.join, len(parts) == len(entry.sources))
        for key, parts in found.items()
    }


def torn(start: NamedOptimizer, direction: Direction) -> list[Fault]:
    """Tensors made from several that are in different groups, or of which only some train."""
    if direction.back:
        return []
    group = {name: number for number, of in enumerate(start.groups) for name in of.names}
    faults = []
    for name, entry in direction.plan.tensors.items():
        if entry.kind == "buffer" or len(entry.sources) < 2:
            continue
        sources = " and ".join(entry.sources)
        if len({group.get(source) for source in entry.sources}) > 1:
            faults.append(
                Fault("optimizer.joined_across_groups", name, f"{sources} are in different groups", _ALIKE)
            )
        elif len({source in start.idle for source in entry.sources}) > 1:
            faults.append(
                Fault("optimizer.joined_partly_frozen", name, f"not all of {sources} train", _ALIKE)
            )
    return faults


def sources_of(source: Any) -> Sequence[Any]:
    """What a state tensor is made from: one value, or several that are joined."""
    return source.parts if isinstance(source, Joined) else (source,)
