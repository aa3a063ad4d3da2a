"""Hyperparameters of a wide run compared with the base's in new units.

Compared is what a step uses: an optimizer under `step_in_units_` keeps the reference's settings in its groups and
steps each tensor with its own, which are those that count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..plans.names import parameter_names
from ..proofs.compare import Settings, Unequal
from ..proofs.trial import Trial
from ..rules.optimizers import OptimizerRule, rule_for
from .direction import Direction
from .state import NamedGroup, carry_groups, factors_of, scale_setting
from .stepping import units_of

_CLOSE = 1e-6
"""A float32 learning rate, as a scheduler or a checkpoint may hold it, counts as its float64 one."""
_BOOKKEEPING = ("initial_lr", "lr_factor")
"""Written for schedulers and for `set_lr_`; no step reads them, so a group without them trains alike."""


def settings_comparer(rules: Mapping[str, OptimizerRule] | None) -> Settings:
    """What finds the first setting of a trial's wide run that is not the base's in new units."""

    def unequal(trial: Trial) -> Unequal | None:
        direction = Direction(trial.plan)
        for base, wide in zip(trial.base.optimizers, trial.wide.optimizers, strict=True):
            expected = list(_stepped(base, trial.base.model, rules))
            groups, _ = carry_groups(rule_for(type(base), rules=rules), expected, direction)
            wanted = {name: group.settings for group in groups for name in group.names}
            for found in _stepped(wide, trial.wide.model, rules):
                for name in found.names:
                    key = _first_unequal(found.settings, wanted.get(name, {}))
                    if key is not None:
                        return Unequal(name, key, found.settings.get(key), wanted[name][key])
        return None

    return unequal


def _first_unequal(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    keys = (key for key in wanted if key in found or key not in _BOOKKEEPING)
    return next((key for key in keys if not _close(found.get(key), wanted[key])), None)


def _stepped(
    optimizer: Optimizer, model: nn.Module, rules: Mapping[str, OptimizerRule] | None
) -> Iterator[NamedGroup]:
    """The groups with which an optimizer steps; one per tensor where it is stepped in units."""
    names, since, rule = parameter_names(model), units_of(optimizer), rule_for(type(optimizer), rules=rules)
    for group in optimizer.param_groups:
        members = [names[id(p)] for p in group["params"]]
        if since is None:
            yield NamedGroup(tuple(members), group)
            continue
        for name in members:
            settings = {**group, "lr_factor": 1.0}
            for key, scale in factors_of(rule, group, since[name]).items():
                if key in settings:
                    settings[key] = scale_setting(settings[key], scale)
            yield NamedGroup((name,), settings)


def _close(got: Any, want: Any) -> bool:
    if isinstance(want, (tuple, list)) and isinstance(got, (tuple, list)):
        return len(got) == len(want) and all(map(_close, got, want))
    if isinstance(want, bool) or not isinstance(want, (int, float, Tensor)):
        return True
    return isinstance(got, (int, float, Tensor)) and abs(float(got) - float(want)) <= _CLOSE * abs(
        float(want)
    )
