"""What a row of the table of optimizers says, and the factors that follow from it.

Knows: the kinds of decay, of state and of settings, how lr and decay change with a tensor's units, and rows that are
chosen by a group. Which optimizer has which row is data in `optimizers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Literal

from ..arguments import wrong_kind, wrong_list
from ..errors import Fault, MupscaleError, raise_faults
from .axes import Axis
from .matrices import copied_blocks, with_matrices
from .scale import Scale
from .units import NEUTRAL, Change, G, Units, W

Group = Mapping[str, Any]


class Decay(StrEnum):
    """How an optimizer applies `weight_decay`. A row may name it by its text.

    >>> OptimizerRule(lr=W, decay="decoupled").decay is Decay.DECOUPLED
    True
    """

    COUPLED = "coupled"
    """Added to the gradient."""
    DECOUPLED = "decoupled"
    """Multiplied by lr, beside the update."""
    INDEPENDENT = "independent"
    """Beside the update, not multiplied by lr."""


@dataclass(frozen=True)
class State:
    """Units of one state tensor, and its shape where that is not the shape of the weights.

    Args:
        units: Its units, such as `G` for a first moment.
        mean_over: The dimension that a factored moment averages away; "short" is the shorter one of the last two.
        dropped: True if the state does not have that dimension; otherwise its size is 1.
        stack: How many tensors lie one behind the other, in a first dimension that the weights do not have; 0 for none.
        copy: True for a copy of the weights: an average, a master weight. It is made as the weight is, with the same noise.

    Raises:
        MupscaleError: If it is called a copy and has other units or another shape than the weights.

    >>> from mupscale.rules.optimizers import rule_for
    >>> str(rule_for("torch.optim.Adafactor").state["row_var"].units)
    'G^2'
    """

    units: Units
    mean_over: int | Literal["short"] | None = None
    dropped: bool = False
    stack: int = 0
    copy: bool = False

    @property
    def may_be_a_copy(self) -> bool:
        """Whether it has the units of the weights, so that it can be a copy of them."""
        return self.units == W and self.mean_over is None and not self.stack

    def __post_init__(self) -> None:
        if self.copy and not self.may_be_a_copy:
            what = f"a copy of the weights has the shape and the units of the weights, and these are {self.units}"
            raise MupscaleError(
                "this is not a row of units",
                [Fault("optimizer.copy_in_other_units", "copy", what, "write State(W, copy=True)")],
            )


@dataclass(frozen=True)
class OptimizerRule:
    """The row of an optimizer: the units of its settings and of its state.

    An optimizer of your own is registered by writing its row with `register_optimizer`, and proved by `check_optimizer`.

    Args:
        lr: The units of the learning rate: `W` for Adam and its kind, `W / G` for plain SGD.
        hyper: Settings of a group that have units, by name; a tuple has one for each entry of the setting.
        state: Units of the state, by name; a `State` where a tensor has another shape than the weights.
        neutral: Settings without units, such as betas.
        decay: How decay is applied: "coupled" if it is added to the gradient, "decoupled" if it is multiplied by lr, beside the
            update, "independent" if it is beside the update and not multiplied by lr. Or its units, where they do not follow from that.
        decay_key: The name of the decay in a group.
        decoupled_flag: A group key that, when true, turns `decay` into `Decay.DECOUPLED`.
        refuse: Given a group and a parameter's state: why widening cannot be exact now, or None.
        constructor_only: Settings that the optimizer reads when it is made, not from its groups.
        entrywise: False if a step of one entry depends on others of its tensor.
        agrees_with_mup: False if its units give another width rule than μP, so that constants cannot be moved to other widths.
        takes_padding: False if it averages over a whole tensor and no setting can correct that for zeros.
        blocks: A group key that counts the blocks of rows (heads) which are stepped as matrices of their own.
        stacked: True if the first tensor of a group holds the state of all its tensors, stacked along a new first dimension.
        by: The key by which one of `rows` is chosen: of the group or of a parameter's state, or `DIMENSIONS`.
        rows: The rows among which is chosen, by value; `by_key` fills it in.

    Raises:
        MupscaleError: If something that should have units has none.

    >>> lion = OptimizerRule(lr=W, decay="decoupled", state={"exp_avg": G}, neutral={"betas"})
    >>> str(lion.state["exp_avg"].units)
    'G'
    """

    lr: Units
    hyper: Mapping[str, Units | tuple[Units, ...]] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    neutral: frozenset[str] | set[str] = frozenset()
    decay: str | Units | None = None
    decay_key: str = "weight_decay"
    decoupled_flag: str | None = None
    refuse: Callable[[Group, Mapping[str, Any]], str | None] | None = None
    constructor_only: frozenset[str] | set[str] = frozenset()
    entrywise: bool = True
    agrees_with_mup: bool = True
    takes_padding: bool = True
    blocks: str | None = None
    stacked: bool = False
    by: str | None = None
    rows: Mapping[Any, OptimizerRule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        raise_faults("this is not a row of units", self._faults())
        if isinstance(self.decay, str):
            object.__setattr__(self, "decay", Decay(self.decay))
        state = {k: v if isinstance(v, State) else State(v) for k, v in self.state.items()}
        object.__setattr__(self, "state", MappingProxyType({"step": State(NEUTRAL), **state}))
        object.__setattr__(self, "hyper", MappingProxyType(dict(self.hyper)))
        object.__setattr__(self, "rows", MappingProxyType(dict(self.rows)))
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
            known = isinstance(self.decay, str) and self.decay in {*Decay}
            remedy = 'write decay="decoupled", "coupled", "independent" or None'
            faults += [] if known else wrong_kind("decay", self.decay, Units, remedy)
        return faults

    @classmethod
    def by_key(cls, key: str, rows: Mapping[Any, OptimizerRule]) -> OptimizerRule:
        """One row of several, for an optimizer that is several in one class.

        Each row lists every setting of its own groups: what only another row reads, and its groups hold nevertheless, is in its
        `neutral`.

        Args:
            key: The key by which a row is chosen: of the group, of a parameter's state, or `DIMENSIONS`.
            rows: The rows by the value that chooses them.

        Raises:
            MupscaleError: If the key is no string, there are no rows, or one of them is no `OptimizerRule`.

        >>> adam = OptimizerRule(lr=W, hyper={"eps": G}, state={"exp_avg": G, "exp_avg_sq": G**2})
        >>> sign = OptimizerRule(lr=W, state={"momentum": G})
        >>> str(OptimizerRule.by_key("kind", {"adam": adam, "sign": sign}).row({"kind": "adam"}, 2).hyper["eps"])
        'G'
        """
        remedy = 'write by_key("kind", {"adam": OptimizerRule(…)}), for example'
        faults = wrong_kind("key", key, str, remedy) + wrong_kind("rows", rows, Mapping, remedy)
        if isinstance(rows, Mapping):
            for value, row in rows.items():
                faults += wrong_kind(repr(value), row, OptimizerRule, "write OptimizerRule(…)")
            if not rows:
                faults += [Fault("argument.no_rows", "rows", "it is empty, expected one row or more", remedy)]
        raise_faults("these are no rows", faults)
        every = [leaf for row in rows.values() for leaf in row.every_row]
        state = {k: v for row in every for k, v in row.state.items()}
        own = {value: _chosen_by(key, row) for value, row in rows.items()}
        return cls(lr=NEUTRAL, state=state, by=key, rows=own)

    def decay_kind(self, group: Group) -> str | Units | None:
        """How this group's decay is applied; `decoupled_flag` in the group overrides the row.

        Args:
            group: A parameter group.
        """
        if self.decoupled_flag is not None and group.get(self.decoupled_flag):
            return Decay.DECOUPLED
        return self.decay

    @property
    def constants(self) -> frozenset[str]:
        """The settings of a group that a step reads, without learning rates, which follow a schedule."""
        if self.rows:
            return frozenset.intersection(*(row.constants for row in self.rows.values()))
        return frozenset({*self.hyper, *self.neutral, *([self.decay_key] if self.decay else [])})

    @property
    def of_matrices(self) -> bool:
        """Whether it sees matrices in its tensors, so that their sizes are part of its units."""
        settings = [
            u for units in self.hyper.values() for u in (units if isinstance(units, tuple) else (units,))
        ]
        return any(u.of_matrices for u in (self.lr, *settings, *(s.units for s in self.state.values())))

    @property
    def every_row(self) -> tuple[OptimizerRule, ...]:
        """The rows among which a group chooses; the row itself if there is no choice."""
        return tuple(r for row in self.rows.values() for r in row.every_row) if self.rows else (self,)

    def known(self, key: str) -> bool:
        """True for a setting whose units this row states.

        Args:
            key: The name of the setting.
        """
        return (
            key in UNIVERSAL
            or key in self.hyper
            or key in self.neutral
            or key in (self.decoupled_flag, self.blocks, self.by)
            or (key == self.decay_key and self.decay is not None)
            or any(row.known(key) for row in self.rows.values())
        )

    def row(self, group: Group, dimensions: int, state: Mapping[str, Any] | None = None) -> OptimizerRule:
        """The row of one tensor: this one, or the one that its group, its state or its dimensions choose.

        Args:
            group: Its parameter group.
            dimensions: How many dimensions it has.
            state: Its state.

        >>> from mupscale.rules.optimizers import rule_for
        >>> str(rule_for("torch.optim.Muon").row({"adjust_lr_fn": "match_rms_adamw"}, 2).lr)
        'W^1/2 G^-1/2 rows^-1/2 columns^-1/2 short^1/2 blocks^-1/2'
        """
        if self.by is None:
            return self
        if self.by == DIMENSIONS:
            value: Any = dimensions
        else:
            value = group[self.by] if self.by in group else (state or {}).get(self.by)
        try:
            chosen = self.rows.get(value)
        except TypeError:  # a list, for example, has no hash and is no key
            chosen = None
        if chosen is None:
            found = f"{value} dimensions" if self.by == DIMENSIONS else f"{self.by} = {value!r}"
            raise MupscaleError(
                f"a tensor has {found}, and the optimizer has rows for {', '.join(map(repr, self.rows))}; register "
                "it with a row for this value in by_key",
                code="optimizer.no_row_for_value",
            )
        return chosen.row(group, dimensions, state)


DIMENSIONS = "its number of dimensions"
"""The `by` of rows that are chosen by how many dimensions a tensor has."""


def _chosen_by(key: str, row: OptimizerRule) -> OptimizerRule:
    """A row that also knows the key by which it is chosen."""
    if row.rows:
        return replace(row, rows={value: _chosen_by(key, r) for value, r in row.rows.items()})
    return replace(row, neutral=row.neutral if row.known(key) else row.neutral | {key})


RATES = ("lr", "initial_lr", "lr_factor", "max_lr", "min_lr", "swa_lr")
"""Keys of any group with the units of its learning rate: `lr` itself, our factor on it, and what torch's schedulers keep."""
# Keys of any group that no row has to list: the parameters, learning rates (which `lr` covers), the momenta between which
# torch's schedulers cycle, and torch's choices of implementation, which have no units. `declare_neutral` adds to it.
UNIVERSAL = {
    "params",
    *RATES,
    "base_momentum",
    "max_momentum",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "maximize",
}


def declare_neutral(*keys: str) -> None:
    """Say that settings which you keep in groups of any optimizer have no units, such as timm's `lr_scale`.

    Args:
        *keys: The names of the settings.

    Raises:
        MupscaleError: If a key is no text.

    >>> declare_neutral("lr_scale")
    >>> from mupscale.rules.optimizers import rule_for
    >>> rule_for("torch.optim.AdamW").known("lr_scale")
    True
    >>> UNIVERSAL.remove("lr_scale")                                  # it was for this example only
    """
    raise_faults(
        "no settings are named", [f for key in keys for f in wrong_kind("key", key, str, "write its name")]
    )
    UNIVERSAL.update(keys)


def change_for(rule: OptimizerRule, group: Group, change: Change, axes: Sequence[Axis]) -> Change:
    """The change of units of a tensor as an optimizer sees it, with the sizes of its matrices where they matter."""
    if not rule.of_matrices or len(axes) < 2:
        return change
    blocks = block_count(rule, group)
    return with_matrices(change, axes, blocks, copied_blocks(axes[-2], blocks) or 1)


def block_count(rule: OptimizerRule, group: Group) -> int:
    """How many blocks of rows are stepped as matrices of their own."""
    return int(group.get(rule.blocks) or 1) if rule.blocks else 1


def decay_factor(kind: str | Units | None, change: Change, lr: Scale) -> Scale:
    """What the decay is multiplied by, given the factor put on lr."""
    if isinstance(kind, Units):
        return change.factor(kind)
    if kind is Decay.COUPLED:
        return change.factor(G / W)
    return lr**-1 if kind is Decay.DECOUPLED else Scale()
