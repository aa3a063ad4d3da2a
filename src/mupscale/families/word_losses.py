"""The loss of a stock model over the words of its base, and what new words add to the loss over all words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..proofs.identity import Loss
from ..training.grow.loss_rise import measured
from .batches import writes_text
from .loaded import WordLosses
from .measures import Measure

_IGNORED = -100  # the label of a position that no loss of transformers counts


def over_words(loss: Loss, words: int) -> Loss:
    """The same loss over the first `words` words of a stock model, which may have more."""

    def narrowed(model: Any) -> Tensor:
        if not hasattr(model, "loss_function"):
            return loss(model)
        own = model.loss_function

        def first(logits: Tensor, labels: Tensor, vocab_size: int, **more: Any) -> Tensor:
            found: Tensor = own(logits[..., :words].contiguous(), labels, vocab_size=words, **more)
            return found

        model.loss_function = first
        try:
            return loss(model)
        finally:
            del model._loss_function

    return narrowed


def word_losses(base: Any, wide: Any, measure: Measure, words: tuple[int, int]) -> WordLosses | None:
    """What new words add to the loss of a model that writes text; None for other models."""
    if measure.kind != "loss" or not writes_text(base):
        return None
    now, new = words
    old, every = measured(over_words(measure.of, now), wide), measured(measure.of, wide)
    return WordLosses(old, every, _expected(base, measure.inputs, new - now), now, new)


def _expected(base: Any, inputs: Mapping[str, Any], added: int) -> float:
    """The mean of log(1 + added/Z) over the positions that a loss counts, by the logits of the base alone."""
    given = {key: value for key, value in inputs.items() if key != "labels"}
    labels = inputs.get("labels", inputs["input_ids"])[:, 1:]
    with torch.no_grad():
        logits = base(**given).logits[:, :-1].double()
    rises = torch.log1p(added * torch.exp(-logits.logsumexp(-1)))
    return float(rises[labels != _IGNORED].mean())
