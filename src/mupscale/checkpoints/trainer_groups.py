"""Which optimizer left a state dict, and which parameter each of its positions means.

The Trainer's own grouping of the stock class is rebuilt at both ends; what does not fit it is refused, with what to
say instead. Knows: settings, names and groups. Reads no file and touches no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from torch import nn

from ..errors import Fault, MupscaleError
from ..files.strict import printable, raise_few
from ..models.names import resolve
from ..optimizers.read import Names, settings_of
from ..plans.block_order import in_wide_order
from ..plans.direction import Direction
from ..plans.plan import Plan
from ..rules.optimizer_rule import OptimizerRule
from ..rules.optimizers import RULES

CLAIM = "the optimizer state cannot be widened"
LEAVE = "move optimizer.pt and scheduler.pt away to grow the weights alone"
Ordered = list[list[str]]


def told_by(
    groups: Sequence[Mapping[str, Any]],
    states: Iterable[Mapping[str, Any]],
    rules: Mapping[str, OptimizerRule] | None = None,
    *,
    remedy: str = f"name it (--optimizer torch.optim.AdamW), register it, or {LEAVE}",
) -> OptimizerRule:
    """The one row of the table that knows these settings and this state; several are fine when they agree.

    >>> settings = dict(lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, amsgrad=False, params=[0])
    >>> told_by([settings], [{"step": 1, "exp_avg": 0, "exp_avg_sq": 0}]).decay_kind(settings).name
    'COUPLED'
    """
    every = list(states)
    kept = {key for state in every for key in state}
    given = {key for group in groups for key in settings_of(group)}
    fits = fitting(given, kept, rules)
    found = {name: rule for name, rule in fits.items() if all(_stacks(rule, state) for state in every)}
    # Rows that give the present state the same units and the same refusals do the same here.
    kinds = {(rule.refuse, *(rule.state[key] for key in sorted(kept))) for rule in found.values()}
    if len(kinds) == 1:
        return next(iter(found.values()))
    has = ", ".join(sorted(map(printable, given))), ", ".join(sorted(map(printable, kept))) or "nothing"
    which = f"which fits {', '.join(found)}" if found else "which no optimizer in the registry has"
    what = f"its groups have {has[0]}; its state has {has[1]}, {which}"
    raise MupscaleError(CLAIM, [Fault("state.optimizer_unclear", "which optimizer was it?", what, remedy)])


def fitting(
    given: Set[str], kept: Set[str], rules: Mapping[str, OptimizerRule] | None = None
) -> dict[str, OptimizerRule]:
    """Every row of the table that knows the settings that are given and the state that is kept.

    >>> sorted(fitting({"lr", "momentum", "dampening", "nesterov", "weight_decay"}, {"momentum_buffer"}))
    ['torch.optim.SGD']
    """
    found: dict[str, OptimizerRule] = {}
    for name, rule in (RULES if rules is None else rules).items():
        asked = rule.constants - rule.constructor_only
        if asked <= given and all(map(rule.known, given)) and kept <= set(rule.state):
            found[name] = rule
    return found


def _stacks(rule: OptimizerRule, state: Mapping[str, Any]) -> bool:
    """Whether what a row calls a stack of tensors has a dimension more than the rest of the state."""
    sizes = {key: len(getattr(value, "shape", ())) for key, value in state.items()}
    most = max((size for key, size in sizes.items() if not rule.state[key].stack), default=0)
    return all(size == most + 1 for key, size in sizes.items() if rule.state[key].stack)


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
        order = _checked(groups, plan, [_trained(base, plan.ties)])
        wide_order = [[_planned(n, plan, plan.tensors) for n in _trained(wide, plan.ties)]]
        raise_few(CLAIM, _misfits(plan, order, wide_order))
        return order, wide_order
    if len(groups) != 2 or groups[1].get("weight_decay"):
        decays = ", ".join(str(group.get("weight_decay")) for group in groups)
        what = f"groups with weight decays {decays}; the Trainer makes two, the second without decay"
        remedy = f"say which parameters they hold with names=[[...], ...], or {LEAVE}"
        raise MupscaleError(CLAIM, [Fault("state.groups_ambiguous", "param_groups", what, remedy)])
    order = _checked(groups, plan, trainer_order(base, plan.ties))
    wide_order = [[_planned(n, plan, plan.tensors) for n in of] for of in trainer_order(wide, plan.ties)]
    raise_few(CLAIM, _misfits(plan, order, wide_order))
    return order, wide_order


def named_orders(
    groups: Sequence[Mapping[str, Any]], plan: Plan, names: Names | None
) -> tuple[Ordered, Ordered]:
    """The same for groups whose names are given, or kept in them; the wide end follows the base's order."""
    given = names if names is not None else [list(map(str, group["param_names"])) for group in groups]
    order = _checked(groups, plan, given)
    joining = Direction(plan).joining
    made = [[end for name in of for end in (*plan.sources[name], *joining.get(name, ()))] for of in order]
    once = [list(dict.fromkeys(ends)) for ends in made]
    wide_order = [in_wide_order(ends, of, plan) for ends, of in zip(once, order, strict=True)]
    raise_few(CLAIM, _misfits(plan, order, wide_order))
    return order, wide_order


def _checked(groups: Sequence[Mapping[str, Any]], plan: Plan, names: Names) -> Ordered:
    many, expected = [len(group["params"]) for group in groups], [len(of) for of in names]
    if many != expected:
        what = f"groups of {many} parameters, expected {expected}: some are frozen, or were grouped otherwise"
        remedy = f"say which parameters they hold with names=[[...], ...], or {LEAVE}"
        raise MupscaleError(CLAIM, [Fault("state.group_sizes_differ", "param_groups", what, remedy)])
    return [[_planned(name, plan, plan.sources) for name in of] for of in names]


def _planned(name: str, plan: Plan, known: Mapping[str, Any]) -> str:
    found = resolve(name, {*known, *plan.ties})
    planned = None if found is None else found if found in known else plan.ties[found]
    if planned is None or planned not in known:
        raise MupscaleError(
            CLAIM,
            [Fault("plan.unknown_tensor", printable(name), "no tensor of the plan has this name", LEAVE)],
        )
    return planned


def _misfits(plan: Plan, order: Names, wide_order: Names) -> list[Fault]:
    """Wide tensors that are not made of trained tensors in the same group."""
    group_of = {name: i for i, of in enumerate(order) for name in of}
    wide_group = {name: i for i, of in enumerate(wide_order) for name in of}
    alike, faults = "group the parameters of both models alike", []
    if len(group_of) != sum(map(len, order)):
        faults.append(
            Fault(
                "state.parameter_in_two_groups",
                "param_groups",
                "a parameter appears twice in them",
                "put it into one group",
            )
        )
    for name, i in wide_group.items():
        new = plan[name].like
        for source in plan[name].sources if new is None else (new,):
            if (first := group_of.get(source)) != i:
                what = f"{source} is in group {first} of the base, this one in group {i}"
                faults.append(Fault("state.groups_differ", name, what, alike))
    lost = [n for source in group_of for n in plan.sources[source] if n not in wide_group]
    return faults + [
        Fault("state.in_no_wide_group", n, "trained in the base, in no group of the wide model", alike)
        for n in lost
    ]
