"""Mappings inside frozen values, which cannot be changed either, so that a hash stays true."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(dict[K, V]):
    """A dict that cannot be changed. JSON, pickle, copies and comparisons take it for the dict that it is.

    >>> FrozenDict(a=1) == {"a": 1}, {**FrozenDict(a=1), "b": 2}
    (True, {'a': 1, 'b': 2})
    >>> FrozenDict(a=1)["a"] = 2
    Traceback (most recent call last):
    TypeError: this mapping belongs to a frozen value and cannot be changed; dict(…) makes a copy that can
    """

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "this mapping belongs to a frozen value and cannot be changed; dict(…) makes a copy that can"
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (dict(self),)


def freeze_mappings(value: Any) -> None:
    """Replace every mapping among the fields of a frozen dataclass by a copy that cannot be changed."""
    for field in fields(value):
        found = getattr(value, field.name)
        if isinstance(found, Mapping) and not isinstance(found, FrozenDict):
            object.__setattr__(value, field.name, FrozenDict(found))
