"""The sums of grains from a compiled loop: the same numbers, two to three times as fast, where numba is installed.

Knows: one loop that numba compiles (the extra `fast`), and when loading it repays itself. The portable code in
`fingerprints.py` says what is right: a compiled loop that differs from it on a sample is not used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from threading import Lock
from typing import Any

import numpy as np

from ...tensors.compiled import VARIABLE

Loop = Callable[[Any, Any, Any, Any], None]
"""Takes grains as rows of words, the two sets of weights, and where the sums go."""
_REPAID = (
    4 << 30
)  # bytes; loading numba takes about a second, in which the portable code sums two of these four
_LOADED = 1 << 28  # the same where something else has loaded it
_HALF = np.uint64(32)
_expected = [0]
_loading = Lock()


def expect(count: int) -> None:
    """Tell that about so many bytes will be summed, which decides whether numba is loaded for it."""
    _expected[0] = max(_expected[0], count)


def loop_for(portable: Loop) -> Loop:
    """The compiled loop where it is asked for or repays itself, the portable one otherwise."""
    choice = os.environ.get(VARIABLE, "")
    enough = _LOADED if "numba" in sys.modules else _REPAID
    if choice == "portable" or (choice != "compiled" and _expected[0] < enough):
        return portable
    with _loading:
        return _load(portable) or portable


@lru_cache(maxsize=1)
def _load(portable: Loop) -> Loop | None:
    try:
        numba = import_module("numba")
        if numba.config.DISABLE_JIT:
            return None
        loop: Loop = _compile(numba)
        sample = np.random.default_rng(0).integers(0, 2**64, (6, 1024), dtype=np.uint64)
        found, want = np.empty(4, np.uint64), np.empty(4, np.uint64)
        loop(sample[:4], sample[4], sample[5], found)
        portable(sample[:4], sample[4], sample[5], want)
    except Exception:  # numba, llvmlite or a linker: none of them may stop the portable code
        return None
    return loop if np.array_equal(found, want) else None


def _compile(numba: Any) -> Loop:
    array = numba.types.Array(numba.uint64, 2, "C", readonly=True)
    row = numba.types.Array(numba.uint64, 1, "C", readonly=True)
    into = numba.types.Array(numba.uint64, 1, "C")
    signature = numba.void(array, row, row, into)
    try:
        return numba.njit(signature, nogil=True, cache=True)(_sum_grains)  # type: ignore[no-any-return]
    except Exception:  # a cache that cannot be read or written; any other fault comes back below
        return numba.njit(signature, nogil=True)(_sum_grains)  # type: ignore[no-any-return]


def _sum_grains(words: Any, low: Any, high: Any, into: Any) -> None:
    for grain in range(words.shape[0]):
        total = np.uint64(0)
        for at in range(words.shape[1]):
            word = words[grain, at]
            total += word * low[at] + (word >> _HALF) * high[at]
        into[grain] = total
