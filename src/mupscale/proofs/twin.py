"""The twin of a base run: the same run with weights moved by one unit in the last place, trained beside it.

The twin also measures optimizers that round by themselves, like Muon, whose orthogonalization is computed in bfloat16:
the gradients that the twin hands to such an optimizer are moved by one unit in the last place of that dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ..plans.ends import identity_plan
from ..runs.run import Run
from ..tensors.differences import loss_gap
from .causes import BATCHES
from .certificate import Failure
from .compare import compare_steps
from .identity import DRAWS, Compared, Evaluated, Loss, evaluated
from .rounding import Rounding, disturb_, move_, together
from .trial import Step, Trial, go

TWINS = 3
"""One draw may miss what happens rarely, like an activation that rounds to the other side of zero."""


def unrepeated(
    clone: Callable[[], Run], step: Step | None, loss: Loss | None, tolerance: float
) -> Failure | None:
    """A failure if two copies of the base part at once: they were given other data, so nothing can be compared."""
    a, b = (go(clone(), step, loss) for _ in range(2))
    if a != a or loss_gap(a, b) <= tolerance:
        return None
    what = f"two copies of the base under one seed give {a:.6g} and {b:.6g}"
    if step is None:
        return Failure(0, "the loss itself", what, DRAWS, "batch")
    return Failure(0, "the batch", what, BATCHES, "batch")


def rounding_of_steps(clone: Callable[[], Run], step: Step, steps: int) -> Rounding:
    """How far a base run parts from itself in these steps; `clone` makes a fresh copy of it."""
    return together([_steps(clone(), clone(), step, steps, seed) for seed in range(TWINS)])


def rounding_of_loss(clone: Callable[[], Run], loss: Loss) -> Rounding:
    """How far the loss and the gradients of a base part from themselves."""
    model = clone().model
    plan, own = identity_plan(model), evaluated(model, loss)
    return together([_loss(Compared(own, _moved(clone(), loss, seed), plan)) for seed in range(TWINS)])


def _steps(base: Run, twin: Run, step: Step, steps: int, seed: int) -> Rounding:
    move_(twin.model, seed)
    coarse = _Coarse(base.optimizers)
    places = {id(optimizer): i for i, optimizer in enumerate(twin.optimizers)}

    def disturb(optimizer: Optimizer) -> None:
        disturb_(optimizer, coarse.eps.get(places[id(optimizer)], 0.0), seed)

    trial = Trial(base, twin, identity_plan(base.model), float("inf"), disturb=disturb)
    with coarse:
        compare_steps(trial, step, steps, lambda _: None)
    losses = _up_to([{"": loss_gap(a, b)} for a, b in trial.losses])
    return Rounding([own[""] for own in losses], _up_to(trial.weights), trial.identity)


def _moved(twin: Run, loss: Loss, seed: int) -> Evaluated:
    move_(twin.model, seed)
    return evaluated(twin.model, loss)


def _loss(found: Compared) -> Rounding:
    return Rounding([found.gap], [], found.identity)


def _up_to(steps: list[dict[str, float]]) -> list[dict[str, float]]:
    """The largest value up to each step: a difference may pass through zero."""
    found: list[dict[str, float]] = []
    for step in steps:
        before = found[-1] if found else {}
        found.append({name: max(value, before.get(name, 0.0)) for name, value in step.items()})
    return found


class _Coarse(TorchFunctionMode):
    """Notes the coarsest dtype that each optimizer casts to while it steps, as its unit in the last place."""

    def __init__(self, optimizers: tuple[Optimizer, ...]) -> None:
        super().__init__()
        self.eps: dict[int, float] = {}
        self._stepping: int | None = None
        self._optimizers = optimizers
        self._hooks = ExitStack()

    def __enter__(self) -> _Coarse:
        for i, optimizer in enumerate(self._optimizers):
            # Both return None: what a hook returns replaces the arguments of the step.
            before = optimizer.register_step_pre_hook(lambda *_, i=i: setattr(self, "_stepping", i))
            after = optimizer.register_step_post_hook(lambda *_: setattr(self, "_stepping", None))
            self._hooks.callback(before.remove)
            self._hooks.callback(after.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        ends = [*args[:1], result]
        if self._stepping is not None and all(isinstance(t, Tensor) and t.is_floating_point() for t in ends):
            before, eps = torch.finfo(ends[0].dtype).eps, torch.finfo(result.dtype).eps
            if eps > before and result.dim() > 0:
                self.eps[self._stepping] = max(eps, self.eps.get(self._stepping, 0.0))
        return result
