"""The slow, obvious twin of the kernel: one entry at a time, straight from the definition.

Shares nothing with `expand.py` but the definition of an axis. It is the oracle of the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from ..rules.axes import Axis
from ..rules.scale import ONE, Scale


def expand_slowly(base: Tensor, axes: Sequence[Axis], scale: Scale = ONE) -> Tensor:
    """W'[i, j, …] = s · W[source(i), source(j), …], and zero where an index is padding."""
    out = torch.zeros([axis.wide for axis in axes], dtype=base.dtype)
    ratio = scale.fraction
    for index in product(*(range(axis.wide) for axis in axes)):
        source = [axis.source(i) for axis, i in zip(axes, index, strict=True)]
        if None in source:
            continue
        entry = base[tuple(source)]
        if not scale.is_one:
            entry = entry.float() if entry.itemsize < 4 else entry
            exact_quotient = ratio is not None and ratio.numerator == 1
            entry = entry / ratio.denominator if exact_quotient else entry * float(scale)  # type: ignore[union-attr]
        out[index] = entry
    return out


def join_slowly(sources: Sequence[Tensor], dim: int, stacked: bool) -> Tensor:
    """Entry i of dimension `dim` comes from source i when stacked, else from the source in which i lies."""
    sizes = [1 if stacked else source.shape[dim] for source in sources]
    owners = [(source, at) for source, size in zip(sources, sizes, strict=True) for at in range(size)]
    first = tuple(sources[0].shape)
    rest = (*first[:dim], *first[dim + (not stacked) :])
    out = torch.zeros((*rest[:dim], len(owners), *rest[dim:]), dtype=sources[0].dtype)
    for index in product(*map(range, out.shape)):
        source, at = owners[index[dim]]
        inner = () if stacked else (at,)
        out[index] = source[(*index[:dim], *inner, *index[dim + 1 :])]
    return out
