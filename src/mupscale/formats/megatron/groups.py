"""Parameter groups of Megatron: which tensors are in them, and what its optimizer and its schedule read from them.

Megatron stores groups without their members, and finds a group of a checkpoint by four of its settings. Every wide group is
distinguished by one of them, `is_decoupled_lr`, that nothing is computed from. Its rates are in `max_lr` and `min_lr`, which
the schedule reads, its decay in `wd_mult`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...errors import Fault
from ...files.strict import printable, raise_few
from ...optimizers.named import NamedGroup
from ...optimizers.read import Names
from ...optimizers.settings import factors_of
from ...plans.plan import Plan
from ...storage.location import Location
from .fsdp_dtensor import FsdpDtensor, is_fsdp_dtensor, read_fsdp_dtensor
from .parts import CLAIM
from .torch_dist import read_torch_dist

OPTIMIZER, GROUPS, NAMES = "optimizer", "param_groups", "param_names"
_DEEPEST = 2
"""How many optimizers may lie inside of one another: one that keeps float32 copies of the weights holds the one that steps."""
_ADDED = ("default_config", "end_wd", "is_decoupled_lr", "max_lr", "min_lr", "start_wd", "wd_mult")
OVERRIDDEN = (*_ADDED, "eps")
"""What a group of the wide optimizer is given."""
TAKEN = (
    "they do not name their tensors; taken as Megatron groups them by default: biases and vectors where wd_mult is 0, the rest "
    "elsewhere; with apply_wd_to_qk_layernorm or rules of your own, pass names="
)
_WARMING = "the base is in its warm-up, and the rate that it starts from is not stored; it must be 0"
_MARK = "mupscale "
"""What `is_decoupled_lr` of a grown group begins with."""
_RATES = ("max_lr", "min_lr")
_OWN = (*_ADDED, NAMES, "lr_mult", "is_expert_parallel", "step")
"""What Megatron adds to the settings of an optimizer."""


def stored_groups(path: Location | str) -> list[dict[str, Any]]:
    """The groups of a checkpoint with the names of their tensors, where they have them; none if they have another form."""
    if is_fsdp_dtensor(path):
        groups, members = groups_of(read_fsdp_dtensor(path))
        return [{**group, NAMES: names} for group, names in zip(groups, members, strict=True)]
    found = groups_in(read_torch_dist(path).common.get(OPTIMIZER))
    return found if isinstance(found, list) and all(isinstance(each, dict) for each in found) else []


def groups_in(optimizer: Any) -> Any:
    """The groups of an optimizer as `common.pt` holds it, or of the one inside of it; None if there are none.

    >>> groups_in({"param_groups": [{"lr": 0.1}]}) == groups_in({"optimizer": {"param_groups": [{"lr": 0.1}]}})
    True
    """
    inner = optimizer
    for _ in range(_DEEPEST):
        if isinstance(inner, dict) and GROUPS not in inner:
            inner = inner.get(OPTIMIZER)
    return inner.get(GROUPS) if isinstance(inner, dict) else None


def groups_of(checkpoint: FsdpDtensor) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """The groups that tensors say they are in, and the names of the tensors of each."""
    groups: list[dict[str, Any]] = []
    members: list[list[str]] = []
    for name, settings in checkpoint.settings().items():
        if odd := [key for key, value in settings.items() if isinstance(value, Tensor)]:
            raise_few(
                CLAIM,
                [
                    Fault(
                        "state.setting_is_tensor",
                        printable(name),
                        f"its {odd[0]} is a tensor, expected a plain value",
                    )
                ],
            )
        if settings not in groups:
            groups.append(settings)
            members.append([])
        members[groups.index(settings)].append(name)
    return groups, members


def with_rates(group: Mapping[str, Any], schedule: Mapping[str, Any]) -> dict[str, Any]:
    """A group with the rates that it takes from the schedule where it has none of its own.

    >>> with_rates({"min_lr": None, "eps": 1e-8}, {"max_lr": 0.1, "min_lr": 0.01})
    {'min_lr': 0.01, 'eps': 1e-08, 'max_lr': 0.1}
    """
    rates = {key: _setting(key, group, schedule) for key in _RATES}
    return {**group, **{key: rate for key, rate in rates.items() if rate is not None}}


def settings_of_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The settings that the optimizer itself has, group by group."""
    return [{key: value for key, value in group.items() if key not in _OWN} for group in groups]


def members_of(
    groups: Sequence[Mapping[str, Any]], plan: Plan, names: Names | None
) -> tuple[Names, list[Fault]]:
    """The names of the tensors of every group: given, kept by a grown checkpoint, or by Megatron's own rule."""
    if names is not None:
        return names, []
    if all(NAMES in group for group in groups):
        return [list(map(str, group[NAMES])) for group in groups], []
    trained = {n: len(e.axes) for n, e in plan.tensors.items() if e.kind == "parameter" and e.trainable}
    return default_members(groups, trained)


def default_members(
    groups: Sequence[Mapping[str, Any]], dims: Mapping[str, int]
) -> tuple[list[list[str]], list[Fault]]:
    """The names of the tensors of every group by Megatron's own rule, which asks how many dimensions they have."""
    if len(groups) == 1:
        return [[*dims]], []
    marks = [group.get("wd_mult") for group in groups]
    if sorted(map(bool, marks)) != [False, True]:
        what = f"{len(groups)} groups with wd_mult {marks}; Megatron makes two, one of them with 0"
        return [], [
            Fault(
                "state.groups_ambiguous",
                "param_groups",
                what,
                "say which tensors they hold with names=[[...], ...]",
            )
        ]
    bare = {name for name, many in dims.items() if many == 1 or name.endswith(".bias")}
    return [[name for name in dims if (name in bare) != bool(mark)] for mark in marks], []


def warming(schedule: Mapping[str, Any]) -> dict[str, str]:
    """What is to be said of a schedule that is in its warm-up."""
    early = schedule.get("num_steps", 0) < schedule.get("lr_warmup_steps", 0)
    return {"opt_param_scheduler": _WARMING} if early else {}


def grown_before(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether groups say that their checkpoint was grown, or comes from one that was."""
    return any(str(group.get("is_decoupled_lr")).startswith(_MARK) for group in groups)


def group_faults(groups: Any, schedule: Any) -> list[Fault]:
    """What keeps groups from being carried: their form, experts, and rates that are not there."""
    if not isinstance(schedule, Mapping) or not all(
        isinstance(schedule.get(key, 0), float | int) for key in ("num_steps", "lr_warmup_steps")
    ):
        return [
            Fault(
                "megatron.unknown_scheduler",
                "opt_param_scheduler",
                "it is not what Megatron's scheduler saves",
            )
        ]
    if not isinstance(groups, list) or not groups or not all(isinstance(group, dict) for group in groups):
        return [
            Fault(
                "megatron.no_param_groups",
                "common.pt",
                "its optimizer has no param_groups: several optimizers, or none that is known",
            )
        ]
    faults = []
    for at, group in enumerate(groups):
        if not isinstance(group.get(NAMES, []), list | tuple):
            faults.append(
                Fault("megatron.names_not_a_list", f"param_groups[{at}]", f"its {NAMES} is no list")
            )
        if group.get("is_expert_parallel"):
            faults.append(
                Fault(
                    "megatron.group_of_experts", f"param_groups[{at}]", "it holds experts, which are not read"
                )
            )
        faults += [
            Fault(
                "state.setting_not_a_number",
                f"param_groups[{at}]",
                f"{key} = {printable(str(rate))}, expected a number",
            )
            for key in _RATES
            if not isinstance(rate := _setting(key, group, schedule), float | int)
        ]
        if not isinstance(group.get("wd_mult"), float | int):
            faults.append(
                Fault(
                    "megatron.no_decay_multiplier",
                    f"param_groups[{at}]",
                    "it has no wd_mult: megatron-core 0.16 writes it",
                )
            )
    return faults


def wide_groups(
    carried: Sequence[NamedGroup], base: Sequence[Mapping[str, Any]], schedule: Mapping[str, Any], plan: Plan
) -> list[dict[str, Any]]:
    """The groups of the wide checkpoint, with the names of their tensors."""
    fastest = max(group.growth_factor for group in carried)
    found = []
    for at, group in enumerate(carried):
        base_group = base[group.origin]
        factors = factors_of(group.rule, group.settings, plan[group.names[0]])
        decay = factors.get(group.rule.decay_key)
        found.append(
            {
                **{key: value for key, value in base_group.items() if key in _OWN},
                **group.settings,
                **{key: _setting(key, base_group, schedule) * group.growth_factor for key in _RATES},
                "wd_mult": base_group["wd_mult"] * (1.0 if decay is None else float(decay)),
                "is_decoupled_lr": f"{_MARK}{at}",
                "default_config": group.growth_factor == fastest,
                NAMES: list(group.names),
            }
        )
    return found


def _setting(key: str, group: Mapping[str, Any], schedule: Mapping[str, Any]) -> Any:
    """A rate of a group, or that of the schedule where the group has none."""
    return schedule.get(key) if group.get(key) is None else group[key]
