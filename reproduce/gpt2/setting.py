"""A small GPT-2 that learns textbooks: heads that grow in size with attention scaled by 1/d, as in the paper.

With a fixed head size the heads grow in number instead. The text (OpenStax) stands in for FineWeb-Edu, which is read
when a scale asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mupscale as mu

from ..data import WORDS, fineweb, text
from ..scale import Scale
from ..setting import Setting

CONSTANTS = {"betas": (0.9, 0.95), "weight_decay": 0.1}
WATCHED = 4
"""Batches of 16 windows that every point of a curve is measured on."""


@dataclass(frozen=True)
class Sizes:
    """Everything about the model and its data that is not the width."""

    layers: int = 2
    heads: int = 4
    head_size: int | None = None
    """A fixed size, with heads as many as fit; None: `heads` of them that grow."""
    context: int = 128
    batch: int = 8
    parts: int = 1
    words: int = WORDS
    reference: int = 32
    source: str = "openstax"

    def heads_at(self, width: int) -> int:
        return self.heads if self.head_size is None else width // self.head_size

    def attention(self, width: int) -> float:
        """1/d, equal to the usual 1/sqrt(d) for heads of the reference width."""
        early = self.reference / self.heads_at(self.reference)
        return float(early**0.5 / (width / self.heads_at(width)))

    def declare(self, narrow: int, wide: int) -> mu.Declared:
        """The plan in words: heads move as one where they grow in number, and the tied readout's 1/k is in the norm.

        The gradient identity finds the same, and takes long for wide models.
        """
        head = 1 if self.head_size is None else self.head_size
        layouts: dict[str, int | dict[int, int]] = {
            "tokens.weight": 1,
            "positions.weight": 1,
            "*norm*": 1,
            "*.bias": 1,
            "*.qkv.bias": head,
            "*.qkv.weight": {0: head, 1: 1},
            "*.proj.weight": {0: 1, 1: head},
            "*.up.weight": {0: 1, 1: 1},
            "*.down.weight": {0: 1, 1: 1},
        }
        return mu.Declared(layouts=layouts, folds={"norm.*": Fraction(narrow, wide)})


class Block(nn.Module):
    def __init__(self, width: int, sizes: Sizes) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.scale = sizes.heads_at(width), sizes.attention(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        x = x + self.proj(mixed.transpose(1, 2).flatten(-2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return out


class GPT2(nn.Module):
    def __init__(self, width: int, sizes: Sizes = Sizes()) -> None:  # noqa: B008
        super().__init__()
        self.tokens, self.positions = nn.Embedding(sizes.words, width), nn.Embedding(sizes.context, width)
        self.blocks = nn.ModuleList(Block(width, sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(width)
        self.readout = nn.Linear(width, sizes.words, bias=False)
        self.apply(_init)
        self.readout.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[-1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.readout(self.norm(x))
        return logits


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.1 if isinstance(module, nn.Linear) else 0.05)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def _windows(tokens: Tensor, length: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(tokens) - length - 1, (count,), generator=torch.Generator().manual_seed(seed))
    rows = tokens[starts[:, None] + torch.arange(length + 1)]
    return rows[:, :-1], rows[:, 1:]


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor], device: str) -> Tensor:
    x, y = (part.to(device).long() for part in batch)
    with torch.autocast("cuda", torch.bfloat16, enabled=device.startswith("cuda")):
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def setting(sizes: Sizes = Sizes(), device: str = "cpu") -> Setting:  # noqa: B008
    def data() -> tuple[Tensor, Tensor]:
        return fineweb() if sizes.source == "fineweb" else text(sizes.words)

    def loss(model: nn.Module, step: int, seed: int) -> Tensor:
        windows = _windows(data()[0], sizes.context, sizes.batch, 1_000_000 * seed + step)
        return _loss(model, windows, device)

    def mean(model: nn.Module, tokens: Tensor, count: int) -> float:
        """The mean loss over windows that no step sees; every part of a large text is as good as unseen."""
        with torch.no_grad():
            every = (_windows(tokens, sizes.context, 16, 900_000_000 + i) for i in range(count))
            return float(torch.stack([_loss(model, windows, device) for windows in every]).mean())

    def measure(model: nn.Module) -> dict[str, float]:
        return {name: mean(model, t, 16) for name, t in zip(("loss", "held_out"), data(), strict=True)}

    def inputs() -> Any:
        return torch.zeros(sizes.batch, sizes.context, dtype=torch.long)

    return Setting(
        "gpt2_adamw" if sizes.head_size is None else "gpt2_heads",
        lambda width: GPT2(width, sizes),
        loss,
        measure,
        torch.optim.AdamW,
        sizes.reference,
        CONSTANTS,
        clip=1.0,
        shapes_tell=False,
        declare=sizes.declare,
        watch=lambda model: {"held_out": mean(model, data()[1], WATCHED)},
        inputs=inputs,
        batch=sizes.batch,
        parts=sizes.parts,
        device=device,
    )


def of(scale: Scale, variant: str) -> Setting:
    """The setting of one experiment; what a variant is, its sizes say."""
    del variant
    return setting(Sizes(**scale.sizes), scale.device)
