"""Fingerprints of files that add up: the sum of the fingerprints of disjoint parts is the fingerprint of the whole.

A file is cut into grains of 64 KiB. The sum of a grain is that of its 32-bit words times fixed odd numbers, modulo 2^64,
and the fingerprint of a file is that of its grains times other odd numbers. A single changed word is always seen, any
other change is missed with a probability of about 2^-32. It detects accidents, not forgery.

Because it adds up, a block that is written anywhere in a file has a share in the fingerprint of the file that does not
depend on the other blocks, and a file has the same fingerprint whichever blocks it was written in.

>>> raw = bytes(range(256)) * 600
>>> fingerprint(raw, 0) == (fingerprint(raw[:99_999], 0) + fingerprint(raw[99_999:], 99_999)) % 2**64
True
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from threading import local

import numpy as np
import numpy.typing as npt

from .compiled_sums import loop_for

Sums = npt.NDArray[np.uint64]
GRAIN = 1 << 16
ALGORITHM = f"mupscale fingerprint 2, of every {GRAIN >> 10} KiB"
_WORDS = GRAIN // 8
_AT_ONCE = 4  # grains; a quarter of a MiB and its shifted copy stay in the second-level cache
_HALF = np.uint64(32)
_room = local()


def grain_sums(raw: memoryview | bytes | bytearray, offset: int) -> tuple[int, Sums]:
    """The first grain that bytes at an offset of a file touch, and their sum in every grain.

    What lies outside of `raw` counts as zero.
    """
    data = np.frombuffer(raw, np.uint8)
    first = offset // GRAIN
    last = -(-(offset + len(data)) // GRAIN)
    sums = np.zeros(last - first, np.uint64)
    at = min(-offset % GRAIN, len(data))  # where the first whole grain begins
    whole = (len(data) - at) // GRAIN
    if at:
        sums[0] += _padded_sum(data[:at], offset % GRAIN)
    if whole:
        begin = (offset + at) // GRAIN - first
        _sum_grains_(data[at : at + whole * GRAIN].view(np.uint64).reshape(whole, _WORDS), sums[begin:])
    if at + whole * GRAIN < len(data):
        sums[-1] += _padded_sum(data[at + whole * GRAIN :], 0)
    return first, sums


def fingerprint(raw: memoryview | bytes | bytearray, offset: int) -> int:
    """The share of bytes at an offset in the fingerprint of their file."""
    return total(*grain_sums(raw, offset))


def total(first: int, sums: Sums) -> int:
    """The share of grains, by their sums, in the fingerprint of their file."""
    return int((sums * _multipliers(first, len(sums))).sum()) if len(sums) else 0


def as_text(value: int) -> str:
    return f"{value % 2**64:016x}"


def _sum_grains_(words: Sums, into: Sums) -> None:
    loop = loop_for(_sum_portably_) if words.flags.aligned else _sum_portably_
    loop(words, *_weights(), into[: len(words)])


def _sum_portably_(words: Sums, low: Sums, high: Sums, into: Sums) -> None:
    for start in range(0, len(words), _AT_ONCE):
        part = words[start : start + _AT_ONCE]
        shifted = _scratch(words.shape[1])[: len(part)]
        np.right_shift(part, _HALF, out=shifted)
        into[start : start + len(part)] = part @ low + shifted @ high


def _padded_sum(data: npt.NDArray[np.uint8], at: int) -> np.uint64:
    """The sum of a grain of which only these bytes count."""
    grain = np.zeros(GRAIN, np.uint8)
    grain[at : at + len(data)] = data
    found = np.empty(1, np.uint64)
    _sum_grains_(grain.view(np.uint64).reshape(1, _WORDS), found)
    return np.uint64(found[0])


def _scratch(words: int) -> Sums:
    """Room for shifted words, one for each thread."""
    if not hasattr(_room, "words"):
        _room.words = np.empty((_AT_ONCE, _WORDS), np.uint64)
    found: Sums = _room.words
    return found[:, :words]


@lru_cache(maxsize=1)
def _weights() -> tuple[Sums, Sums]:
    """Odd numbers for whole words and for their upper halves.

    An upper half counts 2^32 · w + u times, which is odd; a sum of the words alone would not see two flipped signs.
    """
    raw = hashlib.shake_128(b"mupscale fingerprint 2").digest(16 * _WORDS)
    odd = np.frombuffer(raw, np.uint64) | np.uint64(1)
    return odd[:_WORDS], odd[_WORDS:]


@lru_cache(maxsize=64)
def _multipliers(first: int, count: int) -> Sums:
    """An odd number for each grain of a file: its index, mixed as splitmix64 does."""
    mixed = np.arange(first + 1, first + 1 + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
