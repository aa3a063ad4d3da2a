"""What a module of torch is: its kind, as far as its class shows it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from .names import module_paths, name_in

KNOWN_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)


def is_norm(module: nn.Module) -> bool:
    """True for a norm of torch or of anybody else, whose class is called one.

    >>> is_norm(nn.BatchNorm1d(2)), is_norm(nn.Linear(2, 2))
    (True, False)
    """
    return "norm" in type(module).__name__.lower()


def is_batch_norm(module: nn.Module) -> bool:
    """True for torch's batch and instance norms, which take each channel by itself; the others average over channels."""
    return isinstance(module, _NormBase)


def padding_rows(model: nn.Module) -> Mapping[str, int]:
    """Embedding -> its padding row, by the names of the model's tensors."""
    return {
        name_in(path, "weight"): int(m.padding_idx)
        for path, m in module_paths(model)
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.padding_idx is not None
    }
