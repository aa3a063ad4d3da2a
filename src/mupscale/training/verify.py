"""`mu.verify`: copy a base run, widen the copy, and compare the two with `proofs`.

Everything happens on copies, in float64 by default, with the caller's own step function. The run itself is not
changed, except for the state of its data loader.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from math import prod

import torch
from torch import Tensor, nn

from ..arguments import wrong_function, wrong_kind, wrong_number, wrong_whole
from ..errors import Fault, MupscaleError, raise_faults
from ..plans.build import Make, build
from ..plans.float64 import cast_inputs, lifted_casts
from ..plans.identity import Loss
from ..plans.infer import infer_plan
from ..plans.names import named_tensors
from ..plans.plan import Plan
from ..proofs.certificate import Certificate, Failure
from ..proofs.compare import certificate_of, compare_losses, compare_steps, tolerance_of
from ..proofs.diagnose import diagnose
from ..proofs.trial import Step, Trial
from ..rules.optimizers import OptimizerRule
from ..runs.run import Run
from .copies import clone, refuse_hooks
from .settings import settings_comparer
from .widen import widen

_LOG = logging.getLogger("mupscale")


def verify(
    base: Run | nn.Module,
    wide: Run | Make,
    *,
    step: Step | None = None,
    loss: Loss | None = None,
    plan: Plan | None = None,
    steps: int = 10,
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
    rules: Mapping[str, OptimizerRule] | None = None,
) -> Certificate:
    """Measure whether `wide` (a factory, or a run to be checked as it is) continues `base`; returns the certificate.

    `step(run, i)` takes one optimizer step on the i-th batch and returns the loss. It is called on copies of both runs
    with the same random seed. Without a step, `loss(model)` tests only the gradient identity.

    >>> import torch
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1))
    >>> model, x = make(4), torch.randn(8, 3)
    >>> def step(run, i):
    ...     run.optimizer.zero_grad()
    ...     loss = (run.model(x) - 1).square().mean()
    ...     loss.backward()
    ...     run.optimizer.step()
    ...     return loss
    >>> run = Run(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    >>> verify(run, lambda: make(12), step=step).holds
    True
    """
    start = base if isinstance(base, Run) else Run(base)
    if step is None and loss is None:
        raise MupscaleError(
            "verify needs step=, your training step, or loss=, for the gradient identity alone"
        )
    if isinstance(wide, Run) and len(wide.optimizers) != len(start.optimizers):
        raise MupscaleError(
            f"the base run has {len(start.optimizers)} optimizers, the wide run {len(wide.optimizers)}, expected as many: "
            "they are compared one by one; pass a factory as wide, or give both runs their optimizers"
        )
    raise_faults("verify cannot use what it was given", _unusable(start, step, loss, steps, dtype, tolerance))
    for side in (start, wide) if isinstance(wide, Run) else (start,):
        refuse_hooks(side)
    chosen = plan if plan is not None else wide.plan if isinstance(wide, Run) else None
    if chosen is None:
        chosen = infer_plan(start.model, wide.model if isinstance(wide, Run) else build(wide))
    need = memory(start, chosen, dtype)
    _LOG.info("verify: two copies in %s, about %.2f GB", str(dtype).removeprefix("torch."), need / 1e9)
    limit = tolerance_of(dtype, tolerance)

    def trial() -> Trial:
        copied = clone(start, dtype, rules)
        grown = (
            clone(wide, dtype, rules)
            if isinstance(wide, Run)
            else widen(copied, wide, plan=chosen, rules=rules)
        )
        for model in (copied.model, grown.model):
            cast_inputs(model, dtype)
        return Trial(copied, grown, chosen, limit)

    measured = trial()
    with lifted_casts() if dtype == torch.float64 else nullcontext():
        failure: Failure | None
        if step is not None:
            failure = compare_steps(measured, step, steps, settings_comparer(rules))
        else:
            assert loss is not None
            failure = compare_losses(measured, loss)
        if failure is not None and not failure.cause:
            failure = diagnose(trial(), step, loss, failure)
    return certificate_of(measured, failure, dtype, need)


def _unusable(
    run: Run,
    step: Step | None,
    loss: Loss | None,
    steps: int,
    dtype: torch.dtype,
    tolerance: float | None,
) -> list[Fault]:
    faults = [] if step is None else wrong_function("step", step, "run", "i")
    faults += [] if loss is None else wrong_function("loss", loss, "model")
    faults += [
        *wrong_whole("steps", steps, least=1),
        *wrong_kind("dtype", dtype, torch.dtype, "write torch.float64"),
    ]
    if tolerance is not None:
        faults += wrong_number("tolerance", tolerance, "write tolerance=1e-9, for example")
    if step is not None and not run.optimizers:
        remedy = "write Run(model, optimizer), or pass loss= in place of step="
        faults.append(Fault("optimizers", "the run has none, so no step can be taken", remedy))
    return faults


def memory(run: Run, plan: Plan, dtype: torch.dtype) -> int:
    """Peak memory of two copies in bytes: weights, gradients, recorded gradients, optimizer state, one comparison."""
    state = 0
    for optimizer in run.optimizers:
        state += sum(v.numel() for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor))
    base = sum(t.numel() for _, _, t in named_tensors(run.model))
    wide = sum(prod(t.wide_shape) for t in plan.tensors.values())
    ratio = wide / max(base, 1)
    largest = max((prod(t.wide_shape) for t in plan.tensors.values()), default=0)
    return int((4 * base + 3 * wide + state * (1 + ratio) + 4 * largest) * dtype.itemsize)
