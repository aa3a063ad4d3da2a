"""Parameter groups for training at any width: learning rate, eps and decay in the units of each tensor.

Constants are written down at the reference; a run knows the plan from there to its model, `since` gives it for any model.
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
    scaled,
    without_units,
)
from ...optimizers.sharded_steps import refused_on_shards
from ...plans.ends import check_end
from ...plans.plan import Plan
from ...rules.optimizer_rule import OptimizerRule
from ...rules.optimizers import qualified_name, rule_for
from ...runs.run import Run, Since, since_of
from ...tensors.parts import is_sharded

_CHOICES = frozenset({"foreach", "fused", "capturable", "differentiable", "maximize"})  # of implementation
Chosen = Iterable[tuple[str, nn.Parameter]] | Callable[[str, nn.Parameter], bool] | None
_REFUSED = "these parameters cannot be grouped"


def param_groups(
    model: Run | nn.Module,
    since: Since | type[Optimizer],
    optimizer_class: type[Optimizer] | None = None,
    *,
    parameters: Chosen = None,
    no_decay: Sequence[str] = (),
    rules: Mapping[str, OptimizerRule] | None = None,
    **constants: Any,
) -> list[dict[str, Any]]:
    """Make the parameter groups of an optimizer, with constants that were written at the reference in the units of every tensor.

    Write `param_groups(run, AdamW, lr=…)`, or `param_groups(model, since, AdamW, lr=…)`. Tensors with equal settings share a
    group.

    Args:
        model: The run, or the model alone, followed by `since`.
        since: The plan from the reference to the model; after a run the class of the optimizer.
        optimizer_class: The class of the optimizer, such as `torch.optim.AdamW`.
        parameters: Which parameters, for several optimizers: pairs of name and parameter, or a function of both that picks.
        no_decay: Patterns of names that get no weight decay.
        rules: Rows to use in place of the registry of optimizers, by full class name.
        **constants: lr, eps, weight_decay and others, written at the reference. Those that are not given take the optimizer's
            defaults and are scaled too.

    Returns:
        The groups, to build the optimizer from. Each also has its `lr_factor`: what its rate is multiplied by.

    Raises:
        MupscaleError: If the optimizer has no row, a constant has no known units, or a pattern matches nothing.

    >>> import torch, mupscale as mu
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 1))
    >>> run = mu.Run(make(256), since=mu.plans.plan_between(make, 64, 256))
    >>> groups = param_groups(run, torch.optim.AdamW, lr=1e-2)
    >>> [(group["lr"], [name for name, _ in group["params"]]) for group in groups][1]
    (0.0025, ['2.weight'])
    >>> groups == param_groups(run.model, run.since, torch.optim.AdamW, lr=1e-2)
    True
    """
    module, origin, kind = _subject(model, since, optimizer_class)
    raise_faults(_REFUSED, [*expect_class(kind), *wrong_list("no_decay", no_decay)])
    rule = rule_for(kind, rules=rules)
    settings = _settings(kind, rule, constants)
    _expect_mup(kind, rule, settings)
    plan = since_of(origin, module)
    check_end(plan, module, "wide")
    named = _chosen(module, plan, parameters)
    rows, faults = _rows_of(kind, rule, settings, {name: len(plan[name].axes) for name in named})
    faults += [*_wrong_settings(kind, rule, settings), *_unused(no_decay, named)]
    raise_faults(_REFUSED, [*faults, *refused_on_shards(kind, named, settings)])
    own = {name: _own_settings(settings, rows[name], name, no_decay) for name in named}
    for name in named:
        faults += cannot_be_exact(rows[name], own[name], name, plan[name])
        faults += refused_by_row(rows[name], own[name], LATE, name, plan[name])
    raise_faults(_REFUSED, faults)
    groups: dict[Any, dict[str, Any]] = {}
    for name, parameter in named.items():
        factors = factors_of(rows[name], own[name], plan[name])
        group = {**scaled(copy.deepcopy(own[name]), factors), "lr_factor": float(factors["lr"]), "params": []}
        shared = [
            (key, factors.get(key) if key == "lr" or _matters(value) else None, _plain(value))
            for key, value in sorted(own[name].items())
        ]
        # foreach and fused steps take plain or sharded tensors, not both
        one = groups.setdefault((is_sharded(parameter), *shared), group)
        one["params"].append((name, parameter))
    return list(groups.values())


def _subject(model: Any, since: Any, optimizer_class: Any) -> tuple[nn.Module, Since, Any]:
    """The model, its plan or run, and the class of optimizers, as both forms of the call give them."""
    run = model if isinstance(model, Run) else None
    if optimizer_class is None:  # param_groups(run, AdamW)
        since, optimizer_class = run, since
    return model if run is None else run.model, since, optimizer_class


def _expect_mup(optimizer: type[Optimizer], rule: OptimizerRule, settings: Mapping[str, Any]) -> None:
    if not all(row.agrees_with_mup for row in _rows(rule, settings)):
        raise MupscaleError(
            f"{qualified_name(optimizer)} measures the size of the weights itself, so μP gives it no learning rate that "
            "holds across widths; a run with it can be widened, but not tuned small and applied large",
            code="optimizer.outside_mup",
        )


def _wrong_settings(
    optimizer: type[Optimizer], rule: OptimizerRule, settings: Mapping[str, Any]
) -> list[Fault]:
    """Faults for settings without units, of a wrong type, or that a group cannot have."""
    faults, kind, rows = [], optimizer.__name__, _rows(rule, settings) or (rule,)
    for key in (key for key in settings if not all(row.known(key) for row in rows)):
        what = f"{qualified_name(optimizer)} has no units for it in the registry"
        remedy = f"check its spelling; {without_units(key)}"
        faults.append(Fault("optimizer.unknown_setting", f"{key} = {settings[key]!r}", what, remedy))
    if "lr" not in settings:
        what = f"{kind} has no default learning rate"
        faults.append(Fault("rates.no_default_lr", "lr", what, "pass lr="))
    elif not isinstance(settings["lr"], Tensor):
        faults += wrong_number("lr", settings["lr"], "write lr=1e-3, for example")
    measured = {key for row in rule.every_row for key in (row.decay_key, *row.hyper)}
    for key in (key for key in sorted(measured) if isinstance(settings.get(key), str)):
        what = f"it is {settings[key]!r}, expected a number"
        faults.append(Fault("argument.not_a_number", key, what, f"write {key}=0.1, for example"))
    for key in (key for key in rule.constructor_only if settings.get(key)):
        what = f"{kind} reads it from its constructor, so it cannot differ by group"
        where = f"{key} = {settings[key]}"
        faults.append(Fault("optimizer.setting_of_constructor", where, what, f"pass {key}=0"))
    return faults


def _unused(no_decay: Sequence[str], named: Iterable[str]) -> list[Fault]:
    """A fault for every pattern that no name matches."""
    unused = [pattern for pattern in no_decay if not any(fnmatchcase(name, pattern) for name in named)]
    what = "declared in no_decay, but no parameter has such a name"
    remedy = "write the name of a parameter, or a pattern such as *.bias"
    return [Fault("argument.pattern_matches_nothing", pattern, what, remedy) for pattern in unused]


def _rows_of(
    optimizer: type[Optimizer], rule: OptimizerRule, settings: Mapping[str, Any], dims: Mapping[str, int]
) -> tuple[dict[str, OptimizerRule], list[Fault]]:
    """The row of every tensor, by its number of dimensions, and faults for those that have none."""
    rows: dict[str, OptimizerRule] = {}
    faults = []
    for name, many in dims.items():
        try:
            rows[name] = rule.row(settings, many)
        except MupscaleError as error:
            faults.append(Fault(error.code, name, error.claim))
            continue
        if rows[name].of_matrices and many < 2:
            what, remedy = f"{optimizer.__name__} takes matrices only", "pick matrices with parameters="
            faults.append(Fault("optimizer.takes_matrices_only", name, what, remedy))
    return rows, faults


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
    remedy = "write torch.optim.AdamW, or type(optimizer)"
    return [Fault("optimizer.not_a_class", "optimizer_class", what, remedy)]


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
    what, remedy = "not a trainable parameter of the model", "pick from model.named_parameters()"
    missing = [name for known, name in wanted if known not in everything]
    code = "argument.not_a_trainable_parameter"
    raise_faults(_REFUSED, [Fault(code, name, what, remedy) for name in missing])
    return {known: everything[known] for known, _ in wanted}
