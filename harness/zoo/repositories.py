"""Language models of well-known repositories, rebuilt for the zoo from their description, with the habits that make them special."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.data import LENGTH, TOKENS, text
from harness.zoo.attention import DOWN, UP, joined, split
from harness.zoo.batches import translations
from harness.zoo.entry import Entry, Exact, Impossible, Open


class FusedCausal(nn.Module):
    """Attention of minGPT and nanoGPT: c_attn, c_proj, and the mask in a buffer."""

    bias: Tensor

    def __init__(self, w: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        self.n_head, self.n_embd = heads, w
        self.c_attn, self.c_proj = nn.Linear(w, 3 * w, bias=bias), nn.Linear(w, w, bias=bias)
        self.register_buffer("bias", torch.ones(LENGTH, LENGTH).tril()[None, None])

    def forward(self, x: Tensor) -> Any:
        q, k, v = (split(y, self.n_head) for y in self.c_attn(x).split(self.n_embd, 2))
        scores = q @ k.mT / math.sqrt(k.shape[-1])
        return self.c_proj(joined(scores.masked_fill(self.bias.eq(0), -math.inf).softmax(-1) @ v))


class MinBlock(nn.Module):
    """minGPT's block: its perceptron is called through a function that closes over its modules."""

    def __init__(self, w: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(w), FusedCausal(w, heads), nn.LayerNorm(w)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(w, 4 * w), "act": nn.GELU(), "c_proj": nn.Linear(4 * w, w)}
        )
        m = self.mlp

        def mlpf(x: Tensor) -> Any:
            return m["c_proj"](m["act"](m["c_fc"](x)))

        self.mlpf = mlpf

    def forward(self, x: Tensor) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


class OwnNorm(nn.Module):
    """nanoGPT's LayerNorm with an optional bias."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(w)), nn.Parameter(torch.zeros(w))

    def forward(self, x: Tensor) -> Any:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class NanoBlock(nn.Module):
    def __init__(self, w: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = OwnNorm(w), FusedCausal(w, heads), OwnNorm(w)
        self.c_fc, self.c_proj = nn.Linear(w, 4 * w), nn.Linear(4 * w, w)

    def forward(self, x: Tensor) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class Head(nn.Module):
    """One head of the lecture's GPT, a module of its own."""

    def __init__(self, w: int, size: int) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(w, size, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        return F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), is_causal=True)


class LectureBlock(nn.Module):
    def __init__(self, w: int, heads: int) -> None:
        super().__init__()
        self.heads, self.proj = nn.ModuleList(Head(w, w // heads) for _ in range(heads)), nn.Linear(w, w)
        self.ffwd = nn.Sequential(nn.Linear(w, 4 * w), nn.ReLU(), nn.Linear(4 * w, w))
        self.ln1, self.ln2 = nn.LayerNorm(w), nn.LayerNorm(w)

    def forward(self, x: Tensor) -> Any:
        y = self.ln1(x)
        x = x + self.proj(torch.cat([head(y) for head in self.heads], -1))
        return x + self.ffwd(self.ln2(x))


class Words(nn.Module):
    """Embeddings, two blocks, a norm and a head; the head may be tied."""

    def __init__(
        self, w: int, block: Callable[[], nn.Module], norm: type[nn.Module] = nn.LayerNorm, tied: bool = False
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(TOKENS, w), nn.Embedding(LENGTH, w)
        self.h, self.ln_f = nn.ModuleList(block() for _ in range(2)), norm(w)
        self.lm_head = nn.Linear(w, TOKENS, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Any:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class ScaledPlaces(Words):
    """x-transformers: positions are scaled by width**-0.5 in the call."""

    def forward(self, tokens: Tensor) -> Any:
        places = self.wpe(torch.arange(tokens.shape[1])) * self.wpe.embedding_dim**-0.5
        x = self.wte(tokens) + places
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def sines(length: int, w: int) -> Tensor:
    angle = torch.arange(length)[:, None] * 1e4 ** (-torch.arange(0, w, 2) / w)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1).to(torch.get_default_dtype())


class Cross(nn.Module):
    """Separate projections with heads of a fixed size, a shortcut and a norm after it."""

    def __init__(self, w: int, heads: int) -> None:
        super().__init__()
        self.n_head = heads
        self.w_qs, self.w_ks, self.w_vs = (nn.Linear(w, heads * 4, bias=False) for _ in range(3))
        self.fc, self.layer_norm = nn.Linear(heads * 4, w, bias=False), nn.LayerNorm(w)

    def forward(self, x: Tensor, other: Tensor) -> Any:
        q, k, v = (split(y, self.n_head) for y in (self.w_qs(x), self.w_ks(other), self.w_vs(other)))
        return self.layer_norm(x + self.fc(joined((q / 2 @ k.mT).softmax(-1) @ v)))


class Attentional(nn.Module):
    """An encoder and a decoder in the style of "Attention is all you need", with sines in a buffer or an attribute."""

    def __init__(self, w: int, heads: int, tied: bool = False, stored: bool = True) -> None:
        super().__init__()
        self.w, self.tied, self.source = w, tied, nn.Embedding(TOKENS, w)
        self.target = self.source if tied else nn.Embedding(TOKENS, w)
        self.see, self.read, self.meet = Cross(w, heads), Cross(w, heads), Cross(w, heads)
        self.head = nn.Linear(w, TOKENS, bias=False)
        if tied:
            self.head.weight = self.target.weight
        if stored:
            self.register_buffer("table", sines(LENGTH, w))
        else:
            self.table = sines(LENGTH, w)

    def forward(self, source: Tensor, target: Tensor) -> Any:
        table = self.table[: source.shape[1]]
        x, y = self.source(source) + table, self.target(target) + table
        x, y = self.see(x, x), self.read(y, y)
        y = self.meet(y, x)
        return self.head(y) * (self.w**-0.5 if self.tied else 1.0)


def rebuilt(name: str, make: Callable[[Any], nn.Module], batch: Any, *rest: Any, **options: Any) -> Entry:
    base, wide = options.pop("sizes", (8, 16))
    return Entry(name, make, base, wide, batch, *rest, **{"rebuilt": True, **options})


FOLDS = {"h.*.attn.c_attn.*": DOWN, "h.*.attn.c_proj.weight": UP}
HEADS = {
    "h.*.attn.c_attn.weight": {0: 4, 1: 1},
    "h.*.attn.c_attn.bias": {0: 4},
    "h.*.attn.c_proj.weight": {0: 1, 1: 4},
}
TABLE = Impossible("sines of the width are a plain attribute, which growth cannot copy")
MODELS = (
    rebuilt(
        "mingpt_heads_fixed", lambda w: Words(w, lambda: MinBlock(w, 2)), text, Exact(folds=FOLDS, loss=False)
    ),
    rebuilt(
        "mingpt_heads_grow",
        lambda w: Words(w, lambda: MinBlock(w, w // 4)),
        text,
        Exact(layouts=HEADS, loss=False),
    ),
    rebuilt(
        "nanogpt_heads_fixed",
        lambda w: Words(w, lambda: NanoBlock(w, 2), OwnNorm, tied=True),
        text,
        Exact(folds={**FOLDS, "ln_f.*": "1/2"}),
    ),
    rebuilt("nanogpt_heads_grow", lambda w: Words(w, lambda: NanoBlock(w, w // 4), OwnNorm, tied=True), text),
    rebuilt(
        "lecture_gpt_heads_fixed",
        lambda w: Words(w, lambda: LectureBlock(w, 2)),
        text,
        Exact(folds={"*.key.weight": DOWN, "*.query.weight": DOWN}),
    ),
    rebuilt(
        "lecture_gpt_heads_grow",
        lambda w: Words(w, lambda: LectureBlock(w, w // 4)),
        text,
        Open("new heads are new modules, which would be copies of old ones"),
    ),
    rebuilt(
        "xtransformers_scaled_places",
        lambda w: ScaledPlaces(w, lambda: NanoBlock(w, w // 4), OwnNorm),
        text,
        Exact(folds={"wpe.weight": "2^(1/2)"}),
    ),
    rebuilt("attention_is_all_sizes_fixed", lambda w: Attentional(w, 2), translations, inputs=2),
    rebuilt("attention_is_all_heads_grow", lambda w: Attentional(w, w // 4), translations, inputs=2),
    rebuilt("attention_is_all_tied", lambda w: Attentional(w, 2, tied=True), translations, inputs=2),
    rebuilt(
        "attention_is_all_attribute", lambda w: Attentional(w, 2, stored=False), translations, TABLE, inputs=2
    ),
)
