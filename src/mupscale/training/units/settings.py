"""Hyperparameters of a wide run compared with the base's in new units.

The settings that a step uses are compared. An optimizer with `step_in_units_` keeps the reference settings in its
groups but steps each tensor with scaled ones, and these are the ones that count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...models.names import parameter_names
from ...optimizers.carry import carry_groups, renamed
from ...optimizers.named import NamedGroup, NamedOptimizer
from ...optimizers.read import settings_of
from ...optimizers.settings import in_units, same_setting
from ...plans.direction import Direction
from ...proofs.compare import Settings, Unequal
from ...proofs.trial import Trial
from ...rules.optimizer_rule import RATES, OptimizerRule
from ...rules.optimizers import rule_for
from .stepping import units_of

_BOOKKEEPING = (*(key for key in RATES if key != "lr"), "base_momentum", "max_momentum")
"""Keys that only schedulers and `set_lr_` use. No step reads them, so a group without them trains the same way."""


def settings_comparer(rules: Mapping[str, OptimizerRule] | None) -> Settings:
    """A function that finds the first setting of a trial's wide run that is not the base's in new units."""

    def unequal(trial: Trial) -> Unequal | None:
        direction = Direction(trial.plan)
        for base, wide in zip(trial.base.optimizers, trial.wide.optimizers, strict=True):
            expected = NamedOptimizer("expected", tuple(_stepped(base, trial.base.model, rules)))
            groups = carry_groups(renamed(expected, direction).groups, direction)
            wanted = {name: group.settings for group in groups for name in group.names}
            for found in _stepped(wide, trial.wide.model, rules):
                for name in found.names:
                    key = _first_unequal(found.settings, wanted.get(name, {}))
                    if key is not None:
                        return Unequal(name, key, found.settings.get(key), wanted[name][key])
        return None

    return unequal


def _first_unequal(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    keys = (key for key in wanted if _is_number(wanted[key]) and (key in found or key not in _BOOKKEEPING))
    return next((key for key in keys if not same_setting(found.get(key), wanted[key])), None)


def _is_number(value: Any) -> bool:
    """True for a number or a sequence of numbers; other settings are flags that choose how a step is computed."""
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(part, (int, float, Tensor)) and not isinstance(part, bool) for part in parts)


def _stepped(
    optimizer: Optimizer, model: nn.Module, rules: Mapping[str, OptimizerRule] | None
) -> Iterator[NamedGroup]:
    """The settings with which an optimizer steps, and their row, for each tensor."""
    names, since, rule = parameter_names(model), units_of(optimizer), rule_for(type(optimizer), rules=rules)
    for group in optimizer.param_groups:
        settings = settings_of(group)
        for p in group["params"]:
            name, row = names[id(p)], rule.row(settings, p.dim(), optimizer.state.get(p))
            stepped = (
                settings if since is None else in_units(row, {**settings, "lr_factor": 1.0}, since[name])
            )
            yield NamedGroup((name,), stepped, row)
