"""What training a grown directory needs to go on: the plan since its reference, and an optimizer.

Knows: where the plan is written. Does not know: trainers; their callbacks ask here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from ..checkpoints.about import read_plans
from ..errors import MupscaleError
from ..files.torch_file import read_tree
from ..plans.plan import Plan
from ..rules.optimizers import OptimizerRule
from ..runs.run import Run, since_of
from ..training.groups import Chosen, param_groups

Grown = Plan | Run | Path | str
"""The plan from the reference to the model, or what holds it: a run, a grown directory, a grown checkpoint."""
KEY = "mupscale"
"""Where a checkpoint that is one dict keeps its plans."""
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def both_plans(since: Grown) -> tuple[Plan, Plan]:
    """The plan that made a model wide, and the plan that leads to it from the reference."""
    if isinstance(since, Plan):
        return since, since
    if isinstance(since, Run):
        counted = since_of(since, since.model)
        return since.plan or counted, counted
    return plans_in(since) if Path(since).is_file() else read_plans(since)


def plans_in(checkpoint: Path | str) -> tuple[Plan, Plan]:
    """The two plans of a single checkpoint file that carries them."""
    tree = read_tree(checkpoint)
    told = tree.get(KEY) if isinstance(tree, dict) else None
    if not isinstance(told, dict) or not {"plan", "since_reference"} <= told.keys():
        raise MupscaleError(f"{checkpoint} does not say how it was grown; pass the plan")
    plan, since = (Plan.from_json(json.dumps(told[key])) for key in ("plan", "since_reference"))
    return plan, since


def put_plans_(checkpoint: dict[str, Any], plan: Plan, since: Plan) -> None:
    """Write both plans into a checkpoint that is a dict."""
    checkpoint[KEY] = {"plan": plan.as_json(), "since_reference": since.as_json()}


def optimizer_for(
    model: nn.Module,
    since: Grown,
    optimizer_class: type[AnyOptimizer],
    *,
    parameters: Chosen = None,
    no_decay: tuple[str, ...] | list[str] = (),
    rules: Mapping[str, OptimizerRule] | None = None,
    **constants: Any,
) -> AnyOptimizer:
    """A fresh optimizer for a grown model: the constants you would give the base, in each tensor's units.

    `since` is the directory that `mupscale upscale` wrote, the run, or the plan from the reference to `model`. For the state a Trainer left there, keep the stock
    optimizer and use the callback, or `step_in_units_`.

    >>> import torch, mupscale as mu
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 1))
    >>> optimizer = optimizer_for(make(256), mu.plan_between(make, 64, 256), torch.optim.AdamW, lr=1e-2)
    >>> sorted({group["lr"] for group in optimizer.param_groups})
    [0.0025, 0.01]
    """
    groups = param_groups(
        model,
        since if isinstance(since, Run) else both_plans(since)[1],
        optimizer_class,
        parameters=parameters,
        no_decay=no_decay,
        rules=rules,
        **constants,
    )
    return optimizer_class(groups)  # type: ignore[call-arg]
