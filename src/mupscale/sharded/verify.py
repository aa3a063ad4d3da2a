"""Measure whether a sharded wide run continues a sharded base run, on the ranks where both live.

Nothing is copied to one place: both runs take real steps, one base tensor at a time is gathered and held against
the wide shard of every rank, and all ranks come to the same certificate. Afterwards both runs stand where they
stood; until then a copy of their shards is kept in host memory. Does not know why a run deviates beyond the
usual suspects; `training/diagnose.py`, which does, needs models that fit on one device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import MupscaleError
from ..plans.fits import check_end
from ..plans.names import named_tensors
from ..plans.plan import Plan, TensorPlan
from ..plans.selftest import SILENT, Identity
from ..rules.optimizers import OptimizerRule
from ..tensors.expand import expand_
from ..tensors.making import Making
from ..tensors.parts import held, is_sharded, local_of
from ..training.certificate import Certificate, Failure
from ..training.clip import Clip
from ..training.diagnose import CLIPPING, LAYOUT, OPTIMIZER, STILL
from ..training.run import Run
from ..training.trial import Step, Trial, run_step
from ..training.verify import TOLERANCE, certificate, loss_failure, settings_failure
from .memory import reshard_

START = (
    "the wide run does not stand where the base does: it was loaded from other weights or with noise, "
    "or a constant of the model's code is missing in the plan"
)


def verify_sharded(
    base: Run,
    wide: Run,
    step: Step,
    steps: int = 5,
    *,
    plan: Plan | None = None,
    tolerance: float | None = None,
    rules: Mapping[str, OptimizerRule] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Certificate:
    """The certificate that `wide`, just loaded with zero noise, continues `base`; the same on every rank.

    `step(run, i)` takes one optimizer step on the i-th batch of this rank and returns the loss; it is called
    with the same i and the same random seed for both runs. All ranks of `group` call this together.

    >>> import mupscale as mu
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1))
    >>> model, x = make(4).double(), torch.randn(8, 3).double()
    >>> base = Run(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    >>> def step(run, i):
    ...     run.optimizers[0].zero_grad()
    ...     loss = (run.model(x) - 1).square().mean()
    ...     loss.backward()
    ...     run.optimizers[0].step()
    ...     return loss
    >>> wide, before = mu.widen(base, lambda: make(12)), model[0].weight.detach().clone()
    >>> verify_sharded(base, wide, step).holds, bool((model[0].weight == before).all())
    (True, True)
    """
    chosen = plan or wide.plan
    if chosen is None:
        raise MupscaleError("the wide run does not know its plan; pass plan=, from base to wide")
    if len(base.optimizers) != len(wide.optimizers):
        raise MupscaleError(
            f"the base run has {len(base.optimizers)} optimizers, the wide run {len(wide.optimizers)}; they are compared one by one"
        )
    if steps < 1:
        raise MupscaleError(f"steps={steps}, expected 1 or more: verify_sharded compares steps")
    for run in (base, wide):
        reshard_(run.model)
    check_end(chosen, base.model, "base")
    check_end(chosen, wide.model, "wide")
    dtype = next(t.dtype for _, _, t in named_tensors(base.model) if t.is_floating_point())
    limit = tolerance if tolerance is not None else TOLERANCE.get(dtype, 1e-2)
    trial = Trial(base, wide, chosen, limit)
    with _standing(base) as kept, _standing(wide) as kept_wide:
        failure = _measure(trial, step, steps, rules, kept.weights, group)
        need = max(_everywhere(kept.bytes + kept_wide.bytes, group))
    return certificate(trial, failure, dtype, need)


def _measure(
    trial: Trial,
    step: Step,
    steps: int,
    rules: Mapping[str, OptimizerRule] | None,
    before: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
) -> Failure | None:
    for i in range(steps):
        early = settings_failure(trial, i, rules)
        (a, base_grads), (b, wide_grads) = (run_step(side, step, i) for side in (trial.base, trial.wide))
        late = settings_failure(trial, i, rules, changed=True)
        pairs = _everywhere((a, b, early, late), group)
        trial.losses.append((fmean(p[0] for p in pairs), fmean(p[1] for p in pairs)))
        if trial.identity is None:
            trial.identity = _identity(base_grads, wide_grads, trial.plan, group)
        failure = (
            next((p[2] for p in pairs if p[2] is not None), None)
            or _caused(loss_failure(trial, i), START if i == 0 else OPTIMIZER)
            or _gradient_failure(trial.identity, i, trial.tolerance)
            or next((p[3] for p in pairs if p[3] is not None), None)
            or _weight_failure(trial, i, group)
        )
        if failure is not None:
            return failure
    trial.moved = _moved(trial.base.model, before, group)
    if trial.moved == 0.0:
        return Failure(steps - 1, "the base", f"its weights did not move in {steps} steps", STILL)
    if trial.identity is None or not set(trial.identity.errors) - set(trial.identity.untested):
        return Failure(0, "all tensors", "every gradient is zero", STILL)
    return None


def _identity(
    base: Mapping[str, Tensor | None],
    wide: Mapping[str, Tensor | None],
    plan: Plan,
    group: dist.ProcessGroup | None,
) -> Identity:
    """Hold every wide gradient against r · dup(G), shard by shard."""
    mine: dict[str, tuple[float, float, float, float]] = {}
    silent = []
    for name, entry in plan.tensors.items():
        found, sources = wide.get(name), [base.get(source) for source in entry.sources]
        if entry.kind != "parameter":
            continue
        if found is None and all(g is None for g in sources):
            silent.append(name)
        elif found is None or not sources or any(g is None for g in sources):
            mine[name] = (inf, 1.0, 0.0, 1.0)  # it trains on one side only
        else:
            mine[name] = _compare(found, entry, base, entry.gradient_making())
    together = _everywhere(mine, group)
    whole = {name: _merged([rank[name] for rank in together]) for name in mine}
    largest = max((size / float(plan[n].change.r) for n, (_, size, *_) in whole.items()), default=0.0)
    errors, ratios = {}, {}
    for name, (gap, size, along, norm) in whole.items():
        r = float(plan[name].change.r)
        if size <= SILENT * largest * r:
            silent.append(name)
            size = largest * r or 1.0
        errors[name], ratios[name] = gap / size, along / norm if norm else 1.0
    return Identity(errors, tuple(silent), ratios)


def _gradient_failure(identity: Identity, i: int, tolerance: float) -> Failure | None:
    tested = {n: e for n, e in identity.errors.items() if n not in identity.untested}
    name = next((n for n, e in tested.items() if not e <= tolerance), None)
    if name is None:
        return None
    ratios = [identity.ratios[n] for n in tested]
    alike = max(ratios) - min(ratios) <= 1e-3 * abs(ratios[0])
    what = f"its gradient is {tested[name]:.1e} away from r · dup(G)"
    return Failure(i, name, what, CLIPPING if alike else LAYOUT)


def _weight_failure(trial: Trial, i: int, group: dist.ProcessGroup | None) -> Failure | None:
    assert trial.identity is not None
    base = {name: t.detach() for name, _, t in named_tensors(trial.base.model)}
    mine = {}
    for name, _, found in named_tensors(trial.wide.model):
        if name in trial.plan.ties or not found.is_floating_point():
            continue
        entry = trial.plan[name]
        if entry.sources and entry.fill != "own":
            mine[name] = _compare(found.detach(), entry, base, entry.making())
    together = _everywhere(mine, group)
    worst: Failure | None = None
    for name in mine:
        gap, size, *_ = _merged([rank[name] for rank in together])
        error = gap / (size or 1.0)
        trial.weights[name] = max(trial.weights.get(name, 0.0), error)
        if worst is None and not error <= trial.tolerance and name not in trial.identity.untested:
            what = f"its weight is {error:.1e} away from s · dup(W) after the step"
            worst = Failure(i, name, what, OPTIMIZER)
    return worst


def _compare(
    found: Tensor, entry: TensorPlan, base: Mapping[str, Any], making: Making
) -> tuple[float, float, float, float]:
    """What this rank holds of a wide tensor against the base's: gap, size, and two sums for their ratio."""
    whole = {s: base[s].full_tensor() if is_sharded(base[s]) else base[s] for s in entry.sources}
    got, part = local_of(found), held(found)
    if not part.numel:
        return 0.0, 0.0, 0.0, 0.0
    want = torch.empty(part.shape, dtype=got.dtype, device=got.device)
    expand_(want, entry.source(whole), making, out_start=part.start)
    gap = float((got - want).abs().max())
    along, norm = float((got * want).sum()), float((want * want).sum())
    return gap if gap == gap else inf, float(want.abs().max()), along, norm


def _merged(parts: list[tuple[float, float, float, float]]) -> tuple[float, float, float, float]:
    gaps, sizes, alongs, norms = zip(*parts, strict=True)
    return max(gaps), max(sizes), sum(alongs), sum(norms)


def _moved(model: nn.Module, before: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> float:
    mine = {}
    for name, kind, tensor in named_tensors(model):
        now = local_of(tensor.detach())
        if kind == "parameter" and now.numel():
            then = before[name].to(now.device)
            mine[name] = float((now - then).abs().max()), float(then.abs().max())
    together = _everywhere(mine, group)
    names = {name for rank in together for name in rank}
    rows = {name: [rank[name] for rank in together if name in rank] for name in names}
    return max(
        (max(m for m, _ in row) / (max(s for _, s in row) or 1.0) for row in rows.values()), default=0.0
    )


def _caused(failure: Failure | None, cause: str) -> Failure | None:
    return None if failure is None else Failure(failure.step, failure.where, failure.what, cause)


def _everywhere(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What every rank has to say, in the order of ranks and on every rank alike."""
    if not (dist.is_available() and dist.is_initialized()):
        return [mine]
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, mine, group=group)
    return said


@dataclass(frozen=True)
class _Kept:
    """Where a run stood: its weights by name, what this rank holds of them, in host memory."""

    weights: Mapping[str, Tensor]
    bytes: int


@contextmanager
def _standing(run: Run) -> Iterator[_Kept]:
    """Let a run walk, and put it back where it stood: shards, gradients, state, settings, schedules."""
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
