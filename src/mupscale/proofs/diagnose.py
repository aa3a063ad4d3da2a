"""Why a wide run deviates: the first module or tensor that differs, and the usual suspect behind it.

`diagnose` works on a fresh pair of copies after `verify` has seen a deviation. `suspect` uses only what was measured,
because sharded runs are not copied. The verdict never depends on this file; only the explanation does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..plans.identity import Loss, compare_gradients, gradients
from ..plans.outputs import outputs_of
from ..rules.axes import Axis
from ..tensors.differences import difference
from ..tensors.expand import expand
from ..tensors.making import Making
from .certificate import Failure
from .trial import Step, Trial, run_step

DROPOUT = "dropout: a separate mask is drawn for every copy; set p = 0, or compare in eval mode"
CLIPPING = "plain clipping: a gradient norm depends on the width, so all gradients are off by one factor; clip with mupscale.clip_(optimizer, plan, model, max_norm=…)"
ATTENTION = "the attention scale: the head size grows and 1/sqrt(head size) does not cancel its copies; use 1/head size, or fold k^(-1/4) into q and k"
LAYOUT = "a wrong layout: its copies are not where the plan says; infer the plan with loss="
READOUT = "the readout: the output is off by one factor, so a multiplier of the model's code is missing in the plan; declare it in folds="
SCHEDULER = "an absolute learning rate: a scheduler or the step function sets lr itself; multiply the group's own lr instead"
STILL = "nothing was tested: a learning rate of zero, a loss that reaches no parameter, or everything frozen"
OPTIMIZER = "the optimizer: gradients agree and weights do not, so a state or setting has other units than the registry says"
START = (
    "the wide run does not start from the base's weights: it was loaded from other weights or with noise, "
    "or a constant of the model's code is missing in the plan"
)
_HEAD_SIZE = re.compile(r"head_?(dim|size)|dim_head|d_head|d_kv", re.IGNORECASE)
_HEAD_COUNT = re.compile(r"(num|n)_?heads?$|^heads?$", re.IGNORECASE)


def diagnose(trial: Trial, step: Step | None, loss: Loss | None, failure: Failure) -> Failure:
    """The failure with its place and likely cause filled in."""
    if failure.step == 0 and failure.where == "loss":
        return _forward(trial, step, loss, failure)
    if failure.step == 0 and "gradient" in failure.what:
        return _gradient(trial, step, loss, failure)
    if _dropout(trial.wide.model):
        return replace(failure, cause=DROPOUT)
    return replace(failure, cause=OPTIMIZER)


def suspect(trial: Trial, failure: Failure) -> Failure:
    """The failure with the usual suspect filled in, from what was measured alone."""
    assert trial.identity is not None
    if failure.where == "loss":
        return replace(failure, cause=START if failure.step == 0 else OPTIMIZER)
    if "gradient" in failure.what:
        ratios = [r for n, r in trial.identity.ratios.items() if n not in trial.identity.untested]
        alike = max(ratios) - min(ratios) <= 1e-3 * abs(ratios[0])
        return replace(failure, cause=CLIPPING if alike else LAYOUT)
    return replace(failure, cause=OPTIMIZER)


def settings_cause(key: str, changed: bool) -> str:
    """Why a hyperparameter of the wide run is not the base's in new units."""
    if key == "lr" and changed:
        return SCHEDULER
    return f"unscaled {key}: the wide run's {key} is not the base's in new units; take the groups that widen returns"


def _dropout(model: nn.Module) -> bool:
    dropping = (m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd))
    rates = [m.p for m in dropping if m.training]
    attention = [m.dropout for m in model.modules() if isinstance(m, nn.MultiheadAttention) and m.training]
    recurrent = [m.dropout for m in model.modules() if isinstance(m, nn.modules.rnn.RNNBase) and m.training]
    return any(rate > 0 for rate in (*rates, *attention, *recurrent))


def _forward(trial: Trial, step: Step | None, loss: Loss | None, failure: Failure) -> Failure:
    outputs = [
        outputs_of(side.model, lambda side=side: _go(side, step, loss))  # type: ignore[misc]
        for side in (trial.base, trial.wide)
    ]
    where = _first_difference(trial, *outputs)
    failure = replace(failure, where=f"module {where}" if where else "the loss itself")
    if _dropout(trial.wide.model):
        return replace(failure, cause=DROPOUT)
    if where and _head_size_grows(trial, where):
        return replace(failure, cause=ATTENTION)
    if (factor := _one_factor(outputs)) is not None:
        return replace(
            failure, what=f"{failure.what}; the output is {factor:.4g} times the base's", cause=READOUT
        )
    return replace(failure, cause=LAYOUT)


def _gradient(trial: Trial, step: Step | None, loss: Loss | None, failure: Failure) -> Failure:
    if step is not None:
        grads = [run_step(side, step, 0)[1] for side in (trial.base, trial.wide)]
    else:
        assert loss is not None
        grads = [gradients(side.model, loss)[1] for side in (trial.base, trial.wide)]
    identity = compare_gradients(grads[0], grads[1], trial.plan)
    ratios = [r for n, r in identity.ratios.items() if n not in identity.untested]
    spread = max(ratios) - min(ratios) if ratios else 0.0
    if len(ratios) > 1 and spread <= 1e-6 * abs(ratios[0]) and abs(ratios[0] - 1) > 1e-6:
        what = f"every gradient is {ratios[0]:.6g} times what it should be"
        return replace(failure, where="all tensors", what=what, cause=CLIPPING)
    if _dropout(trial.wide.model):
        return replace(failure, cause=DROPOUT)
    return replace(failure, cause=LAYOUT)


def _go(side: Any, step: Step | None, loss: Loss | None) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if step is not None:
            step(side, 0)
        elif loss is not None:
            loss(side.model)


def _first_difference(trial: Trial, base: Mapping[str, Tensor], wide: Mapping[str, Tensor]) -> str | None:
    for name, output in base.items():
        other = wide.get(name)
        if other is None or other.dim() != output.dim():
            continue
        want = _widened(trial, name, output, tuple(other.shape))
        if want is not None and not _equal(want, other, trial.tolerance):
            return name or "the model"
    return None


def _widened(trial: Trial, name: str, output: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """The base's activation as the wide model should show it, where the plan knows its layout."""
    if tuple(output.shape) == shape:
        return output
    key = next((k for k in (f"{name}.weight", f"{name}.bias") if k in trial.plan), None)
    if key is None:
        return None
    outward = [axis for axis in trial.plan[key].axes if axis.role == "out"]
    grown = [d for d, (a, b) in enumerate(zip(output.shape, shape, strict=True)) if a != b]
    if len(grown) != 1 or len(outward) != 1:
        return None
    if (outward[0].base, outward[0].wide) != (output.shape[grown[0]], shape[grown[0]]):
        return None
    axes = tuple(outward[0] if d == grown[0] else Axis.fixed(n) for d, n in enumerate(output.shape))
    return expand(output, Making(axes, trial.plan[key].fold))


def _equal(want: Tensor, found: Tensor, tolerance: float) -> bool:
    return difference(found, want).relative() <= tolerance


def _head_size_grows(trial: Trial, where: str) -> bool:
    """An owner of the module has a growing head size, or a fixed number of heads on a growing width."""
    path = where.split(".") if where != "the model" else []
    while True:
        owners = []
        for side in (trial.base, trial.wide):
            try:
                owners.append(vars(side.model.get_submodule(".".join(path))))
            except AttributeError:
                break
        if len(owners) == 2:
            numbers = {k: (v, owners[1].get(k)) for k, v in owners[0].items() if type(v) is int}
            if any(_HEAD_SIZE.search(k) and a != b for k, (a, b) in numbers.items()):
                return True
            if any(_HEAD_COUNT.search(k) and a == b for k, (a, b) in numbers.items()):
                return True
        if not path:
            return False
        path.pop()


def _one_factor(outputs: Sequence[Mapping[str, Tensor]]) -> float | None:
    """The constant between two outputs of the whole model, if there is one."""
    last = [side.get("") for side in outputs]
    if last[0] is None or last[1] is None or last[0].shape != last[1].shape:
        return None
    a, b = last[0].flatten(), last[1].flatten()
    norm = float(a @ a)
    factor = float(a @ b) / norm if norm else 1.0
    return factor if abs(factor - 1) > 1e-6 and _equal(a * factor, b, 1e-6) else None
