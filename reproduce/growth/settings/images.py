"""Images: a ResNet-18 on CIFAR-10 with SGD and momentum, a setting that had no part in any choice of the library.

Images are halved in the first layer, which quarters the cost. Held-out images are split in two, as the rows of the MLP are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...data import Images, images
from ...resnet.setting import BATCH, EDGE, setting
from ...setting import Setting

WATCHED = 500
"""Held-out images that a point of a curve is measured on."""
MEASURED = 2000
"""Training images of the loss at the end."""


def task(
    data: Callable[[], Images] = lambda: images("cifar10", edge=EDGE), reference: int = 8, size: int = BATCH
) -> Setting:
    """The setting."""

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> float:
        """In eval mode: with running statistics in the place of the batch's."""
        model.eval()
        with torch.no_grad():
            out = torch.cat([model(part) for part in torch.split(data().normal(x), 500)])
        model.train()
        return float(F.cross_entropy(out, y))

    def measure(model: nn.Module) -> dict[str, float]:
        known = data()
        half = len(known.y_held) // 2
        inside = known.x[:MEASURED, :, EDGE:-EDGE, EDGE:-EDGE]
        return {
            "choose": loss_of(model, known.x_held[:half], known.y_held[:half]),
            "held": loss_of(model, known.x_held[half:], known.y_held[half:]),
            "train": loss_of(model, inside, known.y[:MEASURED]),
        }

    def watch(model: nn.Module) -> dict[str, float]:
        known = data()
        return {"choose": loss_of(model, known.x_held[:WATCHED], known.y_held[:WATCHED])}

    return replace(setting(reference=reference, stem=2, data=data, size=size), measure=measure, watch=watch)


@cache
def made_up(count: int = 256) -> Images:
    """Images of ten colours with noise: for tests, without any file."""
    drawn = torch.Generator().manual_seed(0)
    y = torch.randint(10, (count + count // 4,), generator=drawn)
    colours = torch.randint(60, 200, (10, 3, 1, 1), generator=drawn)
    x = (colours[y] + torch.randint(-40, 40, (len(y), 3, 16, 16), generator=drawn)).byte()
    padded = F.pad(x[:count], (EDGE,) * 4)
    mean, spread = torch.full((3, 1, 1), 128.0), torch.full((3, 1, 1), 50.0)
    return Images(padded, y[:count], x[count:], y[count:], mean, spread)
