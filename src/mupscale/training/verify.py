"""Measure whether a wide run continues a base run: gradient identity, then real steps side by side.

Everything happens on copies, in float64 unless asked otherwise, with the caller's own step function;
the run itself, its data loader state apart, is left as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import wrong_function, wrong_kind, wrong_number, wrong_whole
from ..errors import Fault, MupscaleError, raise_faults
from ..plans.build import build
from ..plans.float64 import cast_inputs, lifted_casts
from ..plans.infer import infer_plan
from ..plans.names import named_tensors, parameter_names
from ..plans.plan import Plan
from ..plans.selftest import LOSS_FLOOR, Identity, Loss, compare_gradients, gradients
from ..rules.optimizers import OptimizerRule, rule_for
from ..tensors.expand import expand
from .certificate import Certificate, Failure, TensorProof
from .diagnose import STILL, diagnose, settings_cause
from .direction import Direction
from .run import Run
from .state import NamedGroup, carry_groups
from .trial import Step, Trial, clone, refuse_hooks, run_step
from .widen import Make, widen

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative errors that count as equal: rounding grows with steps, a wrong factor shows at once."""


def verify(
    run: Run | nn.Module,
    wide: Run | Make,
    *,
    step: Step | None = None,
    loss: Loss | None = None,
    plan: Plan | None = None,
    steps: int = 10,
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
    rules: Mapping[str, OptimizerRule] | None = None,
    tell: Callable[[str], Any] | None = print,
) -> Certificate:
    """The certificate that `wide` (a factory, or a run to be checked as it is) continues `run`.

    `step(run, i)` takes one optimizer step on the i-th batch and returns the loss; it is called on copies,
    with the same random seed for both. Without a step, `loss(model)` tests the gradient identity alone.

    >>> import torch
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1))
    >>> model, x = make(4), torch.randn(8, 3)
    >>> def step(run, i):
    ...     run.optimizers[0].zero_grad()
    ...     loss = (run.model(x) - 1).square().mean()
    ...     loss.backward()
    ...     run.optimizers[0].step()
    ...     return loss
    >>> run = Run(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    >>> verify(run, lambda: make(12), step=step, tell=None).holds
    True
    """
    start = run if isinstance(run, Run) else Run(run)
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
    refuse_hooks(start)
    chosen = plan if plan is not None else wide.plan if isinstance(wide, Run) else None
    if chosen is None:
        chosen = infer_plan(start.model, wide.model if isinstance(wide, Run) else build(wide))
    need = memory(start, chosen, dtype)
    if tell is not None:
        tell(f"verify: two copies in {str(dtype).removeprefix('torch.')}, about {need / 1e9:.2f} GB")
    limit = tolerance if tolerance is not None else TOLERANCE.get(dtype, 1e-2)

    def trial() -> Trial:
        base = clone(start, dtype, rules)
        grown = clone(wide, dtype, rules) if isinstance(wide, Run) else widen(base, wide, chosen, rules=rules)
        for model in (base.model, grown.model):
            cast_inputs(model, dtype)
        return Trial(base, grown, chosen, limit)

    measured = trial()
    with lifted_casts() if dtype == torch.float64 else nullcontext():
        failure = _measure(measured, step, loss, steps, rules)
        if failure is not None and not failure.cause:
            failure = diagnose(trial(), step, loss, failure)
    return certificate(measured, failure, dtype, need)


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
    faults += [] if tolerance is None else wrong_number("tolerance", tolerance, "write tolerance=1e-9, say")
    if step is not None and not run.optimizers:
        remedy = "write Run(model, optimizer), or pass loss= in place of step="
        faults.append(Fault("optimizers", "the run has none, so no step can be taken", remedy))
    return faults


def memory(run: Run, plan: Plan, dtype: torch.dtype) -> int:
    """Bytes that two copies need at their peak: weights, gradients and their record, state, one comparison."""
    state = 0
    for optimizer in run.optimizers:
        state += sum(v.numel() for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor))
    base = sum(t.numel() for _, _, t in named_tensors(run.model))
    wide = sum(prod(t.wide_shape) for t in plan.tensors.values())
    ratio = wide / max(base, 1)
    largest = max((prod(t.wide_shape) for t in plan.tensors.values()), default=0)
    return int((4 * base + 3 * wide + state * (1 + ratio) + 4 * largest) * dtype.itemsize)


def _measure(
    trial: Trial, step: Step | None, loss: Loss | None, steps: int, rules: Mapping[str, OptimizerRule] | None
) -> Failure | None:
    before = {n: t.detach().clone() for n, _, t in named_tensors(trial.base.model)}
    if step is None:
        assert loss is not None
        (a, base_grads), (b, wide_grads) = (gradients(r.model, loss) for r in (trial.base, trial.wide))
        trial.losses.append((float(a), float(b)))
        trial.identity = compare_gradients(base_grads, wide_grads, trial.plan)
        return loss_failure(trial, 0) or _gradient_failure(trial, 0) or _nothing_tested(trial)
    for i in range(steps):
        failure = settings_failure(trial, i, rules)
        captured: list[dict[str, Tensor | None]] = []
        values = []
        for side in (trial.base, trial.wide):
            value, grads = run_step(side, step, i)
            captured.append(grads)
            values.append(value)
        trial.losses.append((values[0], values[1]))
        if trial.identity is None:
            trial.identity = compare_gradients(captured[0], captured[1], trial.plan)
        failure = (
            failure
            or loss_failure(trial, i)
            or _gradient_failure(trial, i)
            or settings_failure(trial, i, rules, changed=True)
            or _weight_failure(trial, i)
        )
        if failure is not None:
            return failure
    trial.moved = _moved(trial.base.model, before)
    if trial.moved == 0.0:
        return Failure(steps - 1, "the base", f"its weights did not move in {steps} steps", STILL)
    return _nothing_tested(trial)


def _nothing_tested(trial: Trial) -> Failure | None:
    """A certificate needs something that could have failed."""
    assert trial.identity is not None
    if set(trial.identity.errors) - set(trial.identity.untested):
        return None
    return Failure(0, "all tensors", "every gradient is zero", STILL)


def loss_failure(trial: Trial, i: int) -> Failure | None:
    """A failure when the two losses of the last step differ."""
    a, b = trial.losses[-1]
    if a != a and b != b:  # the step returns nothing; gradients and weights decide
        trial.losses[-1] = (0.0, 0.0)
        return None
    gap = abs(a - b) / max(abs(a), LOSS_FLOOR)
    return None if gap <= trial.tolerance else Failure(i, "loss", f"base {a:.12g}, wide {b:.12g}", "")


def _gradient_failure(trial: Trial, i: int) -> Failure | None:
    assert trial.identity is not None
    tested = {n: e for n, e in trial.identity.errors.items() if n not in trial.identity.untested}
    name = next((n for n, e in tested.items() if not e <= trial.tolerance), None)
    if name is None:
        return None
    return Failure(i, name, f"its gradient is {tested[name]:.1e} away from r · dup(G)", "")


def _weight_failure(trial: Trial, i: int) -> Failure | None:
    assert trial.identity is not None
    base = {n: t.detach() for n, _, t in named_tensors(trial.base.model)}
    worst: Failure | None = None
    for name, _, found in named_tensors(trial.wide.model):
        if name in trial.plan.ties or not found.is_floating_point():
            continue
        entry = trial.plan[name]
        if not entry.sources or entry.fill == "own":
            continue
        want = expand(entry.source(base), entry.making())
        size = float(want.abs().max()) if want.numel() else 0.0
        gap = float((found.detach() - want).abs().max()) / (size or 1.0) if want.numel() else 0.0
        trial.weights[name] = max(trial.weights.get(name, 0.0), gap if gap == gap else float("inf"))
        if worst is None and not gap <= trial.tolerance and name not in trial.identity.untested:
            worst = Failure(i, name, f"its weight is {gap:.1e} away from s · dup(W) after the step", "")
    return worst


def settings_failure(
    trial: Trial, i: int, rules: Mapping[str, OptimizerRule] | None, changed: bool = False
) -> Failure | None:
    """A hyperparameter of the wide run that is not the base's in new units, or no longer is."""
    direction = Direction(trial.plan)
    for base, wide in zip(trial.base.optimizers, trial.wide.optimizers, strict=True):
        expected = _settings(base, trial.base.model)
        groups, _ = carry_groups(rule_for(type(base), rules), expected, direction)
        wanted = {name: group.settings for group in groups for name in group.names}
        for found in _settings(wide, trial.wide.model):
            for name in found.names:
                for key, want in wanted.get(name, {}).items():
                    got = found.settings.get(key)
                    if not _close(got, want):
                        what = f"{key} is {got}, the base's in new units is {want}"
                        cause = settings_cause(key, changed or i > 0)
                        return Failure(i, name, what, cause)
    return None


def _settings(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[NamedGroup]:
    names = parameter_names(model)
    return [NamedGroup(tuple(names[id(p)] for p in g["params"]), g) for g in optimizer.param_groups]


def _close(got: Any, want: Any) -> bool:
    if isinstance(want, (tuple, list)) and isinstance(got, (tuple, list)):
        return len(got) == len(want) and all(map(_close, got, want))
    if isinstance(want, bool) or not isinstance(want, (int, float, Tensor)):
        return True
    return isinstance(got, (int, float, Tensor)) and abs(float(got) - float(want)) <= 1e-6 * abs(float(want))


def _moved(model: nn.Module, before: dict[str, Tensor]) -> float:
    moved = 0.0
    for name, kind, tensor in named_tensors(model):
        if kind == "parameter" and tensor.numel():
            size = float(before[name].abs().max()) or 1.0
            moved = max(moved, float((tensor.detach() - before[name]).abs().max()) / size)
    return moved


def certificate(trial: Trial, failure: Failure | None, dtype: torch.dtype, need: int) -> Certificate:
    """What a trial measured, as a certificate."""
    identity = trial.identity or Identity({}, (), {})
    rows = tuple(
        TensorProof(
            name,
            str(entry.change.s),
            str(entry.change.r),
            identity.errors.get(name),
            trial.weights.get(name, 0.0),
            name in identity.untested,
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
        need,
        failure,
    )
