"""Why a wide run deviates: the first module or tensor that differs, and the usual suspect behind it.

`diagnose` works on a fresh pair of copies after `verify` has seen a deviation. `suspect` uses only what was measured,
because sharded runs are not copied. The verdict never depends on this file; only the explanation does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from ..models.outputs import outputs_of
from ..plans.rows import old_words
from ..rules.axes import Axis
from ..tensors.differences import difference
from ..tensors.expand import expand
from ..tensors.making import Making
from . import causes
from .attributes import attributes
from .certificate import Failure
from .identity import Identity, Loss, compare_gradients, evaluated
from .observed import observed
from .trial import Step, Trial, go, run_step

_HEAD_SIZE = re.compile(r"head_?(dim|size)|dim_head|d_head|d_kv", re.IGNORECASE)
_HEAD_COUNT = re.compile(r"(num|n)_?heads?$|^heads?$", re.IGNORECASE)


def diagnose(fresh: Callable[[], Trial], step: Step | None, loss: Loss | None, failure: Failure) -> Failure:
    """The failure with its place and likely cause filled in; `fresh` makes another pair of copies."""
    trial = fresh()
    if failure.step > 0 or failure.kind not in ("loss", "gradient"):
        return replace(failure, cause=causes.OPTIMIZER)
    if (cause := attributes(fresh(), step, loss)) is not None:
        return replace(failure, cause=cause)
    if failure.kind == "loss":
        return _forward(trial, step, loss, failure)
    return _gradient(trial, step, loss, failure)


def suspect(trial: Trial, failure: Failure) -> Failure:
    """The failure with the usual suspect filled in, from what was measured alone."""
    if failure.kind == "loss":
        return replace(failure, cause=causes.START if failure.step == 0 else causes.OPTIMIZER)
    if failure.kind == "gradient":
        factor = _factor_of_all(trial.identity, 1e-3)
        return _layout(trial, failure) if factor is None else replace(failure, cause=causes.CLIPPING)
    return replace(failure, cause=causes.OPTIMIZER)


def _forward(trial: Trial, step: Step | None, loss: Loss | None, failure: Failure) -> Failure:
    outputs, draws = [], []
    for side in (trial.base, trial.wide):
        with observed() as seen:
            outputs.append(outputs_of(side.model, lambda side=side: go(side, step, loss)))  # type: ignore[misc]
        draws.append(seen.draws)
    where = _first_difference(trial, *outputs)
    failure = replace(failure, where=f"module {where}" if where else "the loss itself")
    if draws[0] != draws[1]:
        return replace(failure, cause=causes.RANDOM)
    if where is None and old_words(trial.plan) is not None:
        return replace(failure, cause=causes.WORDS)
    if where and _head_size_grows(trial, where):
        return replace(failure, cause=causes.ATTENTION, another_plan=True)
    if (factor := _one_factor(outputs)) is not None:
        what = f"{failure.what}; the output is {factor:.4g} times the base's"
        return replace(failure, what=what, cause=causes.READOUT, another_plan=True)
    if where is None and _outputs_agree(trial, outputs):
        return replace(failure, cause=causes.PENALTY)
    return replace(failure, cause=causes.LAYOUT, another_plan=True)


def _gradient(trial: Trial, step: Step | None, loss: Loss | None, failure: Failure) -> Failure:
    grads: list[Mapping[str, Tensor | None]] = []
    for side in (trial.base, trial.wide):
        if step is not None:
            grads.append(run_step(side, step, 0).grads)
        elif loss is not None:
            grads.append(evaluated(side.model, loss).grads)
    factor = _factor_of_all(compare_gradients(grads[0], grads[1], trial.plan), 1e-6)
    if factor is not None:
        what = f"every gradient is {factor:.6g} times what it should be"
        return replace(failure, where="all tensors", what=what, cause=causes.CLIPPING)
    return _layout(trial, failure)


def _factor_of_all(identity: Identity, tolerance: float) -> float | None:
    """The factor by which all of two or more gradients are off, up to a tolerance; None if there is no such factor."""
    ratios = [r for n, r in identity.ratios.items() if n not in identity.untested]
    if len(ratios) < 2 or max(ratios) - min(ratios) > tolerance * abs(ratios[0]):
        return None
    return ratios[0] if abs(ratios[0] - 1) > tolerance else None


def _layout(trial: Trial, failure: Failure) -> Failure:
    """The failure of one gradient that is not what the plan says."""
    new = failure.where in trial.plan and trial.plan[failure.where].new
    return replace(failure, cause=causes.AWAKE if new else causes.LAYOUT, another_plan=not new)


def _first_difference(trial: Trial, base: Mapping[str, Tensor], wide: Mapping[str, Tensor]) -> str | None:
    for name, output in base.items():
        other = wide.get(name)
        if other is None or other.dim() != output.dim():
            continue
        want = _widened(trial, name, output, tuple(other.shape))
        if want is not None and not _equal(want, other, trial.tolerance):
            return name or "the model"
    return None


def _outputs_agree(trial: Trial, outputs: Sequence[Mapping[str, Tensor]]) -> bool:
    """True if the whole model gave an output and it is the base's."""
    base, wide = (side.get("") for side in outputs)
    same = base is not None and wide is not None and base.shape == wide.shape
    return same and _equal(base, wide, trial.tolerance)  # type: ignore[arg-type]


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
