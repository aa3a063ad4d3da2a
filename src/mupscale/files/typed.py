"""Values of JSON by their type: a text, a whole number, a finite number, or a TypeError that says what was found.

Knows nothing of what the values mean. `strict.refuse_malformed` turns the errors into one refusal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from typing import Any

from .strict import printable

_RUNS = re.compile(r"\d+")


def text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"a text is expected, found {printable(value)}")
    return value


def whole(value: Any) -> int:
    """A whole number, 0 or more."""
    if type(value) is not int or value < 0:
        raise TypeError(f"a whole number is expected, found {printable(value)}")
    return value


def integer(value: Any) -> int:
    """A whole number, below 0 too."""
    if type(value) is not int:
        raise TypeError(f"a whole number is expected, found {printable(value)}")
    return value


def number(value: Any) -> float:
    """A finite number."""
    if type(value) not in (int, float) or not isfinite(value):
        raise TypeError(f"a number is expected, found {printable(value)}")
    return float(value)


def flag(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(f"true or false is expected, found {printable(value)}")
    return value


def texts(values: Any) -> tuple[str, ...]:
    return tuple(map(text, many(values)))


def wholes(values: Any) -> tuple[int, ...]:
    return tuple(map(whole, many(values)))


def many(values: Any) -> list[Any]:
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"a list is expected, found {printable(values)}")
    return list(values)


def named(values: Any) -> Mapping[str, Any]:
    if not isinstance(values, Mapping) or not all(type(name) is str for name in values):
        raise TypeError(f"values by name are expected, found {printable(values)}")
    return values


def short_numbers(value: Any, digits: int) -> str:
    """A text of numbers of so many digits at most: sizes and scales are computed with, and scales are factorised.

    >>> short_numbers("in: 64x2", 12)
    'in: 64x2'
    """
    longest = max(map(len, _RUNS.findall(text(value))), default=0)
    if longest > digits:
        raise ValueError(
            f"{printable(value)} has a number of {longest} digits, at most {digits} are expected"
        )
    return str(value)
