"""The settings of a group in other units, and the comparison of two settings.

Reads the registry; states no exponent. Settings that cannot be exact are returned as faults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isclose
from typing import Any

from torch import Tensor

from ..errors import Fault
from ..plans.tensor_plan import TensorPlan
from ..rules.matrices import copied_blocks
from ..rules.optimizer_rule import RATES, OptimizerRule, block_count, change_for, decay_factor
from ..rules.scale import Scale
from ..rules.units import Change
from .named import NamedGroup

Factors = dict[str, Any]
"""A setting -> what it is multiplied by: a scale, or one for each of its parts."""
_CLOSE = 1e-6
"""Units are changed in floating point, and a checkpoint may hold a float32 for a float64."""


def factors_of(rule: OptimizerRule, settings: Mapping[str, Any], entry: TensorPlan) -> Factors:
    """What each setting of a group is multiplied by for one tensor."""
    rule = rule.row(settings, len(entry.axes))
    change = change_of(rule, settings, entry)
    lr = change.factor(rule.lr)
    factors: Factors = dict.fromkeys(RATES, lr)
    if rule.decay_key in settings:
        factors[rule.decay_key] = decay_factor(rule.decay_kind(settings), change, lr)
    if rule.blocks is not None and settings.get(rule.blocks):
        copies = copied_blocks(entry.axes[-2], settings[rule.blocks])
        factors[rule.blocks] = Scale.of(copies or 1)
    for key, units in rule.hyper.items():
        many = isinstance(units, tuple)
        factors[key] = tuple(map(change.factor, units)) if many else change.factor(units)  # type: ignore[arg-type]
    return factors


def change_of(rule: OptimizerRule, settings: Mapping[str, Any], entry: TensorPlan) -> Change:
    """The change of units of a tensor, as the optimizer of this row sees it."""
    return change_for(rule, settings, entry.change, entry.axes)


def by_factors(
    group: NamedGroup, entries: Iterable[tuple[str, TensorPlan]]
) -> list[tuple[Factors, list[str]]]:
    """Tensors of a group, grouped by equal factors, in the order of their first appearance."""
    found: dict[Any, tuple[Factors, list[str]]] = {}
    for name, entry in entries:
        factors = factors_of(group.rule, group.settings, entry)
        # Tensors whose state is stacked must have one shape.
        shape = entry.wide_shape if group.rule.stacked else ()
        found.setdefault((shape, *sorted(factors.items())), (factors, []))[1].append(name)
    return list(found.values())


def scaled(settings: Mapping[str, Any], factors: Factors, back: bool = False) -> dict[str, Any]:
    """Settings multiplied by their factors, or divided when narrowing. Settings without a factor are unchanged."""
    return {
        key: scale_setting(value, factors[key], back) if key in factors else value
        for key, value in settings.items()
    }


def in_units(
    rule: OptimizerRule, settings: Mapping[str, Any], entry: TensorPlan, back: bool = False
) -> dict[str, Any]:
    """The settings of a group for one of its tensors."""
    return scaled(settings, factors_of(rule, settings, entry), back)


def scale_setting(value: Any, scale: Scale | tuple[Scale, ...], back: bool = False) -> Any:
    """A hyperparameter in new units. A tensor is not modified; a new one is returned."""
    if isinstance(scale, tuple):
        pairs = zip(value, scale, strict=True)
        return tuple(None if v is None else scale_setting(v, s, back) for v, s in pairs)
    if scale.is_one or value is None:
        return value
    number = float(scale**-1 if back else scale)
    if type(value) is int and (value * number).is_integer():
        return int(value * number)
    return value.detach().clone() * number if isinstance(value, Tensor) else value * number


def same_setting(one: Any, other: Any) -> bool:
    """Whether two settings are equal up to the rounding of a change of units.

    >>> same_setting((0.9, 1e-3 * 3), [0.9, 3e-3]), same_setting(1e-8, 1e-7), same_setting(True, None)
    (True, False, False)
    """
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_setting, one, other))
    if isinstance(one, (int, float, Tensor)) and isinstance(other, (int, float, Tensor)):
        return isclose(float(one), float(other), rel_tol=_CLOSE)
    return bool(one == other)


def cannot_be_exact(
    rule: OptimizerRule, settings: Mapping[str, Any], name: str, entry: TensorPlan
) -> list[Fault]:
    """Settings that no factor makes exact for this tensor: eps = 0 where gradients are zero, decay of a folded (1 + w) gain."""
    faults = []
    decay, gain = settings.get(rule.decay_key), f"a (1 + w) gain with a fold of {entry.fold}"
    folded = entry.shift and not entry.fold.is_one
    for key in _zero_floors(rule, settings) if entry.padded or entry.new else ():
        what = f"{key} = 0 on a {'new' if entry.new else 'padded'} tensor divides zero by zero"
        faults.append(Fault("optimizer.divides_zero_by_zero", name, what, f"give {key} a positive value"))
    if folded and decay:
        what = f"{gain} and weight_decay = {decay}: decay pulls w to 0, and in the wide model that is another gain"
        remedy = "put this tensor in a group with weight_decay=0, or fold the constant elsewhere"
        faults.append(Fault("optimizer.decay_of_folded_gain", name, what, remedy))
    elif folded and not rule.entrywise:
        what = f"{gain} under an optimizer that measures the size of w"
        faults.append(
            Fault("optimizer.measures_folded_gain", name, what, "use an entrywise optimizer for it")
        )
    if len(entry.sources) > 1 and not rule.entrywise:
        what = f"made of {' and '.join(entry.sources)}, and the optimizer steps whole tensors: joined, they step otherwise"
        faults.append(
            Fault("optimizer.steps_joined_tensors", name, what, "use an entrywise optimizer for them")
        )
    if entry.stack is not None and not rule.entrywise:
        what = "a stack of experts, like a matrix of the base, and the optimizer steps matrices"
        remedy = f"use an entrywise optimizer for {entry.like or entry.sources[0]}"
        faults.append(Fault("optimizer.steps_stacked_experts", name, what, remedy))
    if entry.padded and not rule.takes_padding:
        what = "padding changes a mean over the whole tensor, which the optimizer holds against a constant in its code"
        remedy = "grow by whole multiples, which needs no padding"
        faults.append(Fault("optimizer.takes_no_padding", name, what, remedy))
    if rule.of_matrices and len(entry.axes) < 2:
        what = f"it has {len(entry.axes)} dimensions, and the row of its group is for matrices"
        remedy = "give it to a group or an optimizer for vectors"
        faults.append(Fault("optimizer.takes_matrices_only", name, what, remedy))
    elif (blocks := block_count(rule, settings)) > 1 and copied_blocks(entry.axes[-2], blocks) is None:
        what = f"{rule.blocks} = {blocks} cuts its rows {entry.axes[-2]} in blocks that do not grow as wholes"
        remedy = f"set {rule.blocks} to a number of blocks that the plan copies whole"
        faults.append(Fault("optimizer.blocks_not_whole", name, what, remedy))
    return faults


LATE: Mapping[str, Any] = {"step": 1_000_000}
"""The state of a tensor long after the first steps: what is refused with it is refused because of the settings."""


def refused_by_row(
    rule: OptimizerRule, settings: Mapping[str, Any], state: Mapping[str, Any], name: str, entry: TensorPlan
) -> list[Fault]:
    """A fault if the row refuses this group and this state; a tensor in the same units is always exact."""
    if rule.refuse is None or entry.change == Change():
        return []
    reason = rule.refuse(settings, state)
    return [Fault("optimizer.refused_by_row", name, reason)] if reason else []


def _zero_floors(rule: OptimizerRule, settings: Mapping[str, Any]) -> list[str]:
    """Settings that keep an optimizer from dividing by a gradient of zero, and are zero themselves.

    These are the powers of G, by any name, and `eps`, which Muon has in other units. Of a pair, the part that has the
    units of a weight is not one.
    """
    found = []
    for key, units in rule.hyper.items():
        value = settings.get(key)
        pairs = zip(units, value or (), strict=False) if isinstance(units, tuple) else [(units, value)]
        floors = [
            own
            for part, own in pairs
            if (key == "eps" and part.weight <= 0) or (part.gradient > 0 and not part.weight)
        ]
        if key not in rule.constructor_only and any(map(_is_zero, floors)):
            found.append(key)
    return found


def _is_zero(value: Any) -> bool:
    return isinstance(value, (int, float, Tensor)) and float(value) == 0.0


def _is_number(value: Any, whole: bool) -> bool:
    """Whether a setting is a number or holds one; integers count with `whole`, flags never."""
    if isinstance(value, (list, tuple)):
        return any(_is_number(part, whole) for part in value)
    return isinstance(value, (float, Tensor)) or (
        whole and isinstance(value, int) and type(value) is not bool
    )


def without_units(key: str) -> str:
    """What to write for a setting that the registry does not know."""
    return f"if it has no units, write mu.rules.declare_neutral({key!r}); otherwise register the optimizer with it in hyper="


def unknown_settings(groups: Sequence[NamedGroup], own: Iterable[str], where: str) -> list[Fault]:
    """Hyperparameters whose units the registry does not state: the optimizer's own, and any other number.

    Names and flags that a user keeps in a group are carried as they are. So are whole numbers, unless the class lists no
    settings of its own (`own`) and they may be its settings.
    """
    listed, keys = list(own), set()
    for group in groups:
        numbers = [key for key, value in group.settings.items() if _is_number(value, whole=not listed)]
        keys |= {key for key in (*listed, *numbers) if not group.rule.known(key)}
    decay = "register the optimizer with decay=Decay.DECOUPLED, or with decay=Decay.COUPLED if its decay is added to gradients"
    remedies = {key: without_units(key) for key in sorted(keys)}
    remedies |= {group.rule.decay_key: decay for group in groups if group.rule.decay_key in keys}
    return [
        Fault(
            "optimizer.unknown_setting",
            where,
            f"its hyperparameter {key!r} has no units in the registry",
            remedy,
        )
        for key, remedy in remedies.items()
    ]
