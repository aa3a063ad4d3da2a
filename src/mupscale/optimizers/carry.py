"""The one change of units of an optimizer: its groups and its state, to the other end of a plan.

Reads the registry; states no exponent and makes no tensor. Unknown state, and settings that cannot be exact, are
returned as faults.

AdamW on two layers whose hidden width doubles. The gradient of the first layer halves, so its moments and its eps do; the
second layer reads twice as many units, so its rate halves:

>>> import torch
>>> from torch import nn
>>> from mupscale.optimizers.read import read_live
>>> from mupscale.plans import plan_between
>>> from mupscale.rules.optimizers import rule_for
>>> make = lambda n: nn.Sequential(nn.Linear(3, n, bias=False), nn.Linear(n, 1, bias=False))
>>> model, direction = make(2), Direction(plan_between(make, 2, 4))
>>> adamw = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-8)
>>> _ = model(torch.ones(1, 3)).backward(), adamw.step()
>>> start, _ = read_live(adamw, model, direction, rule_for(type(adamw)))
>>> carried, faults = carry_optimizer(start, direction)
>>> [(group.names, group.settings["lr"], group.settings["eps"]) for group in carried.groups]
[(('0.weight',), 0.1, 5e-09), (('1.weight',), 0.05, 1e-08)]
>>> [str(carried.state[name]["exp_avg_sq"].making.scale) for name in ("0.weight", "1.weight")]
['1/4', '1']
>>> made(carried, direction).state["1.weight"]["exp_avg_sq"].shape
torch.Size([1, 4])
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..errors import Fault, MupscaleError, raise_faults
from ..plans.block_order import in_wide_order
from ..plans.direction import Direction
from ..plans.tensor_plan import TensorPlan
from ..rules.axes import Axis
from ..rules.matrices import short_dimension
from ..rules.scale import Scale
from ..tensors.making import Making
from ..tensors.noise import TensorNoise
from .joined import Joined, sources_of, state_of, torn
from .named import Moment, NamedGroup, NamedOptimizer
from .quantised import Coded, folded, rounding_warning
from .settings import by_factors, cannot_be_exact, change_of, refused_by_row, scale_setting, scaled

_CLAIM = "this state cannot be carried"
_SAME_SIDE = (
    "grow rows and columns so that the same one stays shorter, or grow the weights alone with optimizers=[]"
)


def carry_optimizer(
    start: NamedOptimizer, direction: Direction, *, split: bool = True
) -> tuple[NamedOptimizer, list[Fault]]:
    """An optimizer at the other end of the plan, with a `Moment` per state tensor, and faults for the rest.

    With `split`, each group holds tensors with equal factors, and its settings are scaled by them. Without it, groups
    and settings are unchanged, for a checkpoint whose trainer steps in units (`training/units/stepping.py`).
    """
    raise_faults("tensors of this optimizer cannot be joined", torn(start, direction))
    there = renamed(start, direction)
    groups = carry_groups(there.groups, direction) if split else there.groups
    state, faults = carry_states(there.groups, there.state, direction, there.idle)
    return replace(there, groups=groups, state=state), _not_exact(there.groups, direction) + faults


def renamed(start: NamedOptimizer, direction: Direction) -> NamedOptimizer:
    """The same groups, settings and state under the names of the tensors at the end; no unit has changed yet."""
    groups = tuple(replace(group, names=_ends_of(group.names, direction)) for group in start.groups)
    ends = {end: direction.origin(end) or end for group in groups for end in group.names}
    new = {end for end in ends if direction.planned(end)[1].new}
    held = {end: start.state.get(name) for end, name in ends.items()}
    if not direction.back:
        held = {end: state_of(direction.planned(end)[1], start.state) for end in ends}
    state = {end: of for end, of in held.items() if of is not None and end not in new}
    frozen = {end for end in ends if not direction.planned(end)[1].trainable}
    idle = frozen | {end for end, name in ends.items() if name in start.idle}
    return NamedOptimizer(start.label, groups, state, idle)


def _ends_of(names: Sequence[str], direction: Direction) -> tuple[str, ...]:
    """What the tensors of a group become at the end, and the new tensors that join it, in the order of the model there."""
    reached, joining = direction.reached, direction.joining
    made = [end for name in names for end in (*reached.get(name, ()), *joining.get(name, ()))]
    ends = list(dict.fromkeys(made))
    if direction.back or not joining:
        return tuple(ends)
    return tuple(in_wide_order(ends, [name for name in names if name in reached], direction.plan))


def carry_groups(groups: Iterable[NamedGroup], direction: Direction) -> tuple[NamedGroup, ...]:
    """Groups with names at the end, split so that each holds tensors with equal factors, and scaled by them.

    One group of AdamW with a matrix whose two dimensions double and its bias becomes two groups: lr / 2 for the matrix,
    lr for the bias.
    """
    carried: list[NamedGroup] = []
    for group in groups:
        for factors, names in by_factors(group, ((end, direction.planned(end)[1]) for end in group.names)):
            own = copy.deepcopy(dict(group.settings))
            own.setdefault("lr_factor", 1.0)
            settings = scaled(own, factors, direction.back)
            rate = direction.number(factors["lr"])
            carried.append(NamedGroup(tuple(names), settings, group.rule, group.origin, rate))
    return tuple(carried)


def _not_exact(groups: Iterable[NamedGroup], direction: Direction) -> list[Fault]:
    members = ((group, *direction.planned(end)) for group in groups for end in group.names)
    return [fault for g, name, entry in members for fault in cannot_be_exact(g.rule, g.settings, name, entry)]


def carry_states(
    groups: Iterable[NamedGroup],
    state: Mapping[str, Mapping[str, Any]],
    direction: Direction,
    idle: Set[str],
) -> tuple[dict[str, dict[str, Any]], list[Fault]]:
    """The state of every tensor in new units; all names are those at the end, all values those at the start."""
    carried: dict[str, dict[str, Any]] = {}
    faults: list[Fault] = []
    for group in groups:
        for name in group.names:
            new, more = carry_state(group, state.get(name, {}), name, direction, name not in idle)
            faults += more
            if name in state:
                carried[name] = new
    return carried, faults


def _state_making(
    group: NamedGroup, key: str, name: str, entry: TensorPlan, noise: TensorNoise | None
) -> Making:
    """How a state tensor of one parameter follows its units; raises where it cannot.

    A copy of the weight is made as the weight itself, with its noise. Moments get none.
    """
    known = group.rule.state.get(key)
    if known is None:
        what = f"its state has {key!r}, whose units the registry does not state"
        raise MupscaleError(
            _CLAIM, [Fault("state.unknown_key", name, what, "register the optimizer with this key in state=")]
        )
    if known.copy:
        return entry.making(noise)
    axes, scale = list(entry.axes), change_of(group.rule, group.settings, entry).factor(known.units)
    if known.mean_over is not None and len(axes) > 1:
        mean_over = known.mean_over
        if mean_over == "short":
            mean_over = short_dimension(entry.base_shape)
            if short_dimension(entry.wide_shape) != mean_over:
                what = f"its state {key!r} averages over the shorter dimension, which is another one in the wide model"
                raise MupscaleError(_CLAIM, [Fault("state.other_shorter_side", name, what, _SAME_SIDE)])
        scale = scale * Scale.of(axes[mean_over].filled)
        # Of the last dimension, -1, the slice must end at None: -1 + 1 is 0.
        axes[mean_over : mean_over + 1 or None] = [] if known.dropped else [Axis.fixed(1)]
    stack = (Axis.fixed(known.stack),) if known.stack else ()
    return Making((*stack, *axes), scale)


def carry_state(
    group: NamedGroup, state: Mapping[str, Any], end_name: str, direction: Direction, trains: bool
) -> tuple[dict[str, Any], list[Fault]]:
    """The state of one parameter in its new units: numbers and counters as copies, tensors as a `Moment` each."""
    planned, entry = direction.planned(end_name)
    state = folded(state)
    faults = refused_by_row(group.rule, group.settings, state, planned, entry) if trains else []
    carried: dict[str, Any] = {}
    noise = direction.noise.tensor(planned) if direction.noise is not None else None
    for key, value in state.items():
        try:
            making = _state_making(group, key, planned, entry, noise)
            carried |= _moved(key, value, making, planned, entry, direction)
        except MupscaleError as error:
            faults += error.faults
    return carried, faults


def _moved(
    key: str, value: Any, making: Making, name: str, entry: TensorPlan, direction: Direction
) -> dict[str, Any]:
    """One value of the state of a parameter in its new units, under its keys; raises if it does not have the form of one."""
    shape = tuple(getattr(value, "shape", ()))
    expected = making.wide_shape if direction.back else making.base_shape
    if isinstance(value, Joined):
        raise_faults(_CLAIM, value.faults(expected, name, key))
        value = value if shape else value.number()
        making = replace(making, join=entry.join)
    if not shape:
        number = value.detach().clone() if isinstance(value, Tensor) else value
        return {key: scale_setting(number, making.scale, direction.back)}
    if shape != expected:
        what = f"its state {key!r} has shape {shape}, expected {expected}"
        raise MupscaleError(
            _CLAIM, [Fault("state.other_shape", name, what, "pass the state of this model's own optimizer")]
        )
    if isinstance(value, Coded) and not isinstance(value.codes, Tensor):
        return {part: Moment(*move) for part, move in value.moves(making, name).items()}
    return {key: Moment(value, making)}


def made(carried: NamedOptimizer, direction: Direction) -> NamedOptimizer:
    """A carried optimizer with every moment made from its tensor; nothing is shared.

    State that is quantised is rounded again where its blocks cannot be kept: a warning says so, and `rounded` by how much.
    """
    state: dict[str, dict[str, Any]] = {name: {} for name in carried.state}
    rounded: dict[str, float] = {}
    for name, key, value in ((name, *pair) for name, of in carried.state.items() for pair in of.items()):
        if isinstance(value, Moment) and isinstance(value.source, Coded):
            values, scales = (direction.made(part, value.making) for part in value.source.read())
            coded, rounded[f"{name}: {key}"] = value.source.write(values, scales)
            state[name] |= coded
        elif isinstance(value, Moment):
            state[name][key] = direction.made(value.making.source(sources_of(value.source)), value.making)
        else:
            state[name][key] = value
    if rounded:
        warnings.warn(rounding_warning(carried.label, rounded), stacklevel=3)
    return replace(carried, state=state, rounded=rounded)
