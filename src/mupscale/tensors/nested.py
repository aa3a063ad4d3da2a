"""The tensors inside nested dicts, lists, tuples and dataclasses, in order, and values with others in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor inside a value.

    >>> import torch
    >>> [tensor.item() for tensor in tensors_in({"a": torch.tensor(1), "b": [torch.tensor(2), (3, torch.tensor(4))]})]
    [1, 2, 4]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def replaced_in(value: Any, new: Callable[[Any], Any]) -> Any:
    """A value with `new(part)` in place of every part that is not a plain dict, list or tuple.

    >>> replaced_in({"a": 1, "b": [2, (3,)]}, lambda part: 10 * part)
    {'a': 10, 'b': [20, (30,)]}
    """
    if type(value) in (list, tuple):
        return type(value)(replaced_in(part, new) for part in value)
    if type(value) is dict:
        return {key: replaced_in(part, new) for key, part in value.items()}
    return new(value)
