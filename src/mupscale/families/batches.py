"""A batch for a stored model: read from a file, or text that the model itself writes; and the loss of it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MupscaleError
from ..tensors.random_states import forked

TEXTS, TOKENS = 8, 64
"""How much text is drawn. 512 tokens tell a loss to a few per cent, and every t is measured on the same ones."""


def read_batch(path: Path) -> dict[str, Any]:
    """A batch by argument name, from safetensors or JSON."""
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return dict(load_file(str(path)))
        values = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): torch.tensor(value) for name, value in values.items()}
    except Exception as error:  # readers and tensor() fail in many ways, and all mean this
        raise MupscaleError(
            f"{path}: expected inputs by argument name, as safetensors or as JSON such as "
            f'{{"input_ids": [[1, 2, 3]]}}: {error}',
            code="data.not_a_batch",
        ) from None


def writes_text(model: Any) -> bool:
    """Whether a model writes text by itself: decoders do, encoders and encoders with decoders do not."""
    writes = getattr(model, "can_generate", lambda: False)()
    return bool(writes) and not getattr(model.config, "is_encoder_decoder", False)


def drawn_text(model: Any, seed: int = 0) -> dict[str, Any]:
    """Text that a language model writes by itself, token by token at its own probabilities.

    Its loss on such text is near its loss on what it was trained on, as far as it models that text well. Texts begin with
    the model's first token, or with token 0 if its configuration names none.
    """
    text = model.config.get_text_config()
    first = text.bos_token_id if isinstance(text.bos_token_id, int) else 0
    length = min(TOKENS, int(getattr(text, "max_position_embeddings", None) or TOKENS)) - 1
    with forked(model, seed=seed), torch.no_grad():
        ids = model.generate(
            torch.full((TEXTS, 1), first, device=model.device),
            attention_mask=torch.ones(TEXTS, 1, dtype=torch.long, device=model.device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=length,
            eos_token_id=-1,  # no token ends a text: it continues with the next one
            pad_token_id=first,
        )
    return {"input_ids": ids}


def loss_of_batch(inputs: Mapping[str, Any]) -> Callable[[nn.Module], Tensor]:
    """The loss that a stock model computes for these inputs; language models get them as labels too."""

    def loss(model: nn.Module) -> Tensor:
        accepted = inspect.signature(model.forward).parameters
        unknown = [name for name in inputs if name not in accepted]
        if unknown:
            names = ", ".join(unknown)
            raise MupscaleError(
                f"the batch has {names}, which {type(model).__name__} does not take; leave it out",
                code="data.unknown_input",
            )
        given = dict(inputs)
        if "labels" in accepted and "labels" not in given and "input_ids" in given:
            given["labels"] = given["input_ids"]
        found: Tensor | None = getattr(model(**given), "loss", None)
        if found is None:
            raise MupscaleError(
                f"{type(model).__name__} gives no loss for this batch; add its labels", code="data.no_loss"
            )
        return found

    return loss
