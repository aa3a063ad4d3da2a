"""Text: a stock Llama of transformers on BPE tokens of textbooks, and a stock GPT-2, whose norms subtract a mean.

OpenStax stands in for a web corpus. Held-out windows are split in two, as the rows of the MLP are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...data import subwords
from ...setting import Setting

WORDS, CONTEXT, ROWS, LAYERS, HEAD = 1024, 64, 8, 2, 16
"""The size of the vocabulary, tokens of a window, windows of a batch, layers, and the size of a head."""
WATCHED, MEASURED = 4, 16
"""Batches that a point of a curve and the end of a run are measured on."""
HELD = 64
"""Windows of each of them."""
LONGEST = 128
"""Tokens of the longest window that a Llama is built for."""
CONSTANTS = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}

Tokens = tuple[Tensor, Tensor]
"""Those to train on, then those held out."""


def fields(width: int, layers: int = LAYERS) -> dict[str, Any]:
    """The fields of a configuration. Heads have a fixed size and grow in number; both embeddings are one tensor."""
    return {
        "vocab_size": WORDS,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "head_dim": HEAD,
        "num_attention_heads": width // HEAD,
        "num_key_value_heads": width // HEAD,
        "max_position_embeddings": LONGEST,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "use_cache": False,
    }


def llama(width: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    stock: Any = LlamaForCausalLM
    model: nn.Module = stock(LlamaConfig(**fields(width)))
    return model


def gpt2(width: int) -> nn.Module:
    """As many heads as the Llama has, and no dropout: every run here sees its text at most once."""
    from transformers import GPT2Config, GPT2LMHeadModel

    stock: Any = GPT2LMHeadModel
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=CONTEXT,
        n_embd=width,
        n_layer=LAYERS,
        n_head=width // HEAD,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.05,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model: nn.Module = stock(config)
    return model


def task(
    tokens: Callable[[], Tokens] = lambda: subwords(WORDS),
    reference: int = 32,
    measured: int = MEASURED,
    build: Callable[[int], nn.Module] = llama,
    held_rows: int = HELD,
    rows: int = ROWS,
    context: int = CONTEXT,
) -> Setting:
    """The setting."""

    def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
        logits = model(windows[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, -2), windows[:, 1:].flatten())

    def loss(model: nn.Module, step: int, seed: int) -> Tensor:
        return loss_of(model, _windows(tokens()[0], rows, 1_000_000 * seed + step, context))

    def mean(model: nn.Module, part: Tensor, count: int, first: int) -> float:
        with torch.no_grad():
            found = [
                loss_of(model, _windows(part, held_rows, 900_000_000 + first + i, context))
                for i in range(count)
            ]
        return float(torch.stack(found).mean())

    def measure(model: nn.Module) -> dict[str, float]:
        train, held = tokens()
        half = len(held) // 2
        return {
            "choose": mean(model, held[:half], measured, 0),
            "held": mean(model, held[half:], measured, 0),
            "train": mean(model, train, measured, 0),
        }

    def watch(model: nn.Module) -> dict[str, float]:
        held = tokens()[1]
        return {"choose": mean(model, held[: len(held) // 2], min(WATCHED, measured), 1000)}

    def inputs() -> Any:
        """With a mask, because without one transformers looks at values, which a model has none of while it is counted."""
        tokens = torch.zeros(rows, context, dtype=torch.long)
        return {"input_ids": tokens, "attention_mask": torch.zeros(rows, 1, context, context)}

    return Setting(
        build.__name__,
        build,
        loss,
        measure,
        torch.optim.AdamW,
        reference=reference,
        constants=CONSTANTS,
        clip=1.0,
        shapes_tell=False,
        watch=watch,
        inputs=inputs,
        batch=rows * context,
    )


@cache
def made_up(count: int = 60_000) -> Tokens:
    """Tokens in which each of the words is followed by one of four: for tests, without any file."""
    drawn = torch.Generator().manual_seed(0)
    after = torch.randint(WORDS, (WORDS, 4), generator=drawn)
    choices = torch.randint(4, (count,), generator=drawn).tolist()
    word, found = 0, []
    for choice in choices:
        word = int(after[word, choice])
        found.append(word)
    tokens = torch.tensor(found)
    return tokens[: 4 * count // 5], tokens[4 * count // 5 :]


def _windows(tokens: Tensor, rows: int, seed: int, context: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - context - 1, (rows,), generator=generator)
    return tokens[starts[:, None] + torch.arange(context + 1)]
