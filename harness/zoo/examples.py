"""Public examples with pictures, rebuilt for the zoo from their description: a U-Net, MNIST, a diffusion transformer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.data import CLASSES
from harness.zoo.attention import DOWN, UP
from harness.zoo.batches import generator, maps, pictures
from harness.zoo.convolution import conv, normed
from harness.zoo.entry import MASKED, Exact
from harness.zoo.repositories import FusedCausal, rebuilt, sines


class UpUNet(nn.Module):
    """milesial's U-Net of two levels, which enlarges by transposed convolution or by interpolation."""

    def __init__(self, w: int, bilinear: bool) -> None:
        super().__init__()
        half = 2 if bilinear else 1
        self.inc, self.down1, self.down2 = normed(3, w), normed(w, 2 * w), normed(2 * w, 4 * w // half)
        self.up1 = None if bilinear else nn.ConvTranspose2d(4 * w, 2 * w, 2, stride=2)
        self.up2 = None if bilinear else nn.ConvTranspose2d(2 * w, w, 2, stride=2)
        self.join1, self.join2, self.out = normed(4 * w, 2 * w // half), normed(2 * w, w), conv(w, 1, 1)

    def forward(self, x: Tensor) -> Any:
        def larger(y: Tensor, layer: nn.Module | None) -> Any:
            return (
                F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=True)
                if layer is None
                else layer(y)
            )

        a = self.inc(x)
        b = self.down1(F.max_pool2d(a, 2))
        c = self.down2(F.max_pool2d(b, 2))
        b = self.join1(torch.cat([b, larger(c, self.up1)], 1))
        return self.out(self.join2(torch.cat([a, larger(b, self.up2)], 1)))


class Digits(nn.Module):
    """PyTorch's MNIST example."""

    def __init__(self, w: int, dropout: float) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, w, 3), nn.Conv2d(w, 2 * w, 3)
        self.fc1, self.fc2 = nn.Linear(8 * w, 4 * w), nn.Linear(4 * w, CLASSES)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Any:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2).flatten(1)
        return F.log_softmax(self.fc2(self.drop(F.relu(self.fc1(x)))), -1)


class Diffusion(nn.Module):
    """DiT: patches, frozen sines, time and label embeddings, one block with adaptive norms, a final modulation."""

    def __init__(self, w: int, heads: int) -> None:
        super().__init__()
        self.patch, self.label, self.time = nn.Conv2d(3, w, 2, 2), nn.Embedding(CLASSES, w), nn.Linear(6, w)
        self.places = nn.Parameter(sines(9, w)[None], requires_grad=False)
        self.norm, self.attend = nn.LayerNorm(w, elementwise_affine=False), FusedCausal(w, heads)
        self.mlp = nn.Sequential(nn.Linear(w, 4 * w), nn.GELU(), nn.Linear(4 * w, w))
        self.modulate, self.last, self.out = nn.Linear(w, 6 * w), nn.Linear(w, 2 * w), nn.Linear(w, 12)
        self.attend.bias = torch.ones(1, 1, 9, 9)

    def forward(self, x: Tensor, label: Tensor) -> Any:
        condition = F.silu(self.time(sines(4, 6)[: len(x)].to(x.dtype)) + self.label(label))[:, None]
        h = self.patch(x).flatten(2).mT + self.places
        shift, scale, gate, shift2, scale2, gate2 = self.modulate(condition).chunk(6, -1)
        h = h + gate * self.attend(self.norm(h) * (1 + scale) + shift)
        h = h + gate2 * self.mlp(self.norm(h) * (1 + scale2) + shift2)
        shift, scale = self.last(condition).chunk(2, -1)
        return self.out(self.norm(h) * (1 + scale) + shift)


def noised(number: int) -> tuple[Tensor, ...]:
    g = generator(number)
    return (
        torch.randn(3, 3, 6, 6, generator=g),
        torch.randint(CLASSES, (3,), generator=g),
        torch.randn(3, 9, 12, generator=g),
    )


def unlogged(found: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(found, labels)


FROZEN = {"places": "out"}
MODELS = (
    rebuilt(
        "milesial_unet_transposed",
        lambda w: UpUNet(w, False),
        maps(8, 8, 1),
        criterion=F.mse_loss,
        sizes=(4, 8),
    ),
    rebuilt(
        "milesial_unet_bilinear", lambda w: UpUNet(w, True), maps(8, 8, 1), criterion=F.mse_loss, sizes=(4, 8)
    ),
    rebuilt("mnist_example", lambda w: Digits(w, 0.0), pictures(8), criterion=unlogged, sizes=(4, 8)),
    rebuilt(
        "mnist_example_dropout",
        lambda w: Digits(w, 0.5),
        pictures(8),
        MASKED,
        criterion=unlogged,
        sizes=(4, 8),
        dropout=True,
    ),
    rebuilt(
        "dit_heads_fixed",
        lambda w: Diffusion(w, 2),
        noised,
        Exact(roles=FROZEN, folds={"attend.c_attn.*": DOWN, "attend.c_proj.weight": UP}),
        criterion=F.mse_loss,
        inputs=2,
    ),
    rebuilt(
        "dit_heads_grow",
        lambda w: Diffusion(w, w // 4),
        noised,
        Exact(roles=FROZEN),
        criterion=F.mse_loss,
        inputs=2,
    ),
)
