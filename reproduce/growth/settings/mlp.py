"""What is trained: an MLP of any depth in batches of 512, on Forest Cover Type or on made-up rows.

Held-out rows are split in two: choices of noise and rate look at the first half, the second is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...data import forest
from ...mlp.setting import OPTIMIZERS, REFERENCE, build
from ...setting import Setting

BATCH = 512
WATCHED = 20_000
"""Held-out rows that a point of a curve is measured on: enough for 1 %."""
MEASURED = 60_000
"""Training rows of the loss at the end."""

Rows = tuple[Tensor, Tensor, Tensor, Tensor]
"""Training features and labels, then those held out."""


def task(layers: int, rows: Callable[[], Rows] = forest, reference: int = REFERENCE) -> Setting:
    """The setting with so many layers. AdamW is torch's fused one, which takes a third less time here."""

    @lru_cache(maxsize=1)
    def shuffled(epoch: int, seed: int) -> tuple[Tensor, Tensor]:
        """The rows of an epoch in their order. Copied at once: gathering every batch takes a fifth of a step longer."""
        x, y, _, _ = rows()
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        return x[order], y[order]

    def loss(model: nn.Module, step: int, seed: int) -> Tensor:
        epoch, place = divmod(step, len(rows()[1]) // BATCH)
        x, y = shuffled(epoch, seed)
        part = slice(place * BATCH, (place + 1) * BATCH)
        return F.cross_entropy(model(x[part]), y[part])

    def measure(model: nn.Module) -> dict[str, float]:
        x, y, x_held, y_held = rows()
        half = len(y_held) // 2
        return {
            "choose": _loss(model, x_held[:half], y_held[:half]),
            "held": _loss(model, x_held[half:], y_held[half:]),
            "train": _loss(model, x[:MEASURED], y[:MEASURED]),
        }

    def watch(model: nn.Module) -> dict[str, float]:
        _, _, x_held, y_held = rows()
        return {"choose": _loss(model, x_held[:WATCHED], y_held[:WATCHED])}

    def inputs() -> Any:
        return torch.zeros(BATCH, 54)

    kind, constants = OPTIMIZERS["adamw"]
    return Setting(
        f"mlp{layers}",
        lambda width: build(width, layers),
        loss,
        measure,
        kind,
        reference=reference,
        constants={**constants, "fused": True},
        watch=watch,
        inputs=inputs,
        batch=BATCH,
    )


@cache
def made_up(count: int = 8192) -> Rows:
    """Rows with seven labels that a random network of two layers gives: for tests, without any file."""
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(count + count // 4, 54, generator=drawn)
    first, second = torch.randn(54, 16, generator=drawn), torch.randn(16, 7, generator=drawn)
    y = (torch.relu(x @ first) @ second).argmax(-1)
    return x[:count], y[:count], x[count:], y[count:]


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(model(x), y))
