"""Copies of a model that share nothing with it, functions that it holds included.

`copy.deepcopy` keeps functions as they are. A model with `self.mlpf = lambda x: m.c_proj(m.c_fc(x))` would, when
copied, still compute with the modules of the original and leave gradients there.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from dis import get_instructions
from functools import partial
from threading import Lock, RLock
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MupscaleError
from .attempts import is_of_device

_SHARED: Any = getattr(torch.distributed, "ProcessGroup", ())
"""Connections between ranks, which a copy uses as well."""
_LOCKS: dict[type, Callable[[], Any]] = {type(make()): make for make in (Lock, RLock)}


def copied(model: nn.Module, hooks: bool = True) -> nn.Module:
    """A copy of a model whose functions, partial functions and bound methods use the copied modules and tensors.

    With `hooks` it has the hooks that parameters have on their gradients, which deepcopy leaves out.

    >>> class Doubled(nn.Linear):
    ...     def __init__(self) -> None:
    ...         super().__init__(2, 2)
    ...         self.twice = lambda: 2 * self.weight
    >>> twin = copied(Doubled())
    >>> bool((twin.twice() == 2 * twin.weight).all())
    True
    """
    memo: dict[int, Any] = {}
    kept: list[Any] = []  # what memo maps by id must stay alive
    for value in held(model):
        if isinstance(value, Tensor) and value.grad_fn is not None:
            memo[id(value)] = value.detach().clone()  # a value kept from a forward, which deepcopy refuses
        elif isinstance(value, torch.Generator):
            memo[id(value)] = value.clone_state()
        elif isinstance(value, _SHARED):
            memo[id(value)] = value
        else:
            continue
        kept.append(value)
    try:
        twin = copy.deepcopy(model, memo)
        for parameter in model.parameters() if hooks else ():
            before, after = hooks_of(parameter)
            register_hooks_(
                memo[id(parameter)], ([isolated(h, memo) for h in before], [isolated(h, memo) for h in after])
            )
    except (TypeError, RuntimeError) as error:
        if is_of_device(error):
            raise
        raise MupscaleError(
            f"this model cannot be copied: {error}; keep locks, streams and open files outside the model, and open files "
            "outside the hooks of its parameters",
            code="model.cannot_be_copied",
        ) from error
    _Binder(memo, twins=True).modules_(twin)
    return twin


def rebind_(model: nn.Module, replaced: Mapping[int, Any]) -> None:
    """Let the functions of a model use new objects in place of old ones, given by the ids of the old."""
    if replaced:
        _Binder(dict(replaced), twins=False).modules_(model)


def rebound(function: Any, replaced: Mapping[int, Any]) -> Any:
    """A function that uses new objects in place of old ones; itself if it holds none of them."""
    return _Binder(dict(replaced), twins=False).bound(function)


Hook = Callable[[Tensor], Any]
Hooks = tuple[Sequence[Hook], Sequence[Hook]]
"""Hooks of a parameter that get its gradient, and those that get the parameter once its gradient was accumulated."""


def hooks_of(parameter: Tensor) -> Hooks:
    """The hooks of one parameter, in the order in which they are called."""
    kinds = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
    before, after = (tuple((hooks or {}).values()) for hooks in kinds)
    return before, after


def register_hooks_(parameter: Tensor, hooks: Hooks) -> None:
    """Register hooks on a parameter, whether or not it is frozen now."""
    trains = parameter.requires_grad
    if any(hooks):
        parameter.requires_grad_(True)
        for hook in hooks[0]:
            parameter.register_hook(hook)  # type: ignore[no-untyped-call]
        for hook in hooks[1]:
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(trains)


@contextmanager
def unhooked(model: nn.Module) -> Iterator[None]:
    """Do not call the hooks that parameters of a model have on their gradients."""
    kinds = [(p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None)) for p in model.parameters()]
    registered = [hooks for pair in kinds for hooks in pair if hooks]
    kept = [dict(hooks) for hooks in registered]
    try:
        for hooks in registered:
            hooks.clear()
        yield
    finally:
        for hooks, own in zip(registered, kept, strict=True):
            hooks.update(own)


def isolated(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of a function whose calls change nothing that the function itself holds: lists, counters, tensors.

    `memo` is that of deepcopy: objects that are in it are not copied again. Globals that the function names are copied too.
    Locks, which deepcopy refuses, are new ones.

    >>> calls = []
    >>> twin = isolated(lambda x: calls.append(x), {})
    >>> twin(1), calls
    (None, [])
    """
    locks = [part for part in held_by(value, memo) if type(part) in _LOCKS]
    memo.update({id(lock): _LOCKS[type(lock)]() for lock in locks if id(lock) not in memo})
    return _isolated(value, memo)


def _isolated(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, FunctionType):
        named = {n: v for n, v in named_globals(value).items() if _is_data(v, value)}
        world = {**value.__globals__} if named else value.__globals__
        cells = tuple(CellType() for _ in value.__closure__ or ())
        new = FunctionType(value.__code__, world, value.__name__, None, cells or None)
        memo[id(value)] = new  # before its cells are filled: a function may hold itself
        world.update({name: _isolated(held, memo) for name, held in named.items()})
        for cell, old in zip(cells, value.__closure__ or (), strict=True):
            if not _is_empty(old):
                cell.cell_contents = _isolated(old.cell_contents, memo)
        new.__defaults__, new.__kwdefaults__ = copy.deepcopy((value.__defaults__, value.__kwdefaults__), memo)
        return new
    if isinstance(value, MethodType):
        return MethodType(_isolated(value.__func__, memo), copy.deepcopy(value.__self__, memo))
    if isinstance(value, BuiltinMethodType) and not isinstance(value.__self__, (ModuleType, type(None))):
        return getattr(copy.deepcopy(value.__self__, memo), value.__name__)
    if isinstance(value, partial):
        return partial(
            _isolated(value.func, memo),
            *copy.deepcopy(value.args, memo),
            **copy.deepcopy(value.keywords, memo),
        )
    return value if isinstance(value, ModuleType) else copy.deepcopy(value, memo)


def held_by(function: Any, known: Container[int] = ()) -> Iterator[Any]:
    """A function and all that it holds, and that this holds, but for what is inside tensors and what has one of the ids."""
    # Globals are followed in the file of the function: functions of packages hold nothing of a run.
    plain = isinstance(function, (FunctionType, MethodType, partial))
    start = function if plain else type(function).__call__
    world = getattr(function_of(start), "__globals__", None)
    seen: set[int] = set()
    waiting: list[Any] = [function, start]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or id(value) in known:
            continue
        seen.add(id(value))
        yield value
        if not isinstance(value, Tensor):
            waiting += _parts(value, world)


def function_of(hook: Any) -> Any:
    """The function of a hook, without what is bound to it."""
    return function_of(hook.func) if isinstance(hook, partial) else getattr(hook, "__func__", hook)


def _parts(value: Any, world: Any) -> Iterator[Any]:
    """What a function, a container or an object holds; of functions with the globals `world`, those that they name."""
    if isinstance(value, FunctionType):
        yield from (value.__defaults__, value.__kwdefaults__, *closed_over(value))
        yield from named_globals(value).values() if value.__globals__ is world else ()
    elif isinstance(value, (MethodType, BuiltinMethodType)):
        yield from (value.__self__, getattr(value, "__func__", None))
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, Mapping):
        yield from (*value.keys(), *value.values())
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from value
    elif not isinstance(value, (ModuleType, type)):
        yield from getattr(value, "__dict__", {}).values()


def named_globals(function: FunctionType) -> dict[str, Any]:
    """The globals whose names stand in the code of a function, or of a function inside it."""
    codes, names = [function.__code__], set()
    while codes:
        code = codes.pop()
        names |= {i.argval for i in get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {name: function.__globals__[name] for name in sorted(names & function.__globals__.keys())}


def _is_data(value: Any, user: FunctionType) -> bool:
    """False for modules, classes, and functions of another file, which are code."""
    if isinstance(value, FunctionType):
        return value.__globals__ is user.__globals__
    return not isinstance(value, (ModuleType, type))


def held(model: nn.Module) -> Iterator[Any]:
    """Every attribute of every module, and what lists, tuples, dicts and dataclasses among them hold."""
    seen: set[int] = set()
    for module in model.modules():
        waiting = list(vars(module).values())
        while waiting:
            value = waiting.pop()
            if type(value) in (list, tuple):
                waiting += value
            elif isinstance(value, dict):
                waiting += value.values()
            elif is_dataclass(value) and id(value) not in seen:
                seen.add(id(value))
                waiting += getattr(value, "__dict__", {}).values()
            else:
                yield value


class _Binder:
    """Replaces modules and tensors inside functions. `memo` maps the ids of old objects to the new ones.

    A function that holds none of them stays as it is. `twins` says that modules and tensors outside the model are
    copied too, as deepcopy would.
    """

    def __init__(self, memo: dict[int, Any], *, twins: bool) -> None:
        self.memo, self.twins = memo, twins
        self.new = {id(value) for value in memo.values()}
        self.cells: dict[int, tuple[CellType, CellType]] = {}

    def modules_(self, model: nn.Module) -> None:
        for module in model.modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, dict):
                    self._dict_(value)
                elif (bound := self.bound(value)) is not value:
                    vars(module)[name] = bound

    def _dict_(self, values: dict[Any, Any]) -> None:
        for key, value in list(values.items()):
            if not isinstance(value, (nn.Module, Tensor)) and (bound := self.bound(value)) is not value:
                values[key] = bound

    def bound(self, value: Any) -> Any:
        """The value with new objects in it, or the value itself if it holds none."""
        if id(value) in self.memo:
            return self.memo[id(value)]
        if isinstance(value, (nn.Module, Tensor)):
            fresh = self.twins and id(value) not in self.new
            return copy.deepcopy(value, self.memo) if fresh else value
        if isinstance(value, FunctionType):
            return self._function(value) if self._reaches(value, set()) else value
        if isinstance(value, MethodType):
            owner, method = self.bound(value.__self__), self.bound(value.__func__)
            same = owner is value.__self__ and method is value.__func__
            return value if same else MethodType(method, owner)
        if isinstance(value, partial):
            inner, args, named = self.bound(value.func), self.bound(value.args), self.bound(value.keywords)
            same = inner is value.func and args is value.args and named is value.keywords
            return value if same else partial(inner, *args, **named)
        if type(value) in (list, tuple):
            parts = [self.bound(part) for part in value]
            return value if all(a is b for a, b in zip(parts, value, strict=True)) else type(value)(parts)
        if type(value) is dict:
            found = {key: self.bound(part) for key, part in value.items()}
            return value if all(found[key] is value[key] for key in value) else found
        return value

    def _function(self, old: FunctionType) -> FunctionType:
        cells = tuple(self._cell(cell) for cell in old.__closure__ or ())
        new = FunctionType(old.__code__, old.__globals__, old.__name__, None, cells or None)
        self.memo[id(old)] = new  # before its cells are filled: a function may hold itself
        self.new.add(id(new))
        new.__defaults__, new.__kwdefaults__ = self.bound(old.__defaults__), self.bound(old.__kwdefaults__)
        new.__qualname__, new.__doc__ = old.__qualname__, old.__doc__
        new.__dict__.update(old.__dict__)
        for cell in old.__closure__ or ():
            self._fill(cell)
        return new

    def _cell(self, cell: CellType) -> CellType:
        return self.cells.setdefault(id(cell), (cell, CellType()))[1]

    def _fill(self, cell: CellType) -> None:
        new = self._cell(cell)
        if _is_empty(new) and not _is_empty(cell):
            new.cell_contents = self.bound(cell.cell_contents)

    def _reaches(self, value: Any, seen: set[int]) -> bool:
        """True if a function holds an object that is to be replaced."""
        if id(value) in seen or id(value) in self.new:
            return False
        seen.add(id(value))
        if id(value) in self.memo:
            return True
        if isinstance(value, (nn.Module, Tensor)):
            return self.twins
        followed = isinstance(value, (FunctionType, MethodType, partial)) or type(value) in (
            list,
            tuple,
            dict,
        )
        return followed and any(self._reaches(part, seen) for part in _parts(value, None))


def closed_over(function: FunctionType) -> list[Any]:
    """What a function holds of the functions around it."""
    return [cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)]


def _is_empty(cell: CellType) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:  # a variable that was never set
        return True
