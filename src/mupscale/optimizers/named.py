"""An optimizer as named data: groups and state by the names of tensors, wherever the tensors lie.

`read.py` makes it, `carry.py` changes its units, `write.py` turns it into an optimizer or a state dict.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from ..rules.optimizer_rule import OptimizerRule
from ..tensors.making import Making


@dataclass(frozen=True)
class NamedGroup:
    """A parameter group with names in place of parameters."""

    names: tuple[str, ...]
    settings: Mapping[str, Any]
    """What the optimizer reads from the group, without its parameters and their names."""
    rule: OptimizerRule
    """The units of these settings and of the state of these tensors."""
    origin: int = 0
    """The index of the group this one was split from."""
    growth_factor: float = 1.0
    """What this growth multiplies the rate of that group by. `settings["lr_factor"]` counts from the reference."""


@dataclass(frozen=True)
class NamedOptimizer:
    """Groups and state of one optimizer.

    A value of the state is a plain number, a tensor, a placeholder with a shape for a tensor that lies elsewhere
    (a place in a file, a slice on other ranks), or a `Moment`.
    """

    label: str
    """Its name in messages: its class, or the file it was read from."""
    groups: tuple[NamedGroup, ...]
    state: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Tensor name -> state key -> value; a tensor that has no state yet is absent."""
    idle: Set[str] = frozenset()
    """Tensors in its groups that do not train. Their settings are not used, so they cause no faults."""
    rounded: Mapping[str, float] = field(default_factory=dict)
    """Quantised state -> by how much it was rounded again, relative to its largest entry."""


@dataclass(frozen=True)
class Moment:
    """A state tensor that is not made yet: its source at the start of the plan, and how to make it at the end."""

    source: Any
    """A tensor, or anything else with a shape, such as the place of a tensor in a file, or a `Coded`."""
    making: Making
