"""Measure whether a sharded wide run continues a sharded base run, on the ranks where both live.

Both runs take real steps on their ranks. One base tensor at a time is gathered and compared with the wide shard of
every rank, and all ranks return the same certificate. Afterwards both runs are restored from a copy of their shards
in host memory. The reported cause of a deviation is the most likely one: finding it for certain needs copies of
models that fit on one device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import Fault, MupscaleError
from ..models.names import named_tensors
from ..plans.ends import check_end
from ..plans.plan import Plan
from ..proofs.certificate import Certificate
from ..proofs.compare import certificate_of, compare_steps, tolerance_of
from ..proofs.diagnose import suspect
from ..proofs.modes import mode_of_steps
from ..proofs.trial import Step, Trial
from ..rules.optimizer_rule import OptimizerRule
from ..runs.run import Run
from ..tensors.parts import local_of
from ..training.units.clip import Clip
from ..training.units.settings import settings_comparer
from .memory import reshard_


def verify_sharded(
    base: Run,
    wide: Run,
    *,
    step: Step,
    plan: Plan | None = None,
    steps: int = 5,
    tolerance: float | None = None,
    group: dist.ProcessGroup | None = None,
    rules: Mapping[str, OptimizerRule] | None = None,
) -> Certificate:
    """Measure on all ranks whether a run that was just loaded, without noise, continues `base`.

    Real training steps are taken side by side; weights, optimizers and schedulers are as before afterwards.

    Args:
        base: The base run, live on the same ranks.
        wide: The run that `load_grown_` filled.
        step: `step(run, i)` takes one optimizer step on the i-th batch of this rank and returns the loss. It is called with the
            same i and the same random seed for both runs.
        plan: The plan from base to wide. By default that of the run `wide`.
        steps: How many steps are taken.
        tolerance: The relative error that counts as equal. By default that of the weights' dtype.
        group: The process group, all ranks of which must call this function; by default all.
        rules: Rows to use in place of the registry of optimizers, by full class name.

    Returns:
        The same certificate on every rank; true if the runs agree.

    Raises:
        MupscaleError: If the runs cannot be compared. A run that deviates raises nothing: it is in the certificate.

    >>> import mupscale as mu
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1))
    >>> model, x = make(4).double(), torch.randn(8, 3).double()
    >>> base = Run(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    >>> def step(run, i):
    ...     run.optimizer.zero_grad()
    ...     loss = (run.model(x) - 1).square().mean()
    ...     loss.backward()
    ...     run.optimizer.step()
    ...     return loss
    >>> wide, before = mu.grow(base, lambda: make(12)), model[0].weight.detach().clone()
    >>> verify_sharded(base, wide, step=step).holds, bool((model[0].weight == before).all())
    (True, True)
    """
    chosen = plan or wide.plan
    if chosen is None:
        raise MupscaleError(
            "the wide run does not know its plan; pass plan=, from base to wide", code="plan.not_given"
        )
    if chosen.carries_mean:
        what = "new channels carry the mean of the others: outputs are the base's, and training is not"
        remedy = "compare the loss of both runs on one batch, or write mu.verify(base, make_wide, loss=…, plan=plan) on one process"
        raise MupscaleError(
            "steps of these runs cannot be compared", [Fault("proof.steps_with_means", "plan", what, remedy)]
        )
    if len(base.optimizers) != len(wide.optimizers):
        raise MupscaleError(
            f"the base run has {len(base.optimizers)} optimizers, the wide run {len(wide.optimizers)}; they are compared one by one",
            code="run.other_optimizer_count",
        )
    if steps < 1:
        raise MupscaleError(
            f"steps={steps}, expected 1 or more: verify_sharded compares steps", code="argument.below_one"
        )
    for run in (base, wide):
        reshard_(run.model)
    check_end(chosen, base.model, "base")
    check_end(chosen, wide.model, "wide")
    dtype = next(t.dtype for _, _, t in named_tensors(base.model) if t.is_floating_point())
    trial = Trial(base, wide, chosen, tolerance_of(dtype, tolerance))
    gather = partial(_everywhere, group=group)
    with _standing(base) as kept, _standing(wide) as kept_wide:
        failure = compare_steps(trial, step, steps, settings_comparer(rules), gather, kept.weights)
        need = max(gather(kept.bytes + kept_wide.bytes))
    if failure is not None and not failure.cause:
        failure = suspect(trial, failure)
    modes = mode_of_steps(base.model, trial.ran) if failure is None else {}
    return certificate_of(trial, failure, dtype, need, modes=modes)


def _everywhere(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks, in the order of ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return [mine]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, mine, group=group)
    return values


@dataclass(frozen=True)
class _Kept:
    """This rank's part of a run's weights before the steps, by name, in host memory."""

    weights: Mapping[str, Tensor]
    bytes: int


@contextmanager
def _standing(run: Run) -> Iterator[_Kept]:
    """Restore a run after the block: shards, gradients, state, settings, schedules."""
    reshard_(run.model)
    named = {name: t for name, _, t in named_tensors(run.model)}
    averages: Any = run.ema if run.ema is not None else {}
    followed = dict(averages.state_dict() if isinstance(averages, nn.Module) else averages)
    grads = [(p, p.grad) for p in run.model.parameters()]
    states = [(o, {p: dict(state) for p, state in o.state.items()}) for o in run.optimizers]
    groups = [(group, dict(group)) for o in run.optimizers for group in o.param_groups]
    schedules = [(s, copy.deepcopy(s.state_dict())) for s in run.schedulers]
    hooks = [h for o in run.optimizers for h in o._optimizer_step_pre_hooks.values()]
    clips = [(h, h.last_norm) for h in hooks if isinstance(h, Clip)]
    values = [
        *named.values(),
        *followed.values(),
        *(grad for _, grad in grads),
        *(value for _, state in states for own in state.values() for value in own.values()),
        *(value for _, settings in groups for value in settings.values()),
    ]
    tensors = {id(t): t for t in values if isinstance(t, Tensor)}
    host = {key: local_of(t.detach()).to("cpu", copy=True) for key, t in tensors.items()}
    try:
        kept = sum(t.numel() * t.element_size() for t in host.values())
        yield _Kept({name: host[id(t)] for name, t in named.items()}, kept)
    finally:
        reshard_(run.model)
        with torch.no_grad():
            for key, tensor in tensors.items():
                local_of(tensor.detach()).copy_(host[key])
        for parameter, grad in grads:
            parameter.grad = grad
        for optimizer, state in states:
            optimizer.state.clear()
            optimizer.state.update(state)
        for scheduler, before in schedules:
            scheduler.load_state_dict(before)
        for group, settings in groups:
            group.clear()
            group.update(settings)
        for hook, norm in clips:
            hook.last_norm = norm
