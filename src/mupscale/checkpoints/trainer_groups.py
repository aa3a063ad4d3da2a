"""Which parameter each position of a Trainer's optimizer state means.

The Trainer's own grouping of the stock class is rebuilt at both ends; what does not fit it is refused, with what to
say instead. Knows: settings, names and groups. Reads no file and touches no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..errors import Fault, MupscaleError
from ..optimizers.positions import CLAIM, LEAVE, Ordered, named_orders, planned_orders
from ..optimizers.read import Names
from ..plans.plan import Plan


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
