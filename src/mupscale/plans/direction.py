"""Widening and narrowing are one map read in two directions.

Everything that carries a run (weights, state, groups, schedulers) is written once in terms of a
`Direction`; this file is the only place that knows which way it goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ..errors import Fault, raise_faults
from ..rules.scale import Scale
from ..tensors.collapse import collapse
from ..tensors.expand import expand
from ..tensors.making import Making
from ..tensors.noise import TensorNoise
from .ends import End, check_duplicates, expect_plan
from .plan import Plan
from .tensor_plan import TensorPlan


class Noises(Protocol):
    """Noise that is known for every tensor."""

    def tensor(self, name: str) -> TensorNoise | None:
        """The noise of one wide tensor, or None."""
        ...

    def woken(self, name: str, entry: TensorPlan) -> TensorPlan:
        """How a wide tensor is made with this noise: one that wakes as a copy has the source of that."""
        ...


@dataclass(frozen=True)
class Direction:
    """A plan and the direction in which it is applied: from base to wide, or back."""

    plan: Plan
    back: bool = False
    noise: Noises | None = None
    """Noise that is added to every weight and to every copy of it (averages, master weights)."""

    def __post_init__(self) -> None:
        expect_plan(self.plan)
        check_duplicates(self.plan)
        if self.back:
            many = {name: len(entry.sources) for name, entry in self.plan.tensors.items()}
            remedies = {0: "load the base, which does not have it"}
            others = [
                Fault(
                    "plan.no_way_back",
                    n,
                    f"made from {m} tensors of the base, expected one",
                    remedies.get(m, "narrow by a plan of copies"),
                )
                for n, m in many.items()
                if m != 1
            ]
            raise_faults("this plan has no way back", others)

    @property
    def start(self) -> End:
        return "wide" if self.back else "base"

    @property
    def end(self) -> End:
        return "base" if self.back else "wide"

    @cached_property
    def reached(self) -> Mapping[str, tuple[str, ...]]:
        """Name at the start -> the names it becomes at the end."""
        if self.back:
            return {name: tensor.sources for name, tensor in self.plan.tensors.items()}
        return self.plan.sources

    @cached_property
    def joining(self) -> Mapping[str, tuple[str, ...]]:
        """Name at the start -> new parameters at the end, which join its group and have no state yet."""
        found: dict[str, tuple[str, ...]] = {}
        for name, entry in self.plan.tensors.items():
            if entry.new and entry.like is not None:
                found[entry.like] = (*found.get(entry.like, ()), name)
        return found

    def planned(self, end_name: str) -> tuple[str, TensorPlan]:
        """The planned (wide) name and the entry of a name at the end."""
        name = self.plan.planned(end_name)
        if self.back:
            name = self.plan.sources[name][0]
        return name, self.plan[name]

    def origin(self, end_name: str) -> str | None:
        """The name at the start of the tensor from which `end_name` takes its group, mode, dtype and device.

        It takes its state from there too, unless it is new. None for a new tensor that is like no other.
        """
        name, entry = self.planned(end_name)
        if self.back:
            return name
        return entry.sources[0] if entry.sources else entry.like

    def tensor(self, source: Mapping[str, Tensor], end_name: str, out: Tensor | None = None) -> Tensor:
        """The weight or buffer `end_name` from the tensors at the start: written into `out`, or in new memory."""
        name, entry = self.planned(end_name)
        if self.noise is not None:
            entry = self.noise.woken(name, entry)
        making = entry.making(self.noise.tensor(name) if self.noise is not None else None)
        if self.back:
            narrow = self.made(source[name], making)
            return narrow if out is None else out.copy_(narrow)
        with torch.no_grad():
            if out is None:
                start = self.origin(end_name)
                assert start is not None, "a tensor that is like no other is written into one that is there"
                out = source[start].detach().new_empty(entry.wide_shape)
            return entry.write_(out, source, making)

    def made(self, value: Tensor, making: Making) -> Tensor:
        """A tensor at the end, in new memory, from the one at the start."""
        with torch.no_grad():
            return collapse(value.detach(), making) if self.back else expand(value.detach(), making)

    def number(self, scale: Scale) -> float:
        """What a plain number is multiplied by."""
        return float(scale**-1 if self.back else scale)
