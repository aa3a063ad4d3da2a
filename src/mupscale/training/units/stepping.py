"""An optimizer whose groups hold the reference constants, stepped in the units of each tensor.

For the duration of a step the groups are split and lr, eps and decay are scaled; before and after the step they
are unchanged. So schedulers, logs and saved state see one learning rate, written at the reference, and every
scheduler works, even one with absolute rates. State belongs to parameters and is not changed.
Knows: live optimizers. Does not know: trainers, checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...arguments import wrong_kind
from ...errors import Fault, MupscaleError, raise_faults
from ...models.names import parameter_names
from ...optimizers.named import NamedGroup
from ...optimizers.read import settings_of
from ...optimizers.rows import split_by_row
from ...optimizers.settings import (
    LATE,
    by_factors,
    cannot_be_exact,
    refused_by_row,
    same_setting,
    scale_setting,
    unknown_settings,
)
from ...optimizers.sharded_steps import refused_on_shards
from ...plans.ends import check_end
from ...plans.plan import Plan
from ...rules.optimizer_rule import OptimizerRule
from ...rules.optimizers import rule_for
from ...rules.scale import Scale
from ...runs.run import Since, model_of, since_of
from ...tensors.parts import is_sharded

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class _AlikeMembers:
    """The members of one group that have the same factors."""

    origin: int
    factors: Mapping[str, Any]
    params: list[nn.Parameter] = field(default_factory=list)


class InUnits:
    """The handle that `step_in_units_` returns; `remove` detaches it from the optimizer."""

    def __init__(self, optimizer: Optimizer, plan: Plan, model: nn.Module, rule: OptimizerRule) -> None:
        self.plan = plan
        self._optimizer, self._rule = optimizer, rule
        self._names = {key: plan.planned(name) for key, name in parameter_names(model).items()}
        self._stock: Groups | None = None
        self._paused = self._begun = False
        self._shares = self._split()
        self._split_of = _members(optimizer.param_groups)
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._enter),
            optimizer.register_step_post_hook(self._leave),
            optimizer.register_state_dict_pre_hook(self._pause),
            optimizer.register_state_dict_post_hook(self._resume),
        ]

    def remove(self) -> None:
        """Step in plain units again."""
        self._put_back()
        for handle in self._handles:
            handle.remove()

    def _split(self) -> list[_AlikeMembers]:
        shares: list[_AlikeMembers] = []
        faults: list[Fault] = []
        for origin, group in enumerate(self._optimizer.param_groups):
            where = f"{type(self._optimizer).__name__}, group {origin}"
            members: dict[str, nn.Parameter] = {}
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name is None:
                    what = "it holds a parameter that does not belong to the model"
                    remedy = "build the optimizer from this model's parameters"
                    faults.append(Fault("optimizer.foreign_parameters", where, what, remedy))
                    continue
                members[name] = parameter
            faults += refused_on_shards(type(self._optimizer), members, group)
            named = NamedGroup(tuple(members), settings_of(group), self._rule, origin)
            dimensions = {name: p.dim() for name, p in members.items()}
            state = {name: self._optimizer.state.get(p, {}) for name, p in members.items()}
            started = any(self._optimizer.state.values())
            for part in split_by_row(named, dimensions, state, where):
                faults += _refused(part.rule, group, where)
                faults += unknown_settings([part], self._optimizer.defaults, where)
                for name in part.names:
                    faults += cannot_be_exact(part.rule, group, name, self.plan[name])
                    # State may be loaded later, so it is judged at the first step. A tensor that has none when others have
                    # gets no gradients.
                    own = state[name] if self._begun and (state[name] or not started) else LATE
                    faults += refused_by_row(part.rule, group, own, name, self.plan[name])
                for apart in (False, True):  # foreach and fused steps take plain or sharded tensors, not both
                    entries = [(n, self.plan[n]) for n in part.names if is_sharded(members[n]) is apart]
                    for factors, names in by_factors(part, entries):
                        shares.append(_AlikeMembers(origin, factors, [members[n] for n in names]))
        raise_faults("this optimizer cannot be stepped in the units of the plan", faults)
        return shares

    def _enter(self, optimizer: Optimizer, *_: Any) -> None:
        self._leave(optimizer)  # a step that raised has left its groups behind
        stock = optimizer.param_groups
        if _members(stock) != self._split_of or not self._begun:
            self._begun = True
            self._shares, self._split_of = self._split(), _members(stock)
        self._own: Groups = [
            {
                **{
                    key: scale_setting(value, share.factors[key]) if key in share.factors else _own(value)
                    for key, value in stock[share.origin].items()
                    if key != "params"
                },
                "params": share.params,
            }
            for share in self._shares
        ]
        self._before = [{key: _own(value) for key, value in group.items()} for group in self._own]
        self._stock, self._paused = stock, False
        optimizer.param_groups = self._own

    def _leave(self, optimizer: Optimizer, *_: Any) -> None:
        if self._stock is None:
            return
        stock, shares = self._stock, list(zip(self._shares, self._own, self._before, strict=True))
        self._put_back()
        written: dict[tuple[int, str], list[Any]] = {}
        for share, group, before in shares:
            for key in (key for key in group if not _same(group[key], before.get(key))):
                back = scale_setting(group[key], share.factors.get(key, Scale()), back=True)
                written.setdefault((share.origin, key), []).append(back)
        odd = {key for (_, key), values in written.items() if not self._rule.known(key) or not _agree(values)}
        if odd:
            raise MupscaleError(
                f"{type(optimizer).__name__} wrote {', '.join(sorted(odd))} into its groups while it stepped; values that an "
                "optimizer keeps in its groups need units in its row, and one value for all tensors; build it from "
                "param_groups",
                code="optimizer.writes_into_groups",
            )
        for (origin, key), values in written.items():
            stock[origin][key] = values[0]

    def _pause(self, optimizer: Optimizer) -> None:
        """Restore the original groups in a state dict that is saved inside a step, by a closure or after an error."""
        if self._stock is not None:
            optimizer.param_groups, self._paused = self._stock, True

    def _resume(self, optimizer: Optimizer, *_: Any) -> None:
        if self._paused:
            optimizer.param_groups, self._paused = self._own, False

    def _put_back(self) -> None:
        if self._stock is not None:
            self._optimizer.param_groups, self._stock = self._stock, None


def step_in_units_(
    optimizer: Optimizer,
    since: Since,
    *,
    model: nn.Module | None = None,
    rules: Mapping[str, OptimizerRule] | None = None,
) -> InUnits:
    """Make every step of an optimizer use the units of each tensor, while its groups keep the reference constants.

    For optimizers that a trainer builds; where you build it yourself, `param_groups` does the same. A run that is stepped in units
    can be grown: the groups stay as they are, and the wide optimizer is stepped in units from the same reference. To clip
    gradients, use `clip_before_step_`.

    Args:
        optimizer: The optimizer, with stock groups.
        since: The run that it trains, or, with `model`, the plan from the reference to it.
        model: The model, where `since` is a plan.
        rules: Rows to use in place of the registry of optimizers, by full class name.

    Returns:
        A handle; its `remove()` detaches it from the optimizer.

    Raises:
        MupscaleError: If the optimizer has no row, is stepped in units already, or has parameters that are not the model's.

    >>> import torch, mupscale as mu
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 1))
    >>> model, plan = make(16), mu.plans.plan_between(make, 4, 16)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    >>> before, _ = model[2].weight.detach().clone(), step_in_units_(optimizer, plan, model=model)
    >>> model(torch.ones(1, 3)).sum().backward(); optimizer.step()
    >>> round(float((model[2].weight.detach() - before).abs().max()), 4), optimizer.param_groups[0]["lr"]
    (0.0025, 0.01)
    """
    remedy = "write step_in_units_(optimizer, run)"
    raise_faults("no optimizer was given", wrong_kind("optimizer", optimizer, Optimizer, remedy))
    rule = rule_for(type(optimizer), rules=rules)
    target = model_of(since, model, "step_in_units_")
    plan = since_of(since, target)
    check_end(plan, target, "wide")
    if units_of(optimizer) is not None:
        raise MupscaleError(
            "this optimizer is stepped in units already; to attach it anew, first call remove() on the handle that "
            "step_in_units_ returned",
            code="optimizer.in_units_already",
        )
    return InUnits(optimizer, plan, target, rule)


def units_of(optimizer: Optimizer) -> Plan | None:
    """The plan by which `step_in_units_` steps an optimizer, or None if it is not attached."""
    owners = [getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values()]
    return next((owner.plan for owner in owners if isinstance(owner, InUnits)), None)


def _own(value: Any) -> Any:
    """A setting that a step may change in place without changing it elsewhere."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _same(value: Any, before: Any) -> bool:
    """Whether a step has left a setting as it was."""
    if isinstance(value, Tensor) and isinstance(before, Tensor):
        return torch.equal(value, before)
    return value is before


def _agree(values: list[Any]) -> bool:
    """Whether the values that a step wrote for the tensors of a group are one, in the units of the reference."""
    return all(same_setting(value, values[0]) for value in values)


def _members(groups: Groups) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in groups]


def _refused(rule: OptimizerRule, group: Mapping[str, Any], where: str) -> list[Fault]:
    faults = []
    if "lr_factor" in group:
        what = "its settings are in the units of its tensors already (it has an lr_factor)"
        remedy = "step it as it is, or build the optimizer from plain parameters"
        faults.append(Fault("optimizer.groups_in_units_already", where, what, remedy))
    if rule.stacked:
        what = "it stacks the state of the tensors of a group, which steps in units would split"
        remedy = "build its groups with param_groups, one call for each kind of group"
        faults.append(Fault("optimizer.state_is_stacked", where, what, remedy))
    for key in (key for key in rule.constructor_only if group.get(key)):
        what = f"{key} = {group[key]} is read when the optimizer is made, so it cannot differ by tensor"
        faults.append(Fault("optimizer.setting_of_constructor", where, what, f"pass {key}=0"))
    return faults
