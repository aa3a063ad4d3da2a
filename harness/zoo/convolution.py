"""Convolutional models of the zoo: shortcuts, concatenations, groups, shuffles, attention over channels, flattening."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.data import CLASSES


def conv(inputs: int, outputs: int, size: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, padding=size // 2, **options)


def normed(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(conv(inputs, outputs), nn.BatchNorm2d(outputs), nn.ReLU())


class Classifier(nn.Module):
    """A stem, what a subclass does with its channels, and a readout of their means."""

    def __init__(self, w: int, out: int = 0) -> None:
        super().__init__()
        self.stem, self.out = conv(3, w), nn.Linear(out or w, CLASSES)

    def features(self, x: Tensor) -> Any:
        return x

    def forward(self, x: Tensor) -> Any:
        return self.out(self.features(F.relu(self.stem(x))).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = normed(3, w), normed(w, 2 * w), normed(2 * w, 4 * w)
        self.up2, self.join2 = nn.ConvTranspose2d(4 * w, 2 * w, 2, stride=2), normed(4 * w, 2 * w)
        self.up1, self.join1 = nn.ConvTranspose2d(2 * w, w, 2, stride=2), normed(2 * w, w)
        self.out = conv(w, 1, 1)

    def forward(self, x: Tensor) -> Any:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        b = self.join2(torch.cat([self.up2(c), b], 1))
        return self.out(self.join1(torch.cat([self.up1(b), a], 1)))


class Dense(nn.Module):
    """DenseNet: each layer reads all before it."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.stem, self.out = conv(3, 2 * w), nn.Linear(5 * w, CLASSES)
        self.norms = nn.ModuleList(nn.BatchNorm2d((2 + i) * w) for i in range(3))
        self.convs = nn.ModuleList(conv((2 + i) * w, w) for i in range(3))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for norm, layer in zip(self.norms, self.convs, strict=True):
            x = torch.cat([x, layer(F.relu(norm(x)))], 1)
        return self.out(x.mean((2, 3)))


class Inception(Classifier):
    """Three branches of unequal widths, side by side."""

    def __init__(self, w: int) -> None:
        super().__init__(w, 2 * w)
        self.small, self.large, self.wide = conv(w, w, 1), conv(w, 2 * w, 3), conv(w, w // 2, 5)
        self.join = conv(w + 2 * w + w // 2, 2 * w, 1)

    def features(self, x: Tensor) -> Any:
        return F.relu(self.join(torch.cat([self.small(x), self.large(x), self.wide(x)], 1)))


class Pyramid(nn.Module):
    """Two scales are added in a neck that does not grow."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.first, self.second = conv(3, w), conv(w, 2 * w, stride=2)
        self.near, self.far, self.out = conv(w, 6, 1), conv(2 * w, 6, 1), conv(6, CLASSES)

    def forward(self, x: Tensor) -> Any:
        a = F.relu(self.first(x))
        b = F.relu(self.second(a))
        return self.out(self.near(a) + F.interpolate(self.far(b), scale_factor=2)).mean((2, 3))


class LayerScale(Classifier):
    """ConvNeXt's block, with a raw gain per channel."""

    def __init__(self, w: int) -> None:
        super().__init__(w)
        self.depth, self.norm = conv(w, w, 3, groups=w), nn.LayerNorm(w)
        self.up, self.down = nn.Linear(w, 4 * w), nn.Linear(4 * w, w)
        self.gamma = nn.Parameter(0.1 * torch.ones(w))

    def features(self, x: Tensor) -> Any:
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        return x + (self.gamma * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class ResponseNorm(Classifier):
    """ConvNeXt V2: each channel is compared with the mean size of all."""

    def __init__(self, w: int) -> None:
        super().__init__(w)
        self.up, self.down = nn.Linear(w, 4 * w), nn.Linear(4 * w, w)
        self.gamma, self.beta = (nn.Parameter(torch.rand(1, 1, 1, 4 * w)) for _ in range(2))

    def features(self, x: Tensor) -> Any:
        y = F.gelu(self.up(x.permute(0, 2, 3, 1)))
        size = torch.linalg.vector_norm(y, dim=(1, 2), keepdim=True)
        y = y + self.gamma * y * size / (size.mean(-1, keepdim=True) + 1e-6) + self.beta
        return x + self.down(y).permute(0, 3, 1, 2)


class SqueezeExcite(Classifier):
    def __init__(self, w: int) -> None:
        super().__init__(w)
        self.down, self.up = conv(w, w // 4, 1), conv(w // 4, w, 1)

    def features(self, x: Tensor) -> Any:
        return x * self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))).sigmoid()


class ChannelConv(Classifier):
    """ECA: a convolution that slides over the channels."""

    def __init__(self, w: int) -> None:
        super().__init__(w)
        self.slide = nn.Conv1d(1, 1, 3, padding=1, bias=False)

    def features(self, x: Tensor) -> Any:
        gate = self.slide(x.mean((2, 3))[:, None]).squeeze(1).sigmoid()
        return x * gate[:, :, None, None]


class SpatialAttention(Classifier):
    """CBAM: mean and maximum over the channels."""

    def __init__(self, w: int) -> None:
        super().__init__(w)
        self.look = conv(2, 1)

    def features(self, x: Tensor) -> Any:
        return x * self.look(torch.cat([x.mean(1, True), x.amax(1, True)], 1)).sigmoid()


class SelectiveKernel(Classifier):
    """Two branches, weighed per channel by a softmax over the branches."""

    def __init__(self, w: int) -> None:
        super().__init__(w)
        self.small, self.large, self.down = conv(w, w, 3), conv(w, w, 5), nn.Linear(w, w // 2)
        self.choose = nn.Linear(w // 2, 2 * w)

    def features(self, x: Tensor) -> Any:
        both = torch.stack([self.small(x), self.large(x)], 1)
        weights = self.choose(F.relu(self.down(both.sum(1).mean((2, 3))))).unflatten(-1, (2, -1)).softmax(1)
        return (both * weights[..., None, None]).sum(1)


class InvertedResidual(Classifier):
    def __init__(self, w: int, norms: bool) -> None:
        super().__init__(w)
        self.up, self.depth = conv(w, 4 * w, 1), conv(4 * w, 4 * w, 3, groups=4 * w)
        self.down = conv(4 * w, w, 1)
        self.norm1, self.norm2, self.norm3 = (
            nn.BatchNorm2d(n) if norms else nn.Identity() for n in (4 * w, 4 * w, w)
        )

    def features(self, x: Tensor) -> Any:
        y = F.relu6(self.norm2(self.depth(F.relu6(self.norm1(self.up(x))))))
        return x + self.norm3(self.down(y))


class Grouped(Classifier):
    """One grouped convolution; the number of groups is a function of the width."""

    def __init__(self, w: int, groups: Callable[[int], int], times: int = 1) -> None:
        super().__init__(w, times * w)
        self.mix = conv(w, times * w, 3, groups=groups(w))

    def features(self, x: Tensor) -> Any:
        return F.relu(self.mix(x))


class Shuffled(Classifier):
    """ShuffleNet: channels are dealt out between two grouped convolutions."""

    def __init__(self, w: int) -> None:
        super().__init__(w)
        self.a, self.b = conv(w, w, 1, groups=2), conv(w, w, 1, groups=2)

    def features(self, x: Tensor) -> Any:
        return F.relu(self.b(self.a(x).unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)))


class Gathered(Classifier):
    """Squares of four pixels become channels, as in YOLO's focus layer."""

    def __init__(self, w: int) -> None:
        super().__init__(w)
        self.mix = conv(4 * w, w)

    def features(self, x: Tensor) -> Any:
        return F.relu(self.mix(F.pixel_unshuffle(x, 2)))


class PatchMerging(Classifier):
    """Swin: four neighbours side by side, normalised and reduced."""

    def __init__(self, w: int) -> None:
        super().__init__(w, 2 * w)
        self.norm, self.reduce = nn.LayerNorm(4 * w), nn.Linear(4 * w, 2 * w, bias=False)

    def features(self, x: Tensor) -> Any:
        x = x.permute(0, 2, 3, 1)
        x = torch.cat([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1)
        return F.gelu(self.reduce(self.norm(x))).permute(0, 3, 1, 2)
