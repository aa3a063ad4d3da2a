"""A universal checkpoint of DeepSpeed at the wide end: files and moves, weights and moments each in their units.

DeepSpeed flattens the tensors of a parameter group, so a group can have one learning rate only. The result has the groups that
units ask for, with names, scaled settings and the schedule's rates; an engine whose optimizer is built from them
(`mu.trainers.groups_for`) loads it. Knows: what the engine reads from which file. Does not know: exponents, how bytes are written.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from ..errors import Fault
from ..files.places import OutFile, Place
from ..files.strict import printable, raise_few
from ..files.torch_file import Room, lay_out
from ..files.universal import LATEST, PARAM, SCHEDULER, STEP, WEIGHT, StateFile, Universal, strange
from ..jobs.job import Move, Text
from ..optimizers.carry import carry_optimizer
from ..optimizers.named import Moment, NamedGroup, NamedOptimizer
from ..optimizers.read import read_positions
from ..plans.direction import Direction, Noises
from ..plans.names import resolve
from ..plans.plan import Plan
from ..rules.optimizers import OptimizerRule, rule_for
from .trainer_groups import named_orders, told_by

CLAIM = "this universal checkpoint cannot be widened"
_GROUPS = "param_groups"
_OPTIMIZER = "optimizer_state_dict"
_KEPT_SETTINGS = ("dynamic_loss_scale", "overflow", "zero_stage", "ds_version")
"""What the engine reads beside the groups. A loss scaler is an object, and the clip is by a norm that depends on the width:
without them the engine keeps its own."""
_SHAPES = "param_shapes"
_LEFT_OUT = {
    "module": "the engine reads weights from the folder zero",
    "optimizer": "the engine reads state from the folder zero",
    "frozen_param_shapes": "they are those of the base",
    "frozen_param_fragments": "they are those of the base",
    _SHAPES: "they are written anew",
    "lr_scheduler": "it is written anew",
}
_PER_GROUP = ("base_lrs", "_last_lr", "min_lrs")
_OTHER_PLAN = "use the plan that starts at this checkpoint's model, or plan.rename"


@dataclass(frozen=True)
class WideUniversal:
    """The wide checkpoint as files with their moves, and what a user should know."""

    files: list[OutFile]
    moves: list[Move]
    texts: list[Text]
    not_carried: dict[str, str] = field(default_factory=dict)


def weight_sources(universal: Universal, plan: Plan) -> dict[str, Place]:
    """Wide tensor -> where the base tensor that it is made from lies, for every parameter of the plan."""
    known = {*plan.sources, *plan.ties}
    folders: dict[str, str] = {}
    faults: list[Fault] = []
    for name, files in universal.parameters.items():
        found = resolve(name, known)
        if found is None:
            what = "no tensor of the plan is made from it"
            faults.append(Fault(f"zero/{printable(name)}", what, _OTHER_PLAN))
            continue
        planned = plan.planned(found)
        # The converter writes other names of a tied tensor as well, without moments.
        if planned not in folders or len(files) > len(universal.parameters[folders[planned]]):
            folders[planned] = name
    places: dict[str, Place] = {}
    for name, entry in plan.tensors.items():
        if entry.kind != "parameter":
            continue
        if entry.sources != (name,) or entry.join is not None:
            what = "a new tensor, or one with other names in the base, which this format does not get"
            faults.append(Fault(name, what, "grow the width alone"))
        elif name not in folders:
            what = "the plan needs it, and the checkpoint has no folder of this name"
            faults.append(Fault(f"zero/{name}", what, _OTHER_PLAN))
        else:
            stored = universal.parameters[folders[name]][WEIGHT]
            places[name] = _shaped(stored, entry.base_shape, faults)
    raise_few(CLAIM, faults)
    return places


def wide_universal(
    universal: Universal,
    plan: Plan,
    *,
    noise: Noises | None = None,
    optimizer: str | None = None,
    rules: Mapping[str, OptimizerRule] | None = None,
) -> WideUniversal:
    """Everything that writes the wide checkpoint. The optimizer is told from what it keeps, unless it is named."""
    weights = weight_sources(universal, plan)
    faults = [*_parallel(universal)]
    members = _members(universal, faults)
    raise_few(CLAIM, faults)
    carried = _carried(universal, plan, members, noise, optimizer, rules)
    out = WideUniversal([], [], [Text(LATEST, universal.tag)], {})
    for name, place in weights.items():
        making = plan[name].making(None if noise is None else noise.tensor(name))
        folder = place.file.split("/")[-2]
        for key, value in {WEIGHT: Moment(place, making), **carried.state.get(name, {})}.items():
            _add(out, universal, folder, key, value, name)
    _settings(out, universal, carried.groups)
    if universal.schedule is not None:
        state = _schedule(universal.schedule, len(members), carried.groups, SCHEDULER)
        out.files.append(_plain_file(SCHEDULER, state))
    for file, told in universal.models.items():
        _model(out, universal, file, told, carried.groups, plan)
    return out


def _parallel(universal: Universal) -> list[Fault]:
    """Tensor and pipeline parallelism store shapes and groups by rank, which are not put together here."""
    faults = []
    for file, told in universal.models.items():
        degree = told.get("mp_world_size", 1)
        dimensions = told.get("checkpoint_parallel_dimensions") or {}
        if degree != 1 or any(size != 1 for size in dimensions.values()):
            what = f"saved with tensor or pipeline parallelism over {degree} ranks, which is not read"
            faults.append(Fault(printable(file), what))
    return faults


def _members(universal: Universal, faults: list[Fault]) -> list[list[str]]:
    """Names of parameters, group by group."""
    told = next(iter(universal.models.values())).get(_SHAPES)
    groups = universal.settings.get(_GROUPS)
    if (
        not isinstance(groups, list)
        or not isinstance(told, list)
        or not all(isinstance(of, dict) for of in told)
    ):
        faults.append(
            Fault(
                _SHAPES,
                "groups and the names of their parameters are not there",
                "save the run with ZeRO 1, 2 or 3",
            )
        )
        return []
    if len(groups) == 1:
        return [[name for of in told for name in of]]
    if len(told) != len(groups):
        what = f"{len(told)} lists of names for {len(groups)} groups: ZeRO 3 has cut groups by its sub_group_size"
        faults.append(Fault(_SHAPES, what, "save the run with a larger sub_group_size"))
    return [list(of) for of in told]


def _carried(
    universal: Universal,
    plan: Plan,
    members: Sequence[Sequence[str]],
    noise: Noises | None,
    optimizer: str | None,
    rules: Mapping[str, OptimizerRule] | None,
) -> NamedOptimizer:
    """Groups and state in new units."""
    groups: list[dict[str, Any]] = []
    states: dict[int, dict[str, Any]] = {}
    faults: list[Fault] = []
    for settings, names in zip(universal.settings[_GROUPS], members, strict=True):
        first = len(states)
        for name in names:
            base = plan.planned(resolve(name, {*plan.sources, *plan.ties}) or name)
            if name not in universal.parameters or base not in plan.sources:
                faults.append(
                    Fault(f"zero/{printable(name)}", "a parameter of the optimizer, and it is not there")
                )
                continue
            shape = plan[plan.sources[base][0]].base_shape
            files = {k: f for k, f in universal.parameters[name].items() if k != WEIGHT}
            states[len(states)] = {
                **{key: _shaped(file, shape, faults) for key, file in files.items()},
                **({STEP: universal.steps[name]} if name in universal.steps else {}),
            }
        groups.append(
            {**{k: v for k, v in settings.items() if k != STEP}, "params": list(range(first, len(states)))}
        )
    raise_few(CLAIM, faults)
    order, _ = named_orders(groups, plan, members)
    rule = rule_for(optimizer, rules=rules) if optimizer else told_by(groups, states.values(), rules)
    held = {position: state for position, state in states.items() if state}
    named, unread = read_positions(groups, held, order, rule, universal.tag)
    carried, uncarried = carry_optimizer(named, Direction(plan, noise=noise))
    raise_few(CLAIM, unread + uncarried)
    # A group of FusedAdam counts its steps itself; every group that it is split into goes on from there.
    counted = [settings.get(STEP) for settings in universal.settings[_GROUPS]]
    own = tuple(
        replace(g, settings={**g.settings, STEP: counted[g.origin]}) if counted[g.origin] is not None else g
        for g in carried.groups
    )
    return replace(carried, groups=own)


def _shaped(stored: StateFile, shape: tuple[int, ...], faults: list[Fault]) -> Place:
    """The place of a tensor with the shape of its parameter, which files of ZeRO 3 do not tell."""
    found = stored.place.shape
    if found != shape and (stored.extras is not None or found != (prod(shape),)):
        what = f"shape {found}, {shape} at the plan's base end"
        faults.append(Fault(printable(stored.place.file), what, _OTHER_PLAN))
    return replace(stored.place, shape=shape)


def _add(out: WideUniversal, universal: Universal, folder: str, key: str, value: Any, name: str) -> None:
    """The file of one state of a parameter, with its move; it has the form of the base's."""
    file = f"{universal.tag}/zero/{folder}/{key}.pt"
    if not isinstance(value, Moment):
        out.files.append(_plain_file(file, value))
        return
    extras, shape = universal.parameters[folder][key].extras, value.making.wide_shape
    room = Room(value.source.dtype, shape if extras is not None else (prod(shape),))
    laid, tree = lay_out(file, room if extras is None else {**extras, PARAM: room})
    place: Place = tree if extras is None else tree[PARAM]
    label = name if key == WEIGHT else f"{name}: {key}"
    out.files.append(laid)
    out.moves.append(Move(label, value.making, (value.source,), replace(place, shape=shape)))


def _plain_file(name: str, tree: Any) -> OutFile:
    """A torch.save file of plain values and single numbers."""
    raw = io.BytesIO()
    torch.save(tree, raw)
    return OutFile(name, raw.tell(), ((0, raw.getvalue()),))


def _settings(out: WideUniversal, universal: Universal, groups: Sequence[NamedGroup]) -> None:
    """The file of groups. ZeRO 1 and 2 read group by group; ZeRO 3 writes what the first holds into all of them."""
    told = universal.settings
    tree: dict[str, Any] = {key: told[key] for key in _KEPT_SETTINGS if key in told}
    tree[_GROUPS] = [
        {**group.settings, "params": [at], "param_names": list(group.names)}
        for at, group in enumerate(groups)
    ]
    if _OPTIMIZER in told:
        first = groups[0].settings
        shared = {k: v for k, v in first.items() if all(g.settings.get(k) == v for g in groups)}
        state = told[_OPTIMIZER]["state"]
        steps = {at: {STEP: of[STEP]} for at, of in state.items() if STEP in of}
        tree[_OPTIMIZER] = {"state": steps, _GROUPS: [{**shared, "params": []}]}
    out.files.append(_plain_file(f"{universal.tag}/zero/optimizer_state.pt", tree))
    where = f"{universal.tag}/zero/optimizer_state.pt"
    if told.get("clip_grad"):
        out.not_carried[f"{where}: clip_grad"] = (
            f"the base was clipped at {told['clip_grad']:g}; DeepSpeed's norm is not the same at every width, "
            "and gradient_clipping of the engine's own config counts"
        )


def _model(
    out: WideUniversal,
    universal: Universal,
    file: str,
    told: Mapping[str, Any],
    groups: Sequence[NamedGroup],
    plan: Plan,
) -> None:
    """A file of model states: counters, the schedule and what the user saved, without weights."""
    where = f"{universal.tag}/{file}"
    tree: dict[str, Any] = {"module": {}, "optimizer": None}
    for key, value in told.items():
        if key in _LEFT_OUT:
            continue
        odd = next(strange(value), None)
        if odd is None:
            tree[key] = value
        else:
            out.not_carried[f"{where}: {printable(key)}"] = f"it holds {odd[1]}, and code is not run"
    tree[_SHAPES] = [{name: tuple(plan[name].wide_shape) for name in group.names} for group in groups]
    tree["lr_scheduler"] = _schedule(
        told.get("lr_scheduler"), len(universal.settings[_GROUPS]), groups, where
    )
    if told.get("buffer_names"):
        out.not_carried[f"{where}: buffers"] = "the engine does not load them from a universal checkpoint"
    out.files.append(_plain_file(where, tree))


def _schedule(state: Any, many: int, groups: Sequence[NamedGroup], where: str) -> Any:
    """The state of a scheduler that multiplies rates, for the wide groups; others are refused."""
    if not isinstance(state, dict):
        return state
    faults = [Fault(f"{where}: lr_scheduler.{at}", f"it is {what}") for at, what in strange(state)]
    found: dict[str, Any] = {}
    for key, value in state.items():
        listed = isinstance(value, list) and len(value) == many
        if key in _PER_GROUP and listed:
            found[key] = [value[group.origin] * group.lr_factor for group in groups]
        elif key == "lr_lambdas" and listed:
            found[key] = [value[group.origin] for group in groups]
        elif (listed and any(isinstance(one, float) for one in value)) or (key == "eta_min" and value):
            what = f"{key} = {value} is an absolute learning rate, and groups have rates of their own now"
            faults.append(
                Fault(
                    f"{where}: lr_scheduler",
                    what,
                    "use a LambdaLR that returns the ratio to the initial learning rate",
                )
            )
        else:
            found[key] = value
    raise_few(CLAIM, faults)
    return found
