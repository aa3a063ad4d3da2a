"""More pictures in the zoo: nets that flatten or enlarge maps, mix tokens, or convolve over time, and all their entries."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.data import CLASSES, INPUTS, OUTPUTS, images
from harness.models import CASES
from harness.zoo import convolution as c
from harness.zoo.batches import maps, pictures, sequences
from harness.zoo.entry import Entry, Exact, Impossible, vector_model


class Flattened(nn.Module):
    """LeNet: maps of 4 by 4 are flattened, channels first or last."""

    def __init__(self, w: int, hidden: int, last: bool = False) -> None:
        super().__init__()
        self.last, self.a = last, c.conv(3, w)
        self.f, self.out = nn.Linear(16 * w, hidden), nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Any:
        x = F.max_pool2d(F.relu(self.a(x)), 2)
        x = x.permute(0, 2, 3, 1) if self.last else x
        return self.out(F.relu(self.f(x.flatten(1))))


class Enlarged(nn.Module):
    """A super-resolution net whose channels become pixels, by a function or a module."""

    def __init__(self, w: int, module: bool) -> None:
        super().__init__()
        self.a, self.b, self.out = c.conv(3, w), c.conv(w, 4 * w), c.conv(w, 3)
        self.shuffle = nn.PixelShuffle(2) if module else None

    def forward(self, x: Tensor) -> Any:
        x = self.b(F.relu(self.a(x)))
        x = F.pixel_shuffle(x, 2) if self.shuffle is None else self.shuffle(x)
        return self.out(F.relu(x))


class RawKernels(nn.Module):
    """Kernels, gains and biases in a ParameterList and a ParameterDict."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.kernels = nn.ParameterList([torch.randn(w, 3, 3, 3) * 0.2, torch.randn(w, w, 3, 3) * 0.1])
        self.affine = nn.ParameterDict({"gain": torch.ones(w), "bias": torch.zeros(w)})
        self.out = nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Any:
        for kernel in self.kernels:
            x = F.relu(F.conv2d(x, kernel, padding=1))
        return self.out(x.mean((2, 3)) * self.affine["gain"] + self.affine["bias"])


class Mixer(nn.Module):
    """MLP-Mixer; the hidden layer of the token mixing is fixed or grows with the width."""

    def __init__(self, w: int, hidden: int) -> None:
        super().__init__()
        self.patch, self.norm1, self.norm2 = nn.Conv2d(3, w, 4, stride=4), nn.LayerNorm(w), nn.LayerNorm(w)
        self.tokens = nn.Sequential(nn.Linear(4, hidden), nn.GELU(), nn.Linear(hidden, 4))
        self.channels = nn.Sequential(nn.Linear(w, 2 * w), nn.GELU(), nn.Linear(2 * w, w))
        self.out = nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Any:
        x = self.patch(x).flatten(2).mT
        x = x + self.tokens(self.norm1(x).mT).mT
        return self.out((x + self.channels(self.norm2(x))).mean(1))


class SpatialGate(nn.Module):
    """gMLP: one half of the channels gates the other after a mix of tokens."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.patch, self.up = nn.Conv2d(3, w, 4, stride=4), nn.Linear(w, 4 * w)
        self.norm = nn.LayerNorm(2 * w)
        self.mix, self.down, self.out = nn.Linear(4, 4), nn.Linear(2 * w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Any:
        x = self.patch(x).flatten(2).mT
        u, v = F.gelu(self.up(x)).chunk(2, -1)
        return self.out((x + self.down(u * self.mix(self.norm(v).mT).mT)).mean(1))


class WaveNet(nn.Module):
    """Dilated gated convolutions over time with summed skips."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.out = nn.Conv1d(INPUTS, w, 1), nn.Conv1d(w, OUTPUTS, 1)
        self.gates = nn.ModuleList(nn.Conv1d(w, 2 * w, 2, dilation=d, padding=d) for d in (1, 2))
        self.stay, self.skip = (nn.ModuleList(nn.Conv1d(w, w, 1) for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        h = self.a(x.mT)
        read = torch.zeros_like(h)
        for gate, stay, skip in zip(self.gates, self.stay, self.skip, strict=True):
            value, door = gate(h)[..., : h.shape[-1]].chunk(2, 1)
            z = value.tanh() * door.sigmoid()
            read, h = read + skip(z), h + stay(z)
        return self.out(F.relu(read)).mean(-1)


class Conformer(nn.Module):
    """Its convolution module: GLU over channels, depthwise convolution, BatchNorm."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.norm, self.batch = nn.Linear(INPUTS, w), nn.LayerNorm(w), nn.BatchNorm1d(w)
        self.out = nn.Linear(w, OUTPUTS)
        self.up, self.down = nn.Conv1d(w, 2 * w, 1), nn.Conv1d(w, w, 1)
        self.depth = nn.Conv1d(w, w, 3, padding=1, groups=w, bias=False)

    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        h = F.silu(self.batch(self.depth(F.glu(self.up(self.norm(x).mT), 1))))
        return self.out((x + self.down(h).mT).mean(1))


def picture(name: str, make: Any, *rest: Any, sizes: tuple[int, int] = (8, 16), size: int = 8) -> Entry:
    return Entry(name, make, *sizes, pictures(size), *rest)


SHUFFLE = Exact(layouts={"b.*": {0: 4}})
SMALL = (4, 8)
MODELS = (
    Entry("house_resnet", CASES["ResNet"].make, (4, 6), (8, 18), images),
    Entry("unet", c.UNet, 4, 8, maps(8, 8, 1), criterion=F.mse_loss),
    picture("densenet", c.Dense, sizes=SMALL),
    picture("inception", c.Inception, sizes=SMALL),
    picture("pyramid_fixed_neck", c.Pyramid, sizes=SMALL),
    picture("convnext_layer_scale", c.LayerScale),
    picture("convnext_response_norm", c.ResponseNorm),
    picture("squeeze_excite", c.SqueezeExcite),
    picture(
        "eca_conv_over_channels",
        c.ChannelConv,
        Impossible("a convolution over channels reads copies as neighbours"),
    ),
    picture("cbam_mean_max", c.SpatialAttention),
    picture("selective_kernel", c.SelectiveKernel),
    picture("inverted_residual", lambda w: c.InvertedResidual(w, norms=False), sizes=SMALL),
    picture("inverted_residual_normed", lambda w: c.InvertedResidual(w, norms=True), sizes=SMALL),
    picture("depthwise_multiplied", lambda w: c.Grouped(w, lambda w: w, 2), sizes=SMALL),
    picture("resnext_groups_fixed", lambda w: c.Grouped(w, lambda _: 4)),
    picture("resnext_groups_grow", lambda w: c.Grouped(w, lambda w: w // 4)),
    picture("channel_shuffle", c.Shuffled, Exact(layouts={"b.weight": {1: 2}})),
    picture("pixel_unshuffle", c.Gathered, sizes=SMALL),
    picture("patch_merging", c.PatchMerging, sizes=SMALL),
    picture("flatten", lambda w: Flattened(w, 2 * w), sizes=SMALL),
    picture("flatten_channels_last", lambda w: Flattened(w, 2 * w, last=True), sizes=SMALL),
    picture(
        "flatten_equal_sizes",
        lambda w: Flattened(w, 16 * w),
        Exact(layouts={"f.weight": {1: 16}}),
        sizes=SMALL,
    ),
    Entry("pixel_shuffle_function", lambda w: Enlarged(w, False), 4, 8, maps(5, 10), SHUFFLE, F.mse_loss),
    Entry("pixel_shuffle_module", lambda w: Enlarged(w, True), 4, 8, maps(5, 10), SHUFFLE, F.mse_loss),
    picture("raw_kernels", RawKernels, sizes=(6, 12)),
    picture("mixer_tokens_fixed", lambda w: Mixer(w, 6)),
    picture("mixer_tokens_grow", lambda w: Mixer(w, w)),
    picture("gmlp_spatial_gate", SpatialGate),
    vector_model("wavenet", WaveNet, batch=sequences),
    vector_model("conformer_convolution", Conformer, batch=sequences),
)
