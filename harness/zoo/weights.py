"""Layers of the zoo whose weight is changed before it is used: standardised, scaled, rounded, masked, normed, or summed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

from harness.data import INPUTS, OUTPUTS
from harness.zoo.batches import pictures, sequences
from harness.zoo.entry import Entry, Exact, Impossible, Open, vector_model
from harness.zoo.norms import ROOT, NormedPictures
from harness.zoo.plain import between, gelu


class StandardConv(nn.Conv2d):
    """A convolution whose weight is standardised in each call, as in BiT."""

    def forward(self, input: Tensor) -> Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        variance = self.weight.var((1, 2, 3), keepdim=True, unbiased=False)
        return F.conv2d(input, (self.weight - mean) / (variance + 1e-5).sqrt(), self.bias, padding=1)


class StandardPictures(NormedPictures):
    def __init__(self, w: int) -> None:
        super().__init__(w, lambda w: nn.GroupNorm(2, w))
        self.a, self.b = StandardConv(3, w, 3), StandardConv(w, w, 3)


class EqualRate(nn.Linear):
    """StyleGAN's layer: the weight is divided by the root of its inputs in each call."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight / self.in_features**0.5, self.bias)


class PositiveWeight(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, F.softplus(self.weight), self.bias)


class TernaryWeight(nn.Linear):
    """BitNet: weights rounded to three values, with a straight gradient."""

    def forward(self, input: Tensor) -> Tensor:
        size = self.weight.abs().mean()
        rounded = (self.weight / size).round().clamp(-1, 1) * size
        return F.linear(input, self.weight + (rounded - self.weight).detach(), self.bias)


class MaskedWeight(nn.Linear):
    def __init__(self, w: int, dtype: torch.dtype | None) -> None:
        super().__init__(w, w)
        self.register_buffer("mask", (torch.rand(w, w) > 0.5).to(dtype or torch.get_default_dtype()))

    def forward(self, input: Tensor) -> Tensor:
        assert isinstance(self.mask, Tensor)
        return F.linear(input, self.weight * self.mask, self.bias)


class LowRank(nn.Linear):
    """LoRA: a frozen weight, and two small trained ones next to it."""

    def __init__(self, w: int) -> None:
        super().__init__(w, w)
        self.weight.requires_grad_(False)
        self.A, self.B = nn.Parameter(torch.randn(2, w) * 0.3), nn.Parameter(torch.randn(w, 2) * 0.3)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + (input @ self.A.T) @ self.B.T


class WeightNormed(nn.Module):
    """A temporal convolution network with weight norm."""

    def __init__(self, w: int) -> None:
        super().__init__()
        normed = parametrizations.weight_norm
        self.a, self.b = normed(nn.Conv1d(INPUTS, w, 3, padding=1)), normed(nn.Conv1d(w, w, 3, padding=1))
        self.out = nn.Linear(w, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        return self.out(F.relu(self.b(F.relu(self.a(x.mT)))).mean(-1))


def spectral(w: int) -> nn.Module:
    sizes = ((INPUTS, w), (w, w), (w, OUTPUTS))
    first, second, third = (spectral_norm(nn.Linear(*size)) for size in sizes)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third)


def equal_rates(w: int) -> nn.Module:
    return nn.Sequential(
        EqualRate(INPUTS, w), nn.LeakyReLU(0.2), EqualRate(w, w), nn.LeakyReLU(0.2), EqualRate(w, OUTPUTS)
    )


MODELS = (
    Entry(
        "weight_standardised",
        StandardPictures,
        4,
        8,
        pictures(6),
        Exact(folds={"b.*": "2", "out.weight": "1/2"}),
    ),
    vector_model("equalised_rate", equal_rates, Exact(folds={"[24].weight": ROOT})),
    vector_model(
        "softplus_weight",
        between(lambda w: PositiveWeight(w, w), gelu),
        Impossible("softplus(W/k) is not softplus(W)/k, and a GELU lets no scale through"),
    ),
    vector_model("ternary_weight", between(lambda w: TernaryWeight(w, w), gelu)),
    vector_model("masked_float", between(lambda w: MaskedWeight(w, None), gelu)),
    vector_model(
        "masked_bool",
        between(lambda w: MaskedWeight(w, torch.bool), gelu),
        Exact(layouts={"1.mask": {0: 1, 1: 1}}),
    ),
    vector_model(
        "lora", between(LowRank, gelu), Open("extra parameters of a Linear are refused whatever is declared")
    ),
    vector_model(
        "weight_norm",
        WeightNormed,
        Open("the gain of every direction could take k^(-1/2), and parametrizations are refused"),
        batch=sequences,
    ),
    vector_model(
        "spectral_norm",
        spectral,
        Open("biases could take k^(-1/2) through the ReLUs, and spectral_norm is refused"),
    ),
)
