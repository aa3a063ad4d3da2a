"""The plan of a grown directory by the names that sentence-transformers gives its tensors.

A `SentenceTransformer` holds the stock model as a part of its first module (`0.model.embeddings…`), and heads behind it. Knows
its classes by name, and does not import it.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ..checkpoints.result.sentence_modules import output_axis
from ..models.names import unwrap
from ..plans.plan import Plan
from ..plans.tensor_plan import TensorPlan
from ..rules.axes import Axis

_PACKAGE, _MODEL, _DENSE, _WEIGHT = "sentence_transformers", "SentenceTransformer", "Dense", "linear.weight"


def in_sentence_model(plan: Plan, model: nn.Module) -> Plan:
    """The plan with the names of a `SentenceTransformer`, and with its dense layers; for another model the plan itself.

    What is not known there has no entry, and is refused by name where the plan is compared with the model.

    >>> from mupscale.plans import plan_between
    >>> plan = plan_between(lambda n: nn.Linear(3, n), 2, 4)
    >>> in_sentence_model(plan, nn.Linear(3, 4)) is plan
    True
    """
    inner = unwrap(model)
    if not _is_one(inner):
        return plan
    names = [name for name, _ in inner.named_parameters(remove_duplicate=False)]
    first = next((f".{name}" for name, entry in plan.tensors.items() if entry.kind == "parameter"), "")
    paths = [name.removesuffix(first) for name in names if name.endswith(first)]
    if not first or len(paths) != 1:
        return plan
    found = plan.rename(lambda name: f"{paths[0]}.{name}")
    heads = _heads(inner, plan)
    return found.with_tensors(heads) if heads else found


def _heads(model: nn.Module, plan: Plan) -> dict[str, TensorPlan]:
    """The tensors of dense layers. The first reads the grown output; its own output has the base's width."""
    axis = output_axis(plan)
    found: dict[str, TensorPlan] = {}
    for path, module in list(model.named_children())[1:]:
        if type(module).__name__ != _DENSE:
            continue
        for name, parameter in module.named_parameters():
            axes = list(map(Axis.fixed, parameter.shape))
            if axis is not None and name == _WEIGHT and parameter.shape[1] == axis.wide:
                axes[1] = replace(axis, role="in")
            found[f"{path}.{name}"] = TensorPlan((f"{path}.{name}",), tuple(axes))
        axis = None
    return found


def _is_one(model: nn.Module) -> bool:
    kinds = type(model).__mro__
    return any(of.__name__ == _MODEL and of.__module__.partition(".")[0] == _PACKAGE for of in kinds)
