"""What a row of the table of optimizers says, and the factors that follow from it.

Knows: the kinds of decay, of state and of settings, and how lr and decay change with a tensor's units. Which
optimizer has which row is data in `optimizers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

from ..arguments import wrong_kind, wrong_list
from ..errors import Fault, MupscaleError, raise_faults
from .scale import Scale
from .units import NEUTRAL, Change, G, Units, W

Group = Mapping[str, Any]


class Decay(Enum):
    """How an optimizer applies `weight_decay`.

    >>> from mupscale.rules import rule_for
    >>> rule_for("torch.optim.AdamW").decay.name, rule_for("torch.optim.SGD").decay.name
    ('DECOUPLED', 'COUPLED')
    """

    COUPLED = "added to the gradient"
    DECOUPLED = "multiplied by lr, beside the update"
    INDEPENDENT = "beside the update, not multiplied by lr"


@dataclass(frozen=True)
class State:
    """Units of one state tensor; `mean_over` names the dimension a factored moment averages away.

    A state that is a copy of the weights says so: `State(W, copy=True)`.

    >>> from mupscale.rules import rule_for
    >>> str(rule_for("torch.optim.Adafactor").state["row_var"].units)
    'G^2'
    """

    units: Units
    mean_over: int | None = None
    copy: bool = False
    """True for a copy of the weights: an average, a master weight. It is made as the weight is, with the same noise."""

    @property
    def may_be_a_copy(self) -> bool:
        """Whether it has the units of the weights, so that it can be a copy of them."""
        return self.units == W and self.mean_over is None

    def __post_init__(self) -> None:
        if self.copy and not self.may_be_a_copy:
            what = f"a copy of the weights has the units of the weights, and these are {self.units}"
            raise MupscaleError(
                "this is not a row of units", [Fault("copy", what, "write State(W, copy=True)")]
            )


@dataclass(frozen=True)
class OptimizerRule:
    """One row of the table.

    A third-party optimizer is registered by writing its row, and proved by `check_optimizer`:

    >>> lion = OptimizerRule(lr=W, decay=Decay.DECOUPLED, state={"exp_avg": G}, neutral={"betas"})
    >>> str(lion.state["exp_avg"].units)
    'G'
    """

    lr: Units
    hyper: Mapping[str, Units | tuple[Units, ...]] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    neutral: frozenset[str] | set[str] = frozenset()
    decay: Decay | None = None
    decoupled_flag: str | None = None
    """A group key that, when true, turns `decay` into DECOUPLED."""
    shape_factor: Callable[[Group, tuple[int, ...]], Scale] | None = None
    """What the optimizer itself multiplies lr by because of a tensor's shape."""
    refuse: Callable[[Group, Mapping[str, Any]], str | None] | None = None
    """Given a group and a parameter's state: why widening cannot be exact now, or None."""
    constructor_only: frozenset[str] | set[str] = frozenset()
    """Settings that the optimizer reads when it is made, not from its groups."""
    entrywise: bool = True
    agrees_with_mup: bool = True

    def __post_init__(self) -> None:
        raise_faults("this is not a row of units", self._faults())
        state = {k: v if isinstance(v, State) else State(v) for k, v in self.state.items()}
        object.__setattr__(self, "state", MappingProxyType({"step": State(NEUTRAL), **state}))
        object.__setattr__(self, "hyper", MappingProxyType(dict(self.hyper)))
        object.__setattr__(self, "neutral", frozenset(self.neutral))

    def _faults(self) -> list[Fault]:
        faults = wrong_kind("lr", self.lr, Units, "write lr=W, or W / G")
        for key, units in self.hyper.items():
            for each in units if isinstance(units, tuple) else (units,):
                faults += wrong_kind(
                    f"hyper, {key!r}", each, Units, f"write {key!r}: G, or list it in neutral="
                )
        for key, units in self.state.items():
            faults += wrong_kind(f"state, {key!r}", units, (Units, State), f"write {key!r}: G, or NEUTRAL")
        faults += [
            *wrong_list("neutral", self.neutral),
            *wrong_list("constructor_only", self.constructor_only),
        ]
        if self.decay is not None:
            faults += wrong_kind("decay", self.decay, Decay, "write decay=Decay.DECOUPLED, or None")
        return faults

    def decay_kind(self, group: Group) -> Decay | None:
        """How this group's `weight_decay` is applied; `decoupled_flag` in the group overrides the row."""
        if self.decoupled_flag is not None and group.get(self.decoupled_flag):
            return Decay.DECOUPLED
        return self.decay

    @property
    def constants(self) -> frozenset[str]:
        """The settings of a group that a step reads, without learning rates, which follow a schedule."""
        return frozenset({*self.hyper, *self.neutral, *(["weight_decay"] if self.decay else [])})

    def known(self, key: str) -> bool:
        """True for a hyperparameter whose units this row states."""
        return (
            key in _UNIVERSAL
            or key in self.hyper
            or key in self.neutral
            or key == self.decoupled_flag
            or (key == "weight_decay" and self.decay is not None)
        )


# Keys of any group that no row has to list: the parameters, learning rates (which `lr` covers), and torch's
# choices of implementation, which have no units.
_UNIVERSAL = frozenset(
    {
        "params",
        "lr",
        "initial_lr",
        "lr_factor",
        "foreach",
        "fused",
        "capturable",
        "differentiable",
        "maximize",
    }
)


def lr_factor(
    rule: OptimizerRule, group: Group, change: Change, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> Scale:
    """What lr is multiplied by: its units, divided by the change of the optimizer's own shape factor."""
    factor = change.factor(rule.lr)
    if rule.shape_factor is not None:
        base, wide = shapes
        factor = factor * rule.shape_factor(group, base) / rule.shape_factor(group, wide)
    return factor


def decay_factor(kind: Decay | None, change: Change, lr: Scale) -> Scale:
    """What weight_decay is multiplied by, given the factor put on lr."""
    if kind is Decay.COUPLED:
        return change.factor(G / W)
    return lr**-1 if kind is Decay.DECOUPLED else Scale()
