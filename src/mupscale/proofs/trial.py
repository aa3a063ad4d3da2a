"""A base and a wide run side by side: what was measured so far, and how a step is observed.

Shared by `compare.py`, which judges, and `diagnose.py`, which explains.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..arguments import shown
from ..errors import MupscaleError
from ..models.names import parameter_names
from ..plans.plan import Plan
from ..runs.run import Run
from ..tensors.differences import difference
from ..tensors.nested import tensors_in
from ..tensors.random_states import forked
from .identity import Compared, Identity, Loss
from .rounding import Rounding

Step = Callable[[Run, int], Any]
_SAME_INPUT = 1e-2
"""Inputs that a model computes from its weights differ by rounding; two batches differ by their own size."""


@dataclass
class Trial:
    """A base and a wide run side by side, and what was measured so far."""

    base: Run
    wide: Run
    plan: Plan
    tolerance: float
    losses: list[tuple[float, float]] = field(default_factory=list)
    identity: Identity = field(default_factory=Identity)
    weights: list[dict[str, float]] = field(default_factory=list)
    """After every step, how far each wide weight is from the base's in new units."""
    moved: float = 0.0
    rounding: Rounding = field(default_factory=Rounding)
    """How far the base parts from itself by rounding, where this was measured."""
    once: Compared | None = None
    """One loss of both, where no step was taken."""
    ran: set[bool] = field(default_factory=set)
    """The modes in which steps ran the base: whether it was training."""
    disturb: Callable[[Optimizer], None] | None = None
    """Called with every optimizer of the wide run before it steps, after its gradients were recorded."""


@dataclass(frozen=True)
class Taken:
    """One step of a run as it was observed."""

    loss: float
    grads: dict[str, Tensor | None]
    inputs: list[Tensor]
    """The tensors that the model was first called with."""


def run_step(run: Run, step: Step, i: int, disturb: Callable[[Optimizer], None] | None = None) -> Taken:
    """Call the caller's step function once under a fixed seed; record gradients and the model's first inputs."""
    grads: dict[str, Tensor | None] = {}
    names = parameter_names(run.model)

    def capture(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                g = p.grad
                grads[names[id(p)]] = None if g is None else (g.to_dense() if g.is_sparse else g.clone())
        if disturb is not None:
            disturb(optimizer)

    handles: list[Any] = [optimizer.register_step_pre_hook(capture) for optimizer in run.optimizers]
    try:
        with forked(run.model, seed=i), first_inputs(run.model) as inputs:
            value = step(run, i)
    finally:
        for handle in handles:
            handle.remove()
    if not grads:
        raise MupscaleError(
            "the step function did not step an optimizer of the run it was given; call run.optimizers[0].step() in it",
            code="proof.no_optimizer_stepped",
        )
    return Taken(as_number(value), grads, inputs)


def go(side: Run, step: Step | None, loss: Loss | None) -> float:
    """Take the first step, or the loss, under a fixed seed, and return the loss."""
    with forked(side.model, seed=0):
        return as_number(
            step(side, 0) if step is not None else loss(side.model) if loss is not None else None
        )


@contextmanager
def first_inputs(model: nn.Module) -> Iterator[list[Tensor]]:
    """The tensors of the first call of a model inside the block."""
    seen: list[Tensor] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        handle.remove()
        seen.extend(tensor.detach().clone() for tensor in tensors_in((args, kwargs)))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def other_batch(base: Sequence[Tensor], wide: Sequence[Tensor]) -> bool:
    """True if two models were called with inputs of the same shapes and other values."""
    pairs = [(a, b) for a, b in zip(base, wide, strict=False) if a.shape == b.shape]
    return any(difference(b, a).relative() > _SAME_INPUT for a, b in pairs)


def with_batches(step: Callable[[Run, Any], Any], batches: Iterable[Any], steps: int) -> Step:
    """A step of (run, i) from one of (run, batch): every batch is drawn once, and every call gets a copy of its own."""
    with forked():
        drawn = list(islice(batches, steps))
    if len(drawn) < steps:
        raise MupscaleError(
            f"batches has {len(drawn)} batches, expected {steps}; pass steps={len(drawn)}",
            code="proof.too_few_batches",
        )
    return lambda run, i: step(run, copy.deepcopy(drawn[i]))


def as_number(loss: Any) -> float:
    """A loss as a float; a step that returns none gives nan."""
    if loss is None:
        return float("nan")
    if isinstance(loss, Tensor):
        # Asked before: what float raises for a tensor may be an error of its device.
        if loss.numel() == 1 and not loss.is_complex() and not loss.is_meta:
            return float(loss.detach())
        found = f"a {loss.dtype} tensor of shape {tuple(loss.shape)}"
    else:
        try:
            return float(loss)
        except (TypeError, ValueError):
            found = shown(loss)
    raise MupscaleError(
        f"the step function returned {found}, expected the loss as one number; return loss, or nothing",
        code="proof.step_returns_no_number",
    )
