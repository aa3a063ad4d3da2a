"""The loops that numba compiles for `compiled.py`: noise added to float32, or added and rounded to bfloat16 at once.

Both go through a tensor a thousand numbers at a time, in several short passes over numbers that stay in the first-level cache.
Each pass does one thing to whole vectors; one pass that did everything would be compiled number by number. For the same reason
parts are slices: of an index such as `at + i` numba asks each time whether it is negative.
Plain Python without numba, and slow; `philox.py` says what is right.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .philox import MULTIPLIERS, ROUNDS, WEYL

LANES = 256
"""Counters at a time: their words stay in the first-level cache, the table in the second."""
ADDING = "void(float32[:,::1], uint64[::1], float32[::1], uint32[::1], float32[::1])"
ROUNDING = "boolean(uint16[:,::1], uint64[::1], float32[::1], uint32[::1], float32[::1], float32, boolean)"
_M0, _M1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
_W0, _W1 = np.uint64(WEYL[0]), np.uint64(WEYL[1])
_LOW, _HALF, _TWO, _THREE = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(2), np.uint64(3)
_LOW16, _SHIFT16, _ODD = np.uint32(0xFFFF), np.uint32(16), np.uint32(1)
_EXPONENT = np.uint32(0x7F800000)  # all of it is set in what is infinite or not a number
_ALMOST_HALF = np.uint32(0x7FFF)  # of the last bit that bfloat16 keeps


def draw_words(words: Any, first: Any, lanes: Any, key: Any) -> None:
    """Four words for each of the counters from `first` on.

    They are held in 64 bits whose upper half may be anything: a product reads the lower half only.
    """
    for lane in range(lanes):
        c0 = first + np.uint64(lane)
        c1, c2, c3 = c0 >> _HALF, np.uint64(key[2]), np.uint64(key[3])
        k0, k1 = np.uint64(key[0]), np.uint64(key[1])
        for _ in range(ROUNDS):
            p0, p1 = (c0 & _LOW) * _M0, (c2 & _LOW) * _M1
            c0, c1 = (p1 >> _HALF) ^ c1 ^ k0, p1
            c2, c3 = (p0 >> _HALF) ^ c3 ^ k1, p0
            k0, k1 = k0 + _W0, k1 + _W1
        words[4 * lane] = np.uint32(c0)
        words[4 * lane + 1] = np.uint32(c1)
        words[4 * lane + 2] = np.uint32(c2)
        words[4 * lane + 3] = np.uint32(c3)


def add_normals(out: Any, starts: Any, stds: Any, key: Any, table: Any) -> None:
    """out[i, j] += stds[i] · z, z the normal of element starts[i] + j."""
    drawn = np.empty(4 * LANES, np.uint32)
    for row in range(out.shape[0]):
        std, at = stds[row], 0
        while at < out.shape[1]:
            element = starts[row] + np.uint64(at)
            skip = np.int64(element & _THREE)
            part = out[row, at : at + 4 * LANES - skip]
            count = part.shape[0]
            draw_words(drawn, element >> _TWO, (skip + count + 3) // 4, key)
            words = drawn[skip : skip + count]
            for i in range(count):
                part[i] += (table[words[i] & _LOW16] + table[words[i] >> _SHIFT16]) * std
            at += count


def round_normals(out: Any, starts: Any, stds: Any, key: Any, table: Any, scale: Any, divides: bool) -> bool:
    """out[i, j] = out[i, j] · scale + stds[i] · z, or divided by `scale`, for the bits of bfloat16.

    As in float32 with one rounding at the end, to the nearest and then to even. False if something was not a finite number:
    its bits are not right then.
    """
    drawn = np.empty(4 * LANES, np.uint32)
    exact = np.empty(4 * LANES, np.float32)
    bits = exact.view(np.uint32)
    odd: Any = np.uint32(0)
    for row in range(out.shape[0]):
        std, at = stds[row], 0
        while at < out.shape[1]:
            element = starts[row] + np.uint64(at)
            skip = np.int64(element & _THREE)
            part = out[row, at : at + 4 * LANES - skip]
            count = part.shape[0]
            draw_words(drawn, element >> _TWO, (skip + count + 3) // 4, key)
            words = drawn[skip : skip + count]
            for i in range(count):
                bits[i] = np.uint32(part[i]) << _SHIFT16
            if divides:
                for i in range(count):
                    exact[i] = exact[i] / scale
            else:
                for i in range(count):
                    exact[i] = exact[i] * scale
            for i in range(count):
                exact[i] += (table[words[i] & _LOW16] + table[words[i] >> _SHIFT16]) * std
            for i in range(count):
                word = bits[i]
                odd |= np.uint32((word & _EXPONENT) == _EXPONENT)
                part[i] = np.uint16((word + _ALMOST_HALF + ((word >> _SHIFT16) & _ODD)) >> _SHIFT16)
            at += count
    return bool(odd == np.uint32(0))
