"""The optimizer state that a Trainer run left next to the weights, widened where it lies.

The file keeps the stock grouping and the reference constants, so the stock Trainer resumes from it; only state
tensors change, by their units. The Trainer's own grouping of the stock class is rebuilt at both ends; what does not fit it
is refused, with what to say instead. Knows: optimizer.pt, its groups, and how its tensors move. Does not know: exponents
(`rules/`), how bytes are written.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import Fault, MupscaleError
from ...files.directory import OPTIMIZER
from ...files.pickles.torch_file import Room, lay_out, read_tensor, read_tree
from ...files.places import OutFile, Place, dtype_name
from ...files.strict import printable, raise_few
from ...jobs.job import Move
from ...optimizers.carry import carry_optimizer
from ...optimizers.identify import identify
from ...optimizers.joined import sources_of
from ...optimizers.named import Moment
from ...optimizers.positions import CLAIM, LEAVE, Ordered, named_orders, planned_orders
from ...optimizers.quantised import Coded, rounding_warning
from ...optimizers.read import Groups, Names, parts, read_positions
from ...optimizers.write import write_positions
from ...plans.direction import Direction, Noises
from ...plans.plan import Plan
from ...rules.optimizer_rule import OptimizerRule
from ...rules.optimizers import rule_for
from ...storage.location import Location, location


def trainer_moves(
    base_dir: Location | str,
    plan: Plan,
    base: nn.Module,
    wide: nn.Module,
    *,
    optimizer: str | None = None,
    names: Names | None = None,
    noise: Noises | None = None,
    rules: Mapping[str, OptimizerRule] | None = None,
) -> tuple[OutFile, list[Move]]:
    """The wide optimizer.pt as a file with its moves; `base` and `wide` may be on the meta device.

    The optimizer is known from what it keeps, unless named ("torch.optim.AdamW"). `names` gives the order of the
    parameters, group by group, for runs whose groups were not made by the Trainer. `noise` is that of the weights, for
    copies of them in the state.
    """
    folder = location(base_dir)
    groups, state = parts(read_tree(folder / OPTIMIZER), OPTIMIZER)
    raise_few(CLAIM, _tensors_in(groups))
    rule = rule_for(optimizer, rules=rules) if optimizer else identify(groups, state.values(), rules)
    order, wide_order = trainer_orders(groups, plan, base, wide, names)
    there = {k: {key: _read_number(folder, value) for key, value in s.items()} for k, s in state.items()}
    named, unread = read_positions(groups, there, order, rule, OPTIMIZER)
    carried, uncarried = carry_optimizer(named, Direction(plan, noise=noise), split=False)
    raise_few(CLAIM, unread + uncarried)
    coded = [f"{name}: {key}" for name, of in named.state.items() for key in of if isinstance(of[key], Coded)]
    if coded:
        warnings.warn(rounding_warning(OPTIMIZER, dict.fromkeys(coded, 0.0)), stacklevel=2)
    tree = write_positions(carried, groups, wide_order)
    rooms = {i: {key: _room(value) for key, value in s.items()} for i, s in tree["state"].items()}
    file, laid = lay_out(OPTIMIZER, {**tree, "state": rooms})
    return _filled(file, laid["state"], tree["state"], [name for of in wide_order for name in of])


def _read_number(folder: Location, value: Any) -> Any:
    """A single number as a tensor; the place of any other tensor as it is."""
    return read_tensor(folder, value) if isinstance(value, Place) and not value.shape else value


def _room(value: Any) -> Any:
    """What a tensor of the wide state needs in the file; anything else is written as it is."""
    if isinstance(value, Moment):
        return Room(value.source.dtype, value.making.wide_shape)
    return Room(dtype_name(value.dtype), tuple(value.shape)) if isinstance(value, Tensor) else value


def _filled(
    file: OutFile,
    laid: Mapping[int, Mapping[str, Any]],
    states: Mapping[int, Mapping[str, Any]],
    names: Sequence[str],
) -> tuple[OutFile, list[Move]]:
    """The file with its single numbers written, and a move for every other tensor."""
    moves: list[Move] = []
    numbers: list[tuple[int, bytes]] = []
    for position, state in states.items():
        for key, value in state.items():
            if isinstance(value, Moment):
                label = f"{names[position]}: {key}"
                moves.append(Move(label, value.making, tuple(sources_of(value.source)), laid[position][key]))
            elif isinstance(value, Tensor):
                raw = value.reshape(1).view(torch.uint8).numpy().tobytes()
                numbers.append((laid[position][key].offset, raw))
    return OutFile(file.name, file.size, _joined([*file.chunks, *numbers])), moves


def _joined(chunks: Iterable[tuple[int, bytes]]) -> tuple[tuple[int, bytes], ...]:
    """The same bytes with neighbours as one."""
    joined: list[tuple[int, bytearray]] = []
    for at, data in sorted(chunks):
        if joined and joined[-1][0] + len(joined[-1][1]) == at:
            joined[-1][1].extend(data)
        else:
            joined.append((at, bytearray(data)))
    return tuple((at, bytes(data)) for at, data in joined)


def _tensors_in(groups: Groups) -> list[Fault]:
    return [
        Fault(
            "state.setting_is_tensor",
            f"{OPTIMIZER}, group {i}",
            f"{printable(key)} is a tensor, not a number",
            LEAVE,
        )
        for i, group in enumerate(groups)
        for key, value in group.items()
        if isinstance(value, Place)
    ]


def trainer_order(model: nn.Module, ties: Mapping[str, str]) -> Ordered:
    """Names of trainable parameters as the stock Trainer groups them: with decay, then without.

    `ties` are the plan's, because a model on the meta device may not be tied yet.
    """
    from transformers import Trainer

    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    names = _trained(model, ties)
    return [[n for n in names if n in decayed], [n for n in names if n not in decayed]]


def _trained(model: nn.Module, ties: Mapping[str, str]) -> list[str]:
    """Names of trainable parameters, tied ones once, under the first of their names."""
    first: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            first.setdefault(ties.get(name, name), name)
    return list(first.values())


def trainer_orders(
    groups: Sequence[Mapping[str, Any]], plan: Plan, base: nn.Module, wide: nn.Module, names: Names | None
) -> tuple[Ordered, Ordered]:
    """Planned names at the base and at the wide end, in the order of a Trainer's groups."""
    if names is not None or all("param_names" in group for group in groups):
        return named_orders(groups, plan, names)
    if len(groups) == 1:
        return planned_orders(groups, plan, [_trained(base, plan.ties)], [_trained(wide, plan.ties)])
    if len(groups) != 2 or groups[1].get("weight_decay"):
        decays = ", ".join(str(group.get("weight_decay")) for group in groups)
        what = f"groups with weight decays {decays}; the Trainer makes two, the second without decay"
        remedy = f"say which parameters they hold with names=[[...], ...], or {LEAVE}"
        raise MupscaleError(CLAIM, [Fault("state.groups_ambiguous", "param_groups", what, remedy)])
    return planned_orders(groups, plan, trainer_order(base, plan.ties), trainer_order(wide, plan.ties))
