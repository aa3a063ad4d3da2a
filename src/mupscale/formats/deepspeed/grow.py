"""A universal checkpoint of DeepSpeed at the wide end: files and moves, weights and moments each in their units.

DeepSpeed flattens the tensors of a parameter group, so a group can have one learning rate only. The result has the groups that
units ask for, with names, scaled settings and the schedule's rates; an engine whose optimizer is built from them
(`mu.trainers.groups_for`) loads it. Knows: what the engine reads from which file. Does not know: exponents, how bytes are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ...errors import Fault
from ...files.elsewhere import UNIVERSAL_LATEST, UNIVERSAL_SETTINGS
from ...files.pickles.torch_file import Room, lay_out
from ...files.pickles.torch_settings import strange
from ...files.places import Place
from ...files.strict import printable, raise_few
from ...jobs.job import Move, Text
from ...models.names import resolve
from ...noise.kinds import Noise
from ...optimizers.named import Moment, NamedGroup, NamedOptimizer
from ...optimizers.schedulers import RATES_OF_GROUPS
from ...plans.ends import expect_exact
from ...plans.plan import Plan
from ...rules.optimizer_rule import OptimizerRule
from ...storage.location import Location
from ..common import NEW_TENSOR, OTHER_PLAN, Growing, NamedState, WideFiles, plain_file, write_grown
from .universal import PARAM, SCHEDULER, STEP, WEIGHT, StateFile, Universal, read_universal

CLAIM = "this universal checkpoint cannot be widened"
_GROUPS = "param_groups"
_OPTIMIZER = "optimizer_state_dict"
_KEPT_SETTINGS = ("dynamic_loss_scale", "overflow", "zero_stage", "ds_version")
"""What the engine reads besides the groups. A loss scaler is an object, and the clip is by a norm that depends on the width:
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
_COUNTED = "last_batch_iteration"
_MULTIPLY = "use a LambdaLR that returns the ratio to the initial learning rate"


def grow_universal_checkpoint(
    base: Location | str,
    out: Location | str,
    *,
    plan: Plan,
    noise: Noise | None = None,
    seed: int = 0,
    optimizer_class: str | None = None,
    prove: bool = True,
    rules: Mapping[str, OptimizerRule] | None = None,
) -> dict[str, str]:
    """Write the universal checkpoint from which a wide DeepSpeed engine continues.

    Weights, first and second moments are grown tensor by tensor, each in its units, in the groups that units ask for: build the
    wide optimizer from `groups_for(model, out)`, and load with `load_universal_(engine, out)`. A call that was interrupted is
    resumed by the same call.

    Args:
        base: The directory that holds `latest_universal`.
        out: The directory to write.
        plan: The plan from the base to the wide model.
        noise: What parts copies or wakes new units. Without it the result trains exactly like the base.
        seed: The number on which the noise depends.
        optimizer_class: The class of the optimizer, "torch.optim.AdamW", where what it keeps does not tell.
        prove: False grows by a plan that nothing has proved.
        rules: Rows to use in place of the registry of optimizers, by full class name.

    Returns:
        What was not carried, with the reason of each.

    Raises:
        MupscaleError: If it is no universal checkpoint, the plan is not proved, or does not fit it.

    >>> import tempfile, torch, mupscale as mu
    >>> plan = mu.plans.plan_between(lambda n: torch.nn.Linear(n, n), 2, 4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     try:
    ...         grow_universal_checkpoint(folder, f"{folder}/wide", plan=plan)
    ...     except mu.MupscaleError as error:
    ...         print(error.code)
    deepspeed.not_universal
    """
    expect_exact(plan, prove, noise)
    universal = read_universal(base)
    places = weight_sources(universal, plan)
    return write_grown(
        universal.path,
        out,
        Growing(plan, optimizer=optimizer_class, rules=rules),
        noise,
        seed,
        weights=[Move(name, plan[name].making(), (place,), place) for name, place in places.items()],
        make=lambda growing: wide_universal(universal, growing),
    )


def weight_sources(universal: Universal, plan: Plan) -> dict[str, Place]:
    """Wide tensor -> where the base tensor that it is made from lies, for every parameter of the plan."""
    known = {*plan.sources, *plan.ties}
    folders: dict[str, str] = {}
    faults: list[Fault] = []
    for name, files in universal.parameters.items():
        found = resolve(name, known)
        if found is None:
            what = "no tensor of the plan is made from it"
            faults.append(Fault("checkpoint.tensor_not_in_plan", f"zero/{printable(name)}", what, OTHER_PLAN))
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
            faults.append(Fault("checkpoint.grows_in_width_only", name, NEW_TENSOR, "grow the width alone"))
        elif name not in folders:
            what = "the plan needs it, and the checkpoint has no folder of this name"
            faults.append(Fault("checkpoint.tensor_missing", f"zero/{name}", what, OTHER_PLAN))
        else:
            stored = universal.parameters[folders[name]][WEIGHT]
            places[name] = _shaped(stored, entry.base_shape, faults)
    raise_few(CLAIM, faults)
    return places


def wide_universal(universal: Universal, growing: Growing) -> WideFiles:
    """Everything that writes the wide checkpoint."""
    plan = growing.plan
    weights = weight_sources(universal, plan)
    faults = _refused(universal)
    members = _members(universal, faults)
    raise_few(CLAIM, faults)
    carried = _carried(universal, growing, members)
    out = WideFiles(texts=[Text(UNIVERSAL_LATEST, universal.tag)])
    for name, place in weights.items():
        making = growing.making(name)
        folder = place.file.split("/")[-2]
        for key, value in {WEIGHT: Moment(place, making), **carried.state.get(name, {})}.items():
            _add(out, universal, folder, key, value, name)
    _settings(out, universal, carried.groups)
    if universal.schedule is not None:
        state = _schedule(universal.schedule, len(members), carried.groups, SCHEDULER)
        out.files.append(plain_file(SCHEDULER, state))
    for file, model in universal.models.items():
        _model(out, universal, file, model, carried.groups, plan)
    return out


def _refused(universal: Universal) -> list[Fault]:
    """What is not read: engines without ZeRO, settings of another form, and ranks that have cut tensors."""
    settings, where = universal.settings, f"zero/{UNIVERSAL_SETTINGS}"
    faults = []
    if settings.get("zero_stage") not in (1, 2, 3):
        what = f"zero_stage = {printable(str(settings.get('zero_stage')))}: saved by an engine without ZeRO"
        faults.append(Fault("deepspeed.without_zero", where, what, "save the run with ZeRO 1, 2 or 3"))
    groups, inner = settings.get(_GROUPS), settings.get(_OPTIMIZER, {"state": {}})
    plain = isinstance(settings.get("clip_grad") or 0.0, int | float)
    if not plain or not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        faults.append(
            Fault(
                "deepspeed.settings_malformed", where, f"{_GROUPS} and clip_grad are not those of an engine"
            )
        )
    state = inner.get("state") if isinstance(inner, dict) else None
    if not isinstance(state, dict) or not all(isinstance(of, dict) for of in state.values()):
        faults.append(
            Fault(
                "deepspeed.optimizer_malformed", where, f"{_OPTIMIZER} is not the state dict of an optimizer"
            )
        )
    for file, model in universal.models.items():
        degree, sizes = model.get("mp_world_size", 1), model.get("checkpoint_parallel_dimensions") or {}
        if degree != 1 or not isinstance(sizes, dict) or any(size != 1 for size in sizes.values()):
            what = f"saved with tensor or pipeline parallelism over {degree} ranks, which is not read"
            faults.append(Fault("deepspeed.saved_in_parallel", printable(file), what))
    return faults


def _members(universal: Universal, faults: list[Fault]) -> list[list[str]]:
    """Names of parameters, group by group."""
    shapes: Any = next(iter(universal.models.values())).get(_SHAPES)
    groups: Any = universal.settings.get(_GROUPS)
    if not isinstance(shapes, list) or not all(
        isinstance(of, dict) and all(isinstance(name, str) for name in of) for of in shapes
    ):
        what = "the names of the parameters in each group are not there"
        faults.append(Fault("deepspeed.names_missing", _SHAPES, what, "save the run with ZeRO 1, 2 or 3"))
    if faults:
        return []
    if len(groups) == 1:
        return [[name for of in shapes for name in of]]
    if len(shapes) != len(groups):
        what = f"{len(shapes)} lists of names for {len(groups)} groups: ZeRO 3 has cut groups by its sub_group_size"
        faults.append(
            Fault("deepspeed.groups_were_cut", _SHAPES, what, "save the run with a larger sub_group_size")
        )
    return [list(of) for of in shapes]


def _carried(universal: Universal, growing: Growing, members: Sequence[Sequence[str]]) -> NamedOptimizer:
    """Groups and state in new units."""
    plan = growing.plan
    states: dict[str, dict[str, Any]] = {}
    faults: list[Fault] = []
    for name in (name for names in members for name in names):
        base = plan.planned(resolve(name, {*plan.sources, *plan.ties}) or name)
        if name not in universal.parameters or base not in plan.sources:
            faults.append(
                Fault(
                    "deepspeed.parameter_missing",
                    f"zero/{printable(name)}",
                    "a parameter of the optimizer, and it is not there",
                )
            )
            continue
        shape = plan[plan.sources[base][0]].base_shape
        files = {k: f for k, f in universal.parameters[name].items() if k != WEIGHT}
        states[name] = {
            **{key: _shaped(file, shape, faults) for key, file in files.items()},
            **({STEP: universal.steps[name]} if name in universal.steps else {}),
        }
    raise_few(CLAIM, faults)
    groups = universal.settings[_GROUPS]
    settings = [{key: value for key, value in group.items() if key != STEP} for group in groups]
    named = NamedState(settings, members, states, universal.tag)
    carried = named.carried(growing, CLAIM)
    # A group of FusedAdam counts its steps itself; every group that it is split into continues from there.
    own = tuple(
        replace(g, settings={**g.settings, STEP: groups[g.origin][STEP]}) if STEP in groups[g.origin] else g
        for g in carried.groups
    )
    return replace(carried, groups=own)


def _shaped(stored: StateFile, shape: tuple[int, ...], faults: list[Fault]) -> Place:
    """The place of a tensor with the shape of its parameter, which files of ZeRO 3 do not hold."""
    found = stored.place.shape
    if found != shape and (stored.extras is not None or found != (prod(shape),)):
        what = f"shape {found}, {shape} at the plan's base end"
        faults.append(Fault("checkpoint.shape_differs", printable(stored.place.file), what, OTHER_PLAN))
    return replace(stored.place, shape=shape)


def _add(out: WideFiles, universal: Universal, folder: str, key: str, value: Any, name: str) -> None:
    """The file of one state of a parameter, with its move; it has the form of the base's."""
    file = f"{universal.tag}/zero/{folder}/{key}.pt"
    if not isinstance(value, Moment):
        out.files.append(plain_file(file, value))
        return
    extras, shape = universal.parameters[folder][key].extras, value.making.wide_shape
    room = Room(value.source.dtype, shape if extras is not None else (prod(shape),))
    laid, tree = lay_out(file, room if extras is None else {**extras, PARAM: room})
    place: Place = tree if extras is None else tree[PARAM]
    label = name if key == WEIGHT else f"{name}: {key}"
    out.files.append(laid)
    out.moves.append(Move(label, value.making, (value.source,), replace(place, shape=shape)))


def _settings(out: WideFiles, universal: Universal, groups: Sequence[NamedGroup]) -> None:
    """The file of groups. ZeRO 1 and 2 read group by group; ZeRO 3 writes what the first holds into all of them."""
    settings = universal.settings
    tree: dict[str, Any] = {key: settings[key] for key in _KEPT_SETTINGS if key in settings}
    tree[_GROUPS] = [
        {**group.settings, "params": [at], "param_names": list(group.names)}
        for at, group in enumerate(groups)
    ]
    if _OPTIMIZER in settings:
        first = groups[0].settings
        shared = {k: v for k, v in first.items() if all(g.settings.get(k) == v for g in groups)}
        state = settings[_OPTIMIZER]["state"]
        steps = {at: {STEP: of[STEP]} for at, of in state.items() if STEP in of}
        tree[_OPTIMIZER] = {"state": steps, _GROUPS: [{**shared, "params": []}]}
    out.files.append(plain_file(f"{universal.tag}/zero/optimizer_state.pt", tree))
    where = f"{universal.tag}/zero/optimizer_state.pt"
    if settings.get("clip_grad"):
        out.not_carried[f"{where}: clip_grad"] = (
            f"the base was clipped at {settings['clip_grad']:g}; DeepSpeed's norm is not the same at every width, "
            "and gradient_clipping of the engine's own config counts"
        )


def _model(
    out: WideFiles,
    universal: Universal,
    file: str,
    model: Mapping[str, Any],
    groups: Sequence[NamedGroup],
    plan: Plan,
) -> None:
    """A file of model states: counters, the schedule and what the user saved, without weights."""
    where = f"{universal.tag}/{file}"
    tree: dict[str, Any] = {"module": {}, "optimizer": None}
    tree |= out.plain({key: value for key, value in model.items() if key not in _LEFT_OUT}, where)
    tree[_SHAPES] = [{name: tuple(plan[name].wide_shape) for name in group.names} for group in groups]
    tree["lr_scheduler"] = _schedule(
        model.get("lr_scheduler"), len(universal.settings[_GROUPS]), groups, where
    )
    if model.get("buffer_names"):
        out.not_carried[f"{where}: buffers"] = "the engine does not load them from a universal checkpoint"
    out.files.append(plain_file(where, tree))


def _schedule(state: Any, many: int, groups: Sequence[NamedGroup], where: str) -> Any:
    """The state of a scheduler that multiplies rates, for the wide groups; others are refused."""
    if not isinstance(state, dict):
        return state
    faults = [
        Fault("schedule.holds_an_object", f"{where}: lr_scheduler.{at}", f"it is {what}")
        for at, what in strange(state)
    ]
    if _COUNTED in state:
        what = f"it has {_COUNTED}: a scheduler of DeepSpeed, which writes absolute learning rates into every group"
        faults.append(Fault("deepspeed.own_scheduler", f"{where}: lr_scheduler", what, _MULTIPLY))
    found: dict[str, Any] = {}
    for key, value in state.items():
        listed = isinstance(value, list) and len(value) == many
        if key in RATES_OF_GROUPS and listed and all(isinstance(rate, float | int) for rate in value):
            found[key] = [value[group.origin] * group.growth_factor for group in groups]
        elif key == "lr_lambdas" and listed:
            found[key] = [value[group.origin] for group in groups]
        elif (listed and any(isinstance(one, float) for one in value)) or (key == "eta_min" and value):
            what = f"{key} = {value} is an absolute learning rate, and groups have rates of their own now"
            faults.append(Fault("schedule.absolute_rate", f"{where}: lr_scheduler", what, _MULTIPLY))
        else:
            found[key] = value
    raise_few(CLAIM, faults)
    return found
