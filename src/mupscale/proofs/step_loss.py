"""The loss inside a training step, as a function of a model: the tensor on which the step first calls backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import MupscaleError
from ..runs.run import Run
from .identity import Loss
from .trial import Step


class _ReachedError(BaseException):
    """Leaves a step at its first backward. Not an Exception, so that a step does not catch it."""

    def __init__(self, loss: Tensor) -> None:
        super().__init__()
        self.loss = loss


class _UntilBackward(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.backward:
            raise _ReachedError(args[0])
        return func(*args, **(kwargs or {}))


def loss_of(step: Step, optimizers: int) -> Loss:
    """The loss of the first step, for a run of this many optimizers.

    >>> def step(run, i):
    ...     run.optimizer.zero_grad()
    ...     run.model(torch.ones(1, 2)).sum().backward()
    ...     run.optimizer.step()
    >>> float(loss_of(step, 1)(nn.Linear(2, 1, bias=False).requires_grad_()).detach()) != 0.0
    True
    """

    def loss(model: nn.Module) -> Tensor:
        run = Run(model, [torch.optim.SGD(model.parameters(), lr=0.0) for _ in range(optimizers)])
        try:
            with _UntilBackward():
                step(run, 0)
        except _ReachedError as reached:
            return reached.loss
        raise MupscaleError(
            "the step function calls no backward; call loss.backward() in it",
            code="proof.step_without_backward",
        )

    return loss
