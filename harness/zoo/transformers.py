"""Whole transformers of the zoo, written by hand or from torch's own layers: GPT, ViT, Llama, encoders and decoders."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.data import CLASSES, INPUTS, LENGTH, OUTPUTS, TOKENS, regression, text
from harness.models import CASES, LLAMA, LlamaSizes, rotate
from harness.zoo.attention import DOWN, UP, joined, split, tokens
from harness.zoo.batches import pictures, sequences
from harness.zoo.entry import MASKED, Entry, Exact, vector_model


class Attention(nn.Module):
    """Fused projections, PyTorch's own attention and its scale of 1/sqrt(head size)."""

    def __init__(self, w: int, heads: int) -> None:
        super().__init__()
        self.n_head, self.qkv, self.proj = heads, nn.Linear(w, 3 * w), nn.Linear(w, w)

    def forward(self, x: Tensor, causal: bool) -> Any:
        q, k, v = (split(y, self.n_head) for y in self.qkv(x).chunk(3, -1))
        return self.proj(joined(F.scaled_dot_product_attention(q, k, v, is_causal=causal)))


class Block(nn.Module):
    def __init__(self, w: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(w), Attention(w, heads), nn.LayerNorm(w)
        self.mlp = nn.Sequential(nn.Linear(w, 4 * w), nn.GELU(), nn.Linear(4 * w, w))

    def forward(self, x: Tensor, causal: bool = False) -> Any:
        x = x + self.attn(self.norm1(x), causal)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Learned positions and a readout that is its own, tied, or the embedding used by a function."""

    def __init__(
        self, w: int, heads: int, readout: str = "own", vocabulary: int = TOKENS, length: int = LENGTH
    ) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, w), nn.Embedding(length, w)
        self.blocks, self.norm = nn.ModuleList(Block(w, heads) for _ in range(2)), nn.LayerNorm(w)
        self.head = None if readout == "functional" else nn.Linear(w, vocabulary, bias=False)
        if readout == "tied" and self.head is not None:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, True)
        x = self.norm(x)
        return F.linear(x, self.embed.weight) if self.head is None else self.head(x)


class ViT(nn.Module):
    """Patches, a class token and positions as raw parameters."""

    def __init__(self, w: int, heads: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, w, 4, stride=4)
        self.blocks = nn.ModuleList(Block(w, heads) for _ in range(2))
        self.cls, self.pos = nn.Parameter(torch.randn(1, 1, w)), nn.Parameter(torch.randn(1, 5, w))
        self.norm, self.head = nn.LayerNorm(w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Any:
        x = self.patch(x).flatten(2).mT
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


class Stock(nn.Module):
    """torch's encoder with learned positions and a causal mask."""

    def __init__(self, w: int, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(TOKENS, w), nn.Embedding(LENGTH, w)
        layer = nn.TransformerEncoderLayer(w, heads, 4 * w, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(w, TOKENS)

    def embedded(self, tokens: Tensor) -> Any:
        return self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.encoder(self.embedded(tokens), mask=causal(tokens.shape[1])))


class Tutorial(Stock):
    """PyTorch's tutorial: the embedding times sqrt(width), and a table of sines in a buffer."""

    def __init__(self, w: int, dropout: float = 0.0) -> None:
        super().__init__(w, 2, dropout)
        del self.positions
        angle = torch.arange(LENGTH)[:, None] * torch.exp(torch.arange(0, w, 2) * (-math.log(1e4) / w))
        self.w, table = w, torch.stack([angle.sin(), angle.cos()], -1).flatten(1)
        self.register_buffer("table", table)

    def embedded(self, tokens: Tensor) -> Any:
        assert isinstance(self.table, Tensor)
        return self.embed(tokens) * math.sqrt(self.w) + self.table[: tokens.shape[1]]


class Translator(Stock):
    """torch's encoder and decoder."""

    def __init__(self, w: int) -> None:
        super().__init__(w)
        del self.encoder
        self.both = nn.Transformer(w, 2, 1, 1, 2 * w, 0.0, batch_first=True)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedded(tokens)
        return self.head(self.both(x.flip(1), x, tgt_mask=causal(tokens.shape[1])))


class CrossAttention(nn.Module):
    """Queries attend to vectors of another size, with learned extra keys and values."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(INPUTS, w), nn.Linear(INPUTS, 6), nn.Linear(w, OUTPUTS)
        self.attend = nn.MultiheadAttention(w, 2, kdim=6, vdim=6, add_bias_kv=True, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        q, other = self.a(x), self.b(x)
        return self.out((q + self.attend(q, other, other)[0]).mean(1))


class Latents(nn.Module):
    """Perceiver: learned latents attend to the input; with `back`, the input attends to them, as in ISAB."""

    def __init__(self, w: int, back: bool) -> None:
        super().__init__()
        self.latents, self.a, self.back = nn.Parameter(torch.randn(4, w)), nn.Linear(INPUTS, w), back
        self.attend, self.answer = (nn.MultiheadAttention(w, 2, batch_first=True) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(w), nn.Linear(w, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        x, h = self.a(x), self.latents.expand(len(x), -1, -1)
        h = h + self.attend(h, x, x)[0]
        h = self.answer(x, h, h)[0] if self.back else h + self.answer(h, h, h)[0]
        return self.out(self.norm(h).mean(1))


class Columns(nn.Module):
    """FT-Transformer: one raw embedding per column of a table, scaled by the value in it."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(INPUTS, w)), nn.Parameter(torch.randn(INPUTS, w))
        self.cls, self.out = nn.Parameter(torch.randn(1, 1, w)), nn.Linear(w, OUTPUTS)
        self.encoder = nn.TransformerEncoderLayer(w, 2, 2 * w, 0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Any:
        x = x[..., None] * self.weight + self.bias
        return self.out(self.encoder(torch.cat([self.cls.expand(len(x), -1, -1), x], 1))[:, 0])


class Rotary(nn.Module):
    """A Llama block whose head size grows, and with it the frequencies of its positions."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.n_head, self.embed = 2, nn.Embedding(TOKENS, w)
        self.q, self.k, self.v, self.o = (nn.Linear(w, w, bias=False) for _ in range(4))
        self.norm, self.head = nn.RMSNorm(w), nn.Linear(w, TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        q, k, v = (split(layer(self.norm(x)), self.n_head) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.head(x + self.o(joined(mixed)))


ASLEEP = Exact(layouts={"[qk].weight": {0: [(4, 1), (2, 1, 2)]}}, folds={"[qk].weight": UP})
"""The new frequencies of queries and keys are zero; the scale of a larger head is made up for."""
FUSED = {"blocks.*.attn.qkv.*": DOWN, "blocks.*.attn.proj.weight": UP}
"""Values are fused with queries and keys, so the projection after them gives back what they lost."""


def images(name: str, make: Callable[[Any], nn.Module], *rest: Any) -> Entry:
    return Entry(name, make, 8, 16, pictures(8), *rest)


MODELS = (
    Entry("house_llama", CASES["Llama"].make, LLAMA, LlamaSizes(32, 6, 60), text),
    Entry("house_gpt2", CASES["GPT-2"].make, CASES["GPT-2"].base, CASES["GPT-2"].wide, text),
    tokens("gpt_heads_fixed", lambda w: GPT(w, 2), Exact(folds=FUSED)),
    tokens("gpt_heads_grow", lambda w: GPT(w, w // 4)),
    tokens("gpt_tied_heads_fixed", lambda w: GPT(w, 2, "tied"), Exact(folds=FUSED)),
    tokens("gpt_tied_heads_grow", lambda w: GPT(w, w // 4, "tied")),
    tokens(
        "gpt_tied_by_function", lambda w: GPT(w, 2, "functional"), Exact(folds={**FUSED, "norm.*": "1/2"})
    ),
    images("vit_heads_fixed", lambda w: ViT(w, 2), Exact(folds=FUSED)),
    images("vit_heads_grow", lambda w: ViT(w, w // 4)),
    tokens("stock_encoder_heads_fixed", Stock),
    tokens("stock_encoder_heads_grow", lambda w: Stock(w, w // 4)),
    Entry("stock_encoder_dropout", lambda w: Stock(w, 2, 0.1), 8, 16, text, MASKED, dropout=True),
    tokens("tutorial_sqrt_width", Tutorial),
    Entry("tutorial_dropout", lambda w: Tutorial(w, 0.1), 8, 16, text, MASKED, dropout=True),
    tokens("stock_encoder_decoder", Translator),
    tokens("rotary_heads_fixed", Rotary, ASLEEP),
    vector_model("cross_attention_bias_kv", CrossAttention, batch=sequences),
    vector_model("perceiver", lambda w: Latents(w, back=False), batch=sequences),
    vector_model("set_transformer", lambda w: Latents(w, back=True), batch=sequences),
    vector_model("ft_transformer", Columns, batch=regression),
)
