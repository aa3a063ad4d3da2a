"""`mu.verify`: copy a base run, grow the copy, and compare the two with `proofs`.

Everything happens on copies, in float64 by default, with the caller's own step function. The run itself is not
changed, except for the state of its data loader.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ...arguments import wrong_function, wrong_kind, wrong_number, wrong_whole
from ...errors import Fault, MupscaleError, NotExact, Undecided, raise_faults
from ...models.build import Make, build
from ...models.example_loss import ExampleInputs
from ...models.float64 import cast_inputs, lifted_casts
from ...models.names import named_tensors
from ...noise.apart import DRAWS, far_apart
from ...planning.declare import Declared, sound_with
from ...planning.infer import find_plan, infer_plan, measured_with
from ...plans.direction import Direction
from ...plans.plan import Plan
from ...proofs.causes import NOISE
from ...proofs.certificate import Certificate, Failure
from ...proofs.compare import tolerance_of
from ...proofs.identity import Loss
from ...proofs.measuring import Measuring
from ...proofs.step_loss import loss_of
from ...proofs.trial import Step, Trial, with_batches
from ...rules.optimizer_rule import OptimizerRule
from ...runs.run import Run
from ..grow.carry import carry
from ..units.settings import settings_comparer
from .clone_run import clone, refuse_hooks

_LOG = logging.getLogger("mupscale")
_SEARCHED = 2_000_000
"""Entries of a wide model up to which a plan is searched for after a failure: up to 600 trials of a few milliseconds."""

_UNDECLARED = Declared()


def verify(
    base: Run | nn.Module,
    wide: Run | Make,
    *,
    step: Step | None = None,
    batches: Iterable[Any] | None = None,
    loss: Loss | None = None,
    example_inputs: ExampleInputs | None = None,
    plan: Plan | None = None,
    declared: Declared | None = None,
    steps: int = 10,
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
    rules: Mapping[str, OptimizerRule] | None = None,
) -> Certificate:
    """Measure whether a larger run continues `base`, on copies of both; dropout is off.

    With `step`, real training steps are taken side by side. With `loss` or `example_inputs` alone, only gradients are compared.

    Args:
        base: The run to compare with, or its model alone. It is not changed.
        wide: A run, which is checked as it is. Or a function that builds the larger model, or that model, into which a copy of
            `base` is grown.
        step: `step(run, i)` takes one optimizer step on the i-th batch and returns the loss. It is called on both runs with
            the same random seed.
        batches: A data loader or a list. Each batch is drawn once, and `step(run, batch)` gets it for both runs.
        loss: `loss(model)`, your loss on one fixed batch. Its gradients are compared in the mode the model is in, train or eval,
            and then in the other. Next to `step` it only helps to find a plan.
        example_inputs: One batch for `forward`, a tuple or a dict, in place of `loss`.
        plan: The plan from base to wide. By default that of the run `wide`, or one that is found.
        declared: What shapes do not show, such as the blocks in which an axis is laid out.
        steps: How many steps are taken.
        dtype: The dtype in which copies are compared.
        tolerance: The relative error that counts as equal. By default that of the dtype.
        rules: Rows to use in place of the registry of optimizers, by full class name.

    Returns:
        A certificate with the error of every tensor and every step. It is true if the runs agree; `raise_if_broken()` raises
        if they do not.

    Raises:
        MupscaleError: If there is nothing to measure with, an argument cannot be used, or no plan is found. A run that
            deviates raises nothing: it is in the certificate.

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
    loss = measured_with(loss, example_inputs)
    if step is None and loss is None:
        raise MupscaleError(
            "verify needs step=, your training step, or loss= or example_inputs=, for the gradient identity alone",
            code="proof.nothing_to_measure",
        )
    if isinstance(wide, Run) and len(wide.optimizers) != len(start.optimizers):
        raise MupscaleError(
            f"the base run has {len(start.optimizers)} optimizers, the wide run {len(wide.optimizers)}, expected as many: "
            "they are compared one by one; pass a factory as wide, or give both runs their optimizers",
            code="proof.other_number_of_optimizers",
        )
    raise_faults(
        "verify cannot use what it was given", _unusable(start, step, batches, loss, steps, dtype, tolerance)
    )
    for side in (start, wide) if isinstance(wide, Run) else (start,):
        refuse_hooks(side)
    if step is not None and batches is not None:
        step = with_batches(step, batches, steps)
    checked = sound_with(declared, plan)
    chosen = plan if plan is not None else wide.plan if isinstance(wide, Run) else None
    # Built once, and outside the context in which new tensors are float64.
    ahead = wide if isinstance(wide, Run) else build(wide)
    if chosen is None:
        model = ahead.model if isinstance(ahead, Run) else ahead
        try:
            chosen = infer_plan(start.model, model, declared=checked)
        except Undecided:
            chosen = _searched(start, model, step, loss, checked)
    if step is not None:
        _refuse_parted_tokens(chosen)
    need = memory(start, chosen, dtype)
    _LOG.info("verify: two copies in %s, about %.2f GB", str(dtype).removeprefix("torch."), need / 1e9)
    measuring = _Copies(
        start,
        ahead,
        chosen,
        rules,
        loss=loss,
        step=step,
        steps=steps,
        dtype=dtype,
        tolerance=tolerance_of(dtype, tolerance),
        settings=settings_comparer(rules),
    )
    with lifted_casts(start.model) if dtype == torch.float64 else nullcontext():
        return measuring.drawn(need)


def _refuse_parted_tokens(plan: Plan) -> None:
    """Raise where copies of an expert share its tokens: steps of such a run are not the base's."""
    if plan.parts_tokens:
        what = "each copy of an expert gets a part of its tokens, so its steps are not the base's"
        fault = Fault("proof.steps_with_parted_tokens", "step", what, "write loss= in place of step=")
        raise_faults("steps of these runs cannot be compared", [fault])


def _searched(
    base: Run, wide: nn.Module, step: Step | None, loss: Loss | None, declared: Declared = _UNDECLARED
) -> Plan:
    """The plan that a search finds, by the loss, or by the loss inside the step."""
    if loss is None:
        assert step is not None
        loss = loss_of(step, len(base.optimizers))
    return find_plan(base.model, wide, loss, declared).plan


@dataclass
class _Copies(Measuring):
    """Copies of the base run, and of the wide run or of what grows from the base."""

    base: Run
    wide: Run | nn.Module
    plan: Plan
    rules: Mapping[str, OptimizerRule] | None
    draw: int = 0
    """Which vectors part copies of experts."""

    def drawn(self, memory: int) -> Certificate:
        """What holds. Where copies of experts part and a token lies between them, other vectors are tried too."""
        tried, found = self, self.certificate(memory)
        again = self.plan.parts_tokens and not isinstance(self.wide, Run)
        for draw in range(1, DRAWS if again else 1):
            if found.holds or not tried.between():
                break
            tried = replace(self, draw=draw)
            found = tried.certificate(memory)
        return found

    def copy(self) -> Run:
        """A copy of the base run."""
        copied = clone(self.base, self.dtype, self.rules)
        cast_inputs(copied.model, self.dtype)
        return copied

    def pair(self) -> Trial:
        """A copy of the base run, and one of the wide run."""
        copied = clone(self.base, self.dtype, self.rules)
        grown = (
            clone(self.wide, self.dtype, self.rules)
            if isinstance(self.wide, Run)
            else carry(copied, build(self.wide), self.wide, self._direction(copied), self.rules)
        )
        for model in (copied.model, grown.model):
            cast_inputs(model, self.dtype)
        return Trial(copied, grown, self.plan, self.tolerance)

    def _direction(self, copied: Run) -> Direction:
        return Direction(self.plan, noise=far_apart(self.plan, copied.model, self.draw))

    def explained(self, failure: Failure) -> Failure:
        """A failure with its likely cause, and, if another plan may cure it, with what the search for one finds."""
        noisy = isinstance(self.wide, Run) and {"noise", "added_noise"} & self.wide.provenance.keys()
        if noisy and failure.kind == "loss" and failure.step == 0:
            return replace(failure, cause=NOISE)
        failure = super().explained(failure)
        size = sum(prod(tensor.wide_shape) for tensor in self.plan.tensors.values())
        if not failure.another_plan or size > _SEARCHED:
            return failure
        wide = self.wide.model if isinstance(self.wide, Run) else self.wide
        call = "infer_plan(base, wide, loss=loss)"
        try:
            found = _searched(self.base, wide, self.step, self.loss)
        except NotExact:
            return replace(failure, cause=f"{failure.cause}; {call} finds no exact plan either")
        except MupscaleError:  # the search cannot say
            return failure
        others = [n for n, t in found.tensors.items() if n not in self.plan or t != self.plan[n]]
        if not others:
            return failure
        named = ", ".join(f"{n} (s = {found[n].change.s})" for n in others[:3])
        return replace(
            failure, cause=f"{failure.cause}; {call} finds an exact plan, other in {named}: pass it as plan="
        )


def _unusable(
    run: Run,
    step: Step | None,
    batches: Iterable[Any] | None,
    loss: Loss | None,
    steps: int,
    dtype: torch.dtype,
    tolerance: float | None,
) -> list[Fault]:
    faults = [] if step is None else wrong_function("step", step, "run", "i" if batches is None else "batch")
    if batches is not None and step is None:
        what, remedy = "it is given without step=", "write step=lambda run, batch: …"
        faults.append(Fault("proof.batches_without_step", "batches", what, remedy))
    if batches is not None:
        faults += wrong_kind("batches", batches, Iterable, "write batches=loader")
    faults += [] if loss is None else wrong_function("loss", loss, "model")
    faults += wrong_whole("steps", steps, least=1)
    faults += wrong_kind("dtype", dtype, torch.dtype, "write torch.float64")
    if tolerance is not None:
        faults += wrong_number("tolerance", tolerance, "write tolerance=1e-9, for example")
    if step is not None and not run.optimizers:
        what, remedy = "the run has none", "write Run(model, optimizer), or pass loss= in place of step="
        faults.append(Fault("run.no_optimizers", "optimizers", f"{what}, so no step can be taken", remedy))
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
