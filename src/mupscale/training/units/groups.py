"""Parameter groups for training at any width: learning rate, eps and decay in the units of each tensor.

Constants are written down at the reference; `since` is the plan from there to the model that is trained.
Every group keeps the factor on its rate (`lr_factor`) and its parameters' names, so that rates can be set
and checked later and checkpoints resume.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...arguments import shown, wrong_list, wrong_number
from ...errors import Fault, MupscaleError, raise_faults
from ...models.names import named_tensors, resolve
from ...optimizers.settings import (
    LATE,
    cannot_be_exact,
    factors_of,
    refused_by_row,
    scale_setting,
    without_units,
)
from ...optimizers.sharded_steps import refused_on_shards
from ...plans.ends import check_end
from ...plans.plan import Plan
from ...rules.optimizer_rule import OptimizerRule
from ...rules.optimizers import qualified_name, rule_for
from ...runs.run import Since, since_of
from ...tensors.parts import is_sharded

_CHOICES = frozenset({"foreach", "fused", "capturable", "differentiable", "maximize"})  # of implementation
Chosen = Iterable[tuple[str, nn.Parameter]] | Callable[[str, nn.Parameter], bool] | None


def param_groups(
    model: nn.Module,
    since: Since,
    optimizer_class: type[Optimizer],
    *,
    parameters: Chosen = None,
    no_decay: Sequence[str] = (),
    rules: Mapping[str, OptimizerRule] | None = None,
    **constants: Any,
) -> list[dict[str, Any]]:
    """Parameter groups of `model` in which the reference constants are scaled to the units of every tensor.

    `since` is the run of this model, or the plan from the reference to it. `constants` (lr, eps, weight_decay, …)
    are written at the reference. Constants that are not given take the optimizer's defaults and are scaled too.
    `parameters` selects some of the parameters, for several optimizers. Tensors with equal settings share a group.

    >>> import torch, mupscale as mu
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 1))
    >>> plan = mu.plan_between(make, 64, 256)
    >>> groups = param_groups(make(256), plan, torch.optim.AdamW, lr=1e-2)
    >>> [(group["lr"], [name for name, _ in group["params"]]) for group in groups][1]
    (0.0025, ['2.weight'])
    """
    faults = [*expect_class(optimizer_class), *wrong_list("no_decay", no_decay)]
    raise_faults("these parameters cannot be grouped", faults)
    rule = rule_for(optimizer_class, rules=rules)
    settings = _settings(optimizer_class, rule, constants)
    if not all(row.agrees_with_mup for row in _rows(rule, settings)):
        raise MupscaleError(
            f"{qualified_name(optimizer_class)} measures the size of the weights itself, so μP gives it no learning rate that "
            "holds across widths; a run with it can be widened, but not tuned small and applied large",
            code="optimizer.outside_mup",
        )
    plan = since_of(since, model)
    check_end(plan, model, "wide")
    faults = [
        Fault(
            "optimizer.unknown_setting",
            f"{key} = {settings[key]!r}",
            f"{qualified_name(optimizer_class)} has no units for it in the registry",
            f"check its spelling; {without_units(key)}",
        )
        for key in settings
        if not all(row.known(key) for row in _rows(rule, settings) or (rule,))
    ]
    if "lr" not in settings:
        faults.append(
            Fault(
                "rates.no_default_lr",
                "lr",
                f"{optimizer_class.__name__} has no default learning rate",
                "pass lr=",
            )
        )
    elif not isinstance(settings["lr"], Tensor):
        faults += wrong_number("lr", settings["lr"], "write lr=1e-3, for example")
    measured = {key for row in rule.every_row for key in (row.decay_key, *row.hyper)}
    texts = [key for key in sorted(measured) if isinstance(settings.get(key), str)]
    faults += [
        Fault(
            "argument.not_a_number",
            key,
            f"it is {settings[key]!r}, expected a number",
            f"write {key}=0.1, for example",
        )
        for key in texts
    ]
    named = _chosen(model, plan, parameters)
    unused = [p for p in no_decay if not any(fnmatchcase(name, p) for name in named)]
    remedy = "write the name of a parameter, or a pattern such as *.bias"
    faults += [
        Fault(
            "argument.pattern_matches_nothing",
            p,
            "declared in no_decay, but no parameter has such a name",
            remedy,
        )
        for p in unused
    ]
    faults += [
        Fault(
            "optimizer.setting_of_constructor",
            f"{key} = {settings[key]}",
            f"{optimizer_class.__name__} reads it from its constructor, so it cannot differ by group",
            f"pass {key}=0",
        )
        for key in rule.constructor_only
        if settings.get(key)
    ]
    rows: dict[str, OptimizerRule] = {}
    for name in named:
        try:
            rows[name] = rule.row(settings, len(plan[name].axes))
        except MupscaleError as error:
            faults.append(Fault(error.code, name, error.claim))
            continue
        if rows[name].of_matrices and len(plan[name].axes) < 2:
            what = f"{optimizer_class.__name__} takes matrices only"
            faults.append(
                Fault("optimizer.takes_matrices_only", name, what, "pick matrices with parameters=")
            )
    faults += refused_on_shards(optimizer_class, named, settings)
    raise_faults("these parameters cannot be grouped", faults)
    chosen = {name: _own_settings(settings, rows[name], name, no_decay) for name in named}
    for name, own in chosen.items():
        faults += cannot_be_exact(rows[name], own, name, plan[name])
        faults += refused_by_row(rows[name], own, LATE, name, plan[name])
    raise_faults("these parameters cannot be grouped", faults)
    groups: dict[Any, dict[str, Any]] = {}
    for name, parameter in named.items():
        own, row = chosen[name], rows[name]
        factors = factors_of(row, own, plan[name])
        group = {
            key: scale_setting(copy.deepcopy(v), factors[key]) if key in factors else v
            for key, v in own.items()
        }
        key = tuple(
            (k, factors.get(k) if k == "lr" or _matters(v) else None, _plain(v))
            for k, v in sorted(own.items())
        )
        group["lr_factor"] = float(factors["lr"])
        apart = is_sharded(parameter)  # foreach and fused steps take plain or sharded tensors, not both
        groups.setdefault((apart, key), {**group, "params": []})["params"].append((name, parameter))
    return list(groups.values())


def _own_settings(
    settings: Mapping[str, Any], row: OptimizerRule, name: str, no_decay: Sequence[str]
) -> dict[str, Any]:
    """The settings of one tensor at the reference."""
    without = row.decay is not None and any(fnmatchcase(name, pattern) for pattern in no_decay)
    return {**settings, row.decay_key: 0.0} if without else dict(settings)


def _settings(
    optimizer: type[Optimizer], rule: OptimizerRule, constants: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of a group: what is given, and the defaults.

    Other packages have constructors with arguments that are no settings of a group (bits, pages), and settings that they
    spell in another way. So an optimizer of one number is made to see them; arguments that it keeps elsewhere are left out.
    """
    plain = {**_defaults(optimizer), **constants}
    if qualified_name(optimizer).startswith("torch.optim."):
        return plain
    try:
        made = optimizer([nn.Parameter(torch.zeros(1, 1, device="cpu"))], **constants).defaults
    except (TypeError, ValueError, AssertionError, KeyError):
        return plain
    kept = {key: value for key, value in made.items() if key not in _CHOICES or key in constants}
    arguments = inspect.signature(optimizer.__init__).parameters
    return {**kept, **{key: v for key, v in constants.items() if rule.known(key) or key not in arguments}}


def _rows(rule: OptimizerRule, settings: Mapping[str, Any]) -> tuple[OptimizerRule, ...]:
    """The rows that tensors can have under these settings."""
    if rule.by is not None and rule.by in settings:
        return _rows(rule.rows[settings[rule.by]], settings) if settings[rule.by] in rule.rows else ()
    return tuple(r for row in rule.rows.values() for r in _rows(row, settings)) if rule.rows else (rule,)


def expect_class(optimizer: object) -> list[Fault]:
    """A fault unless this is an optimizer class. A name is not enough, because the class holds the defaults."""
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        return []
    what = f"it is {shown(optimizer)}, expected a class of optimizers"
    return [
        Fault("optimizer.not_a_class", "optimizer_class", what, "write torch.optim.AdamW, or type(optimizer)")
    ]


def _plain(value: Any) -> Any:
    """A setting in a form that can be compared: 0 and 0.0 are equal."""
    return float(value) if isinstance(value, (int, float)) else repr(value)


def _matters(value: Any) -> bool:
    """A setting of zero is zero in every unit, so it does not split a group."""
    return not (isinstance(value, (int, float)) and value == 0)


def _defaults(optimizer: type[Optimizer]) -> dict[str, Any]:
    signature = inspect.signature(optimizer.__init__)
    skip = {"self", "params", *_CHOICES}
    return {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if name not in skip and parameter.default is not inspect.Parameter.empty
    }


def _chosen(model: nn.Module, plan: Plan, parameters: Chosen) -> dict[str, nn.Parameter]:
    """Trainable parameters by planned name, each once, in the model's order."""
    everything: dict[str, nn.Parameter] = {}
    for name, kind, tensor in named_tensors(model):
        planned = plan.planned(name)
        if kind == "parameter" and isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            everything.setdefault(planned, tensor)
    if parameters is None:
        return everything
    if callable(parameters):
        return {name: p for name, p in everything.items() if parameters(name, p)}
    pairs = list(parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) for pair in pairs):
        raise MupscaleError(
            "parameters= must yield (name, parameter) pairs; write model.named_parameters(), or a function of "
            "(name, parameter) that returns whether to take it",
            code="argument.not_named_pairs",
        )
    wanted = [(plan.planned(known), name) for name, _ in pairs if (known := resolve(name, plan) or name)]
    faults = [
        Fault(
            "argument.not_a_trainable_parameter",
            name,
            "not a trainable parameter of the model",
            "pick from model.named_parameters()",
        )
        for known, name in wanted
        if known not in everything
    ]
    raise_faults("these parameters cannot be grouped", faults)
    return {known: everything[known] for known, _ in wanted}
