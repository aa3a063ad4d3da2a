"""Spectral norms: of a tensor, by block Krylov iteration, and of Gaussian noise, by its known limit.

A convolution is the matrix (out, in·kh·kw); stacked experts are measured one by one. A tensor may lie in memory or
be read in blocks of rows: the blocks are the same, and so is the norm. Everything is computed in float64, so that
threads and machines, which add in different orders, agree to far more digits than are kept. Knows nothing about files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import isfinite, nan, prod, sqrt

import torch
from torch import Tensor

from .devices import has_float64

_TRACY_WIDOM_MEAN = -1.2065335745820  # of the law for real matrices (β = 1)
_BLOCK = (
    1 << 21
)  # entries of a matrix that are read at a time, so that files are read in stretches of megabytes
_HELD = 1 << 24  # entries of the largest matrix that is read once and held: 64 MB of float32 per thread
_PIECE = 1 << 18  # of these, entries that are multiplied at a time: 2 MiB of float64 stay in a core's cache
_COLUMNS = 16  # vectors at a time: a pass costs hardly more than with 8, and half as many are needed
_PASSES = 15  # a random matrix of 2048 x 2048, which has no gap below its norm, needs 11
_ENOUGH = (
    5e-4  # of the norm: less than this gained in a pass. `benchmarks/norms.py` measures what is then left
)

ReadRows = Callable[[int, int], Tensor]


def spectral_norms(weight: Tensor, stacked: bool = False) -> Tensor:
    """The largest singular value of `weight`, or of each matrix along dimension 0 when `stacked`, to about 1e-3.

    >>> round(float(spectral_norms(torch.diag(torch.tensor([3.0, 1.0])))), 6)
    3.0
    """
    rows = weight.detach().flatten(0, 1) if stacked else weight.detach()
    return streamed_spectral_norm(lambda start, stop: rows[start:stop], weight.shape, stacked)


def streamed_spectral_norm(read_rows: ReadRows, shape: Sequence[int], stacked: bool = False) -> Tensor:
    """`spectral_norms` of a tensor of this shape that is read in blocks of rows, two million entries at a time.

    `read_rows(start, stop)` returns these rows, in any float dtype, with the dimensions after the row's as they are
    or flat; when `stacked`, the rows of all matrices are counted through, those of the first matrix first. A matrix
    of up to 16 million entries is read once and held; a larger one is read once for every pass: four or five of a trained
    matrix, 15 at most.

    >>> weight = torch.arange(12.0).view(4, 3)
    >>> bool(streamed_spectral_norm(lambda a, b: weight[a:b], (4, 3)).isclose(spectral_norms(weight), rtol=1e-6))
    True
    """
    matrices, rows = (shape[0], shape[1]) if stacked else (1, shape[0])
    columns = prod(shape[2 if stacked else 1 :])
    if not prod(shape):
        return torch.zeros(matrices if stacked else (), dtype=torch.float64, device="cpu")
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(columns, min(_COLUMNS, columns), generator=generator, device="cpu").double()
    step = max(1, _BLOCK // max(1, columns))
    norms = []
    for matrix in range(matrices):
        start, stop = matrix * rows, (matrix + 1) * rows
        cuts = [(at, min(at + step, stop)) for at in range(start, stop, step)]
        blocks = partial(_read, read_rows, cuts)
        if rows * columns <= _HELD:
            blocks = partial(iter, list(blocks()))
        norms.append(_krylov(blocks, first, _PASSES))
        del blocks  # and what it holds, before the next one is read
    return torch.stack(norms) if stacked else norms[0]


def _read(read_rows: ReadRows, cuts: Iterable[tuple[int, int]]) -> Iterator[Tensor]:
    for start, stop in cuts:
        block = read_rows(start, stop).flatten(1)
        yield block if has_float64(block.device) else block.cpu()


def _krylov(blocks: Callable[[], Iterable[Tensor]], start: Tensor, passes: int) -> Tensor:
    """The norm of the matrix A whose blocks of rows `blocks()` yields in order, each once per pass.

    Q holds orthonormal columns; each pass adds AᵀA times its newest ones, made orthogonal to all before. The square of the
    norm is at least the largest eigenvalue of T = QᵀAᵀAQ, and the two approach each other fast: power iteration keeps only the
    newest column and needs up to a hundred passes where this needs four to eleven.

    T and products with A are held in units of `unit`, about the norm: its square can be too large or too small for a float.

    For A = diag(3, 1) and two columns, the first pass already finds T = diag(9, 1) in the basis of Q, and √9 = 3.
    """
    newest = basis = torch.linalg.qr(start)[0]
    projected = start.new_zeros(0, 0)
    unit = size = 0.0
    for _ in range(passes):
        product, scale = _gram_times(blocks(), newest)
        if not isfinite(scale):
            return start.new_tensor(nan)
        if not scale:
            break
        unit = unit or scale
        product, basis = product * (scale / unit), basis.to(product.device)
        column = basis.T @ product
        projected = projected.to(product.device)
        known = projected.shape[0]
        projected = torch.cat([torch.cat([projected, column[:known].T]), column], 1)
        before, size = size, sqrt(float(torch.linalg.eigvalsh(projected)[-1].clamp_min(0)))
        if size - before <= _ENOUGH * size:
            break
        rest = product - basis @ column
        rest -= basis @ (
            basis.T @ rest
        )  # once more: rounding of the first time is as large as what may be left
        orthogonal, triangle = torch.linalg.qr(rest)
        newest = orthogonal[:, triangle.diagonal().abs() > 1e-10 * size * size]
        if not newest.shape[1]:
            break  # A maps the columns of Q to one another, so T has its norm exactly
        basis = torch.cat([basis, newest], 1)
    return start.new_tensor(size * sqrt(unit))


def _gram_times(blocks: Iterable[Tensor], columns: Tensor) -> tuple[Tensor, float]:
    """AᵀA times the columns, divided by the second value, which is the largest entry of A times them.

    The sum is held as its transpose, (AᵀA·columns)ᵀ = (A·columns)ᵀ·A: both products then go along the rows of A, as they lie.
    """
    total, scale = torch.zeros_like(columns.T), 0.0
    for block in blocks:
        columns, total = columns.to(block.device), total.to(block.device)
        for piece in _pieces(block):
            image = piece @ columns
            largest = float(image.abs().max())
            if not isfinite(largest):
                return total.T, largest
            if not largest:
                continue
            if largest > scale:
                total, scale = total * (scale / largest), largest
            total.addmm_((image / scale).T, piece)
    return total.T, scale


def _pieces(block: Tensor) -> Iterator[Tensor]:
    """The rows of a block in float64, so few at a time that one buffer in cache holds them."""
    rows = max(1, _PIECE // max(1, block.shape[1]))
    buffer = torch.empty(min(rows, len(block)), block.shape[1], dtype=torch.float64, device=block.device)
    for first in range(0, len(block), rows):
        part = block[first : first + rows]
        yield buffer[: len(part)].copy_(part)


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
