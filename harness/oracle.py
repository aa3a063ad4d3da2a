"""Expansion, copying, joining and the gradient identity from their definitions, index by index.

Slow, and independent of the kernel: shares nothing with `tensors/expand.py` but the definition of an axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

import mupscale as mu
from mupscale.rules.axes import Axis
from mupscale.rules.scale import ONE, Scale


def copied(base: Tensor, axes: Sequence[Axis]) -> Tensor:
    """dup(base), index by index from the definition of an axis; zero where an index is padding."""
    for dim, axis in enumerate(axes):
        sources = [axis.source(i) for i in range(axis.wide)]
        live = torch.tensor([source is not None for source in sources])
        shape = [-1 if d == dim else 1 for d in range(len(axes))]
        base = base.index_select(dim, torch.tensor([s or 0 for s in sources])) * live.view(shape)
    return base


def identity_error(
    base: Mapping[str, Tensor], wide: Mapping[str, Tensor], plan: mu.Plan, only: str = ""
) -> float:
    """Gradients against the definition: r · dup(G) on the image and zero off it; of every tensor, or of one.

    Relative to the largest entry wanted, or to 1e-5 of the largest gradient of the base where a tensor has hardly any.
    """
    assert base.keys() == wide.keys()
    largest = max(float(g.abs().max()) for g in base.values())
    worst = 0.0
    for name in [only] if only else wide:
        entry = plan[name]
        want = copied(base[entry.sources[0]], entry.axes) * float(entry.change.r)
        size = max(float(want.abs().max()), 1e-5 * largest * float(entry.change.r))
        worst = max(worst, float((wide[name] - want).abs().max()) / size)
    return worst


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
