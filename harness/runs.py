"""Training steps for tests: one step, a run that is observed after each, and two runs compared side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale as mu
from harness.closeness import difference

Loss = Callable[[nn.Module], Tensor]
Clip = Callable[[nn.Module], Any]
Batches = list[tuple[Tensor, Tensor]]


def step(run: mu.Run, loss: Tensor, clip: Clip | None = None) -> None:
    """One step of every optimizer and scheduler against a loss that the run's model has just computed."""
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    if clip is not None:
        clip(run.model)
    for optimizer in run.optimizers:
        optimizer.step()
    for scheduler in run.schedulers:
        scheduler.step()


def train(run: mu.Run, loss: Loss, steps: int, observe: Loss | None = None) -> list[Tensor]:
    """Steps against one loss; what `observe` (or the loss) saw after each of them."""
    seen = []
    for _ in range(steps):
        step(run, loss(run.model))
        with torch.no_grad():
            seen.append((observe or loss)(run.model).detach().clone())
    return seen


def train_on(run: mu.Run, batches: Batches, clip: Clip | None = None) -> Tensor:
    """A step of the squared error on each batch; the outputs before every step, stacked."""
    outputs = []
    for x, y in batches:
        out = run.model(x)
        step(run, F.mse_loss(out, y), clip)
        outputs.append(out.detach())
    return torch.stack(outputs)


def trained(
    model: nn.Module, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], batches: Batches
) -> mu.Run:
    """A float64 run with optimizer state: the model after a few steps."""
    model = model.double()
    run = mu.Run(model, make_optimizer(model))
    train_on(run, batches)
    return run


def drift(base: mu.Run, wide: mu.Run, loss: Loss, steps: int, observe: Loss | None = None) -> float:
    """How far two runs come apart over `steps` steps, relative to what the base shows."""
    wanted, found = (train(run, loss, steps, observe) for run in (base, wide))
    return max(map(difference, found, wanted))


def gradients(model: nn.Module, loss: Loss) -> dict[str, Tensor]:
    """The gradient of every parameter that the loss reaches, by name."""
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss(model), list(parameters.values()), allow_unused=True)
    return {name: g for name, g in zip(parameters, found, strict=True) if g is not None}
