"""A hash that identifies a proxy by its functions, so that a study is not continued with another training loop.

Covers code, constants, defaults and plain values in closures. Does not cover what functions call or import; the docs
state this.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any


def digest_of(*values: Any) -> str:
    """A hash of code and constants that is the same in every process.

    >>> digest_of(lambda x: x + 1) == digest_of(lambda x: x + 1), digest_of(lambda x: x + 1) == digest_of(lambda x: x + 2)
    (True, False)
    """
    return hashlib.sha256(repr([_plain(value) for value in values]).encode()).hexdigest()[:16]


def _plain(value: Any, depth: int = 0) -> Any:
    if isinstance(value, FunctionType):
        if depth > 4:  # functions whose closures refer to each other
            return value.__qualname__
        cells = [_plain(_held(cell), depth + 1) for cell in value.__closure__ or ()]
        return [_plain(value.__code__), _plain(value.__defaults__, depth + 1), cells]
    if isinstance(value, CodeType):
        return [value.co_code.hex(), value.co_names, [_plain(constant) for constant in value.co_consts]]
    if isinstance(value, MethodType):
        return _plain(value.__func__, depth)
    if isinstance(value, partial):
        return [_plain(value.func, depth), _plain(value.args, depth), _plain(value.keywords, depth)]
    if isinstance(value, Mapping):
        return [(str(key), _plain(entry, depth)) for key, entry in sorted(value.items(), key=str)]
    if isinstance(value, tuple | list):
        return [_plain(entry, depth) for entry in value]
    if isinstance(value, frozenset):  # its order differs between processes
        return sorted(repr(_plain(entry, depth)) for entry in value)
    if value is None or isinstance(value, str | bytes | int | float | complex | bool):
        return repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _held(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
