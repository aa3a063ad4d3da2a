"""Grow a run, or narrow it back: weights, buffers, averages, optimizers, schedulers, in one call.

The result shares no memory with the input, is deterministic, and the wide model is built without initialising
weights that would be overwritten.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...errors import MupscaleError, raise_faults
from ...models.build import Make, build
from ...models.example_loss import ExampleInputs
from ...models.names import named_tensors, unwrap
from ...planning.declare import Declared
from ...planning.infer import measured_with
from ...plans.direction import Direction
from ...plans.more_experts import refuse_equal_scores
from ...plans.plan import Plan
from ...plans.tensor_plan import TensorPlan
from ...proofs.identity import Loss
from ...rules.optimizer_rule import OptimizerRule
from ...rules.products import By, Ways
from ...runs.run import Run
from ..rates.schedules import begin_stage_, wrong_step_cost
from .carry import carry, check_start
from .left_behind import hand_over_
from .prove import proved_plan
from .woken import refuse_other_way


def grow(
    base: Run | nn.Module,
    wide: Make,
    *,
    by: By = "copies",
    loss: Loss | None = None,
    example_inputs: ExampleInputs | None = None,
    plan: Plan | None = None,
    declared: Declared | None = None,
    step_cost: float | None = None,
    prove: bool = True,
    rules: Mapping[str, OptimizerRule] | None = None,
) -> Run:
    """Grow a run exactly: the larger run trains as `base` would have trained.

    Tensors keep the base's dtype and device. A plan that nothing proves is refused: pass `loss` or `example_inputs` if the model
    has code of its own. A plan that was proved before, or that torch's own modules decide, needs neither.

    Args:
        base: The run to grow, or its model alone. It is not changed.
        wide: A function without arguments that builds the larger model, or that model.
        by: "copies" copies every unit and divides the weights that read it. "units" adds units that are zero, and sleep until
            `upscale` wakes them, and copies where zeros cannot be had. "padded" makes copies, and zeros where no whole number of
            copies fits. All are exact.
        loss: `loss(model)`, your loss on one fixed batch. It proves the plan, and does nothing else: gradients of both models are
            compared in the mode the model is in, train or eval, and then in the other, where a deviation refuses nothing.
        example_inputs: One batch for `forward`, a tuple or a dict, which proves the plan by a projection of the outputs. For
            models whose loss is not at hand; give this or `loss`.
        plan: The plan to grow by, from `infer_plan` or an earlier growth. Without it one is found.
        declared: What shapes do not show, such as the blocks in which an axis is laid out.
        step_cost: What one step costs from now on, in the unit of the schedule's budget. Needed if, and only if, the run has a
            `GrowthSchedule`.
        prove: False grows by a plan that nothing has proved, and `provenance` says so.
        rules: Rows to use in place of the registry of optimizers, by full class name.

    Returns:
        A new run that shares no memory with `base`: model, optimizers with their state, schedulers, averages, and `provenance`.

    Raises:
        NotExact: If the two models differ by more than the growth, or an optimizer or schedule cannot be continued exactly.
        Undecided: If nothing proves the plan, or a `loss` or a declaration is needed to find one.
        WrongArgument: If an argument cannot be used. These and all others are `MupscaleError`.

    >>> base = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> wide = grow(Run(base), lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)))
    >>> import torch
    >>> x = torch.randn(5, 3)
    >>> torch.allclose(base(x), wide.model(x))
    True
    """
    start = base if isinstance(base, Run) else Run(base)
    raise_faults("this schedule cannot be continued", wrong_step_cost(start.schedulers, step_cost))
    check_start(start)
    refuse_other_way(None if by == "copies" else by, plan)  # a plan may be given without by=
    built = build(wide)
    chosen, proof = proved_plan(
        start.model,
        built,
        plan,
        measured_with(loss, example_inputs),
        prove,
        Ways(by),
        wide,
        declared=declared,
    )
    refuse_equal_scores(chosen)
    direction = Direction(chosen)
    grown = carry(start, built, wide, direction, rules, settings=prove)
    begin_stage_(grown.schedulers, step_cost)
    left = hand_over_(start, grown, direction, proof)
    return replace(grown, provenance=grown.provenance.noting(**left))


def narrow(
    wide: Run | nn.Module,
    base: Make,
    *,
    plan: Plan | None = None,
    rules: Mapping[str, OptimizerRule] | None = None,
) -> Run:
    """Narrow a run: every entry is the average of its copies, and new units are dropped. Undoes `grow`.

    A warning names new units that are in use: without them the loss is another one.

    Args:
        wide: The run to narrow, or its model alone. It is not changed.
        base: A function without arguments that builds the smaller model, or that model.
        plan: The plan from the smaller model to the larger one. By default the plan by which the run was grown last.
        rules: Rows to use in place of the registry of optimizers, by full class name.

    Returns:
        A new run at the smaller size, with the reference and the history from before the growth.

    Raises:
        MupscaleError: If no plan is known, or it does not fit the two models or an optimizer.

    >>> def make(n): return nn.Sequential(nn.Linear(3, n), nn.Linear(n, 2))
    >>> base = make(4)
    >>> back = narrow(grow(base, lambda: make(8)), lambda: make(4))
    >>> import torch
    >>> torch.equal(back.model[0].weight, base[0].weight)
    True
    """
    start = wide if isinstance(wide, Run) else Run(wide)
    chosen = plan if plan is not None else start.plan
    if chosen is None:
        raise MupscaleError(
            "narrow needs the plan by which the run was widened; pass plan=", code="plan.not_given"
        )
    _warn_of_units_in_use(start.model, chosen)
    direction = Direction(chosen, back=True)
    cut = carry(start, build(base), base, direction, rules)
    hand_over_(start, cut, direction, {})
    return cut


def _warn_of_units_in_use(wide: nn.Module, plan: Plan) -> None:
    """Warn if weights that are zero while new units are asleep, or not trained yet, are not zero."""
    used = []
    for name, _, tensor in named_tensors(unwrap(wide)):
        entry, values = plan.tensors.get(name), tensor.detach()
        if entry is None or values.is_meta or len(values.shape) < 2 or type(values) is not Tensor:
            continue
        for dim in (*entry.cut, *entry.mean):
            new = torch.tensor(entry.axes[dim].new, device=values.device)
            if not _is_unused(values, dim, new, entry):
                used.append(name)
                break
    if used:
        many = f" and {len(used) - 1} more" if used[1:] else ""
        warnings.warn(
            f"new units are in use ({used[0]}{many}), and the narrow run does not have them", stacklevel=3
        )


def _is_unused(values: Tensor, dim: int, new: Tensor, entry: TensorPlan) -> bool:
    """Whether new entries are what growing made of them: zeros, or the mean of the others."""
    found = values.index_select(dim, new)
    if dim not in entry.mean:
        return not bool(found.any())
    others = [i for i in range(values.shape[dim]) if i not in set(new.tolist())]
    mean = values.index_select(dim, torch.tensor(others, device=values.device)).mean(dim, keepdim=True)
    allowed = torch.finfo(values.dtype).eps * len(others)
    return bool((found - mean).abs().max() <= allowed * values.abs().max())
