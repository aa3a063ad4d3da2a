"""An optimizer's groups and state as named data, carried by their units.

Works on plain mappings, so that live optimizers and saved state dicts share it. Reads the registry;
states no exponent. Unknown state, and settings that cannot be exact, are collected as faults.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import Fault
from ..plans.plan import TensorPlan
from ..rules.axes import Axis
from ..rules.optimizers import OptimizerRule, decay_factor, lr_factor
from ..rules.scale import Scale
from ..rules.units import Change
from ..tensors.making import Making
from .direction import Direction

_NAMES = ("params", "param_names")


@dataclass(frozen=True)
class NamedGroup:
    """A parameter group with names in place of parameters."""

    names: tuple[str, ...]
    settings: Mapping[str, Any]
    origin: int = 0
    """The index of the group this one was split from."""
    lr_factor: float = 1.0


def carry_groups(
    rule: OptimizerRule, groups: Sequence[NamedGroup], direction: Direction
) -> tuple[list[NamedGroup], list[Fault]]:
    """Split groups so that each holds tensors with equal factors, and scale their settings."""
    faults: list[Fault] = []
    carried: list[NamedGroup] = []
    for origin, group in enumerate(groups):
        split: dict[tuple[tuple[str, Any], ...], list[str]] = {}
        for name in group.names:
            for end_name in direction.reached.get(name, ()):
                planned, entry = direction.planned(end_name)
                faults += cannot_be_exact(rule, group.settings, planned, entry)
                factors = factors_of(rule, group.settings, entry)
                split.setdefault(tuple(sorted(factors.items())), []).append(end_name)
        for key, names in split.items():
            factors = dict(key)
            settings = {k: copy.deepcopy(v) for k, v in group.settings.items() if k not in _NAMES}
            settings.setdefault("lr_factor", 1.0)
            for setting, scale in factors.items():
                if setting in settings:
                    settings[setting] = scale_setting(settings[setting], scale, direction.back)
            carried.append(NamedGroup(tuple(names), settings, origin, direction.number(factors["lr"])))
    return carried, faults


def factors_of(rule: OptimizerRule, settings: Mapping[str, Any], entry: TensorPlan) -> dict[str, Any]:
    """What each setting of a group is multiplied by for one tensor."""
    change = entry.change
    lr = lr_factor(rule, settings, change, (entry.base_shape, entry.wide_shape))
    factors: dict[str, Any] = {"lr": lr, "initial_lr": lr, "lr_factor": lr}
    if "weight_decay" in settings:
        factors["weight_decay"] = decay_factor(rule.decay_kind(settings), change, lr)
    for key, units in rule.hyper.items():
        many = isinstance(units, tuple)
        factors[key] = tuple(map(change.factor, units)) if many else change.factor(units)  # type: ignore[arg-type]
    return factors


def scale_setting(value: Any, scale: Scale | tuple[Scale, ...], back: bool = False) -> Any:
    """A hyperparameter in new units; a tensor is replaced, never changed."""
    if isinstance(scale, tuple):
        pairs = zip(value, scale, strict=True)
        return tuple(None if v is None else scale_setting(v, s, back) for v, s in pairs)
    if scale.is_one or value is None:
        return value
    number = float(scale**-1 if back else scale)
    return value.detach().clone() * number if isinstance(value, Tensor) else value * number


def cannot_be_exact(
    rule: OptimizerRule, settings: Mapping[str, Any], name: str, entry: TensorPlan
) -> list[Fault]:
    """Settings that no factor carries to this tensor: eps of zero beside pads, decay of a folded (1 + w) gain."""
    faults = []
    eps = settings.get("eps")
    if entry.padded and "eps" in rule.hyper and isinstance(eps, float) and eps == 0.0:
        faults.append(
            Fault(name, "eps = 0 on a padded tensor divides zero by zero", "give eps a positive value")
        )
    if entry.shift and not entry.fold.is_one:
        if settings.get("weight_decay"):
            faults.append(
                Fault(
                    name,
                    f"a (1 + w) gain with a fold of {entry.fold} and weight_decay = {settings['weight_decay']}: decay pulls w to 0, "
                    "and in the wide model that is another gain",
                    "put this tensor in a group with weight_decay=0, or fold the constant elsewhere",
                )
            )
        elif not rule.entrywise:
            faults.append(
                Fault(
                    name,
                    f"a (1 + w) gain with a fold of {entry.fold} under an optimizer that measures the size of w",
                    "use an entrywise optimizer for it",
                )
            )
    return faults


def unknown_settings(
    rule: OptimizerRule, groups: Iterable[Mapping[str, Any]], own: Iterable[str], where: str
) -> list[Fault]:
    """Hyperparameters whose units the registry does not state: the optimizer's own, and any other number.

    Names and flags that a user keeps in a group are carried as they are.
    """
    keys = {key for key in own if not rule.known(key)}
    for group in groups:
        keys |= {k for k, v in group.items() if isinstance(v, (float, Tensor)) and not rule.known(k)}
    return [
        Fault(
            where,
            f"its hyperparameter {key!r} has no units in the registry",
            "register the optimizer with this key in hyper= or neutral=",
        )
        for key in sorted(keys)
    ]


@dataclass(frozen=True)
class Moment:
    """A state tensor that is not made yet: what stands for it at the start, and how the one at the end is made."""

    source: Any
    """A tensor, or anything else with a shape, such as the place of a tensor in a file."""
    making: Making


def state_making(rule: OptimizerRule, key: str, entry: TensorPlan) -> Making | None:
    """How a state tensor of one parameter follows its units; None when the registry does not state them."""
    known = rule.state.get(key)
    if known is None:
        return None
    axes, scale = list(entry.axes), entry.change.factor(known.units)
    if known.mean_over is not None:
        averaged = axes[known.mean_over]
        axes[known.mean_over] = Axis.fixed(1)
        scale = scale * Scale.of(averaged.fill)
    return Making(tuple(axes), scale)


def carry_state(
    rule: OptimizerRule,
    settings: Mapping[str, Any],
    state: Mapping[str, Any],
    end_name: str,
    direction: Direction,
    trains: bool = True,
) -> tuple[dict[str, Any], list[Fault]]:
    """The state of one parameter in its new units: numbers and counters as copies, tensors as a `Moment` each."""
    planned, entry = direction.planned(end_name)
    faults: list[Fault] = []
    changes = trains and entry.change != Change()  # a copy in the same units is always exact
    if changes and rule.refuse is not None and (reason := rule.refuse(settings, state)):
        faults.append(Fault(planned, reason))
    carried: dict[str, Any] = {}
    for key, value in state.items():
        making = state_making(rule, key, entry)
        if making is None:
            faults.append(
                Fault(
                    planned,
                    f"its state has {key!r}, whose units the registry does not state",
                    "register the optimizer with this key in state=",
                )
            )
            continue
        shape, scale = tuple(getattr(value, "shape", ())), making.scale
        expected = making.wide_shape if direction.back else making.base_shape
        if shape and shape != expected:
            faults.append(
                Fault(
                    planned,
                    f"its state {key!r} has shape {shape}, expected {expected}",
                    "pass the state of this model's own optimizer",
                )
            )
        elif shape:
            carried[key] = Moment(value, making)
        elif isinstance(value, Tensor):
            carried[key] = (
                value.detach().clone() if scale.is_one else value.detach() * direction.number(scale)
            )
        else:
            carried[key] = value if value is None or scale.is_one else value * direction.number(scale)
    return carried, faults


def made_state(carried: Mapping[str, Any], direction: Direction) -> dict[str, Any]:
    """What `carry_state` returned, with every moment made from its tensor; nothing is shared."""
    return {
        key: direction.made(value.source, value.making) if isinstance(value, Moment) else value
        for key, value in carried.items()
    }
