"""The opcodes of a pickle, walked without running it: how large its memo may become.

The C unpickler keeps its memo in an array that is as long as the largest index, at 16 bytes per entry: nine bytes
with an index of 2^32 ask for 64 GB. A pickler numbers what it has written, so its indices stay below the number of
its opcodes.
"""

from __future__ import annotations

import pickletools

from ..errors import MupscaleError

_STOP, _PUT = b".p"
_PUTS = frozenset(b"qrp")  # BINPUT, LONG_BINPUT and PUT; MEMOIZE counts by itself
_OPCODES = {ord(opcode.code): opcode for opcode in pickletools.opcodes}
_DIGITS = 20  # of an index in text: no 64-bit number has more


def check_memo(raw: bytes) -> None:
    """Raise if a memo index is above the number of opcodes, or an argument ends behind the pickle.

    >>> import pickle
    >>> check_memo(pickle.dumps([["a"], {"b": 1.5}]))
    >>> check_memo(bytes([0x80, 2, 0x5D, 0x72, 0, 0, 0, 8, 0x2E]))            # an empty list, put at index 2^27
    Traceback (most recent call last):
        ...
    mupscale.errors.MupscaleError: its memo has an index of 134217728, and it has 4 opcodes
    """
    size, code = len(raw), 0
    position = opcodes = largest = 0
    while code != _STOP:
        if position >= size:
            raise MupscaleError("it ends before its last opcode")
        code = raw[position]
        start = position + 1
        fixed = _FIXED[code]
        position = start + fixed if fixed >= 0 else _after(raw, start, code)
        opcodes += 1
        if position > size:
            raise MupscaleError(f"its opcode {opcodes} is incomplete")
        if code in _PUTS:
            largest = max(largest, _index(code, raw[start:position]))
    if largest > opcodes:
        raise MupscaleError(f"its memo has an index of {largest}, and it has {opcodes} opcodes")


def _after(raw: bytes, start: int, code: int) -> int:
    """The end of an argument that is lines of text, or bytes after their count; behind `raw` if it is cut off."""
    opcode = _OPCODES.get(code)
    if opcode is None or opcode.arg is None:
        raise MupscaleError(f"{code} is not an opcode")
    if opcode.arg.n == pickletools.UP_TO_NEWLINE:
        for _ in range(2 if opcode.arg is pickletools.stringnl_noescape_pair else 1):
            start = raw.find(b"\n", start) + 1 or len(raw) + 1
        return start
    behind = start + _COUNTS[opcode.arg.n]
    return behind + int.from_bytes(raw[start:behind], "little")


def _index(code: int, argument: bytes) -> int:
    """The index that a put names: one byte, four bytes, or a line of digits."""
    if code != _PUT:
        return int.from_bytes(argument, "little")
    if len(argument) > _DIGITS + 1 or not argument[:-1].isdigit():
        raise MupscaleError("its memo has an index that is not a number")
    return int(argument)


def _fixed(code: int) -> int:
    """Bytes of the argument of an opcode; negative if its size must be read, or if the opcode does not exist."""
    opcode = _OPCODES.get(code)
    if opcode is None:
        return -1
    return 0 if opcode.arg is None else opcode.arg.n


_FIXED = [_fixed(code) for code in range(256)]
_COUNTS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
"""Bytes of the count in front of a counted argument."""
