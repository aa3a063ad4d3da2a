"""A proxy for `mupscale tune`: an MLP that learns a wavy function of eight numbers, with AdamW.

    mupscale tune examples/proxy_mlp.py --width 128 -k 2 --steps 400

`build` and `train` are all that is needed; the rest says with what. The batch is a function of the step, so a worker
that takes over continues with the same data.
"""

from collections.abc import Callable

import torch
from torch import nn

import mupscale as mu

optimizer = torch.optim.AdamW
settings = {"weight_decay": 0.01}
batch = 256
torch.set_num_threads(1)

X = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
Y = torch.sin(2 * X[:, :1] * X[:, 1:2]) + torch.cos(3 * X[:, 2:3] + X[:, 3:4])


def build(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    )


def inputs() -> torch.Tensor:
    """A batch, so that FLOPs can be counted."""
    return X[:batch]


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)


def train(run: mu.Run, steps: int, report: Callable[[int, torch.Tensor], None]) -> None:
    for step in range(run.steps, steps):
        rows = torch.randint(len(X), (batch,), generator=torch.Generator().manual_seed(step))
        loss = (run.model(X[rows]) - Y[rows]).square().mean()
        run.model.zero_grad()
        loss.backward()
        for part in (*run.optimizers, *run.schedulers):
            part.step()
        report(step, loss)
