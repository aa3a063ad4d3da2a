"""Two models that are one number wide, with their data: what the benchmarks over widths train.

Heads have a fixed size, so a wider transformer has more of them and its attention scale stays.

Slopes are read near the infinite-width limit, and width 64 is not far out: with more tokens, longer texts or a
larger readout the slopes of the transformer leave ±0.05 (to -0.13), most likely through terms of order
width^-1/2 such as the overlap of random embeddings. So inputs have few dimensions, texts few tokens, and the
readout starts small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mupscale as mu
from harness.data import cross_entropy

INPUTS, CLASSES, TOKENS, LENGTH, HEAD = 8, 10, 4, 4, 8
READOUT, POSITIONS = 0.03, 0.2


class MLP(nn.Module):
    """Three hidden layers with biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(INPUTS, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.readout = nn.Linear(width, CLASSES)
        nn.init.normal_(self.readout.weight, std=READOUT / sqrt(width))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inputs(x))
        for layer in self.hidden:
            x = torch.tanh(layer(x))
        logits: Tensor = self.readout(x)
        return logits


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Transformer(nn.Module):
    """Embeddings, a block, a norm and an untied readout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, width), nn.Embedding(LENGTH, width)
        nn.init.normal_(self.positions.weight, std=POSITIONS)
        self.blocks = nn.ModuleList([Block(width)])
        self.norm = nn.LayerNorm(width)
        self.readout = nn.Linear(width, TOKENS, bias=False)
        nn.init.normal_(self.readout.weight, std=READOUT / sqrt(width))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.readout(self.norm(x))
        return logits


def points(seed: int) -> tuple[Tensor, Tensor]:
    """Inputs whose class is the largest of fixed random projections."""
    teacher = torch.randn(INPUTS, CLASSES, generator=torch.Generator().manual_seed(7))
    x = torch.randn(128, INPUTS, generator=torch.Generator().manual_seed(1000 + seed))
    return x, (x @ teacher).argmax(-1)


def sequences(seed: int) -> tuple[Tensor, Tensor]:
    """Text in which the next token is 5t + 3, or, one time in four, any token."""
    g = torch.Generator().manual_seed(1000 + seed)
    tokens = torch.randint(TOKENS, (32, LENGTH + 1), generator=g)
    kept = torch.rand(32, LENGTH, generator=g) < 0.75
    for i in range(LENGTH):
        tokens[:, i + 1] = torch.where(kept[:, i], (5 * tokens[:, i] + 3) % TOKENS, tokens[:, i + 1])
    return tokens[:, :-1], tokens[:, 1:]


@dataclass(frozen=True)
class Family:
    """A model at any width, and the data it is trained on."""

    name: str
    make: Callable[[int], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    layouts: Mapping[str, Any] = field(default_factory=dict)

    def plan(self, base: int, wide: int) -> mu.Plan:
        return mu.plans.plan_between(self.make, base, wide, declared=mu.Declared(layouts=dict(self.layouts)))

    def fresh(self, reference: int, width: int, seed: int) -> tuple[nn.Module, mu.Plan]:
        """A model initialised under μP from its sizes at the reference."""
        plan = self.plan(reference, width)
        torch.manual_seed(seed)
        with torch.device("meta"):
            empty = self.make(width)
        model = mu.init_weights_(empty.to_empty(device="cpu"), plan, std=self.make(reference), seed=seed)
        return model, plan

    def loss(self, model: nn.Module, seed: int = 0) -> Tensor:
        x, y = self.batch(seed)
        return cross_entropy(model(x), y)


_HEADS = {f"blocks.*.{name}.weight": {0: HEAD} for name in "qkv"} | {"blocks.*.o.weight": {1: HEAD}}
FAMILIES = {
    family.name: family
    for family in (
        Family("MLP", MLP, points),
        Family("transformer", Transformer, sequences, _HEADS),
    )
}


def slope(widths: Sequence[int], values: Sequence[float]) -> float:
    """Least-squares slope of log2(value) against log2(width)."""
    return mu.diagnostics.Coordinates(tuple(widths), {"": tuple(values)}).slopes[""]
