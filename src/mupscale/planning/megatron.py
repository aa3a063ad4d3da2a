"""How the tensors of Megatron's `GPTModel` are laid out, for a plan between two of them."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import raise_faults
from ..rules.axes import Layout
from .heads import other_heads


def megatron_layouts(base: nn.Module, wide: nn.Module) -> dict[str, dict[int, Layout]]:
    """Find the layouts of a plan between two of Megatron's `GPTModel`s: fused query, key and value by groups, gate and up by halves.

    The size of heads and the number of queries in a group stay; `num_attention_heads` and `num_query_groups` grow by one factor.

    Args:
        base: The base on one rank.
        wide: The wide model on one rank.

    Returns:
        What `Declared.megatron` declares.

    Raises:
        MupscaleError: If heads or groups have other sizes in the wide model.

    >>> from types import SimpleNamespace
    >>> def make(heads):
    ...     model = nn.Module()
    ...     model.linear_qkv = nn.Linear(4, 4 * heads, bias=False)
    ...     model.config = SimpleNamespace(
    ...         kv_channels=2, num_attention_heads=2 * heads, num_query_groups=heads, gated_linear_unit=True
    ...     )
    ...     return model
    >>> megatron_layouts(make(2), make(4))
    {'linear_qkv.weight': {0: 8}}
    """
    (size, group), others = _heads(base), _heads(wide)
    remedy = "keep both, and multiply num_attention_heads and num_query_groups by one factor"
    raise_faults("these two models cannot be planned", other_heads("config", (size, group), others, remedy))
    gated = bool(getattr(base.config, "gated_linear_unit", False))
    layouts: dict[str, dict[int, Layout]] = {}
    for name, tensor in base.named_parameters():
        shape = wide.get_parameter(name).shape
        layer, _, kind = name.rpartition(".")
        grown = {dim: 1 for dim, n in enumerate(tensor.shape) if n != shape[dim]}
        own: dict[int, Layout] = dict(grown)
        if layer.endswith("linear_qkv") and 0 in grown and kind in ("weight", "bias"):
            own[0] = (group + 2) * size
        elif layer.endswith("linear_proj") and 1 in grown:
            own[1] = group * size
        elif layer.endswith("linear_fc1") and 0 in grown and gated:
            half = (tensor.shape[0] // 2, shape[0] // tensor.shape[0])
            own[0] = [[half], [half]]
        if own != grown:
            layouts[name] = own
    return layouts


def _heads(model: Any) -> tuple[int, int]:
    """The size of a head, and how many queries share a key."""
    config = model.config
    groups = config.num_query_groups or config.num_attention_heads
    return config.kv_channels, config.num_attention_heads // groups
