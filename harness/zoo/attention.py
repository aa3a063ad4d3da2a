"""Attention layers of the zoo: how heads are split, scaled, normalised, positioned and mixed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.data import INPUTS, OUTPUTS, TOKENS, text
from harness.zoo.batches import sequences
from harness.zoo.entry import Entry, Exact, Open, vector_model

DOWN, UP = "2^(-1/4)", "2^(1/4)"
"""The head size doubles and the scale is 1/sqrt(head size): queries and keys take 2^(-1/4) each."""


def split(x: Any, heads: int) -> Any:
    """(batch, length, width) as (batch, heads, length, head size)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class Separate(nn.Module):
    """Tokens, one layer of attention with separate projections, logits. Subclasses change how it attends."""

    def __init__(self, w: int, heads: int = 2) -> None:
        super().__init__()
        self.n_head, self.embed = heads, nn.Embedding(TOKENS, w)
        self.q, self.k, self.v, self.o = (nn.Linear(w, w) for _ in range(4))
        self.readout = nn.Linear(w, TOKENS)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        q, k, v = (split(layer(x), self.n_head) for layer in (self.q, self.k, self.v))
        return self.readout(x + self.o(joined(self.attend(q, k, v))))


class NormedQueries(Separate):
    """RMSNorm on queries and keys, over the head size."""

    def __init__(self, w: int, heads: int = 2) -> None:
        super().__init__(w, heads)
        self.q_norm, self.k_norm = nn.RMSNorm(w // heads), nn.RMSNorm(w // heads)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return super().attend(self.q_norm(q), self.k_norm(k), v)


class Cosine(Separate):
    """Queries and keys of length one, and a learned scale per head."""

    def __init__(self, w: int, heads: int = 2) -> None:
        super().__init__(w, heads)
        self.scale = nn.Parameter(torch.full((heads, 1, 1), 2.0))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        scores = self.scale * F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        return scores.softmax(-1) @ v


class Sigmoid(Separate):
    """A sigmoid in place of the softmax."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return (q @ k.mT * q.shape[-1] ** -0.5).sigmoid() @ v


class TalkingHeads(Separate):
    """Scores are mixed between heads before the softmax."""

    def __init__(self, w: int, heads: int = 2) -> None:
        super().__init__(w, heads)
        self.mix = nn.Linear(heads, heads, bias=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        return self.mix(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(-1) @ v


class HeadBias(Separate):
    """A learned bias per head and distance, as in T5."""

    def __init__(self, w: int, heads: int = 2) -> None:
        super().__init__(w, heads)
        self.bias = nn.Embedding(8, heads)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        place = torch.arange(q.shape[-2])
        bias = self.bias((place[:, None] - place).clamp(min=0))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.permute(2, 0, 1))


class Alibi(Separate):
    """Slopes that are computed from the number of heads, in each call."""

    def slopes(self) -> Tensor:
        return 2.0 ** (-8 * torch.arange(1, self.n_head + 1) / self.n_head)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        place = torch.arange(q.shape[-2])
        distance = (place - place[:, None]).to(q.dtype)
        bias = self.slopes().to(q.dtype)[:, None, None] * distance.masked_fill(distance > 0, -1e9)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class StoredAlibi(Alibi):
    """The same slopes in a buffer, which growth can copy."""

    def __init__(self, w: int, heads: int = 2) -> None:
        super().__init__(w, heads)
        self.register_buffer("stored", super().slopes())

    def slopes(self) -> Any:
        return self.stored


class FixedView(Separate):
    """Heads of size 4, written into the view; no attribute tells of them."""

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.readout(x + self.o(joined(self.attend(q, k, v))))


class Latent(nn.Module):
    """Keys and values come from a small latent, as in DeepSeek; everything grows but the head size."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.n_head, self.embed, self.q = w // 4, nn.Embedding(TOKENS, w), nn.Linear(w, w, bias=False)
        self.down, self.norm = nn.Linear(w, w // 2, bias=False), nn.RMSNorm(w // 2)
        self.k, self.v = nn.Linear(w // 2, w, bias=False), nn.Linear(w // 2, w, bias=False)
        self.o, self.readout = nn.Linear(w, w, bias=False), nn.Linear(w, TOKENS)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        latent = self.norm(self.down(x))
        q, k, v = (split(y, self.n_head) for y in (self.q(x), self.k(latent), self.v(latent)))
        return self.readout(x + self.o(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True))))


class SharedKeys(nn.Module):
    """One key and value head for all queries; queries grow."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.n_head, self.embed, self.q = w // 4, nn.Embedding(TOKENS, w), nn.Linear(w, w)
        self.k, self.v, self.o = nn.Linear(w, 4), nn.Linear(w, 4), nn.Linear(w, w)
        self.readout = nn.Linear(w, TOKENS)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        q, k, v = split(self.q(x), self.n_head), self.k(x)[:, None], self.v(x)[:, None]
        return self.readout(x + self.o(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True))))


class SingleHead(nn.Module):
    """Attention over vectors in one head as wide as the model."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.w, self.a, self.out = w, nn.Linear(INPUTS, w), nn.Linear(w, OUTPUTS)
        self.q, self.k, self.v = (nn.Linear(w, w) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        weights = (self.q(x) @ self.k(x).mT / self.w**0.5).softmax(-1)
        return self.out((weights @ self.v(x)).mean(1))


class Linearised(nn.Module):
    """Linear attention with positive features."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.heads, self.a, self.qkv = 2, nn.Linear(INPUTS, w), nn.Linear(w, 3 * w)
        self.o, self.out = nn.Linear(w, w), nn.Linear(w, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        mixed = q @ (k.mT @ v) / (q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True)
        return self.out((x + self.o(joined(mixed))).mean(1))


class CrossCovariance(nn.Module):
    """XCiT: channels attend to channels, with queries and keys normalised over the tokens."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.heads, self.a, self.qkv = 2, nn.Linear(INPUTS, w), nn.Linear(w, 3 * w)
        self.scale = nn.Parameter(torch.ones(2, 1, 1))
        self.o, self.out = nn.Linear(w, w), nn.Linear(w, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 4, 1)
        weights = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.scale).softmax(-1)
        return self.out((x + self.o((weights @ v).flatten(1, 2).mT)).mean(1))


class Einsum(nn.Module):
    """Projections are raw parameters (heads, head size, width)."""

    def __init__(self, w: int, heads: int) -> None:
        super().__init__()
        self.a, self.out, self.size = nn.Linear(INPUTS, w), nn.Linear(w, OUTPUTS), w // heads
        drawn = (nn.Parameter(torch.randn(heads, w // heads, w) / w**0.5) for _ in range(4))
        self.wq, self.wk, self.wv, self.wo = drawn

    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        q, k, v = (torch.einsum("btm,hdm->bhtd", x, p) for p in (self.wq, self.wk, self.wv))
        mixed = (q @ k.mT / self.size**0.5).softmax(-1) @ v
        return self.out((x + torch.einsum("bhtd,hdm->btm", mixed, self.wo)).mean(1))


def tokens(name: str, make: Any, judgement: Any = None, sizes: tuple[int, int] = (8, 16)) -> Entry:
    """A model that reads and predicts tokens."""
    return Entry(name, make, *sizes, text, judgement or Exact())


SCALED = Exact(folds={"q.*": DOWN, "k.*": DOWN})
SIZE_ROLES = {"w[qkv]": {1: "out", 2: "in"}, "wo": {1: "in", 2: "out"}}
MODELS = (
    tokens("heads_fixed", Separate, SCALED),
    tokens("heads_grow", lambda w: Separate(w, w // 4)),
    tokens("qk_norm_heads_fixed", NormedQueries, Exact(folds={"?_norm.weight": DOWN})),
    tokens("qk_norm_heads_grow", lambda w: NormedQueries(w, w // 4)),
    tokens("cosine_heads_fixed", Cosine),
    tokens("cosine_heads_grow", lambda w: Cosine(w, w // 4)),
    tokens("sigmoid_heads_fixed", Sigmoid, SCALED),
    tokens("talking_heads_fixed", TalkingHeads, SCALED),
    tokens("talking_heads_grow", lambda w: TalkingHeads(w, w // 4)),
    tokens("relative_bias_heads_fixed", HeadBias, SCALED),
    tokens("relative_bias_heads_grow", lambda w: HeadBias(w, w // 4)),
    tokens("alibi_heads_fixed", Alibi, SCALED),
    tokens(
        "alibi_heads_grow",
        lambda w: Alibi(w, w // 4),
        Open("every second slope is a base slope, and zeros come behind copies only"),
    ),
    tokens("alibi_stored_heads_grow", lambda w: StoredAlibi(w, w // 4)),
    tokens("head_size_in_view", FixedView, Exact(layouts={"[qkv].*": {0: 4}, "o.weight": {1: 4}})),
    tokens("latent_attention", Latent),
    tokens("multi_query", SharedKeys),
    vector_model("single_head", SingleHead, SCALED, batch=sequences),
    vector_model("linear_attention", Linearised, batch=sequences),
    vector_model("cross_covariance", CrossCovariance, batch=sequences),
    vector_model("einsum_heads_grow", lambda w: Einsum(w, w // 4), batch=sequences),
    vector_model(
        "einsum_head_size_grows",
        lambda w: Einsum(w, 2),
        Exact(roles=SIZE_ROLES, folds={"w[qk]": DOWN}),
        batch=sequences,
    ),
)
