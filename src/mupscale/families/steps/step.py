"""A step of growth that changes what a model is made of, and a chain of such steps.

A step starts at a configuration in its class and leads to another. It has a plan between the two models, and the same
step exists from a small copy, where it is tried. `--to vocab=+64,layers=4` makes a chain of two steps:

    end      full model               small copy              step that follows
    0        512 words, 2 layers      131 words, 2 layers     words
    1        576 words, 2 layers      136 words, 2 layers     blocks
    2        576 words, 4 layers      136 words, 4 layers     then the width grows

Both columns are chains: `chain.small(copy)` makes the second one from the first. All widths of a chain are the base's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from ...plans.plan import Plan
from ..config.nested import Path
from ..copy.trial import End, Trial, trial
from ..models import on_meta


@dataclass(frozen=True)
class Step(ABC):
    """One thing that a model gets: experts, rows of its tables, blocks."""

    start: End

    @property
    @abstractmethod
    def end(self) -> End:
        """The configuration that it leads to, and its class; raises where there is none."""

    @abstractmethod
    def plan(self, base: nn.Module, wide: nn.Module, copy: End) -> Plan:
        """The plan between two models of its ends, which may be on the meta device; `copy` is a small one that can run."""

    @abstractmethod
    def small(self, copy: End) -> Step:
        """The same step from a small copy of its start."""

    @abstractmethod
    def judged(self, done: Trial) -> float:
        """The worst gradient error of its trial; raises where the base's run would not continue."""

    @property
    def edits(self) -> Mapping[Path, Any]:
        """Every field of the configuration that changes, by path, where the class stays."""
        return {}

    @property
    def makes_tensors(self) -> bool:
        """Whether the result has tensors that the base has not."""
        return True

    @property
    def new_blocks(self) -> tuple[int, ...]:
        """The numbers of the blocks that the base does not have."""
        return ()

    def tried(self) -> float:
        """Try the step at its own sizes, which must be small: the worst gradient error; raises unless it is exact."""
        return self.judged(trial(self.start, self.end, lambda base, wide: self.plan(base, wide, self.start)))


@dataclass(frozen=True)
class Chain:
    """A model, and what it becomes step by step before its width grows."""

    start: End
    steps: tuple[Step, ...] = ()

    @property
    def ends(self) -> tuple[End, ...]:
        """The start, and where every step leads."""
        return (self.start, *(step.end for step in self.steps))

    @property
    def last(self) -> End:
        return self.ends[-1]

    @property
    def own(self) -> End:
        """The first end in the class of the result: with its experts, and without rows and blocks that are like others."""
        return next(end for end in self.ends if end.cls is self.last.cls)

    @cached_property
    def models(self) -> tuple[nn.Module, ...]:
        """A model on the meta device for every end."""
        return tuple(on_meta(*end) for end in self.ends)

    @property
    def edits(self) -> dict[Path, Any]:
        """Every field that the steps change, by path."""
        return {path: value for step in self.steps for path, value in step.edits.items()}

    def then(self, step: Step) -> Chain:
        """The chain with one more step, which starts where this one ends."""
        return replace(self, steps=(*self.steps, step))

    def small(self, copy: End) -> Chain:
        """The same steps from a small copy of the start."""
        found = Chain(copy)
        for step in self.steps:
            found = found.then(step.small(found.last))
        return found

    def plans(self, copy: Chain) -> list[Plan]:
        """The plan of every step; `copy` is the chain of a small copy."""
        pairs = zip(self.steps, self.models, self.models[1:], copy.ends, strict=False)
        return [step.plan(base, wide, end) for step, base, wide, end in pairs]

    def tried(self) -> float:
        """Try all steps of a small chain, the last one first: the worst gradient error; raises unless all are exact."""
        return max((step.tried() for step in reversed(self.steps)), default=0.0)
