"""The opcodes of a pickle, carried out on plain values and inert records, within a budget.

Nothing is imported, and nothing is called except what the caller's names stand for. A pickle of a few hundred bytes can
ask Python's own unpickler for endless work: a tuple that holds itself twice, 36 levels deep, has 2^36 entries when
it is hashed as a key. Here a key is a text, a number or a record, whose hashes take constant time; the memo is as long
as what was put into it; and what a pickle builds, names and remembers is counted, against its size and against the bytes
that were read so far, so that a pickle of nothing but containers ends soon.

Knows: the opcodes that Python writes since protocol 2. Does not know: what the names mean.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from struct import Struct, error
from typing import Any, NoReturn

from ..errors import MupscaleError

Find = Callable[[str, str], Any]
"""Gives what a name (module, name) stands for; raises if the pickle may not use it."""
_MARK = object()
_PLAIN_KEYS = (str, int, float, bool, bytes, type(None))
_MOST_TEXT = 1 << 24  # characters of one text or number; a tensor's name has at most a few thousand
_MOST_STACKED = 1 << 20  # values on the stack; picklers put lists and dicts together a thousand at a time
_FIRST = 1000  # records and memo entries that the first bytes may have, however short they are
_NEW_NAME = 20  # what a name counts when it is met first: its class takes a thousand bytes
_I4, _U2, _U4, _U8, _F8 = (Struct(code) for code in ("<i", "<H", "<I", "<Q", ">d"))


class Record:
    """An inert stand-in for an instance of a class: its name and attributes."""

    kind = ""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict or not all(type(key) is str for key in state):
            raise MupscaleError(
                f"{self.kind} has a state that is not attributes by name", code="pickle.state_not_attributes"
            )
        self.__dict__.update(state)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.kind} without {name}")

    def __hash__(self) -> int:
        return id(self)  # keys of a pickled dict; they are compared by what they hold later


class SafeCall:
    """A function that a pickle may call with plain values, but not modify."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


def unpickled(raw: bytes, find: Find, nodes: int, persistent: Callable[[Any], Any] | None = None) -> Any:
    """What a pickle holds; at most `nodes` lists, dicts, tuples, records, names, calls and memo entries may be in it.

    >>> import pickle
    >>> unpickled(pickle.dumps({"a": [1, 2.5, ("x", None)]}), _no_names, 10)
    {'a': [1, 2.5, ('x', None)]}
    >>> try:
    ...     unpickled(pickle.dumps({(1, 2): 3}), _no_names, 10)
    ... except MupscaleError as error:
    ...     print(error.code)
    pickle.key_not_plain
    """
    machine = _Machine(raw, find, nodes, persistent)
    try:
        with uncollected():
            return machine.run()
    except KeyError:
        raise MupscaleError(
            "it takes something from its memo that was not put there", code="pickle.memo_never_put"
        ) from None
    except (IndexError, error):
        raise MupscaleError(
            f"it ends, or its stack does, at byte {machine.at}", code="pickle.ends_too_early"
        ) from None


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector: while much is made and nothing given up, it takes a third of the time and finds nothing."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _no_names(module: str, name: str) -> Any:
    raise MupscaleError(f"it asks for {module}.{name}", code="pickle.forbidden_name")


class _Machine:
    """The stack, the memo and the position of one pickle."""

    def __init__(self, raw: bytes, find: Find, nodes: int, persistent: Callable[[Any], Any] | None) -> None:
        self.raw, self.at = raw, 0
        self.find, self.persistent = find, persistent
        self.most, self.nodes, self.room = nodes, 0, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.names: dict[tuple[str, str], Any] = {}

    def run(self) -> Any:
        raw, stack, memo, steps, at = self.raw, self.stack, self.memo, _STEPS, 0
        while True:
            code = raw[at]
            at += 1
            if code == 0x94:  # MEMOIZE; this and the next two are half of the opcodes of a large `.metadata`
                memo[len(memo)] = stack[-1]
                if 2 * len(memo) > at + _FIRST:  # each entry is of something that has bytes of its own
                    self.refuse_size()
            elif code == 0x6A:  # LONG_BINGET
                stack.append(memo[raw[at] | raw[at + 1] << 8 | raw[at + 2] << 16 | raw[at + 3] << 24])
                at += 4
            elif code == 0x4B:  # BININT1
                stack.append(raw[at])
                at += 1
            elif code == 0x2E:  # STOP
                return stack.pop()
            else:
                step = steps[code]
                if step is None:
                    raise MupscaleError(
                        f"{code} at byte {at - 1} is not an opcode of a checkpoint",
                        code="pickle.unknown_opcode",
                    )
                self.at = at
                step(self)
                at = self.at
                if len(stack) > _MOST_STACKED:
                    self.refuse_size()

    def node(self, count: int = 1) -> None:
        self.nodes += count
        if self.nodes + len(self.memo) > self.room:
            self.room = min(self.most, _FIRST + self.at * 3 // 4)
            if self.nodes + len(self.memo) > self.room:
                self.refuse_size()

    def refuse_size(self) -> NoReturn:
        raise MupscaleError(
            "it holds more lists, dicts and records than a checkpoint of this size has",
            code="pickle.too_many_records",
        )

    def read(self, count: int) -> bytes:
        start, self.at = self.at, self.at + count
        if count > _MOST_TEXT:
            raise MupscaleError(
                f"it has an argument of {count} bytes at byte {start}", code="pickle.argument_too_long"
            )
        if self.at > len(self.raw):
            raise MupscaleError(
                f"its argument at byte {start} is incomplete", code="pickle.argument_incomplete"
            )
        return self.raw[start : self.at]

    def number(self, form: Struct) -> Any:
        start, self.at = self.at, self.at + form.size
        return form.unpack_from(self.raw, start)[0]

    def line(self) -> str:
        end = self.raw.find(b"\n", self.at, self.at + 4096)
        if end < 0:
            raise MupscaleError(f"its line at byte {self.at} is incomplete", code="pickle.line_incomplete")
        start, self.at = self.at, end + 1
        return self.raw[start:end].decode("utf-8")

    def marked(self) -> list[Any]:
        """Everything above the last mark, taken from the stack together with the mark."""
        stack = self.stack
        for index in range(len(stack) - 1, -1, -1):
            if stack[index] is _MARK:
                found = stack[index + 1 :]
                del stack[index:]
                return found
        raise IndexError

    def put(self, index: int) -> None:
        if index > self.at:  # a pickler numbers what it has written
            raise MupscaleError(
                f"its memo has an index of {index} at byte {self.at}", code="pickle.memo_index_too_large"
            )
        self.node(0)
        self.memo[index] = self.stack[-1]

    def pair(self, target: Any, key: Any, value: Any) -> None:
        if type(key) not in _PLAIN_KEYS and not isinstance(key, Record):
            raise MupscaleError(
                f"a key is a {type(key).__name__}, expected a text or a number", code="pickle.key_not_plain"
            )
        if not isinstance(target, dict):
            raise MupscaleError(
                f"it puts a key into a {type(target).__name__}", code="pickle.key_outside_dict"
            )
        target[key] = value

    def items(self, found: list[Any], target: Any) -> None:
        if len(found) % 2:
            raise MupscaleError("it has a key without a value", code="pickle.key_without_value")
        for at in range(0, len(found), 2):
            self.pair(target, found[at], found[at + 1])

    def extend(self, target: Any, found: list[Any]) -> None:
        if type(target) is not list:
            raise MupscaleError(f"it appends to a {type(target).__name__}", code="pickle.append_outside_list")
        target.extend(found)

    def name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise MupscaleError("it asks for a name that is not a text", code="pickle.name_not_text")
        self.node()
        if (module, name) not in self.names:
            self.node(_NEW_NAME)
            self.names[module, name] = self.find(module, name)
        self.stack.append(self.names[module, name])

    def call(self) -> None:
        """A function with its arguments; the only functions are those that the caller's names stand for."""
        arguments, function = self.stack.pop(), self.stack.pop()
        self.node()
        if type(arguments) is not tuple:
            raise MupscaleError(
                "it calls something with arguments that are not a tuple", code="pickle.arguments_not_tuple"
            )
        if isinstance(function, SafeCall):
            self.stack.append(function.function(*arguments))
        elif isinstance(function, type) and issubclass(function, Record):
            self.stack.append(function(*arguments))
        else:
            raise MupscaleError(f"it calls a {type(function).__name__}", code="pickle.calls_no_function")

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Record):
            target.__setstate__(state)
        elif isinstance(target, dict) and type(state) is dict:
            return  # attributes of an OrderedDict, such as a state dict's _metadata
        else:
            what = "function" if isinstance(target, SafeCall) else type(target).__name__
            raise MupscaleError(f"it modifies a {what}", code="pickle.modifies_no_record")

    def outside(self) -> None:
        if self.persistent is None:
            raise MupscaleError("it refers to something outside of itself", code="pickle.refers_outside")
        self.stack.append(self.persistent(self.stack.pop()))


def _push(value: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        machine.stack.append(value(machine))

    return step


def _new(kind: Callable[[], Any]) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        machine.node()
        machine.stack.append(kind())

    return step


def _tuple(count: int) -> Callable[[_Machine], None]:
    def step(machine: _Machine) -> None:
        machine.node()
        stack = machine.stack
        if len(stack) < count:
            raise IndexError
        stack[-count:] = [tuple(stack[-count:])]

    return step


def _marked_tuple(machine: _Machine) -> None:
    machine.node()
    machine.stack.append(tuple(machine.marked()))


def _text(form: Struct) -> Callable[[_Machine], None]:
    return _push(lambda machine: machine.read(machine.number(form)).decode("utf-8", "surrogatepass"))


def _bytes(form: Struct) -> Callable[[_Machine], None]:
    return _push(lambda machine: machine.read(machine.number(form)))


def _long(form: Struct) -> Callable[[_Machine], None]:
    return _push(lambda machine: int.from_bytes(machine.read(machine.number(form)), "little", signed=True))


def _append(machine: _Machine) -> None:
    value = machine.stack.pop()
    machine.extend(machine.stack[-1], [value])


def _appends(machine: _Machine) -> None:
    found = machine.marked()
    machine.extend(machine.stack[-1], found)


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.pair(machine.stack[-1], key, value)


def _set_items(machine: _Machine) -> None:
    found = machine.marked()
    machine.items(found, machine.stack[-1])


def _global(machine: _Machine) -> None:
    module = machine.line()
    machine.name(module, machine.line())


def _stack_global(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.name(module, name)


def _frame(machine: _Machine) -> None:
    machine.at += 8


def _protocol(machine: _Machine) -> None:
    if machine.raw[machine.at] > 5:
        raise MupscaleError(
            f"it has protocol {machine.raw[machine.at]}, known are 2 to 5", code="pickle.unknown_protocol"
        )
    machine.at += 1


_U1 = Struct("<B")
_KNOWN: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": _protocol,
    b"\x95": _frame,
    b"q": lambda machine: machine.put(machine.number(_U1)),
    b"r": lambda machine: machine.put(machine.number(_U4)),
    b"h": _push(lambda machine: machine.memo[machine.number(_U1)]),
    b"(": lambda machine: machine.stack.append(_MARK),
    b"0": lambda machine: (machine.stack.pop(), None)[1],
    b"N": _push(lambda _: None),
    b"\x88": _push(lambda _: True),
    b"\x89": _push(lambda _: False),
    b"M": _push(lambda machine: machine.number(_U2)),
    b"J": _push(lambda machine: machine.number(_I4)),
    b"G": _push(lambda machine: machine.number(_F8)),
    b"\x8a": _long(_U1),
    b"\x8b": _long(_U4),
    b"\x8c": _text(_U1),
    b"X": _text(_U4),
    b"\x8d": _text(_U8),
    b"C": _bytes(_U1),
    b"B": _bytes(_U4),
    b"\x8e": _bytes(_U8),
    b"]": _new(list),
    b"}": _new(dict),
    b")": _new(tuple),
    b"t": _marked_tuple,
    b"\x85": _tuple(1),
    b"\x86": _tuple(2),
    b"\x87": _tuple(3),
    b"a": _append,
    b"e": _appends,
    b"s": _set_item,
    b"u": _set_items,
    b"c": _global,
    b"\x93": _stack_global,
    b"R": _Machine.call,
    b"\x81": _Machine.call,
    b"b": _Machine.build,
    b"Q": _Machine.outside,
}
_STEPS = [_KNOWN.get(bytes([code])) for code in range(256)]
