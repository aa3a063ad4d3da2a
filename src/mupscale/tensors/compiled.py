"""The stream of `philox.py` from a compiled loop: the same bits, about ten times as fast on one core.

Knows: how numba compiles the loops of `loops.py` (the extra `fast`), when that repays itself, and how to do without. Knows
nothing about slices, axes or sizes of noise; says nothing about what is right: the portable code does, and a compiled loop
that differs from it on a sample is not used.

The environment variable MUPSCALE_KERNEL = portable | compiled forces a choice. Without it, a process draws its
first numbers with the portable code and takes the compiled loop, where numba is installed, once that has cost about
as much time as compiling; at once if `expect` announced it. Which of the two drew a number cannot be seen from its bits.
Its third value, triton, is about CUDA devices (`triton/launch.py`); on the CPU it is as if unset.
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
from . import loops
from .philox import Stream, normals, quantiles

VARIABLE = "MUPSCALE_KERNEL"

# Numbers that the portable code draws while numba would load and compile, about half a second.
_REPAID = 1 << 24


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
        out = torch.zeros(len(starts), length, dtype=torch.float32, device="cpu")
        return self.add_(out, stream, starts, torch.ones(len(starts), dtype=torch.float32, device="cpu"))

    def round_(
        self, out: Tensor, stream: Stream, starts: Tensor, stds: Tensor, scale: float, *, divides: bool
    ) -> bool:
        """`add_` to a contiguous bfloat16 matrix times `scale`, or divided by it: in float32, rounded once at the end.

        False if it could not be done; then `out` holds anything. So it is with numbers that are not finite: the
        bits of a rounded NaN differ from one of torch's own loops to the next.
        """
        with _loading:
            loop = _load_rounding()
        return loop is not None and loop(
            out.detach().view(torch.uint16).numpy(),
            starts.numpy().view(np.uint64),
            stds.numpy(),
            np.array(stream.words, np.uint32),
            quantiles().numpy(),
            np.float32(scale),
            divides,
        )


@dataclass
class _Work:
    """How many numbers this process has drawn with the portable code while the compiled one might have been used."""

    drawn: int = 0
    expected: int = 0
    """How many it will draw, as far as `expect` announced it."""


_work = _Work()
_loading = Lock()


def expect(numbers: int) -> None:
    """Tell that so many numbers will be drawn: if compiling repays itself by them, none is drawn without it."""
    _work.expected = max(_work.expected, numbers)


def chosen_kernel() -> str:
    """What MUPSCALE_KERNEL asks for: portable, compiled, triton, or nothing."""
    choice = os.environ.get(VARIABLE, "")
    if choice not in ("", "portable", "compiled", "triton"):
        fault = Fault(
            "kernel.unknown_choice",
            VARIABLE,
            f"it is {choice!r}, expected portable, compiled or triton",
            "set it to one of them, or leave it unset",
        )
        raise MupscaleError("there is no such noise kernel", [fault])
    return choice


def kernel_for(numbers: int) -> Kernel | None:
    """The compiled kernel, where it is asked for or repays itself; None where the portable code is to be used.

    `numbers` is how many are about to be drawn. A kernel that MUPSCALE_KERNEL asks for and that cannot be had is
    an error.
    """
    choice = chosen_kernel()
    if choice == "portable":
        return None
    if choice != "compiled":
        _work.drawn += numbers
        if max(_work.drawn, _work.expected) < _REPAID:
            return None
    with _loading:
        kernel = load_kernel()
    if isinstance(kernel, Kernel):
        return kernel
    if choice == "compiled":
        raise MupscaleError("the compiled noise kernel was asked for and cannot be used", [kernel])
    return None


@lru_cache(maxsize=1)
def load_kernel() -> Kernel | Fault:
    """The compiled kernel, loaded from numba's cache or compiled; or the reason why there is none."""
    try:
        numba = import_module("numba")
        if numba.config.DISABLE_JIT:
            return Fault(
                "kernel.compiling_disabled",
                "numba",
                "does not compile here: NUMBA_DISABLE_JIT is set",
                "unset it",
            )
        kernel = Kernel(_compile(numba, loops.ADDING, loops.add_normals))
        agrees = _agrees(kernel)
    except ModuleNotFoundError as missing:
        return Fault(
            "extra.missing",
            missing.name or "numba",
            "is not installed",
            f"pip install 'mupscale[fast]', or set {VARIABLE}=portable",
        )
    except Exception as error:  # numba, llvmlite or a linker: none of them may stop the portable code
        reason = f"failed with {type(error).__name__}: {error}"
        return Fault("kernel.failed_to_compile", "numba", reason, f"mend numba, or set {VARIABLE}=portable")
    if agrees:
        return kernel
    return Fault(
        "kernel.other_bits",
        "numba",
        "compiled a loop that gives other bits",
        f"report it, and set {VARIABLE}=portable",
    )


@lru_cache(maxsize=1)
def _load_rounding() -> Callable[..., bool] | None:
    """The compiled loop for bfloat16, which only some processes need; None where it cannot be had or gives other bits."""
    try:
        loop = _compile(import_module("numba"), loops.ROUNDING, loops.round_normals)
        return loop if _rounds_rightly(loop) else None
    except Exception:  # as above; what it does can be done in three steps
        return None


def _compile(numba: ModuleType, signature: str, loop: Callable[..., Any]) -> Callable[..., Any]:
    """The machine code of a loop, kept on disk where that is possible."""
    numba.extending.register_jitable(loops.draw_words)
    try:
        return numba.njit(signature, nogil=True, cache=True)(loop)  # type: ignore[no-any-return]
    except Exception:  # a cache that cannot be read or written; any other fault comes back below
        return numba.njit(signature, nogil=True)(loop)  # type: ignore[no-any-return]


def _agrees(kernel: Kernel) -> bool:
    """Whether a sample has the bits of the portable code: odd starts, far starts, a sum that fusing would change."""
    stream, length = Stream(0, "sample"), 4 * loops.LANES + 7
    starts = torch.tensor([0, 3, (1 << 32) - 5, (1 << 34) - 9, (1 << 40) + 2], device="cpu")
    stds = torch.tensor([1.0, 0.3, 1e-3, 7.0, 1.1], dtype=torch.float32, device="cpu")
    out = torch.linspace(-1, 1, len(starts) * length, dtype=torch.float32, device="cpu").view(
        len(starts), length
    )
    want = out + normals(stream, starts, length) * stds[:, None]
    return torch.equal(kernel.add_(out, stream, starts, stds), want)


def _rounds_rightly(loop: Callable[..., bool]) -> bool:
    """The same for the loop that rounds: quotients and products, numbers of every size, and whether it sees an infinite one."""
    stream, length = Stream(0, "sample"), 4 * loops.LANES + 7
    starts = torch.tensor([0, 3, (1 << 34) - 9], device="cpu")
    stds = torch.tensor([1.0, 1e-3, 1e-38], dtype=torch.float32, device="cpu")
    key, table = np.array(stream.words, np.uint32), quantiles().numpy()
    sizes = torch.logspace(-40, 38, 3 * length, dtype=torch.float64, device="cpu")
    before = (
        torch.where(torch.arange(3 * length, device="cpu") % 2 == 0, sizes, -sizes).bfloat16().view(3, length)
    )
    for scale, divides in ((0.5, False), (3.0, True), (0.7, False)):
        out = before.clone()
        exact = (
            out.float() / scale
            if divides
            else out.float() * torch.tensor(scale, dtype=torch.float32, device="cpu")
        )
        want = (exact + normals(stream, starts, length) * stds[:, None]).bfloat16()
        given = (starts.numpy().view(np.uint64), stds.numpy(), key, table, np.float32(scale), divides)
        if not loop(out.view(torch.uint16).numpy(), *given) or not torch.equal(out, want):
            return False
    before[1, -1] = torch.inf
    return not loop(before.view(torch.uint16).numpy(), *given)
