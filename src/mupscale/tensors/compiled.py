"""The stream of `philox.py` from a compiled loop: the same bits, about ten times as fast on one core.

Knows: Philox and the table look-up as one loop that numba compiles (the extra `fast`), when compiling repays
itself, and how to do without. Knows nothing about slices, axes or sizes of noise; says nothing about what is
right: the portable code does, and a compiled loop that differs from it on a sample is not used.

The environment variable MUPSCALE_KERNEL = portable | compiled forces a choice. Without it, a process draws its
first numbers with the portable code and takes the compiled loop, where numba is installed, once that has cost about
as much time as compiling. Which of the two drew a number cannot be seen from its bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from threading import Lock
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import Fault, MupscaleError
from .philox import MULTIPLIERS, ROUNDS, WEYL, Stream, normals, quantiles

VARIABLE = "MUPSCALE_KERNEL"

# Numbers that the portable code draws while numba would load and compile, about half a second.
_REPAID = 1 << 24
_LANES = 256  # counters at a time: their words stay in the first-level cache, the table in the second

_M0, _M1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
_W0, _W1 = np.uint64(WEYL[0]), np.uint64(WEYL[1])
_LOW, _HALF, _TWO, _THREE = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(2), np.uint64(3)
_LOW16, _SHIFT16 = np.uint32(0xFFFF), np.uint32(16)
_SIGNATURE = "void(float32[:,::1], uint64[::1], float32[::1], uint32[::1], float32[::1])"


@dataclass(frozen=True)
class Kernel:
    """A compiled loop that has been checked against the portable code."""

    loop: Callable[..., None]

    def add_(self, out: Tensor, stream: Stream, starts: Tensor, stds: Tensor) -> Tensor:
        """out[i, j] += stds[i] · z, z the normal of element starts[i] + j; a product and a sum, each rounded.

        `out` is a contiguous float32 matrix and `stds` a float32 vector, both on the CPU. Other threads may run
        meanwhile.
        """
        self.loop(
            out.detach().numpy(),
            starts.numpy().view(np.uint64),
            stds.numpy(),
            np.array(stream.words, np.uint32),
            quantiles().numpy(),
        )
        return out

    def normals(self, stream: Stream, starts: Tensor, length: int) -> Tensor:
        """`philox.normals`, compiled.

        >>> kernel = load_kernel()
        >>> starts, stream = torch.tensor([5, 1 << 34]), Stream(0, "w")
        >>> isinstance(kernel, Fault) or torch.equal(kernel.normals(stream, starts, 9), normals(stream, starts, 9))
        True
        """
        out = torch.zeros(len(starts), length, dtype=torch.float32)
        return self.add_(out, stream, starts, torch.ones(len(starts), dtype=torch.float32))


@dataclass
class _Work:
    """How many numbers this process has drawn with the portable code while the compiled one might have been used."""

    drawn: int = 0


_work = _Work()
_loading = Lock()


def kernel_for(numbers: int) -> Kernel | None:
    """The compiled kernel, where it is asked for or repays itself; None where the portable code is to be used.

    `numbers` is how many are about to be drawn. A kernel that MUPSCALE_KERNEL asks for and that cannot be had is
    an error.
    """
    choice = os.environ.get(VARIABLE, "")
    if choice not in ("", "portable", "compiled"):
        fault = Fault(
            VARIABLE,
            f"it is {choice!r}, expected portable or compiled",
            "set it to one of them, or leave it unset",
        )
        raise MupscaleError("there is no such noise kernel", [fault])
    if choice == "portable":
        return None
    if not choice:
        _work.drawn += numbers
        if _work.drawn < _REPAID:
            return None
    with _loading:
        kernel = load_kernel()
    if isinstance(kernel, Kernel):
        return kernel
    if choice:
        raise MupscaleError("the compiled noise kernel was asked for and cannot be used", [kernel])
    return None


@lru_cache(maxsize=1)
def load_kernel() -> Kernel | Fault:
    """The compiled kernel, loaded from numba's cache or compiled; or the reason why there is none."""
    try:
        numba = import_module("numba")
        if numba.config.DISABLE_JIT:
            return Fault("numba", "does not compile here: NUMBA_DISABLE_JIT is set", "unset it")
        kernel = Kernel(_compile(numba))
        agrees = _agrees(kernel)
    except ModuleNotFoundError as missing:
        return Fault(
            missing.name or "numba",
            "is not installed",
            f"pip install 'mupscale[fast]', or set {VARIABLE}=portable",
        )
    except Exception as error:  # numba, llvmlite or a linker: none of them may stop the portable code
        reason = f"failed with {type(error).__name__}: {error}"
        return Fault("numba", reason, f"mend numba, or set {VARIABLE}=portable")
    if agrees:
        return kernel
    return Fault("numba", "compiled a loop that gives other bits", f"report it, and set {VARIABLE}=portable")


def _compile(numba: ModuleType) -> Callable[..., None]:
    """The machine code of `_add_normals`, kept on disk where that is possible."""
    try:
        return numba.njit(_SIGNATURE, nogil=True, cache=True)(_add_normals)  # type: ignore[no-any-return]
    except Exception:  # a cache that cannot be read or written; any other fault comes back below
        return numba.njit(_SIGNATURE, nogil=True)(_add_normals)  # type: ignore[no-any-return]


def _agrees(kernel: Kernel) -> bool:
    """Whether a sample has the bits of the portable code: odd starts, far starts, a sum that fusing would change."""
    stream, length = Stream(0, "sample"), 4 * _LANES + 7
    starts = torch.tensor([0, 3, (1 << 32) - 5, (1 << 34) - 9, (1 << 40) + 2])
    stds = torch.tensor([1.0, 0.3, 1e-3, 7.0, 1.1], dtype=torch.float32)
    out = torch.linspace(-1, 1, len(starts) * length, dtype=torch.float32).view(len(starts), length)
    want = out + normals(stream, starts, length) * stds[:, None]
    return torch.equal(kernel.add_(out, stream, starts, stds), want)


def _add_normals(out: Any, starts: Any, stds: Any, key: Any, table: Any) -> None:
    """The loop. Words are held in 64 bits whose upper half may be anything: a product reads the lower half only."""
    bits = np.empty(4 * _LANES, np.uint32)
    run = out.shape[1]
    for row in range(out.shape[0]):
        std, at = stds[row], 0
        while at < run:
            element = starts[row] + np.uint64(at)
            first, skip = element >> _TWO, np.int64(element & _THREE)
            count = min(run - at, 4 * _LANES - skip)
            for lane in range((skip + count + 3) // 4):
                c0 = first + np.uint64(lane)
                c1, c2, c3 = c0 >> _HALF, np.uint64(key[2]), np.uint64(key[3])
                k0, k1 = np.uint64(key[0]), np.uint64(key[1])
                for _ in range(ROUNDS):
                    p0, p1 = (c0 & _LOW) * _M0, (c2 & _LOW) * _M1
                    c0, c1 = (p1 >> _HALF) ^ c1 ^ k0, p1
                    c2, c3 = (p0 >> _HALF) ^ c3 ^ k1, p0
                    k0, k1 = k0 + _W0, k1 + _W1
                bits[4 * lane] = np.uint32(c0)
                bits[4 * lane + 1] = np.uint32(c1)
                bits[4 * lane + 2] = np.uint32(c2)
                bits[4 * lane + 3] = np.uint32(c3)
            for i in range(count):
                word = bits[skip + i]
                out[row, at + i] += (table[word & _LOW16] + table[word >> _SHIFT16]) * std
            at += count
