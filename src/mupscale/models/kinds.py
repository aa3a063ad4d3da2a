"""What a module of torch is: its kind, as far as its class shows it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from .names import module_paths, name_in

KNOWN_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,
)


def padding_rows(model: nn.Module) -> Mapping[str, int]:
    """Embedding -> its padding row, by the names of the model's tensors."""
    return {
        name_in(path, "weight"): int(m.padding_idx)
        for path, m in module_paths(model)
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.padding_idx is not None
    }
