"""The widening kernel: any slice of W' = s · dup(W) from the slice of W that covers it.

Live models, streamed files and sharded jobs all call `expand_`, so they all get the same bits. Each
entry is rounded once, in the compute type of its dtype (float32 for 16-bit types), and not at all
when s is a power of two. `reference.py` holds the slow twin that defines what is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import torch
from torch import Tensor

from ..errors import MupscaleError
from ..rules.axes import Axis, Piece
from ..rules.scale import ONE, Scale

_BLOCK = 1 << 19  # elements written at a time: large enough to thread, small enough to stay in cache
_RUN = 16  # neighbours that a strided copy moves at memory speed; shorter runs are stacked first


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def rescale(x: Tensor, scale: Scale, shift: int = 0) -> Tensor:
    """s · x with one rounding, or (x + shift) · s - shift for gains that are used as (shift + w)."""
    if scale.is_one:
        return x
    if not (x.is_floating_point() or x.is_complex()):
        raise MupscaleError(f"a tensor of {x.dtype} cannot be multiplied by {scale}")
    fraction = scale.fraction
    y = x.to(compute_dtype(x.dtype))
    if shift:
        y = y + shift
    # A quotient is rounded once; a product with the reciprocal would be rounded twice.
    quotient = fraction is not None and fraction.numerator == 1
    y = y / fraction.denominator if quotient and fraction is not None else y * float(scale)
    return y - shift if shift else y


def expand_(
    out: Tensor,
    base: Tensor,
    axes: Sequence[Axis],
    scale: Scale = ONE,
    *,
    shift: int = 0,
    out_start: Sequence[int] | None = None,
    base_start: Sequence[int] | None = None,
) -> Tensor:
    """Fill `out`, the slice of the wide tensor that begins at `out_start`, and return it.

    `base` is any slice of the base tensor, beginning at `base_start`, that contains what `out` reads
    (see `Axis.cover`). Both default to the whole tensor.

    >>> axes = [Axis.parse("out: 1x2"), Axis.parse("in: 2x2")]
    >>> expand_(torch.empty(2, 4), torch.tensor([[6.0, 2.0]]), axes, Scale.of("1/2"))
    tensor([[3., 3., 1., 1.],
            [3., 3., 1., 1.]])
    """
    out_at = list(out_start) if out_start is not None else [0] * len(axes)
    base_at = list(base_start) if base_start is not None else [0] * len(axes)
    _check(out, base, axes, out_at, base_at)
    if not axes:
        return out.copy_(rescale(base, scale, shift))
    cuts = [
        list(axis.pieces(start, start + size))
        for axis, start, size in zip(axes, out_at, out.shape, strict=True)
    ]
    for pieces in product(*cuts):
        target, source = out, base
        for dim, piece in enumerate(pieces):
            target = target.narrow(dim, piece.start - out_at[dim], piece.length)
        if any(piece.factors is None for piece in pieces):
            target.zero_()
            continue
        for dim, piece in enumerate(pieces):
            source = source.narrow(dim, piece.base_start - base_at[dim], piece.base_length)
        _expand_product(target, source, pieces, scale, shift)
    return out


def expand(base: Tensor, axes: Sequence[Axis], scale: Scale = ONE, *, shift: int = 0) -> Tensor:
    """The whole wide tensor s · dup(W), in new memory.

    >>> expand(torch.tensor([1.0, 2.0]), [Axis.parse("out: 2x2+1")])
    tensor([1., 1., 2., 2., 0.])
    """
    return expand_(base.new_empty([axis.wide for axis in axes]), base, axes, scale, shift=shift)


def _expand_product(out: Tensor, base: Tensor, pieces: Sequence[Piece], scale: Scale, shift: int) -> None:
    """Write one product of factors, in blocks of rows."""
    factors = [piece.factors or () for piece in pieces]
    rows, inner = factors[0][0], factors[0][1:]
    base_unit = prod(n for n, _ in inner)
    wide_unit = rows[1] * prod(n * k for n, k in inner)
    per_row = max(1, out.numel() // max(1, rows[0]))
    step = max(1, _BLOCK // per_row)
    for start in range(0, rows[0], step):
        count = min(step, rows[0] - start)
        digits = [(count, rows[1]), *inner, *(pair for axis in factors[1:] for pair in axis)]
        source = base.narrow(0, start * base_unit, count * base_unit)
        target = out.narrow(0, start * wide_unit, count * wide_unit)
        _write(target, rescale(source, scale, shift).to(out.dtype), digits)


def _write(out: Tensor, source: Tensor, digits: list[tuple[int, int]]) -> None:
    copied = max((i for i, (_, k) in enumerate(digits) if k > 1), default=None)
    shape = [size for n, k in digits for size in (n, k)]
    read = [size for n, _ in digits for size in (n, 1)]
    if copied is not None:
        run = prod(n for n, _ in digits[copied + 1 :])
        if run < _RUN:
            k = digits[copied][1]
            source = torch.stack([source.reshape(-1, run)] * k, dim=1)
            read[2 * copied + 1] = k
    out.view(shape).copy_(source.reshape(read).expand(shape))


def _check(out: Tensor, base: Tensor, axes: Sequence[Axis], out_at: list[int], base_at: list[int]) -> None:
    if not out.dim() == base.dim() == len(axes) == len(out_at) == len(base_at):
        raise MupscaleError(
            f"{len(axes)} axes for a base tensor of shape {tuple(base.shape)} and a wide one of {tuple(out.shape)}"
        )
    for dim, axis in enumerate(axes):
        if not axis.duplicates:
            whole = int(axis.k)
            raise MupscaleError(
                f"dimension {dim} grows from {axis.base} to {axis.wide}, which is not a whole number of copies; "
                f"nearest: {axis.base * max(whole, 1)} (x{max(whole, 1)}), {axis.base * (whole + 1)} (x{whole + 1}); "
                "or pad with zeros (pad=True)"
            )
        stop = out_at[dim] + out.shape[dim]
        low, high = axis.cover(out_at[dim], stop)
        inside = low == high or (base_at[dim] <= low and high <= base_at[dim] + base.shape[dim])
        if stop > axis.wide or not inside:
            raise MupscaleError(
                f"dimension {dim}: wide entries {out_at[dim]}..{stop} of {axis.wide} read base entries {low}..{high}, "
                f"found {base_at[dim]}..{base_at[dim] + base.shape[dim]} of {axis.base}"
            )
