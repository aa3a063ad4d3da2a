"""What tells one proxy from another: a digest of its functions, so that a study is not gone on with by another loop.

Sees code, constants, defaults, and plain values that a function closes over. Does not see what functions call or
import; the docs say so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any


def digest_of(*values: Any) -> str:
    """The same for the same code and constants, in every process.

    >>> digest_of(lambda x: x + 1) == digest_of(lambda x: x + 1), digest_of(lambda x: x + 1) == digest_of(lambda x: x + 2)
    (True, False)
    """
    return hashlib.sha256(repr([_told(value) for value in values]).encode()).hexdigest()[:16]


def _told(value: Any, depth: int = 0) -> Any:
    if isinstance(value, FunctionType):
        if depth > 4:  # functions that close over each other
            return value.__qualname__
        cells = [_told(_held(cell), depth + 1) for cell in value.__closure__ or ()]
        return [_told(value.__code__), _told(value.__defaults__, depth + 1), cells]
    if isinstance(value, CodeType):
        return [value.co_code.hex(), value.co_names, [_told(constant) for constant in value.co_consts]]
    if isinstance(value, MethodType):
        return _told(value.__func__, depth)
    if isinstance(value, partial):
        return [_told(value.func, depth), _told(value.args, depth), _told(value.keywords, depth)]
    if isinstance(value, Mapping):
        return [(str(key), _told(entry, depth)) for key, entry in sorted(value.items(), key=str)]
    if isinstance(value, tuple | list):
        return [_told(entry, depth) for entry in value]
    if isinstance(value, frozenset):  # its order is another in every process
        return sorted(repr(_told(entry, depth)) for entry in value)
    if value is None or isinstance(value, str | bytes | int | float | complex | bool):
        return repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _held(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
