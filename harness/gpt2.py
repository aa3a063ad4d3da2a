"""GPT-2 in plain PyTorch, and the plan that doubles it: 124 M parameters at width 768.

Heads of 64, so a wider model has more of them and the attention scale stays; embeddings tied to the
readout, so the last norm absorbs the copies.
"""

from __future__ import annotations

from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mupscale as mu

VOCABULARY, CONTEXT, LAYERS, HEAD = 50257, 1024, 12, 64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return out


class GPT2(nn.Module):
    def __init__(self, width: int, layers: int = LAYERS, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.readout = nn.Linear(width, vocabulary, bias=False)
        self.readout.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[-1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.readout(self.norm(x))
        return logits


def declared_plan(base: int, wide: int, layers: int = LAYERS, vocabulary: int = VOCABULARY) -> mu.Plan:
    """The plan from shapes and declarations alone: two models on the meta device and no loss."""
    return mu.plans.plan_between(
        lambda width: GPT2(width, layers, vocabulary),
        base,
        wide,
        declared=mu.Declared(
            layouts={
                "blocks.*.qkv.weight": {0: HEAD},
                "blocks.*.qkv.bias": HEAD,
                "blocks.*.proj.weight": {1: HEAD},
            },
            folds={"norm.*": Fraction(base, wide)},
        ),
    )
