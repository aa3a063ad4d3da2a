"""What the code of a class says about its attributes: which are arguments of its constructor, which its methods write.

A model is asked for numbers of its own making (a counter, an annealed weight) as well as for what its factory set. The
values do not show the difference, the code does.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

_LIBRARIES = {"torch", "transformers", "accelerate", "lightning", "pytorch_lightning"}
"""Their classes and hooks put what they need in place again in a model that is built anew."""
_MUTATORS = {"append", "appendleft", "add", "extend", "update", "insert", "pop", "setdefault", "clear"}
_MUTATORS |= {"popleft", "popitem", "remove", "discard", "sort", "reverse"}
_ENDS = {"POP_TOP", "RETURN_VALUE", "STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF"}
"""Instructions that end a statement without writing an attribute."""


@dataclass(frozen=True)
class Code:
    """What the code of one class says about names of attributes."""

    settings: frozenset[str]
    """Arguments of its constructor, and attributes that it sets to an argument: self.config = cfg."""
    counted: frozenset[str]
    """What a method other than the constructor changes in place: self.seen += 1."""
    assigned: frozenset[str]
    """What such a method assigns, or may change by a call."""
    torchs: bool
    """One of torch's own modules."""


def of_library(thing: Any) -> bool:
    """True for a function, an object or a class whose code belongs to torch or to a trainer, not to the user.

    >>> of_library(nn.functional.relu), of_library(lambda: None)
    (True, False)
    """
    while isinstance(thing, (MethodType, partial)):
        thing = thing.__func__ if isinstance(thing, MethodType) else thing.func
    # Not `__module__`, which functools.wraps copies.
    if isinstance(thing, FunctionType):
        home = thing.__globals__.get("__name__", "")
    else:
        home = (thing if isinstance(thing, type) else type(thing)).__module__
    return home.split(".")[0] in _LIBRARIES


def code_of(kind: type) -> Code:
    """What the code of a class and of its parents says; the parents in libraries are left out.

    >>> class Counts(nn.Module):
    ...     def __init__(self, share: float) -> None:
    ...         super().__init__()
    ...         self.p, self.seen, self.last = share, 0, None
    ...     def forward(self, x: Any) -> Any:
    ...         self.seen += 1
    ...         self.last = x.mean()
    ...         return x * self.p
    >>> code = code_of(Counts)
    >>> sorted(code.settings), sorted(code.counted), sorted(code.assigned)
    (['p', 'share'], ['seen'], ['last'])
    """
    own = [parent for parent in kind.__mro__ if not of_library(parent)]
    methods: dict[str, list[CodeType]] = {}
    for parent in own:
        for name, value in vars(parent).items():
            function = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else value
            if isinstance(function, FunctionType):
                methods.setdefault(name, []).append(function.__code__)
    building = _reached({"__init__", "__new__", "__post_init__", "__setstate__"}, methods)
    counted: set[str] = set()
    assigned: set[str] = set()
    for name, codes in methods.items():
        for code in codes if name not in building else ():
            for written, in_place in _writes(code):
                (counted if in_place else assigned).add(written)
    settings = {name for parent in kind.__mro__ if parent is not nn.Module for name in _arguments(parent)}
    torchs = kind.__module__.partition(".")[0] == "torch"
    return Code(frozenset(settings), frozenset(counted), frozenset(assigned - counted), torchs)


def _reached(start: set[str], methods: dict[str, list[CodeType]]) -> set[str]:
    """Methods that run while an object is built: those that the constructor names, and those that they name."""
    found, todo = set(start), list(start)
    while todo:
        for code in methods.get(todo.pop(), ()):
            new = {name for name in code.co_names if name in methods} - found
            found |= new
            todo += new
    return found


def _arguments(kind: type) -> Iterator[str]:
    """The arguments of a constructor, and the attributes that it sets to one of them."""
    init = vars(kind).get("__init__")
    if not isinstance(init, FunctionType):
        return
    arguments = list(inspect.signature(init).parameters)[1:]
    yield from arguments
    stack: list[str | None] = []  # names of variables, None for any other value
    steps = list(dis.get_instructions(inspect.unwrap(init)))
    for before, step, following in zip(steps, steps[1:], steps[2:], strict=False):  # the first one is RESUME
        if step.opname.startswith("LOAD_FAST") or step.opname == "LOAD_DEREF":
            stack += step.argval if isinstance(step.argval, tuple) else [step.argval]
            continue
        if step.opname == "STORE_ATTR" and len(stack) > 1 and stack[-2] in arguments:
            yield str(step.argval)
        if step.opname == "SWAP" and len(stack) >= step.argval:
            stack[-1], stack[-step.argval] = stack[-step.argval], stack[-1]
        elif step.opname == "BUILD_TUPLE" and following.opname == "UNPACK_SEQUENCE":
            stack[-step.argval :] = [*reversed(stack[-step.argval :]), None]  # None is the tuple
        elif step.opname == "UNPACK_SEQUENCE":
            stack[-1:] = [] if before.opname == "BUILD_TUPLE" else [None] * step.argval
        else:
            change = dis.stack_effect(step.opcode, step.arg, jump=False)
            stack = stack[:change] if change < 0 else [*stack, *[None] * change]
            if stack and not step.opname.startswith(("STORE_", "POP_TOP")):
                copied = step.opname == "COPY" and step.argval == 1 and len(stack) > 1
                stack[-1] = stack[-2] if copied else None


def _writes(code: CodeType) -> Iterator[tuple[str, bool]]:
    """Names of attributes that a function writes, each with whether in place (+=), functions inside it included.

    An entry of a dict is written by its key, self.seen["words"] += 1; if the key is not known, by the names of the statement.
    """
    names: list[str] = []
    key: str | None = None
    in_place = False
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.append(str(step.argval))
        elif step.opname == "LOAD_CONST" and not in_place:
            key = step.argval if isinstance(step.argval, str) else key
        elif step.opname == "BINARY_OP" and step.argrepr.endswith("="):
            in_place = True
        elif step.opname in ("STORE_ATTR", "DELETE_ATTR"):
            yield str(step.argval), in_place
        elif step.opname == "STORE_SUBSCR":
            yield from [(key, in_place)] if key is not None else [(name, False) for name in names]
        elif step.opname == "POP_TOP" and _MUTATORS & set(names):
            yield from ((name, False) for name in names)
        if step.opname.startswith("STORE_") or step.opname in _ENDS:
            names, key, in_place = [], None, False
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _writes(inner)
