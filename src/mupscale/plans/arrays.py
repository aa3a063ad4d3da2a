"""Tensors that are no weights or buffers, and arrays of numpy, among the attributes of a model: equal, scaled, or of a width."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = (Tensor, np.ndarray)


def equal_arrays(a: Any, b: Any) -> bool:
    """True for two tensors or two arrays of one type with the same numbers; NaN is the same as NaN, as is what is on the meta device.

    >>> equal_arrays(torch.ones(2), torch.ones(2)), equal_arrays(np.ones(2), np.ones(3)), equal_arrays(None, np.ones(3))
    (True, False, False)
    """
    if not same_form(a, b):
        return False
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))
    if a.is_meta or b.is_meta:
        return True
    a, b = a.detach().cpu(), b.detach().cpu()
    return bool(torch.equal(a, b) or ((a == b) | ((a != a) & (b != b))).all())


def same_form(a: Any, b: Any) -> bool:
    """True for two tensors, or two arrays, of one shape and dtype."""
    kinds = isinstance(a, Tensor) == isinstance(b, Tensor)
    return kinds and all(isinstance(v, Array) for v in (a, b)) and (a.shape, a.dtype) == (b.shape, b.dtype)


def numbers_of(value: Any) -> Any:
    """The numbers of tensors and arrays as Python's, in lists; any other value itself.

    >>> numbers_of((torch.ones(2), 3)), numbers_of(np.float32(2))
    ([[1.0, 1.0], 3], 2.0)
    """
    if isinstance(value, (np.ndarray, np.generic)) or (isinstance(value, Tensor) and not value.is_meta):
        return value.tolist()
    nested = isinstance(value, (list, tuple, deque)) and any(True for _ in arrays_in(value))
    return [numbers_of(part) for part in value] if nested else value


def arrays_in(value: Any) -> Iterator[Any]:
    """The tensors and arrays inside lists, tuples and dicts."""
    if isinstance(value, Array):
        yield value
    elif isinstance(value, (list, tuple, set, deque, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from arrays_in(part)


def of_width(value: Any, widths: Collection[int]) -> bool:
    """True if a tensor inside has an axis as long as one that grows.

    >>> of_width([torch.ones(2, 4)], {4}), of_width([torch.ones(2, 3)], {4})
    (True, False)
    """
    return any(size in widths for array in arrays_in(value) for size in array.shape)
