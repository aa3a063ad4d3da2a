"""Six small models in two widths each: what the benchmarks and the tests grow.

The models are ordinary PyTorch: nothing in them knows that it will be widened. `CASES` gives each a base
and a wide size, the data it is trained on and its loss. Models and batches have torch's default dtype.

No parameter has a gradient that is zero in exact arithmetic (a key bias, a bias before BatchNorm): an
optimizer that looks at signs would turn its rounding errors into steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mupscale as mu
from harness.data import (
    CLASSES,
    INPUTS,
    LENGTH,
    OUTPUTS,
    TOKENS,
    cross_entropy,
    images,
    regression,
    text,
    word_pairs,
)


class MLP(nn.Module):
    """Linear layers with biases; tanh maps 0 to 0, so its widths can also be padded."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        sizes = [INPUTS, *widths, OUTPUTS]
        self.layers = nn.ModuleList(map(nn.Linear, sizes[:-1], sizes[1:]))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        out: Tensor = self.layers[-1](x)
        return out


class Residual(nn.Module):
    """Two convolutions with BatchNorm around a shortcut."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, inner, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(inner)))


class ResNet(nn.Module):
    """A stem, a residual block, a wider stage with another block, a classifier."""

    def __init__(self, widths: tuple[int, int]) -> None:
        super().__init__()
        first, second = widths
        self.stem = nn.Conv2d(3, first, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(first)
        self.block1 = Residual(first, first)
        self.down = nn.Conv2d(first, second, 3, stride=2, padding=1, bias=False)
        self.down_norm = nn.BatchNorm2d(second)
        self.block2 = Residual(second, second)
        self.classifier = nn.Linear(second, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block1(F.relu(self.norm(self.stem(x))))
        x = self.block2(F.relu(self.down_norm(self.down(x))))
        logits: Tensor = self.classifier(x.mean((2, 3)))
        return logits


@dataclass(frozen=True)
class LlamaSizes:
    """Stream, key-value heads and feed-forward width; two queries share a head of fixed size 4."""

    stream: int
    kv_heads: int
    ffn: int
    group: int = 2
    head_size: int = 4


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of (batch, heads, length, head_size)."""
    half = x.shape[-1] // 2
    frequency = 10.0 ** -torch.arange(half, dtype=x.dtype)
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * frequency
    left, right = x[..., :half], x[..., half:]
    return torch.cat(
        [left * angle.cos() - right * angle.sin(), left * angle.sin() + right * angle.cos()], dim=-1
    )


class GroupedAttention(nn.Module):
    """Causal attention with rotary positions, several query heads to a key-value head."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.kv_heads, self.head_size = sizes.kv_heads, sizes.head_size
        self.heads = sizes.kv_heads * sizes.group
        self.q = nn.Linear(sizes.stream, self.heads * self.head_size, bias=False)
        self.k = nn.Linear(sizes.stream, self.kv_heads * self.head_size, bias=False)
        self.v = nn.Linear(sizes.stream, self.kv_heads * self.head_size, bias=False)
        self.o = nn.Linear(self.heads * self.head_size, sizes.stream, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(-2))
        return out


class LlamaBlock(nn.Module):
    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(sizes.stream, eps=1e-2)
        self.attention = GroupedAttention(sizes)
        self.norm2 = nn.RMSNorm(sizes.stream, eps=1e-2)
        self.gate = nn.Linear(sizes.stream, sizes.ffn, bias=False)
        self.up = nn.Linear(sizes.stream, sizes.ffn, bias=False)
        self.down = nn.Linear(sizes.ffn, sizes.stream, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Llama(nn.Module):
    """RMSNorm, rotary positions, grouped attention, SwiGLU, tied embeddings."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, sizes.stream)
        self.blocks = nn.ModuleList(LlamaBlock(sizes) for _ in range(2))
        self.norm = nn.RMSNorm(sizes.stream, eps=1e-2)
        self.readout = nn.Linear(sizes.stream, TOKENS, bias=False)
        nn.init.normal_(self.embed.weight, std=0.5)
        self.readout.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.readout(self.norm(x))
        return logits


@dataclass(frozen=True)
class GPT2Sizes:
    """Stream, head size and feed-forward width of a model with two heads; the rest does not grow."""

    stream: int
    head_size: int
    ffn: int
    heads: int = 2
    tokens: int = TOKENS
    length: int = LENGTH


class FusedAttention(nn.Module):
    """Causal attention with one projection for q, k, v, and logits divided by the head size."""

    def __init__(self, sizes: GPT2Sizes) -> None:
        super().__init__()
        self.heads, self.head_size = sizes.heads, sizes.head_size
        self.qkv = nn.Linear(sizes.stream, 3 * self.heads * self.head_size, bias=False)
        self.proj = nn.Linear(self.heads * self.head_size, sizes.stream)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.head_size)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / self.head_size)
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(-2))
        return out


class GPT2Block(nn.Module):
    def __init__(self, sizes: GPT2Sizes) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(sizes.stream)
        self.attention = FusedAttention(sizes)
        self.norm2 = nn.LayerNorm(sizes.stream)
        self.up = nn.Linear(sizes.stream, sizes.ffn)
        self.down = nn.Linear(sizes.ffn, sizes.stream)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class GPT2(nn.Module):
    """LayerNorm, learned positions, fused qkv, an untied readout."""

    def __init__(self, sizes: GPT2Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.tokens, sizes.stream)
        self.positions = nn.Embedding(sizes.length, sizes.stream)
        self.blocks = nn.ModuleList(GPT2Block(sizes) for _ in range(2))
        self.norm = nn.LayerNorm(sizes.stream)
        self.readout = nn.Linear(sizes.stream, sizes.tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.readout(self.norm(x))
        return logits


class LSTM(nn.Module):
    """Embedding, two recurrent layers, readout."""

    def __init__(self, widths: tuple[int, int]) -> None:
        super().__init__()
        embedding, hidden = widths
        self.embed = nn.Embedding(TOKENS, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=2, batch_first=True)
        self.readout = nn.Linear(hidden, TOKENS, bias=False)
        for parameter in self.lstm.parameters():
            nn.init.normal_(parameter, std=0.7)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(tokens))
        logits: Tensor = self.readout(hidden)
        return logits


class Word2Vec(nn.Module):
    """Skip-gram: the score of two words is a dot product of two embeddings, whose gradients are sparse."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.word = nn.Embedding(TOKENS, width, sparse=True)
        self.context = nn.Embedding(TOKENS, width, sparse=True)

    def forward(self, pairs: Tensor) -> Tensor:
        scores: Tensor = (self.word(pairs[:, 0]) * self.context(pairs[:, 1])).sum(-1)
        return scores


@dataclass(frozen=True)
class Case:
    """A model in two sizes, with the data and the loss it is trained on."""

    name: str
    make: Callable[[Any], nn.Module]
    base: Any
    wide: Any
    batch: Callable[[int], tuple[Tensor, Tensor]]
    criterion: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    by: Any = "copies"
    roles: Mapping[str, str] = field(default_factory=dict)
    sparse: bool = False
    """True when gradients are sparse tensors, which few optimizers take."""

    def loss(self, model: nn.Module, seed: int = 0) -> Tensor:
        x, y = self.batch(seed)
        return self.criterion(model(x), y)

    @cached_property
    def plan(self) -> mu.Plan:
        given: dict[str, Any] = {
            "loss": self.loss,
            "by": self.by,
            "declared": mu.Declared(roles=dict(self.roles)),
        }
        return mu.plans.plan_between(self.make, self.base, self.wide, **given)


LLAMA, GPT = LlamaSizes(16, 2, 12), GPT2Sizes(12, 4, 10)
CASES = {
    case.name: case
    for case in (
        Case("MLP", MLP, (6, 8, 4), (12, 24, 20), regression, F.mse_loss),
        Case("MLP+p", MLP, (6, 8, 4), (15, 29, 22), regression, F.mse_loss, by="padded"),
        Case("ResNet", ResNet, (4, 6), (8, 18), images),
        Case("Llama", Llama, LLAMA, LlamaSizes(32, 6, 60), text),
        Case("Llama+p", Llama, LLAMA, LlamaSizes(36, 5, 31), text, by="padded"),
        Case("GPT-2", GPT2, GPT, GPT2Sizes(24, 12, 50), text),
        Case("LSTM", LSTM, (6, 8), (18, 16), text),
        Case(
            "Word2Vec", Word2Vec, 6, 18, word_pairs, F.mse_loss, roles={"context.weight": "in"}, sparse=True
        ),
    )
}
