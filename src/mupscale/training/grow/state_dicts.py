"""Grow the state dicts of models and optimizers, for training loops without a `Run`.

Optimizer state dicts may be keyed by name (as torch.distributed.checkpoint keys them) or by position.
In the second case the groups must have `param_names`, or the names must be given.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...arguments import wrong_kind, wrong_list
from ...errors import Fault, MupscaleError, raise_faults
from ...files.elsewhere import UNIVERSAL_LATEST, is_universal
from ...files.pickles.torch_settings import universal_settings
from ...files.strict import printable
from ...models.names import named_tensors, resolve
from ...optimizers.carry import carry_optimizer, made
from ...optimizers.named import NamedGroup
from ...optimizers.read import read_state_dict
from ...optimizers.write import write_state_dict
from ...plans.direction import Direction
from ...plans.ends import check_shapes, check_ties, expect_exact, expect_proved
from ...plans.plan import Plan
from ...plans.tensor_plan import TensorPlan
from ...rules.optimizer_rule import OptimizerRule
from ...rules.optimizers import rule_for
from ...storage.location import Location, Url, location
from ..units.groups import expect_class


def grow_state_dict(state: Mapping[str, Tensor], plan: Plan, *, prove: bool = True) -> dict[str, Tensor]:
    """Grow a model's state dict. Keys keep their spelling, and tied tensors stay tied.

    A buffer that grows and is not in the state dict (`persistent=False`) causes a warning, because the wide model
    computes values of its own for it; pass it in `state` too.

    Args:
        state: The state dict of the base.
        plan: The plan from the base to the wide model.
        prove: False grows by a plan that nothing has proved.

    Returns:
        The state dict of the wide model, without buffers that the plan leaves to it (`fill="own"`).

    Raises:
        MupscaleError: If the plan is not proved, or does not fit the state dict.

    >>> from mupscale.plans import plan_between
    >>> plan = plan_between(lambda n: nn.Linear(n, n), 2, 4)
    >>> grow_state_dict(nn.Linear(2, 2).state_dict(), plan)["weight"].shape
    torch.Size([4, 4])
    """
    direction = Direction(plan)
    expect_exact(plan, prove, noise=None)
    return carry_tensors(state, direction)


def carry_tensors(
    state: Mapping[str, Tensor], direction: Direction, partial: bool = False
) -> dict[str, Tensor]:
    """Named tensors at the other end; `partial` allows some to be missing."""
    remedy = "write model.state_dict(); of a checkpoint, the part that holds the model"
    others = wrong_kind("state", state, Mapping, remedy)
    for name, value in state.items() if not others else ():
        others += wrong_kind(name, value, Tensor, "leave it out and carry it yourself")
    raise_faults("only a state dict of tensors can be widened or narrowed", others)
    tensors, plan = dict(state), direction.plan
    check_shapes(plan, {n: tuple(t.shape) for n, t in tensors.items()}, direction.start, complete=False)
    known = {*direction.reached, *plan.ties}
    named = {resolve(n, known) or n: t for n, t in tensors.items()}
    check_ties(plan, named)
    named = {**{plan.planned(n): t for n, t in named.items()}, **named}
    if not partial:
        lost = [(n, direction.planned(ends[0])[1]) for n, ends in direction.reached.items() if n not in named]
        what, remedy = "the plan needs this tensor; it is missing", "pass all of model.state_dict()"
        faults = [
            Fault("plan.missing_tensor", name, what, remedy)
            for name, entry in lost
            if entry.kind == "parameter"
        ]
        raise_faults("the state dict is not complete", faults)
        _warn_of_missing([name for name, entry in lost if _needs_copies(entry)])
    done: dict[str, Tensor] = {}
    out: dict[str, Tensor] = {}
    for key in tensors:
        name = resolve(key, known) or key
        start = plan.planned(name)
        for end in direction.reached[start]:
            if direction.planned(end)[1].fill == "own":
                continue  # each model computes it for itself; load the result with strict=False
            if end not in done:
                done[end] = direction.tensor(named, end)
            out[key[: len(key) - len(name)] + (end if name == start else name)] = done[end]
        for end in direction.joining.get(start, ()) if name == start and not direction.back else ():
            out[key[: len(key) - len(name)] + end] = direction.tensor(named, end)
    return out


def _needs_copies(entry: TensorPlan) -> bool:
    """Whether a buffer of the other end must hold the values of this end, which its model would not compute."""
    return entry.kind == "buffer" and entry.grows and entry.fill != "own"


def _warn_of_missing(buffers: list[str]) -> None:
    if buffers:
        first = buffers[0]
        warnings.warn(
            f"{', '.join(buffers)}: buffers that grow and are not in the state dict (persistent=False?). The model at the "
            "other end computes values of its own for them, not copies of these. To carry them, write state = "
            "{**model.state_dict(), **dict(model.named_buffers())}, and after loading the result write "
            f'other.get_buffer("{first}").copy_(result["{first}"]); or register them with persistent=True',
            stacklevel=4,
        )


def grow_optimizer_state_dict(
    state: Mapping[str, Any],
    plan: Plan,
    optimizer_class: type,
    *,
    names: Sequence[str] | None = None,
    keep_initial_lr: bool = False,
    prove: bool = True,
    rules: Mapping[str, OptimizerRule] | None = None,
) -> dict[str, Any]:
    """Grow an optimizer's state dict. Groups are split where the factors of their tensors differ.

    Args:
        state: The state dict of the base's optimizer.
        plan: The plan from the base to the wide model.
        optimizer_class: The class of the optimizer.
        names: The parameters' names in the order of the groups, if the state dict has none.
        keep_initial_lr: Whether groups keep the `initial_lr` of the base's schedule, in new units, for a scheduler that continues
            it: `LambdaLR(optimizer, function, last_epoch=step)`. Otherwise a new scheduler starts at the rate of the groups.
        prove: False grows by a plan that nothing has proved.
        rules: Rows to use in place of the registry of optimizers, by full class name.

    Returns:
        The state dict to load into `optimizer_class(groups_for(model, result))`.

    Raises:
        MupscaleError: If the plan is not proved, or an entry of the state cannot be carried exactly.

    >>> import torch
    >>> from mupscale.plans import plan_between
    >>> plan, base = plan_between(lambda n: nn.Linear(n, n), 2, 4), nn.Linear(2, 2)
    >>> state = torch.optim.AdamW(base.named_parameters(), lr=0.1).state_dict()
    >>> wide = grow_optimizer_state_dict(state, plan, torch.optim.AdamW)
    >>> [(group["param_names"], group["lr"]) for group in wide["param_groups"]]
    [(['weight'], 0.05), (['bias'], 0.1)]
    """
    direction = Direction(plan)
    expect_proved(plan, prove)
    faults = wrong_kind("state", state, Mapping, "write optimizer.state_dict()")
    faults += [*expect_class(optimizer_class), *([] if names is None else wrong_list("names", names))]
    others = [key for key in state if key not in ("state", "param_groups")] if not faults else []
    what, remedy = "its units are not known", "remove it from the state dict and carry it yourself"
    faults += [
        Fault("state.unknown_entry", str(key), what, remedy) for key in others if "param_groups" in state
    ]
    raise_faults("this optimizer state cannot be carried", faults)
    named, unread = read_state_dict(
        state, direction, optimizer_class, rule_for(optimizer_class, rules=rules), names
    )
    carried, uncarried = carry_optimizer(named, direction)
    raise_faults("this optimizer state cannot be widened exactly", unread + uncarried)
    if not keep_initial_lr:
        carried = replace(carried, groups=tuple(map(_at_its_rate, carried.groups)))
    by_name = any(isinstance(key, str) for group in state["param_groups"] for key in group["params"])
    return write_state_dict(made(carried, direction), by_name)


def groups_for(model: nn.Module, state: Mapping[str, Any] | Location | str) -> list[dict[str, Any]]:
    """Make the parameter groups of a model in the order and with the settings of a saved state dict, ready to load it.

    Args:
        model: The model.
        state: The state dict of one optimizer, which `grow`, `upscale` or `param_groups` made, or what
            `grow_optimizer_state_dict` returned. Or a checkpoint of DeepSpeed that `grow_checkpoint` wrote: ZeRO 1 and 2 load group by
            group, and leave out without a word what an engine has more groups for.

    Returns:
        The groups, to build the optimizer from.

    Raises:
        MupscaleError: If there is no such checkpoint, the groups have no names, or the model lacks one of the parameters.

    >>> import torch
    >>> from mupscale.plans import plan_between
    >>> plan, base, wide = plan_between(lambda n: nn.Linear(n, n), 2, 4), nn.Linear(2, 2), nn.Linear(4, 4)
    >>> state = torch.optim.AdamW(base.named_parameters(), lr=0.1).state_dict()
    >>> state = grow_optimizer_state_dict(state, plan, torch.optim.AdamW)
    >>> optimizer = torch.optim.AdamW(groups_for(wide, state))
    >>> optimizer.load_state_dict(state)
    >>> [group["lr"] for group in optimizer.param_groups]
    [0.05, 0.1]
    """
    parameters = {name: t for name, kind, t in named_tensors(model) if kind == "parameter"}
    if isinstance(state, str | Path | Url):
        state = _settings_in(location(state))
    groups = []
    saved = state.get("param_groups", [{}]) if isinstance(state, Mapping) else [{}]
    if not all("param_names" in group for group in saved):
        raise MupscaleError(
            "the state has no groups with names, expected the state dict of an optimizer that grow, upscale or "
            "param_groups made, or what grow_optimizer_state_dict returned; pass that",
            code="state.no_names",
        )
    unknown = [n for group in saved for n in group["param_names"] if n not in parameters]
    what, remedy = (
        "the model has no such parameter",
        "pass the model that the state was widened or narrowed for",
    )
    raise_faults(
        "this state does not belong to the model",
        [Fault("state.unknown_parameter", n, what, remedy) for n in unknown],
    )
    for group in saved:
        settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append({**settings, "params": [(n, parameters[n]) for n in group["param_names"]]})
    return groups


def _settings_in(place: Location) -> Mapping[str, Any]:
    """The groups that a universal checkpoint holds; raises for any other place, and says how to read what may lie there."""
    if is_universal(place):
        return universal_settings(place)
    shown = printable(str(place))
    what = f"it has no {UNIVERSAL_LATEST}, expected a universal checkpoint of DeepSpeed"
    remedy = (
        f'pass the state dict in it, as groups_for(model, torch.load("{shown}")["optimizer"])'
        if isinstance(place, Path) and place.is_file()
        else f'for a grown Hugging Face directory write mu.trainers.optimizer_in_units(model, "{shown}", torch.optim.AdamW, lr=0.1)'
    )
    raise MupscaleError("no groups are read here", [Fault("state.not_universal", shown, what, remedy)])


def _at_its_rate(group: NamedGroup) -> NamedGroup:
    """The group without the `initial_lr` of an earlier schedule, from which torch would start a new one."""
    return replace(group, settings={k: v for k, v in group.settings.items() if k != "initial_lr"})
