"""The loss inside a training step, as a function of a model: the tensor on which the step first calls backward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import MupscaleError
from ..runs.run import Run
from .identity import Loss, UntilBackward
from .trial import Step


class _ReachedError(BaseException):
    """Leaves a step at its first backward. Not an Exception, so that a step does not catch it."""

    def __init__(self, loss: Tensor) -> None:
        super().__init__()
        self.loss = loss


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
            with UntilBackward(_ReachedError):
                step(run, 0)
        except _ReachedError as reached:
            return reached.loss
        raise MupscaleError(
            "the step function calls no backward; call loss.backward() in it",
            code="proof.step_without_backward",
        )

    return loss
