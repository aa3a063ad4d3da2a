"""Spectral norms: of a tensor, by power iteration, and of Gaussian noise, by its known limit.

A convolution is the matrix (out, in·kh·kw); stacked experts are measured one by one. A tensor may lie in memory or
be read in blocks of rows: the blocks are the same, and so is the norm. Everything is computed in float64, so that
threads and machines, which add in different orders, agree to far more digits than are kept. Knows nothing about files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import prod, sqrt

import torch
from torch import Tensor

_TRACY_WIDOM_MEAN = -1.2065335745820  # of the law for real matrices (β = 1)
_BLOCK = 1 << 21  # entries of a matrix that are read at a time, 16 MiB of float64

ReadRows = Callable[[int, int], Tensor]


def spectral_norms(weight: Tensor, stacked: bool = False, steps: int = 100) -> Tensor:
    """The largest singular value of `weight`, or of each matrix along dimension 0 when `stacked`.

    >>> round(float(spectral_norms(torch.diag(torch.tensor([3.0, 1.0])))), 6)
    3.0
    """
    rows = weight.detach().flatten(0, 1) if stacked else weight.detach()
    return streamed_spectral_norm(lambda start, stop: rows[start:stop], weight.shape, stacked, steps)


def streamed_spectral_norm(
    read_rows: ReadRows, shape: Sequence[int], stacked: bool = False, steps: int = 100
) -> Tensor:
    """`spectral_norms` of a tensor of this shape that is read in blocks of rows, two million entries at a time.

    `read_rows(start, stop)` returns these rows, in any float dtype, with the dimensions after the row's as they are
    or flat; when `stacked`, the rows of all matrices are counted through, those of the first matrix first. A matrix
    of one block is read once; a larger one is read once for every step, of which there are at most `steps`.

    >>> weight = torch.arange(12.0).view(4, 3)
    >>> bool(streamed_spectral_norm(lambda a, b: weight[a:b], (4, 3)).isclose(spectral_norms(weight), rtol=1e-6))
    True
    """
    matrices, rows = (shape[0], shape[1]) if stacked else (1, shape[0])
    columns = prod(shape[2 if stacked else 1 :])
    first = torch.randn(columns, generator=torch.Generator().manual_seed(0), dtype=torch.float32).double()
    step = max(1, _BLOCK // max(1, columns))
    norms = []
    for matrix in range(matrices):
        start, stop = matrix * rows, (matrix + 1) * rows
        cuts = [(at, min(at + step, stop)) for at in range(start, stop, step)]
        blocks = partial(_read, read_rows, cuts)
        if len(cuts) == 1:
            held = list(blocks())
            blocks = partial(iter, held)
        norms.append(_power_iteration(blocks, first, steps))
    return torch.stack(norms) if stacked else norms[0]


def _read(read_rows: ReadRows, cuts: Iterable[tuple[int, int]]) -> Iterator[Tensor]:
    for start, stop in cuts:
        yield read_rows(start, stop).flatten(1).double()


def _power_iteration(blocks: Callable[[], Iterable[Tensor]], v: Tensor, steps: int) -> Tensor:
    """The norm of the matrix whose blocks of rows `blocks()` yields in order, each once per step."""
    size = torch.zeros((), dtype=torch.float64)
    for _ in range(steps):
        v = v / torch.linalg.vector_norm(v).clamp_min(1e-300)
        total, square = torch.zeros_like(v), torch.zeros_like(size)
        for block in blocks():
            v, total, square = v.to(block.device), total.to(block.device), square.to(block.device)
            u = block @ v
            length = torch.linalg.vector_norm(u)
            # Of unit length on the way back: the square of a norm can be too large, or too small, for a float.
            total += block.T @ (u / length.clamp_min(1e-300)) * length
            square += length.square()
        v = total / square.sqrt().clamp_min(1e-300)
        before, size = size.to(v.device), torch.linalg.vector_norm(v)
        if bool((size - before).abs() <= 1e-6 * size):
            break
    return size


def gaussian_norm(rows: int, columns: int) -> float:
    """The expected largest singular value of a rows x columns matrix of standard normals.

    The edge (√m + √n)² with the mean of the Tracy–Widom law: within a percent or so from 100 x 100 on.
    """
    m, n = max(rows, columns), min(rows, columns)
    if n == 1:
        return sqrt(m - 0.5)
    edge = (sqrt(m - 1) + sqrt(n)) ** 2
    spread = (sqrt(m - 1) + sqrt(n)) * (1 / sqrt(m - 1) + 1 / sqrt(n)) ** (1 / 3)
    return sqrt(edge + _TRACY_WIDOM_MEAN * spread)
