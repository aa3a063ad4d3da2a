"""Norms and scales of the zoo: modules and functions that look at all channels, at neighbours, or at the width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.data import CLASSES, INPUTS, OUTPUTS, cross_entropy
from harness.zoo.batches import labelled, pictures
from harness.zoo.entry import Entry, Exact, Impossible, Open, vector_model

ROOT = "2^(1/2)"


class NormedPictures(nn.Module):
    """A convolution, a norm, a convolution, a readout of the mean."""

    def __init__(self, w: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, w, 3, padding=1), norm(w)
        self.b, self.out = nn.Conv2d(w, w, 3, padding=1), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.out(F.relu(self.b(F.relu(self.norm(self.a(x))))).mean((2, 3)))


class Twice(nn.Module):
    """A hidden vector that a subclass changes before it is read out."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.w, self.a, self.out = w, nn.Linear(INPUTS, w), nn.Linear(w, OUTPUTS)

    def between(self, h: Tensor) -> Any:
        return h

    def forward(self, x: Tensor) -> Any:
        return self.out(self.between(self.a(x)))


class FunctionalRMS(Twice):
    def __init__(self, w: int) -> None:
        super().__init__(w)
        self.gain = nn.Parameter(torch.ones(w))

    def between(self, h: Tensor) -> Any:
        return F.gelu(F.rms_norm(h, h.shape[-1:], self.gain))


class HandNorm(Twice):
    """LayerNorm as people write it, with gamma and beta."""

    def __init__(self, w: int) -> None:
        super().__init__(w)
        self.gamma, self.beta = nn.Parameter(torch.ones(w)), nn.Parameter(torch.zeros(w))

    def between(self, h: Tensor) -> Any:
        mean, variance = h.mean(-1, keepdim=True), h.var(-1, unbiased=False, keepdim=True)
        return F.gelu(self.gamma * (h - mean) / (variance + 1e-5).sqrt() + self.beta)


class HandNormUnbiased(HandNorm):
    """The same with torch's default for the deviation, which divides by the width less one."""

    def between(self, h: Tensor) -> Any:
        return F.gelu(
            self.gamma * (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 1e-6) + self.beta
        )


class UnitLength(Twice):
    def between(self, h: Tensor) -> Any:
        return F.normalize(h, dim=-1)


class ScaleNorm(Twice):
    """One gain for all channels, which starts at sqrt(width)."""

    def __init__(self, w: int) -> None:
        super().__init__(w)
        self.gain = nn.Parameter(torch.tensor(float(w) ** 0.5))

    def between(self, h: Tensor) -> Any:
        return self.gain * F.normalize(h, dim=-1)


class WidthInForward(Twice):
    """Hidden units are divided by the root of the width, which the model reads from itself."""

    def between(self, h: Tensor) -> Any:
        return torch.tanh(h) / self.w**0.5


class WidthInBuffer(Twice):
    """The same constant in a buffer."""

    scale: Tensor

    def __init__(self, w: int) -> None:
        super().__init__(w)
        self.register_buffer("scale", torch.tensor(w**-0.5))

    def between(self, h: Tensor) -> Any:
        return torch.tanh(h) * self.scale


class SummedBuffer(Twice):
    """Fixed random weights that are read over their growing axis."""

    fixed: Tensor

    def __init__(self, w: int) -> None:
        super().__init__(w)
        self.register_buffer("fixed", torch.randn(w, 6))
        self.out = nn.Linear(6, OUTPUTS)

    def between(self, h: Tensor) -> Any:
        return torch.tanh(h @ self.fixed)


class HiddenTable(Twice):
    """A table that grows and is not saved."""

    table: Tensor

    def __init__(self, w: int) -> None:
        super().__init__(w)
        self.register_buffer("table", torch.arange(1.0, w + 1).sin(), persistent=False)

    def between(self, h: Tensor) -> Any:
        return torch.tanh(h + self.table)


class ChannelSoftmax(Twice):
    """A gate that is a softmax over all channels."""

    def __init__(self, w: int) -> None:
        super().__init__(w)
        self.gate = nn.Linear(w, w)

    def between(self, h: Tensor) -> Any:
        return h * self.gate(h).softmax(-1)


class Summed(nn.Module):
    """The output is the sum or the mean of the last hidden units."""

    def __init__(self, w: int, mean: bool) -> None:
        super().__init__()
        self.mean, self.a, self.b = mean, nn.Linear(INPUTS, w), nn.Linear(w, w)

    def forward(self, x: Tensor) -> Any:
        h = F.gelu(self.b(F.gelu(self.a(x))))
        read = h.mean(-1, keepdim=True) if self.mean else h.sum(-1, keepdim=True)
        return read.expand(-1, OUTPUTS)


class CosineClasses(nn.Module):
    """Logits are cosines between features and class weights."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.classes = nn.Linear(INPUTS, w), nn.Linear(w, CLASSES, bias=False)
        self.scale = nn.Parameter(torch.tensor(5.0))

    def forward(self, x: Tensor) -> Any:
        h = F.normalize(F.gelu(self.a(x)), dim=-1)
        return self.scale * F.linear(h, F.normalize(self.classes.weight, dim=-1))


class LocalResponse(nn.Module):
    """AlexNet's norm over neighbouring channels."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.out = nn.Conv2d(3, w, 3, padding=1), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.out(F.local_response_norm(10 * F.relu(self.a(x)), 3, alpha=1.0).mean((2, 3)))


def norm_after_norm(w: int) -> nn.Module:
    """A linear layer between two BatchNorms: the mean that the second one keeps is zero by nature."""
    first, second = nn.Sequential(nn.Linear(INPUTS, w), nn.BatchNorm1d(w)), nn.Linear(w, 4 * w, bias=False)
    return nn.Sequential(first, second, nn.BatchNorm1d(4 * w), nn.ReLU(), nn.Linear(4 * w, OUTPUTS))


def frozen_norm(w: int) -> nn.Module:
    model = NormedPictures(w, nn.BatchNorm2d)
    model.norm.eval()
    return model


def normed(name: str, norm: Callable[[int], nn.Module], *rest: Any) -> Entry:
    return Entry(name, lambda w: NormedPictures(w, norm), 8, 16, pictures(6), *rest)


NEIGHBOURS = "a channel is normalised by its neighbours, which are copies after growth"
MODELS = (
    normed("groupnorm_groups_fixed", lambda w: nn.GroupNorm(4, w)),
    normed(
        "groupnorm_groups_grow",
        lambda w: nn.GroupNorm(w // 4, w),
        Open("copies of whole groups would be exact, and a growing num_groups is refused"),
    ),
    normed("instancenorm_affine", lambda w: nn.InstanceNorm2d(w, affine=True)),
    normed("instancenorm_tracked", lambda w: nn.InstanceNorm2d(w, track_running_stats=True)),
    normed("batchnorm_cumulative", lambda w: nn.BatchNorm2d(w, momentum=None)),
    Entry("batchnorm_frozen", frozen_norm, 8, 16, pictures(6)),
    normed("layernorm_over_maps", lambda w: nn.LayerNorm([w, 6, 6])),
    vector_model("batchnorm_after_batchnorm", norm_after_norm),
    vector_model("rms_functional", FunctionalRMS),
    vector_model("layernorm_by_hand", HandNorm),
    vector_model(
        "layernorm_unbiased",
        HandNormUnbiased,
        Impossible("1/(n - 1) could be folded, the eps next to it cannot"),
    ),
    vector_model("unit_length", UnitLength),
    vector_model("scalenorm_root_width", ScaleNorm),
    vector_model("width_in_forward", WidthInForward, Exact(folds={"out.weight": ROOT})),
    vector_model("width_in_buffer", WidthInBuffer, Exact(folds={"out.weight": ROOT})),
    vector_model("buffer_summed_over", SummedBuffer, Exact(folds={"a.*": "1/2"})),
    vector_model("buffer_not_saved", HiddenTable),
    vector_model("softmax_over_channels", ChannelSoftmax),
    vector_model(
        "summed_readout",
        lambda w: Summed(w, mean=False),
        Impossible("a GELU's output is summed, and no tensor stands between"),
    ),
    vector_model("mean_readout", lambda w: Summed(w, mean=True)),
    vector_model("cosine_classifier", CosineClasses, batch=labelled, criterion=cross_entropy),
    Entry("local_response", LocalResponse, 8, 16, pictures(6), Impossible(NEIGHBOURS)),
)
