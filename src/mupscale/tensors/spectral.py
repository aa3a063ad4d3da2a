"""Spectral norms: of a tensor, by power iteration, and of Gaussian noise, by its known limit.

A convolution is the matrix (out, in·kh·kw); stacked experts are measured one by one.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

_TRACY_WIDOM_MEAN = -1.2065335745820


def spectral_norms(weight: Tensor, stacked: bool = False, steps: int = 100) -> Tensor:
    """The largest singular value of `weight`, or of each matrix along dimension 0 when `stacked`.

    >>> float(spectral_norms(torch.diag(torch.tensor([3.0, 1.0]))))
    3.0
    """
    matrices = weight.detach().flatten(2) if stacked else weight.detach().flatten(1).unsqueeze(0)
    matrices = matrices.to(torch.promote_types(weight.dtype, torch.float32))
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(matrices.shape[0], matrices.shape[2], 1, generator=generator).to(matrices)
    size = torch.zeros(matrices.shape[0], device=matrices.device, dtype=matrices.dtype)
    for _ in range(steps):
        u = matrices @ (v / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp_min(1e-30))
        v = matrices.transpose(1, 2) @ (u / torch.linalg.vector_norm(u, dim=1, keepdim=True).clamp_min(1e-30))
        before, size = size, torch.linalg.vector_norm(v, dim=(1, 2))
        if bool(((size - before).abs() <= 1e-6 * size).all()):
            break
    return size if stacked else size[0]


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
