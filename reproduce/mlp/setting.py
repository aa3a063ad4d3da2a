"""A ReLU MLP of four layers that learns Forest Cover Type in batches of 2,000, with SGD or AdamW."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import forest
from ..scale import Scale
from ..setting import Setting

LAYERS, BATCH, REFERENCE = 4, 2000, 32
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"weight_decay": 1e-4}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 1e-4}),
}


def build(width: int, layers: int = LAYERS) -> nn.Module:
    sizes = [54] + [width] * (layers - 1)
    hidden = [module for a, b in pairwise(sizes) for module in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 7))


def setting(
    optimizer: str, rows: int | None = None, watched: int | None = None, device: str = "cpu"
) -> Setting:
    """The setting with one of the OPTIMIZERS on so many training rows, by default all.

    Curves watch the first `watched` of the held-out rows.
    """
    kind, constants = OPTIMIZERS[optimizer]

    @cache
    def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, y, x_held, y_held = forest(rows)
        return x.to(device), y.to(device), x_held.to(device), y_held.to(device)

    @cache
    def order(epoch: int, seed: int) -> Tensor:
        return torch.randperm(len(data()[1]), generator=torch.Generator().manual_seed(1000 * seed + epoch))

    def loss(model: nn.Module, step: int, seed: int) -> Tensor:
        x, y, _, _ = data()
        epoch, place = divmod(step, len(y) // BATCH)
        chosen = order(epoch, seed)[place * BATCH : (place + 1) * BATCH].to(device)
        return F.cross_entropy(model(x[chosen]), y[chosen])

    def held_out(model: nn.Module, rows: int | None) -> dict[str, float]:
        _, _, x, y = data()
        with torch.no_grad():
            out = model(x[:rows])
        return {
            "held_out": float(F.cross_entropy(out, y[:rows])),
            "accuracy": float((out.argmax(-1) == y[:rows]).double().mean()),
        }

    def measure(model: nn.Module) -> dict[str, float]:
        x, y, _, _ = data()
        with torch.no_grad():
            trained = F.cross_entropy(model(x), y)
        return {"loss": float(trained), **held_out(model, None)}

    def inputs() -> Any:
        return torch.zeros(BATCH, 54)

    return Setting(
        f"mlp_{optimizer}",
        build,
        loss,
        measure,
        kind,
        reference=REFERENCE,
        constants=constants,
        watch=lambda model: held_out(model, watched),
        inputs=inputs,
        batch=BATCH,
        device=device,
    )


def of(scale: Scale, variant: str) -> Setting:
    """The setting of one experiment; a variant is an optimizer."""
    return setting(variant, **scale.sizes, device=scale.device)


def epoch(rows: int | None) -> int:
    """Steps in an epoch."""
    return len(forest(rows)[1]) // BATCH
