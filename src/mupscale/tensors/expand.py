"""The widening kernel: any slice of W' = s · dup(W) from the slice of W that covers it.

Live models, streamed files and sharded jobs all call `expand_`, so they all get the same bits. Each
entry is rounded once, in the compute type of its dtype (float32 for 16-bit types), and not at all
when s is a power of two. The slow twin that defines what is right is in `harness/oracle.py`, for the tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod

import torch
from torch import Tensor

from ..errors import MupscaleError
from ..rules.axes import Axis, fraction_fault
from ..rules.products import Piece
from ..rules.scale import ONE, Scale
from .compiled import chosen_kernel
from .devices import exact
from .entry_sources import models_of
from .making import Making
from .noise import TensorNoise, Waking

_BLOCK = 1 << 25  # bytes written at a time: threads seldom wait for each other, and caches still help
# Bytes of float32 that get their noise at a time: the extra memory of a 16-bit result.
_NOISY_BLOCK = 1 << 23
RUN = 64
"""Entries whose sum is one term of a mean: parts of an axis whose mean is taken are cut at multiples of it."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which a tensor of `dtype` is computed: float32 for 16-bit floats, its own for all others."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def rescale(x: Tensor, scale: Scale, shift: int = 0, *, out: Tensor | None = None) -> Tensor:
    """s · x with one rounding, or (x + shift) · s - shift for gains that are used as (shift + w).

    Returns `out` where given; else x itself when s = 1, and a new tensor of the compute type when not.
    """
    if scale.is_one:
        return x if out is None else out.copy_(x)
    if not (x.is_floating_point() or x.is_complex()):
        raise MupscaleError(
            f"a tensor of {x.dtype} cannot be multiplied by {scale}; convert it to a float dtype, or copy it with s = 1",
            code="scale.not_a_float_tensor",
        )
    y = x.to(compute_dtype(x.dtype))
    if shift:
        y = y + shift
    # Written in place where that changes nothing, to save a temporary and a pass over it.
    into = y if y is not x else None
    if out is not None and not shift and (out.dtype, out.device) == (y.dtype, y.device):
        into = out
    if y.requires_grad:
        into = None
    value, divides = scale.operand
    # The divisor is a tensor because CUDA turns division by a plain number into a product with its reciprocal.
    y = torch.div(y, y.new_full((), value), out=into) if divides else torch.mul(y, value, out=into)
    y = y - shift if shift else y
    return y if out is None or y is out else out.copy_(y.to(out.dtype))


def expand_(
    out: Tensor,
    base: Tensor | None,
    making: Making,
    *,
    out_start: Sequence[int] | None = None,
    base_start: Sequence[int] | None = None,
) -> Tensor:
    """Fill `out`, the slice of the wide tensor that begins at `out_start`, and return it.

    `base` is any slice of the base tensor, beginning at `base_start`, that contains what `out` reads
    (see `Making.reads`), and None where the making has no source. Both starts default to the whole tensor. Behind the last
    entry of a dimension with means lies the mean of all of them: a base that begins there holds it alone.

    >>> making = Making((Axis.parse("out: 1x2"), Axis.parse("in: 2x2")), Scale.of("1/2"))
    >>> expand_(torch.empty(2, 4), torch.tensor([[6.0, 2.0]]), making)
    tensor([[3., 3., 1., 1.],
            [3., 3., 1., 1.]])
    """
    if making.fill is not None:
        base = None
    if base is None and making.noise is None:
        return making.fill_(out)
    out_at = list(out_start) if out_start is not None else [0] * len(making.axes)
    base_at = list(base_start) if base_start is not None else [0] * len(making.axes)
    for part, at, source, low in _with_means(out, base, making, out_at, base_at):
        if making.noise is not None:
            _expand_noisy(part, source, making, at, low, making.noise)
        else:
            _expand_exact(part, source, making, at, low)
    return out


def expand(base: Tensor, making: Making) -> Tensor:
    """The whole wide tensor s · dup(W), in new memory.

    >>> expand(torch.tensor([1.0, 2.0]), Making((Axis.parse("out: 2x2+1"),)))
    tensor([1., 1., 2., 2., 0.])
    """
    return expand_(base.new_empty(making.wide_shape), base, making)


def _expand_exact(
    out: Tensor, base: Tensor | None, making: Making, out_at: list[int], base_at: list[int]
) -> Tensor:
    """The slice without noise."""
    if base is None:
        return making.fill_(out)
    cuts = _cuts(out, base, making.axes, out_at, base_at)
    if not making.axes:
        return out.copy_(rescale(base, making.scale, making.shift))
    for pieces in product(*cuts):
        target, source = out, base
        for dim, piece in enumerate(pieces):
            target = target.narrow(dim, piece.start - out_at[dim], piece.length)
        zeros = {dim for dim, piece in enumerate(pieces) if piece.factors is None}
        if zeros - set(making.mean):
            target.fill_(making.pad)
            continue
        for dim, piece in enumerate(pieces):
            if dim not in zeros:
                source = source.narrow(dim, piece.base_start - base_at[dim], piece.base_length)
        if zeros:
            _write_mean_(target, source, making, pieces)
        else:
            _expand_product(target, source, pieces, making.scale, making.shift)
    return out


def _write_mean_(out: Tensor, mean: Tensor, making: Making, pieces: Sequence[Piece]) -> None:
    """s times a mean in float64, which is rounded once, in every new channel."""
    row = rescale(mean, making.scale, making.shift).to(compute_dtype(out.dtype)).to(out.device)
    whole = [
        replace(piece, factors=((1, piece.length),)) if piece.factors is None else piece for piece in pieces
    ]
    _expand_product(out, row, whole, ONE, 0)


def mean_along(parts: Iterable[Tensor], dim: int, size: int) -> Tensor:
    """The mean along `dim` of `size` entries, in float64. They come in parts, each but the last of whole runs of `RUN` entries.

    Every run is folded in half until one entry is left, and runs are added in order. These are additions of whole slices, so the
    bits depend neither on how the entries are cut, along this dimension or another, nor on the device.

    >>> x = torch.arange(300.0).view(100, 3)
    >>> mean_along([x], 0, 100).tolist(), mean_along([x[:64], x[64:]], 0, 100).tolist()
    ([[148.5, 149.5, 150.5]], [[148.5, 149.5, 150.5]])
    """
    total: Tensor | None = None
    for part in parts:
        dtype = torch.complex128 if part.is_complex() else torch.float64
        for start in range(0, part.shape[dim], RUN):
            run = exact(part.narrow(dim, start, min(RUN, part.shape[dim] - start)), dtype)
            while (length := run.shape[dim]) > 1:
                half, odd = divmod(length, 2)
                folded = run.narrow(dim, 0, half) + run.narrow(dim, length - half, half)
                run = torch.cat((folded, run.narrow(dim, half, 1)), dim) if odd else folded
            total = run if total is None else total + run
    assert total is not None, "an axis whose mean is taken has entries"
    return total / total.new_full((), size)


def cut_at_means(
    out: Tensor, making: Making, at: Sequence[int]
) -> Iterator[tuple[Tensor, list[int], tuple[int, ...]]]:
    """A slice of a wide tensor, cut where new channels that carry a mean begin: each part, its start, and along which
    dimensions it has nothing but such channels.

    >>> making = Making((Axis.parse("out: 4+2"), Axis.fixed(3)), mean=(0,))
    >>> [(tuple(part.shape), start, new) for part, start, new in cut_at_means(torch.empty(6, 3), making, (0, 0))]
    [((4, 3), [0, 0], ()), ((2, 3), [4, 0], (0,))]
    """
    cuts = [list(making.axes[dim].pieces(at[dim], at[dim] + out.shape[dim])) for dim in making.mean]
    for pieces in product(*cuts):
        part, start = out, list(at)
        for dim, piece in zip(making.mean, pieces, strict=True):
            part, start[dim] = part.narrow(dim, piece.start - at[dim], piece.length), piece.start
        pairs = zip(making.mean, pieces, strict=True)
        yield part, start, tuple(dim for dim, piece in pairs if piece.factors is None)


def _with_means(
    out: Tensor, base: Tensor | None, making: Making, out_at: list[int], base_at: list[int]
) -> Iterator[tuple[Tensor, list[int], Tensor | None, list[int]]]:
    """The slice and its base; where new channels carry a mean, they lie in parts of their own whose base is the mean."""
    if base is None or not making.mean:
        yield out, out_at, base, base_at
        return
    for part, at, new in cut_at_means(out, making, out_at):
        source, low = base, list(base_at)
        for dim in new:
            size = making.axes[dim].base
            if base_at[dim] == size and base.shape[dim] == 1:
                continue
            if base.shape[dim] != size:
                raise MupscaleError(
                    f"dimension {dim}: new channels are the mean of all others, of which this slice holds {base.shape[dim]} of "
                    f"{size}; pass the range that Making.reads covers",
                    code="plan.mean_in_parts",
                )
            source, low[dim] = mean_along([source], dim, size), size
        yield part, at, source, low


def _expand_noisy(
    out: Tensor,
    base: Tensor | None,
    making: Making,
    out_at: list[int],
    base_at: list[int],
    noise: TensorNoise,
) -> Tensor:
    """The slice in small blocks, in the compute type, with noise added to each block."""
    if not making.mean and chosen_kernel() == "triton":
        from .triton import launch

        if launch.is_for(out, base, noise):
            if base is not None:
                _cuts(out, base, making.axes, out_at, base_at)  # an error when the slices do not fit
            return launch.expand_noisy_(out, base, making, out_at, base_at, noise)
    wide = compute_dtype(out.dtype)
    whole = making  # as `add_` expects it: of a split, every copy holds the whole entry
    if noise.split is not None:
        whole = replace(making, scale=making.scale * Scale.of(making.axes[noise.split].k))
    for corner, shape in _blocks(out.shape, _NOISY_BLOCK // 4, noise.paired):
        part, at = out, [low + i for low, i in zip(out_at, corner, strict=True)]
        for dim, (start, length) in enumerate(zip(corner, shape, strict=True)):
            part = part.narrow(dim, start, length)
        if base is not None and _round_noisy(part, base, making, at, base_at, noise):
            continue
        exact = part
        if part.dtype != wide or not part.is_contiguous():
            exact = torch.empty(shape, dtype=wide, device=out.device)
        _expand_exact(exact, base, whole, at, base_at)
        if base is not None and noise.zeros is not None and noise.zeros.copied:
            _copy_units_(exact, base, making, at, base_at, noise.zeros)
        noise.add_(exact, making.axes, at)
        if exact is not part:
            part.copy_(exact)
    return out


def _copy_units_(
    out: Tensor, base: Tensor, making: Making, out_at: list[int], base_at: list[int], zeros: Waking
) -> None:
    """Make the zeros that wake copies of trained units: s · W at the indices of the units that theirs are like."""
    for part, at, kind in zeros.regions(out, making.axes, out_at):
        if kind != "wakes":
            continue
        source = base
        for dim, axis in enumerate(making.axes):
            index = models_of(axis, at[dim], at[dim] + part.shape[dim]) - base_at[dim]
            if int(index.min()) < 0 or int(index.max()) >= base.shape[dim]:
                raise MupscaleError(
                    f"dimension {dim}: new units are copies of units of the base that this slice does not hold; pass the range that Making.reads covers",
                    code="noise.copies_whole_tensor",
                )
            source = source.index_select(dim, index.to(base.device))
        rescale(source, making.scale, making.shift, out=part)


def _round_noisy(
    out: Tensor, base: Tensor, making: Making, out_at: list[int], base_at: list[int], noise: TensorNoise
) -> bool:
    """The slice in 16 bits without a temporary in 32: copies first, then scale, noise and rounding in one loop.

    False where that cannot be done; then `out` holds anything.
    """
    if making.shift or making.mean or base.dtype != out.dtype or not noise.rounds(out, out_at):
        return False
    _expand_exact(out, base, replace(making, scale=ONE), out_at, base_at)
    value, divides = making.scale.operand
    return noise.round_(out, making.axes, out_at, value, divides=divides)


def _blocks(shape: Sequence[int], most: int, uncut: int | None) -> Iterator[tuple[list[int], list[int]]]:
    """Corners and shapes of blocks of at most `most` entries, cut along outer dimensions first, never along `uncut`."""
    steps = list(shape)
    for dim in range(len(steps)):
        if prod(steps) <= most:
            break
        if dim != uncut:
            steps[dim] = max(1, most // (prod(steps) // steps[dim]))
    for corner in product(*(range(0, n, max(1, step)) for n, step in zip(shape, steps, strict=True))):
        sizes = [min(step, n - i) for i, n, step in zip(corner, shape, steps, strict=True)]
        yield list(corner), sizes


def _expand_product(out: Tensor, base: Tensor, pieces: Sequence[Piece], scale: Scale, shift: int) -> None:
    """Write one product of factors, in blocks along the outermost digit that is long enough to cut."""
    digits = [digit for piece in pieces for digit in piece.factors or ()]
    lengths, copies = [n for n, _ in digits], [k for _, k in digits]
    source, target = base.view(lengths), out.view([size for digit in digits for size in digit])
    blocks = -(-out.numel() * out.element_size() // _BLOCK)
    dim = next((i for i, n in enumerate(lengths) if n >= blocks), lengths.index(max(lengths)))
    step = -(-lengths[dim] // blocks)
    for start in range(0, lengths[dim], step):
        count = min(step, lengths[dim] - start)
        part = target.narrow(2 * dim, start, count)
        _write(part, source.narrow(dim, start, count), copies, scale, shift)


def _write(out: Tensor, source: Tensor, copies: Sequence[int], scale: Scale, shift: int) -> None:
    """out[i, a, j, b, …] = s · source[i, j, …] for all copies a, b, …

    The first of all copies is computed, its innermost neighbours are copied from it, and whole runs of
    them outwards. So short strides touch a small part of the bytes, and the rest moves in long runs.
    """
    grown = [(2 * i + 1, k) for i, k in enumerate(copies) if k > 1]
    parts = [out]
    for dim, _ in grown:
        parts.append(parts[-1].narrow(dim, 0, 1))
    first = parts.pop()
    rescale(source.view(first.shape), scale, shift, out=first)
    for (dim, k), part in zip(reversed(grown), reversed(parts), strict=True):
        for copy in range(1, k):
            part.narrow(dim, copy, 1).copy_(part.narrow(dim, 0, 1))


def _cuts(
    out: Tensor, base: Tensor, axes: Sequence[Axis], out_at: list[int], base_at: list[int]
) -> list[list[Piece]]:
    """The pieces of every dimension, or an error when the slices do not fit them."""
    if not out.dim() == base.dim() == len(axes) == len(out_at) == len(base_at):
        raise MupscaleError(
            f"{len(axes)} axes for a base tensor of shape {tuple(base.shape)} and a wide one of {tuple(out.shape)}, "
            "expected one for each dimension",
            code="axis.not_one_per_dimension",
        )
    cuts = []
    for dim, axis in enumerate(axes):
        if not axis.duplicates:
            fault = fraction_fault(f"dimension {dim}", axis)
            raise MupscaleError(f"{fault.where} {fault.what}; {fault.remedy}", code=fault.code)
        stop = out_at[dim] + out.shape[dim]
        cuts.append(list(axis.pieces(out_at[dim], stop)))
        read = [p for p in cuts[-1] if p.factors is not None]
        low = min((p.base_start for p in read), default=0)
        high = max((p.base_start + p.base_length for p in read), default=0)
        inside = low == high or (base_at[dim] <= low and high <= base_at[dim] + base.shape[dim])
        if stop > axis.wide or not inside:
            raise MupscaleError(
                f"dimension {dim}: wide entries {out_at[dim]}..{stop} of {axis.wide} read base entries {low}..{high}, "
                f"found {base_at[dim]}..{base_at[dim] + base.shape[dim]} of {axis.base}; pass the range that Making.reads covers",
                code="axis.range_outside_base",
            )
    return cuts
