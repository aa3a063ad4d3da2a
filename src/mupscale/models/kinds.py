"""What a module of torch is: its kind, as far as its class shows it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from .names import strip_wrappers, unwrap

KNOWN_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,
)


def padding_rows(model: nn.Module) -> Mapping[str, int]:
    """Embedding -> its padding row, by the names of the model's tensors."""
    modules = [(strip_wrappers(f"{n}.") if n else "", m) for n, m in unwrap(model).named_modules()]
    return {
        f"{prefix}weight": int(m.padding_idx)
        for prefix, m in modules
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.padding_idx is not None
    }
