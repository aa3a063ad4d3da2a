"""Compare a base and a wide run: the gradient identity, then real steps side by side.

Written once for any number of ranks: every rank compares the part of each tensor that it holds, and `gather` brings
together what all of them measured. A single process is the case of one rank. Copies nothing and grows nothing.

In every step the settings are compared first, then the loss, the gradients and the weights, so that what deviates first is what
is wrong. Below nothing compares settings, so a wrong rate shows in the weights after the first step, and a wrong weight in its
loss:

>>> from torch import nn
>>> import mupscale as mu
>>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1)).double()
>>> model, x = make(4), torch.ones(2, 3, dtype=torch.float64)
>>> run = mu.Run(model, torch.optim.SGD(model.parameters(), lr=0.1))
>>> def step(run, i):
...     run.optimizer.zero_grad()
...     loss = run.model(x).square().mean()
...     loss.backward()
...     run.optimizer.step()
...     return loss
>>> def first_deviation(change):
...     wide = mu.grow(run, lambda: make(8))
...     change(wide)
...     trial = Trial(mu.grow(run, lambda: make(4)), wide, wide.plan, 1e-9)
...     failure = compare_steps(trial, step, 2, lambda trial: None)
...     return failure and (failure.step, failure.kind)
>>> first_deviation(lambda wide: None)
>>> first_deviation(lambda wide: wide.model[2].weight.data.mul_(2))
(0, 'loss')
>>> first_deviation(lambda wide: wide.optimizer.param_groups[0].update(lr=0.3))
(0, 'weight')
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..models.names import named_tensors
from ..tensors.differences import Difference, difference, loss_gap
from ..tensors.parts import local_of
from .causes import BATCHES, BUFFER, STILL, settings_cause
from .certificate import Certificate, Failure, TensorProof
from .identity import (
    Compared,
    Gather,
    Loss,
    alone,
    compare_gradients,
    compared,
    expected_weight,
    merged,
)
from .modes import Modes, watched_modes
from .rounding import COARSE
from .trial import Step, Trial, other_batch, run_step

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative errors that count as equal: rounding grows with steps, a wrong factor shows at once."""
_OTHER_TOLERANCE = 1e-2
_BUFFERS = 1e-6
"""Buffers are compared up to this tolerance, so in float64 only: a mean that is zero by nature holds rounding, which in
float32 is as large as the floor of relative differences."""


class Unequal(NamedTuple):
    """A hyperparameter of the wide run that is not the base's in the units of its model."""

    name: str
    key: str
    found: Any
    expected: Any


Settings = Callable[[Trial], Unequal | None]
"""Finds the first setting that differs. The caller passes it, because this room does not know the units of settings."""


def tolerance_of(dtype: torch.dtype, given: float | None) -> float:
    """The given tolerance, or the default of a dtype."""
    return given if given is not None else TOLERANCE.get(dtype, _OTHER_TOLERANCE)


def compare_losses(trial: Trial, loss: Loss) -> Failure | None:
    """The first deviation of one loss, its gradients and the buffers that it writes, without a step."""
    trial.once = once = compared(trial.base.model, trial.wide.model, trial.plan, loss)
    return judge_losses(trial, once)


def judge_losses(trial: Trial, once: Compared) -> Failure | None:
    """The same of a loss that was computed before."""
    trial.losses.append((once.base.value, once.wide.value))
    trial.identity = once.identity
    return (
        _loss_failure(trial, 0)
        or _gradient_failure(trial, 0)
        or _factor_failure(trial, 0)
        or _buffer_failure(trial, once)
        or _nothing_tested(trial)
    )


def _buffer_failure(trial: Trial, once: Compared) -> Failure | None:
    if trial.tolerance > _BUFFERS:
        return None
    for name, error in once.buffers.items():
        if not error <= trial.tolerance:
            what = f"forward leaves it {error:.1e} away from the base's in the units of the wide model"
            return Failure(0, name, what, BUFFER, "buffer")
    return None


def compare_steps(
    trial: Trial,
    step: Step,
    steps: int,
    settings: Settings,
    gather: Gather = alone,
    before: Mapping[str, Tensor] | None = None,
) -> Failure | None:
    """The first deviation in `steps` steps of both runs; what was measured is noted in the trial.

    `before` holds this rank's part of the base's weights, where the caller has a copy of them already.
    """
    if before is None:
        before = {n: local_of(t.detach()).clone() for n, _, t in named_tensors(trial.base.model)}
    for i in range(steps):
        early = _settings_failure(settings(trial), i, changed=i > 0)
        with watched_modes(trial.base.model) as ran:
            a = run_step(trial.base, step, i)
        trial.ran |= ran
        b = run_step(trial.wide, step, i, trial.disturb)
        late = _settings_failure(settings(trial), i, changed=True)
        ranks = gather((a.loss, b.loss, early, late, other_batch(a.inputs, b.inputs)))
        trial.losses.append((fmean(rank[0] for rank in ranks), fmean(rank[1] for rank in ranks)))
        if i == 0:
            trial.identity = compare_gradients(a.grads, b.grads, trial.plan, gather)
        failure = (
            next((rank[2] for rank in ranks if rank[2] is not None), None)
            or _loss_failure(trial, i)
            or _gradient_failure(trial, i)
            or next((rank[3] for rank in ranks if rank[3] is not None), None)
            or _weight_failure(trial, i, gather)
            or _factor_failure(trial, i)
        )
        if failure is not None and any(rank[4] for rank in ranks):
            what = "the base and the wide model were called with other inputs"
            return Failure(i, "the batch", what, BATCHES, "batch")
        if failure is not None:
            return failure
    trial.moved = _moved(trial, before, gather)
    if trial.moved == 0.0:
        what = f"its weights did not move in {steps} steps"
        return Failure(steps - 1, "the base", what, STILL, "nothing_tested")
    return _nothing_tested(trial)


def _nothing_tested(trial: Trial) -> Failure | None:
    """A failure if nothing was tested: a certificate needs a check that could have failed."""
    if set(trial.identity.errors) - set(trial.identity.untested):
        return None
    return Failure(0, "all tensors", "every gradient is zero", STILL, "nothing_tested")


def _settings_failure(unequal: Unequal | None, i: int, changed: bool) -> Failure | None:
    if unequal is None:
        return None
    name, key, found, expected = unequal
    what = f"{key} is {found}, the base's in the units of the wide model is {expected}"
    return Failure(i, name, what, settings_cause(key, changed), "setting")


def _loss_failure(trial: Trial, i: int) -> Failure | None:
    a, b = trial.losses[-1]
    if a != a and b != b:  # the step returns nothing; gradients and weights decide
        trial.losses[-1] = (0.0, 0.0)
        return None
    if loss_gap(a, b) <= max(trial.tolerance, trial.rounding.loss(i)):
        return None
    return Failure(i, "loss", f"base {a:.12g}, wide {b:.12g}", "", "loss")


def _gradient_failure(trial: Trial, i: int) -> Failure | None:
    tested = {n: e for n, e in trial.identity.errors.items() if n not in trial.identity.untested}
    allowed = {n: max(trial.tolerance, trial.rounding.gradient(trial.plan[n])) for n in tested}
    name = next((n for n, e in tested.items() if not e <= allowed[n]), None)
    if name is None:
        return None
    return Failure(i, name, f"its gradient is {tested[name]:.1e} away from r · dup(G)", "", "gradient")


def _factor_failure(trial: Trial, i: int) -> Failure | None:
    """A gradient that is off by one factor, which 16-bit types show only over all entries of a tensor."""
    if trial.tolerance <= COARSE:
        return None
    for name, ratio in trial.identity.ratios.items():
        allowed = trial.rounding.factor(trial.plan[name])
        if allowed is not None and name not in trial.identity.untested and not abs(ratio - 1) <= allowed:
            what = f"its gradient is {ratio:.4g} times r · dup(G), where rounding explains {allowed:.1e}"
            return Failure(i, name, what, "", "gradient")
    return None


def _weight_failure(trial: Trial, i: int, gather: Gather) -> Failure | None:
    base = {name: t.detach() for name, _, t in named_tensors(trial.base.model)}
    mine: dict[str, Difference] = {}
    for name, _, tensor in named_tensors(trial.wide.model):
        entry = trial.plan[name]
        made = name not in trial.plan.ties and entry.sources and entry.fill != "own"
        if made and (tensor.is_floating_point() or tensor.is_complex()):
            found = tensor.detach()
            mine[name] = difference(local_of(found), expected_weight(entry, base, found))
    errors = {name: measured.relative() for name, measured in merged(gather(mine)).items()}
    trial.weights.append(errors)
    for name, error in errors.items():
        allowed = max(trial.tolerance, trial.rounding.weight(trial.plan[name], i))
        if not error <= allowed and name not in trial.identity.rounding:
            what = f"its weight is {error:.1e} away from s · dup(W) after the step"
            return Failure(i, name, what, "", "weight")
    return None


def _moved(trial: Trial, before: Mapping[str, Tensor], gather: Gather) -> float:
    """How far the base's weights moved, relative to the size they had; absolute for those that were zero."""
    mine = {}
    for name, kind, tensor in named_tensors(trial.base.model):
        if kind == "parameter":
            now = local_of(tensor.detach())
            mine[name] = difference(now, before[name].to(now.device))
    return max((m.relative() if m.size else m.gap for m in merged(gather(mine)).values()), default=0.0)


def certificate_of(
    trial: Trial,
    failure: Failure | None,
    dtype: torch.dtype,
    memory: int,
    remarks: tuple[str, ...] = (),
    modes: Modes | None = None,
) -> Certificate:
    """What a trial measured, as a certificate."""
    identity, own = trial.identity, trial.rounding
    last = len(trial.weights) - 1
    rows = tuple(
        TensorProof(
            name,
            str(entry.change.s),
            str(entry.change.r),
            identity.errors.get(name),
            max((step.get(name, 0.0) for step in trial.weights), default=0.0),
            name in identity.untested,
            name in identity.rounding,
            own.gradient(entry),
            own.weight(entry, last),
            own.factor(entry),
        )
        for name, entry in trial.plan.tensors.items()
        if entry.kind == "parameter"
    )
    return Certificate(
        rows,
        tuple(a for a, _ in trial.losses),
        tuple(b for _, b in trial.losses),
        trial.moved,
        trial.tolerance,
        str(dtype).removeprefix("torch."),
        trial.plan.hash,
        memory,
        failure,
        own.loss(len(trial.losses) - 1),
        remarks,
        dict(modes or {}),
    )
