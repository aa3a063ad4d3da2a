"""Small learnable tasks, the same for every width: a batch is a function of its number alone.

Floating inputs have torch's default dtype. `DATA` is the folder of real data, which no registry has; `tokenizer_of` reads
the tokenizer of its Llama.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

INPUTS, OUTPUTS, CLASSES, TOKENS, LENGTH = 5, 3, 4, 11, 8
DATA = Path(os.environ.get("MUPSCALE_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
HELD_OUT = -1
"""The number of a batch that no run is trained on."""


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


def regression(seed: int) -> tuple[Tensor, Tensor]:
    g = _generator(seed)
    x = torch.randn(16, INPUTS, generator=g)
    teacher = torch.linspace(-1, 1, INPUTS * OUTPUTS).sin().view(INPUTS, OUTPUTS)
    return x, torch.sin(2 * x @ teacher)


def images(seed: int) -> tuple[Tensor, Tensor]:
    g = _generator(seed)
    labels = torch.randint(CLASSES, (8,), generator=g)
    ramp = torch.linspace(0, 3, 3 * 6 * 6).view(1, 3, 6, 6)
    waves = torch.sin(ramp * (labels + 1).view(-1, 1, 1, 1))
    return waves + 0.5 * torch.randn(waves.shape, generator=g), labels


def text(seed: int) -> tuple[Tensor, Tensor]:
    """Sequences in which the next token is 3t + 1, or, one time in four, any token."""
    g = _generator(seed)
    tokens = torch.randint(TOKENS, (8, LENGTH + 1), generator=g)
    kept = torch.rand(8, LENGTH, generator=g) < 0.75
    for i in range(LENGTH):
        tokens[:, i + 1] = torch.where(kept[:, i], (3 * tokens[:, i] + 1) % TOKENS, tokens[:, i + 1])
    return tokens[:, :-1], tokens[:, 1:]


def word_pairs(seed: int) -> tuple[Tensor, Tensor]:
    g = _generator(seed)
    drawn = torch.randint(TOKENS, (32, 2), generator=g)
    return drawn, torch.cos(drawn[:, 0] * 1.0 + 2.0 * drawn[:, 1])


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def tokenizer_of(path: Path) -> Any:
    """The tokenizer of a llama2.c file: tokens with scores, merged best score first, bytes for what is unknown."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    raw, at, tokens = path.read_bytes(), 4, list[tuple[str, float]]()
    while at < len(raw):
        score, length = struct.unpack_from("<fi", raw, at)
        tokens.append((raw[at + 8 : at + 8 + length].decode().replace(" ", "▁"), score))
        at += 8 + length
    tokens[1:3] = [("<s>", 0.0), ("</s>", 0.0)]
    words = {token: number for number, (token, _) in enumerate(tokens)}
    merges = [
        (token[:cut], token[cut:])
        for token, score in sorted(tokens[259:], key=lambda pair: -pair[1])
        for cut in range(1, len(token))
        if token[:cut] in words and token[cut:] in words
    ]
    made: Any = Tokenizer(models.BPE(words, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return made
