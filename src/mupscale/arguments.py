"""Checks of arguments before anything is done: types, numbers, functions, lists of names.

Each function returns a list of at most one fault, so that a caller collects them and raises once. Knows Python's and
NumPy's types and numbers, and nothing about torch, models or plans.
"""

from __future__ import annotations

import inspect
from math import inf, isfinite
from numbers import Integral, Real

from .errors import Fault

_PLAIN = (int, float, complex, bool, str, type(None))
_LONGEST = 40  # longer values are shown by their type


def shown(value: object) -> str:
    """A value as messages show it: itself where it is short, its type where it is not.

    >>> shown(0.1), shown("adam"), shown(int), shown([1, 2])
    ('0.1', "'adam'", 'the class int', 'a list')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value) if isinstance(value, _PLAIN) else ""
    if text and len(text) <= _LONGEST:
        return text
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def wrong_kind(where: str, value: object, kinds: type | tuple[type, ...], remedy: str) -> list[Fault]:
    """A fault unless a value has one of these types.

    >>> [fault.code for fault in wrong_kind("noise", 0.1, (int, str), "write noise=1")]
    ['argument.wrong_type']
    """
    if isinstance(value, kinds):
        return []
    names = [kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,))]
    return [
        Fault("argument.wrong_type", where, f"it is {shown(value)}, expected {' or '.join(names)}", remedy)
    ]


def wrong_number(
    where: str, value: object, remedy: str, *, above: bool = False, infinite: bool = False
) -> list[Fault]:
    """A fault unless a value is a number, 0 or more; `above` 0 only, and finite unless it may be `infinite`.

    >>> [fault.code for fault in wrong_number("lr", "0.1", "write lr=0.1")], wrong_number("lr", 0.1, "")
    (['argument.not_a_number'], [])
    """
    if not isinstance(value, bool) and isinstance(value, Real):
        number = float(value)
        large_enough = number > 0 if above else number >= 0
        if large_enough and (isfinite(number) or (infinite and number == inf)):
            return []
    expected = f"a {'' if infinite else 'finite '}number, {'above 0' if above else '0 or more'}"
    return [Fault("argument.not_a_number", where, f"it is {shown(value)}, expected {expected}", remedy)]


def wrong_whole(where: str, value: object, least: int | None = None) -> list[Fault]:
    """A fault unless a value is a whole number, and `least` or more.

    >>> [fault.code for fault in wrong_whole("seed", 1.5)], wrong_whole("steps", 3, least=1)
    (['argument.not_whole'], [])
    """
    if not isinstance(value, bool) and isinstance(value, Integral) and (least is None or int(value) >= least):
        return []
    bound = "" if least is None else f", {least} or more"
    example = 0 if least is None else least
    return [
        Fault(
            "argument.not_whole",
            where,
            f"it is {shown(value)}, expected a whole number{bound}",
            f"write {where}={example}, for example",
        )
    ]


def wrong_function(where: str, value: object, *arguments: str) -> list[Fault]:
    """A fault unless a value can be called with these arguments, by position.

    >>> [fault.code for fault in wrong_function("step", lambda run: run, "run", "i")]
    ['argument.wrong_signature']
    """
    form = f"({', '.join(arguments)})"
    remedy = f"write {where}=lambda{' ' * bool(arguments)}{', '.join(arguments)}: …, or the name of a function of {form}"
    if not callable(value):
        return [
            Fault(
                "argument.not_a_function",
                where,
                f"it is {shown(value)}, expected a function of {form}",
                remedy,
            )
        ]
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return []
    try:
        signature.bind(*arguments)
    except TypeError:
        return [Fault("argument.wrong_signature", where, f"it does not take {form}", remedy)]
    return []


def wrong_list(where: str, value: object) -> list[Fault]:
    """A fault if a string was passed instead of a list of strings, since its letters would be taken for the members.

    >>> [fault.code for fault in wrong_list("no_decay", "*.bias")]
    ['argument.not_a_list']
    """
    if isinstance(value, str):
        return [
            Fault(
                "argument.not_a_list",
                where,
                f"it is {value!r}, expected a list of names",
                f"write {where}=[{value!r}]",
            )
        ]
    return []
