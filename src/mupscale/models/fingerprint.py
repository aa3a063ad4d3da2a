"""A fingerprint of the code of a model's classes, which lies next to a plan that was measured.

A plan is proved for code, and shapes do not show when that code changes. The fingerprint has a digest for every class of the
model's modules: of the instructions and constants of all its methods, those of its parents, and the functions that they call in
the same file. Names of classes, comments, docstrings and line numbers are not in it, nor what no method holds: settings of an
instance, values of globals, other files, C++. Of torch's own classes it has the names: their code changes with every release.

Instructions are read from what Python runs and need no source, which may be missing or newer. They are the same in every process
and for all releases of one Python such as 3.12, whose name a digest begins with; digests of two Pythons are not compared.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from .names import unwrap

_PYTHON = f"{sys.implementation.cache_tag}{'-O' * sys.flags.optimize}"
_DIGITS = 16
"""64 bits: two classes of one model do not collide by chance."""


def code_fingerprint(*models: nn.Module) -> dict[str, str]:
    """Class -> digest, for every class in the models.

    >>> class Net(nn.Sequential):
    ...     def forward(self, x):
    ...         return super().forward(x).relu()
    >>> found = code_fingerprint(Net(nn.Linear(2, 2)))
    >>> [*found], found["Linear"].partition(":")[2], found["Net"] != code_fingerprint(nn.Sequential())["Sequential"]
    (['Net', 'Linear'], 'torch.nn.modules.linear.Linear', True)
    """
    parts: dict[type, bytes] = {}
    found: dict[str, set[str]] = {}
    for kind in {type(module): None for model in models for module in unwrap(model).modules()}:
        own = [
            owner for owner in kind.__mro__ if owner.__module__.partition(".")[0] not in ("torch", "builtins")
        ]
        for owner in own:
            if owner not in parts:
                parts[owner] = _digest(owner)
        # torch makes classes too, from its own and from others, to shard or to parametrize a module.
        stock = next(
            (owner for owner in kind.__mro__ if owner.__module__.startswith("torch.nn.modules")), kind
        )
        digest = hashlib.sha256(b"".join(parts[owner] for owner in own)).hexdigest()[:_DIGITS]
        name, identity = (own[0], digest) if own else (stock, f"{stock.__module__}.{stock.__qualname__}")
        found.setdefault(name.__qualname__, set()).add(identity)
    return {name: f"{_PYTHON}:{'+'.join(sorted(digests))}" for name, digests in found.items()}


def changed_code(known: Mapping[str, str], *models: nn.Module) -> str:
    """The classes of a fingerprint that the models do not have, and theirs that it does not have; "" if it is the same code.

    A class that has only another name is the same. Digests of another Python are not compared.

    >>> known = code_fingerprint(nn.Tanh())
    >>> changed_code(known, nn.Tanh()), changed_code({}, nn.ReLU()), changed_code({"Tanh": "cpython-36:1a"}, nn.ReLU())
    ('', '', '')
    >>> "Tanh" in changed_code(known, nn.ReLU()) and "ReLU" in changed_code(known, nn.ReLU())
    True
    """
    if {digest.partition(":")[0] for digest in known.values()} != {_PYTHON}:
        return ""
    found = code_fingerprint(*models)
    then, now = (
        ", ".join(f"{name} ({digest})" for name, digest in one.items() if digest not in other.values())
        or "nothing else"
        for one, other in ((known, found), (found, known))
    )
    return f"the plan was proved on other code: {then} then, {now} now" if then != now else ""


def _digest(owner: type) -> bytes:
    """The digest of the methods of one class, and of the functions of its module that they call."""
    found = hashlib.sha256()
    seen: set[CodeType] = set()
    methods = {name: [*_functions(value)] for name, value in sorted(vars(owner).items())}
    if not any(methods.values()):
        return b""  # another name for its parent
    found.update(repr([name for name, functions in methods.items() if functions]).encode())
    waiting = [function for functions in methods.values() for function in functions]
    while waiting:
        function = waiting.pop(0)
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        for name in _instructions(function.__code__, found):
            called = function.__globals__.get(name)
            if isinstance(called, FunctionType) and called.__module__ == owner.__module__:
                waiting.append(called)
    return found.digest()


def _functions(value: Any) -> Iterator[FunctionType]:
    """The Python functions in an attribute of a class."""
    if isinstance(value, property):
        parts: tuple[Any, ...] = (value.fget, value.fset)
    elif isinstance(value, cached_property):
        parts = (value.func,)
    else:
        parts = (getattr(value, "__func__", value),)
    for part in parts:
        # What a decorator has wrapped; the decorator is code of another place.
        function = inspect.unwrap(part) if callable(part) else part
        if isinstance(function, FunctionType):
            yield function


def _instructions(code: CodeType, found: Any) -> list[str]:
    """Add what a function does to a hash, and return the globals that it names."""
    named = []
    for one in dis.get_instructions(code):
        value = one.argval
        if isinstance(value, CodeType):
            found.update(one.opname.encode())
            named += _instructions(value, found)
            continue
        if isinstance(value, frozenset):  # in an order that differs between processes
            value = sorted(map(repr, value))
        found.update(f"{one.opname} {value!r};".encode())
        named += [value] if one.opname == "LOAD_GLOBAL" else []
    return named
