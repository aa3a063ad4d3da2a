"""Models of torchvision and timm, rebuilt for the zoo from their description, with one or two blocks each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.data import CLASSES
from harness.zoo.attention import DOWN, UP
from harness.zoo.batches import pictures
from harness.zoo.convolution import Classifier, conv
from harness.zoo.entry import Entry, Exact, Impossible
from harness.zoo.repositories import rebuilt


def activated(inputs: int, outputs: int, size: int = 3, **options: Any) -> nn.Sequential:
    act = options.pop("act", nn.ReLU())
    return nn.Sequential(conv(inputs, outputs, size, bias=False, **options), nn.BatchNorm2d(outputs), act)


class Bottleneck(nn.Module):
    """Only the inner width of the block grows, as with width_per_group; or inner channels are split as in Res2Net."""

    def __init__(self, w: int, parts: int = 1) -> None:
        super().__init__()
        self.stem, self.out, self.parts = activated(3, 12), nn.Linear(12, CLASSES), parts
        self.reduce, self.expand = activated(12, w * parts, 1), activated(w * parts, 12, 1, act=nn.Identity())
        self.mix = nn.ModuleList(activated(w, w) for _ in range(parts))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        done: list[Tensor] = []
        for part, mix in zip(self.reduce(x).chunk(self.parts, 1), self.mix, strict=True):
            done.append(mix(part + done[-1] if done else part))
        return self.out(F.relu(x + self.expand(torch.cat(done, 1))).mean((2, 3)))


class MobileV2(nn.Module):
    """MobileNetV2: a block has a shortcut when its inputs are as many as its outputs."""

    def __init__(self, stem: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem, self.blocks, inputs = activated(3, stem, act=nn.ReLU6()), nn.ModuleList(), stem
        for w in widths:
            hidden = 2 * inputs
            layers = (
                activated(inputs, hidden, 1),
                activated(hidden, hidden, groups=hidden),
                activated(hidden, w, 1, act=nn.Identity()),
            )
            self.blocks.append(nn.Sequential(*layers))
            inputs = w
        self.out = nn.Linear(inputs, CLASSES)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            y = block(x)
            x = x + y if x.shape == y.shape else y
        return self.out(x.mean((2, 3)))


class ShuffleV2(Classifier):
    """ShuffleNetV2: half of the channels pass by, then both halves are dealt out."""

    def __init__(self, w: int) -> None:
        super().__init__(w)
        half = w // 2
        layers = (activated(half, half, 1), activated(half, half, groups=half), activated(half, half, 1))
        self.branch, self.last = nn.Sequential(*layers), activated(w, w, 1)

    def features(self, x: Tensor) -> Any:
        still, moved = x.chunk(2, 1)
        both: Any = torch.cat([still, self.branch(moved)], 1)
        return self.last(both.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2))


class Fire(Classifier):
    """SqueezeNet: a narrow layer feeds two that are put side by side."""

    def __init__(self, w: int) -> None:
        super().__init__(w, 2 * w)
        self.squeeze, self.small, self.large = conv(w, w // 2, 1), conv(w // 2, w, 1), conv(w // 2, w)
        self.last = conv(2 * w, 2 * w, 1)

    def features(self, x: Tensor) -> Any:
        x = F.relu(self.squeeze(x))
        return F.relu(self.last(torch.cat([F.relu(self.small(x)), F.relu(self.large(x))], 1)))


class Efficient(Classifier):
    """EfficientNet's block: expansion, depthwise convolution, squeeze and excitation, projection."""

    def __init__(self, w: int) -> None:
        super().__init__(w)
        self.expand = activated(w, 4 * w, 1, act=nn.SiLU())
        self.depth = activated(4 * w, 4 * w, groups=4 * w, act=nn.SiLU())
        self.fc1, self.fc2 = conv(4 * w, w // 4, 1), conv(w // 4, 4 * w, 1)
        self.project = activated(4 * w, w, 1, act=nn.Identity())

    def features(self, x: Tensor) -> Any:
        y = self.depth(self.expand(x))
        y = y * self.fc2(F.silu(self.fc1(y.mean((2, 3), keepdim=True)))).sigmoid()
        return x + self.project(y)


class Ghost(Classifier):
    """GhostNet: half of the outputs are cheap copies of the other half."""

    def __init__(self, w: int) -> None:
        super().__init__(w)
        self.primary, self.cheap = activated(w, w // 2, 1), activated(w // 2, w // 2, groups=w // 2)
        self.last = activated(w, w, 1)

    def features(self, x: Tensor) -> Any:
        first = self.primary(x)
        return self.last(torch.cat([first, self.cheap(first)], 1))


class ChannelsFirstNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXt(Classifier):
    """torchvision's spelling: a gain of shape (channels, 1, 1) and a norm that permutes."""

    def __init__(self, w: int) -> None:
        super().__init__(w)
        self.norm0, self.layer_scale = ChannelsFirstNorm(w), nn.Parameter(torch.full((w, 1, 1), 0.1))
        self.depth, self.norm = conv(w, w, 3, groups=w), nn.LayerNorm(w)
        self.up, self.down = nn.Linear(w, 4 * w), nn.Linear(4 * w, w)

    def features(self, x: Tensor) -> Any:
        x = self.norm0(x)
        y = self.down(F.gelu(self.up(self.norm(self.depth(x).permute(0, 2, 3, 1)))))
        return x + self.layer_scale * y.permute(0, 3, 1, 2)


class Pooling(Classifier):
    """PoolFormer: tokens are mixed by a pooling without weights."""

    def __init__(self, w: int) -> None:
        super().__init__(w)
        self.norm1, self.norm2 = nn.GroupNorm(1, w), nn.GroupNorm(1, w)
        self.scale1, self.scale2 = (nn.Parameter(torch.full((w, 1, 1), 0.1)) for _ in range(2))
        self.up, self.down = conv(w, 4 * w, 1), conv(4 * w, w, 1)

    def features(self, x: Tensor) -> Any:
        y = self.norm1(x)
        x = x + self.scale1 * (F.avg_pool2d(y, 3, 1, 1, count_include_pad=False) - y)
        return x + self.scale2 * self.down(F.gelu(self.up(self.norm2(x))))


class Swin(Classifier):
    """Attention in windows of 2 by 2, with a learned bias per head and place."""

    relative_position_index: Tensor

    def __init__(self, w: int, heads: int) -> None:
        super().__init__(w)
        self.heads, self.norm, self.qkv = heads, nn.LayerNorm(w), nn.Linear(w, 3 * w)
        self.proj = nn.Linear(w, w)
        self.relative_position_bias_table = nn.Parameter(torch.randn(9, heads) * 0.3)
        place = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        distance = place[:, :, None] - place[:, None] + 1
        self.register_buffer("relative_position_index", distance[0] * 3 + distance[1])

    def features(self, x: Tensor) -> Any:
        windows = self.norm(
            x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 4, 5, 1).flatten(3, 4).flatten(0, 2)
        )
        q, k, v = self.qkv(windows).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        bias = self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)
        mixed = self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))
        return mixed.mean(1).unflatten(0, (len(x), -1)).mT[..., None] + x.mean((2, 3), keepdim=True)


class Pyramid(Classifier):
    """PVT: keys and values come from a smaller map, in one fused projection."""

    def __init__(self, w: int, heads: int) -> None:
        super().__init__(w)
        self.heads, self.norm, self.sr = heads, nn.LayerNorm(w), nn.Conv2d(w, w, 2, 2)
        self.q, self.kv, self.proj = nn.Linear(w, w), nn.Linear(w, 2 * w), nn.Linear(w, w)

    def features(self, x: Tensor) -> Any:
        near, far = (self.norm(y.flatten(2).mT) for y in (x, self.sr(x)))
        q = self.q(near).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(far).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + mixed.mT.unflatten(-1, x.shape[2:])


def vgg(w: int) -> nn.Module:
    layers = [
        nn.Conv2d(3, w, 3, padding=1),
        nn.BatchNorm2d(w),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(2),
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * w, 3 * w), nn.ReLU(), nn.Linear(3 * w, CLASSES))


def vision(name: str, make: Any, *rest: Any, sizes: tuple[int, int] = (8, 16)) -> Entry:
    return rebuilt(name, make, pictures(8, 8), *rest, sizes=sizes)


SWIN = Exact(folds={"qkv.*": DOWN, "proj.weight": UP})
PVT = Exact(folds={"q.*": DOWN, "kv.*": DOWN, "proj.weight": UP})
MODELS = (
    vision("resnet_inner_width", Bottleneck, sizes=(4, 8)),
    vision("res2net_split", lambda w: Bottleneck(w, 3), sizes=(4, 8)),
    vision("mobilenet_v2", lambda w: MobileV2(w, (2 * w, 2 * w)), sizes=(4, 8)),
    vision(
        "mobilenet_v2_new_shortcut",
        lambda w: MobileV2(8, (w,)),
        Impossible("the wide model has a shortcut that the base has not"),
        sizes=(4, 8),
    ),
    vision(
        "shufflenet_v2",
        ShuffleV2,
        Exact(layouts={"last.0.weight": {1: 2}}),
    ),
    vision("squeezenet_fire", Fire),
    vision("efficientnet_block", Efficient),
    vision("ghostnet_block", Ghost),
    vision("convnext_torchvision", ConvNeXt),
    vision("poolformer_block", Pooling),
    vision("swin_heads_fixed", lambda w: Swin(w, 2), SWIN),
    vision("swin_heads_grow", lambda w: Swin(w, w // 4)),
    vision("pvt_heads_fixed", lambda w: Pyramid(w, 2), PVT),
    vision("pvt_heads_grow", lambda w: Pyramid(w, w // 4)),
    vision("vgg_classifier", vgg, sizes=(4, 8)),
)
