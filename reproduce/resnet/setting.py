"""A ResNet-18 of any width that learns small images with SGD and momentum; the width is that of its first stage.

The standard ("1x") model has width 64. CIFAR-10 stands in for CIFAR-100 unless the scale asks for the original.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import Images, images
from ..scale import Scale
from ..setting import Setting

BATCH = 128
CONSTANTS = {"momentum": 0.9, "weight_decay": 1e-4}
EDGE = 4
"""Pixels around an image, of which a crop takes some."""


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.shortcut(x))


class ResNet18(nn.Module):
    def __init__(self, width: int, classes: int = 10, stem: int = 1) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, stem, 1, bias=False), nn.BatchNorm2d(width)
        channels, blocks = width, []
        for stage in range(4):
            outputs = width * 2**stage
            blocks += [Block(channels, outputs, 1 if stage == 0 else 2), Block(outputs, outputs, 1)]
            channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.readout = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        logits: Tensor = self.readout(x.mean((-2, -1)))
        return logits


def augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """Every image cropped at a place of its own and mirrored or not; `x` has an edge around each.

    >>> x = torch.arange(2 * 3 * 40 * 40).view(2, 3, 40, 40)
    >>> augmented(x, torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 32, 32])
    """
    count, size = len(x), x.shape[-1] - 2 * EDGE
    down, right = torch.randint(2 * EDGE + 1, (2, count, 1), generator=generator)
    rows, columns = down + torch.arange(size), right + torch.arange(size)
    mirror = torch.rand(count, 1, generator=generator) < 0.5
    columns = torch.where(mirror, columns.flip(1), columns)
    picked = torch.arange(count)[:, None, None]
    return x[picked, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def setting(
    dataset: str = "cifar10",
    reference: int = 8,
    stem: int = 1,
    rows: int | None = None,
    watched: int | None = None,
    device: str = "cpu",
    data: Callable[[], Images] | None = None,
    size: int = BATCH,
) -> Setting:
    """The setting on so many images, or on those that `data` gives, with batches of a size.

    `stem` 2 halves them in the first layer, which quarters the cost.
    """
    classes = {"cifar10": 10, "cifar100": 100}[dataset]

    known_images = data if data is not None else lambda: images(dataset, rows, edge=EDGE)

    @cache
    def order(epoch: int, seed: int) -> Tensor:
        return torch.randperm(
            len(known_images().y), generator=torch.Generator().manual_seed(1000 * seed + epoch)
        )

    def batch(step: int, seed: int) -> tuple[Tensor, Tensor]:
        known = known_images()
        epoch, place = divmod(step, len(known.y) // size)
        chosen = order(epoch, seed)[place * size : (place + 1) * size]
        generator = torch.Generator().manual_seed(1_000_000 * (seed + 1) + step)
        return known.normal(augmented(known.x[chosen], generator)), known.y[chosen]

    def loss(model: nn.Module, step: int, seed: int) -> Tensor:
        x, y = batch(step, seed)
        return F.cross_entropy(model(x.to(device)), y.to(device))

    def measured(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Loss and accuracy in eval mode: running statistics in the place of the batch's."""
        model.eval()
        with torch.no_grad():
            out = torch.cat([model(part.to(device)).cpu() for part in torch.split(x, 500)])
        model.train()
        return float(F.cross_entropy(out, y)), float((out.argmax(-1) == y).double().mean())

    def held_out(model: nn.Module, rows: int | None) -> dict[str, float]:
        known = known_images()
        loss, accuracy = measured(model, known.normal(known.x_held[:rows]), known.y_held[:rows])
        return {"held_out": loss, "accuracy": accuracy}

    def measure(model: nn.Module) -> dict[str, float]:
        known = known_images()
        inside = known.x[:, :, EDGE:-EDGE, EDGE:-EDGE]
        return {"loss": measured(model, known.normal(inside), known.y)[0], **held_out(model, None)}

    def inputs() -> Any:
        return torch.zeros(size, 3, 32, 32)

    return Setting(
        "resnet_sgd",
        lambda width: ResNet18(width, classes, stem),
        loss,
        measure,
        torch.optim.SGD,
        reference,
        CONSTANTS,
        watch=lambda model: held_out(model, watched),
        inputs=inputs,
        batch=size,
        device=device,
        shapes_tell=False,
    )


def of(scale: Scale, variant: str) -> Setting:
    """The setting of one experiment; there is one variant."""
    del variant
    return setting(**scale.sizes, device=scale.device)
