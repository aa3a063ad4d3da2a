"""Narrower configurations of the same model: every width divided by one number, head size and depth kept.

A proxy is such a model: growing it by that number gives the configuration that it was made from.
"""

from __future__ import annotations

from math import gcd
from typing import Any

from ...errors import Fault, MupscaleError, raise_faults
from ..models import Config, as_data, config_from
from ..types.rows import row_for
from ..types.symbols import power, symbols
from .goal import Goal
from .grown import grown
from .multipliers import EVERY
from .nested import Path, growing_fields, nested_configs, with_edits

ENOUGH_UNITS = 100
"""The best point found on a narrower proxy may still move with the width."""


def divisors(config: Config) -> list[int]:
    """The numbers by which every width of a configuration can be divided, 1 included.

    >>> sizes = {"hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 4, "num_hidden_layers": 1}
    >>> divisors(config_from({"model_type": "llama", **sizes}))
    [1, 2, 4]
    """
    sizes = [
        size
        for _, part in nested_configs(as_data(config))
        for names in growing_fields(part).values()
        for name in names
        for size in (part[name] if isinstance(part[name], list) else [part[name]])
    ]
    common = gcd(*sizes)
    return [n for n in range(1, common + 1) if common % n == 0 and sizes]


def hidden_size(config: Config) -> int:
    """The hidden size by which the width of a model is given."""
    size = symbols(as_data(config)).get("E")
    if size is None:
        what = "its hidden size is not known by any usual name"
        fault = Fault("config.no_hidden_size", config.model_type, what, "tune a Python file instead")
        raise MupscaleError("this model has no width", [fault])
    return int(size)


def narrowed(config: Config, divisor: int) -> Config:
    """The configuration with every width divided; growing it `divisor` times gives `config` back.

    >>> sizes = {"hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 4, "num_hidden_layers": 1}
    >>> small = narrowed(config_from({"model_type": "llama", **sizes}), 2)
    >>> small.hidden_size, small.intermediate_size, small.num_attention_heads, small.head_dim
    (32, 86, 2, 16)
    """
    data = as_data(config)
    changed: dict[Path, Any] = {}
    for path, part in nested_configs(data):
        for name in (name for names in growing_fields(part).values() for name in names):
            old = part[name]
            changed[(*path, name)] = [n // divisor for n in old] if isinstance(old, list) else old // divisor
        for name, text in row_for(str(part.get("model_type"))).config.items():
            if isinstance(part.get(name), (int, float)):
                changed[(*path, name)] = part[name] / float(power(text, divisor))
    small = config_from(with_edits(data, changed))
    again = as_data(small if divisor == 1 else grown(small, Goal({EVERY: divisor})))
    others = [key for key in data if again.get(key) != data[key]]
    raise_faults(
        f"{config.model_type} cannot be made {divisor} times narrower",
        [
            Fault(
                "proxy.does_not_grow_back", key, f"{data[key]} becomes {again.get(key)} when it grows again"
            )
            for key in others
        ],
    )
    return small


def proxy_width(config: Config) -> int:
    """The width of the proxy where none is given: the least that has enough units, or else half of the model's.

    A model whose widths have no common divisor is its own proxy.

    >>> sizes = {"intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 1}
    >>> proxy_width(config_from({"model_type": "llama", "hidden_size": 768, **sizes}))
    128
    """
    size, found = hidden_size(config), divisors(config)
    wide_enough = [size // n for n in found if n > 1 and size // n >= ENOUGH_UNITS]
    return min(wide_enough) if wide_enough else size // (found[1] if len(found) > 1 else 1)
