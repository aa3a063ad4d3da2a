"""The theorem on an MLP: a base is trained for a while, then widened by a factor of four with its optimizer state.

Both continue side by side; the control is the same wide model with the base's settings left unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...runs.run import Run
from ...tensors.random_states import forked
from ..grow.grow import grow

BASE, K = 16, 4
EXACT, DIFFERENT = 1e-12, 1e-3
"""Relative differences of losses in float64: of the wide run at most, of the control at least."""
Curve = list[float]


def train(
    steps: int,
    before: int = 100,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float64,
    **options: bool,
) -> tuple[Curve, Curve, Curve, Curve]:
    """The losses before widening, and of base, wide and control after it; `options` are AdamW's."""
    with _one_thread(), forked(torch.empty(0, device=device), seed=0):
        x = torch.randn(128, 8, dtype=torch.float64, device="cpu")
        y = torch.sin(2 * x[:, :1]) * x[:, 1:2] + (x[:, 2:3] * x[:, 3:4]).tanh()
        x, y = (data.to(dtype).to(device) for data in (x, y))
        model = _mlp(BASE).to(dtype).to(device)
        settings: dict[str, Any] = {"lr": 4e-3, "eps": 1e-2, "weight_decay": 0.1, **options}
        start = Run(model, torch.optim.AdamW(model.parameters(), **settings))
        step = _step(x, y)
        early = [step(start) for _ in range(before)]
        wide = grow(start, lambda: _mlp(BASE * K))
        control = grow(start, lambda: _mlp(BASE * K))
        for group in control.optimizers[0].param_groups:
            ours = start.optimizers[0].param_groups[0]
            group.update({key: ours[key] for key in ("lr", "eps", "weight_decay")})
        curves = [[step(side) for side in (start, wide, control)] for _ in range(steps)]
    base, grown, broken = (list(curve) for curve in zip(*curves, strict=True))
    return early, base, grown, broken


@contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices this small only lose time to threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _mlp(width: int) -> nn.Module:
    layers = (nn.Linear(8, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))
    return nn.Sequential(*layers).double()


def _step(x: torch.Tensor, y: torch.Tensor) -> Callable[[Run], float]:
    def step(run: Run) -> float:
        run.optimizers[0].zero_grad()
        loss = (run.model(x) - y).square().mean()
        loss.backward()
        run.optimizers[0].step()
        return float(loss.detach())

    return step
