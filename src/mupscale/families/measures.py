"""What noise is judged by on a stored model: the loss of a batch, or, where there is none, how far the outputs move.

An encoder without a head has no loss. What its users compare are directions of outputs, so it is judged by the cosines
between them: their change over all pairs of output vectors, as root mean square. Copies of a unit leave cosines as they
are, so the base and the exact wide model are at 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MupscaleError
from .batches import TEXTS, TOKENS, drawn_text, loss_of_batch, read_batch, writes_text

Kind = Literal["loss", "outputs"]
_MOST = 1024
"""Output vectors that are compared with each other; a million cosines take 4 MB."""


@dataclass(frozen=True)
class Measure:
    """How a model is measured, and what that is."""

    of: Callable[[nn.Module], Tensor]
    kind: Kind
    text: str
    """The data, in words."""
    inputs: Mapping[str, Any]


def measure_for(base: Any, batch: Path | None) -> Measure:
    """The measure for a base and its wide models: of a batch that was given, or of data drawn from the base."""
    if batch is not None:
        inputs = read_batch(batch)
        kind: Kind = "loss" if "labels" in inputs or writes_text(base) else "outputs"
        return _measure(base, inputs, kind, str(batch))
    if writes_text(base):
        return _measure(base, drawn_text(base), "loss", "text that the base writes")
    return _measure(base, _random_tokens(base), "outputs", "random tokens")


def _measure(base: Any, inputs: Mapping[str, Any], kind: Kind, text: str) -> Measure:
    if kind == "loss":
        return Measure(loss_of_batch(inputs), kind, text, inputs)
    base.eval()
    with torch.no_grad():
        wanted = cosines(_vectors(base, inputs))

    def moved(model: nn.Module) -> Tensor:
        return (cosines(_vectors(model, inputs)) - wanted).square().mean().sqrt()

    return Measure(moved, kind, text, inputs)


def _random_tokens(model: Any) -> dict[str, Any]:
    """Tokens at random, for a model that reads text and does not write it."""
    config = model.config.get_text_config()
    known = getattr(config, "vocab_size", None)
    named = inspect.signature(model.forward).parameters
    if not known or "input_ids" not in named or getattr(model.config, "is_encoder_decoder", False):
        raise MupscaleError(
            f"{type(model).__name__} neither writes text nor reads text alone, so it needs a batch: --inputs FILE",
            code="data.batch_needed",
        )
    length = min(TOKENS, int(getattr(config, "max_position_embeddings", None) or TOKENS) // 2)
    drawn = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(int(known), (TEXTS, length), generator=drawn, device="cpu").to(
            model.device
        )
    }


def _vectors(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """The vectors of a model's first output, one per position."""
    unknown = [name for name in inputs if name not in inspect.signature(model.forward).parameters]
    if unknown:
        what = f"the batch has {', '.join(unknown)}, which {type(model).__name__} does not take; leave it out"
        raise MupscaleError(what, code="data.unknown_input")
    found = model(**inputs)
    first = next((value for value in found.to_tuple() if isinstance(value, Tensor) and value.ndim > 1), None)
    if first is None:
        raise MupscaleError(
            f"{type(model).__name__} gives no vectors for this batch; add labels, so that it gives a loss",
            code="data.no_vectors",
        )
    return first.flatten(0, -2)[:_MOST].float()


def cosines(vectors: Tensor) -> Tensor:
    """The cosines between all pairs of vectors.

    >>> cosines(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]])).tolist()
    [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    unit = F.normalize(vectors, dim=-1)
    return unit @ unit.T
