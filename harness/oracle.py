"""Expansion, copying, joining and the gradient identity from their definitions, index by index.

Slow, and independent of the kernel: shares nothing with `tensors/expand.py` but the definition of an axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

import mupscale as mu
from mupscale.rules.axes import Axis
from mupscale.rules.scale import ONE, Scale
from mupscale.tensors.making import Making


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
    for index in product(*(range(axis.wide) for axis in axes)):
        source = [axis.source(i) for axis, i in zip(axes, index, strict=True)]
        if None in source:
            continue
        entry = base[tuple(source)]
        out[index] = entry if scale.is_one else _scaled(entry, scale)
    return out


def mean_slowly(base: Tensor, axes: Sequence[Axis], dim: int, scale: Scale = ONE) -> Tensor:
    """The same where new channels along `dim` carry the mean of the others: numbers of Python, added one pair at a time."""
    out = expand_slowly(base, axes, scale)
    for index in product(*(range(axis.wide) for axis in axes)):
        source = [axis.source(i) for axis, i in zip(axes, index, strict=True)]
        if [d for d, at in enumerate(source) if at is None] != [dim]:
            continue
        others = [[*source[:dim], at, *source[dim + 1 :]] for at in range(axes[dim].base)]
        values = [float(base[tuple(other)]) for other in others]
        mean = _added(values) / len(values)
        divisor = scale.fraction.denominator if scale.fraction and scale.fraction.numerator == 1 else None
        found = torch.tensor(mean / divisor if divisor else mean * float(scale), dtype=torch.float64)
        out[index] = found.to(torch.float32 if base.itemsize < 4 else base.dtype).to(base.dtype)
    return out


def _added(values: list[float]) -> float:
    """Runs of 64, one after the other; the first half of a run plus its second, until one number is left."""
    total = None
    for start in range(0, len(values), 64):
        run = values[start : start + 64]
        while len(run) > 1:
            half = len(run) // 2
            pairs = zip(run[:half], run[-half:], strict=True)
            run = [a + b for a, b in pairs] + run[half : len(run) - half]
        total = run[0] if total is None else total + run[0]
    assert total is not None
    return total


def _scaled(entry: Tensor, scale: Scale) -> Tensor:
    entry = entry.float() if entry.itemsize < 4 else entry
    ratio = scale.fraction
    return entry / ratio.denominator if ratio is not None and ratio.numerator == 1 else entry * float(scale)


def like_slowly(axis: Axis, index: int) -> int:
    """The unit that a wide index copies or is like, digit by digit: zeros are like the units before them, in turn."""
    offset = 0
    for segment in axis.segments:
        wide = math.prod(factor.wide for factor in segment)
        if index < wide:
            found = 0
            for place, factor in enumerate(segment):
                digit, index = divmod(index, math.prod(f.wide for f in segment[place + 1 :]))
                found = found * factor.size + (digit % int(factor.live)) // int(factor.k)
            return offset + found
        index, offset = index - wide, offset + math.prod(factor.size for factor in segment)
    raise IndexError


def wake_slowly(base: Tensor, making: Making, z: Tensor, u: Tensor) -> Tensor:
    """New units that are copies of trained ones, and entries that go whole to one copy, one entry after the other.

    `z` and `u` are the normal and uniform numbers of the whole wide tensor.
    """
    noise, axes = making.noise, making.axes
    assert noise is not None
    assert noise.zeros is not None
    assert isinstance(noise.std, float)
    assert isinstance(noise.zeros.std, float)
    out = torch.zeros(making.wide_shape, dtype=base.dtype)
    sources = [[axis.source(i) for i in range(axis.wide)] for axis in axes]
    for index in product(*(range(axis.wide) for axis in axes)):
        new = {dim for dim, i in enumerate(index) if sources[dim][i] is None}
        if new & set(noise.zeros.cut):
            continue
        entry = base[tuple(like_slowly(axis, i) for axis, i in zip(axes, index, strict=True))]
        scale, std = making.scale, noise.zeros.std if new else noise.std
        if not new and (dim := noise.split) is not None:
            k = int(axes[dim].k)
            copies = [i for i, source in enumerate(sources[dim]) if source == sources[dim][index[dim]]]
            drawn = u[(*index[:dim], copies[0], *index[dim + 1 :])]
            scale, kept = scale * Scale.of(k), copies[min(int(drawn * k), k - 1)] == index[dim]
            entry = entry if kept else torch.zeros_like(entry)
        entry = _scaled(entry, scale)
        out[index] = entry + z[index].to(entry.dtype) * std if std else entry
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
