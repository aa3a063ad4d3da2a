"""Slices of wide tensors on a GPU, where MUPSCALE_KERNEL=triton asks for the Triton kernel: one launch for every region of
equal noise.

Knows how a slice of any number of dimensions becomes rows and columns, and the tables of places that the kernel reads.
They are made on the device, so that nothing waits for it. Everything else uses the code of `expand.py`, which defines what
is right. That is the default on every device, because no report of a GPU says yet that the kernel agrees with it;
`mupscale doctor --device cuda` makes one. TRITON_INTERPRET=1 runs the kernel on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from math import prod

import torch
from torch import Tensor

from ...errors import Fault, MupscaleError
from ..compiled import VARIABLE, chosen_kernel
from ..entry_sources import copies_of
from ..making import Making
from ..noise import TensorNoise, centred_spread
from ..philox import Stream, quantiles
from .regions import Region, regions

_BLOCK = 1024  # entries of a row for one program at most: four warps with eight entries a thread
_LEAST_BLOCK = 16  # a power of two, as every block is
_MOST_COLUMNS = 1 << 16  # columns of a matrix: each has an entry in the tables of places
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def interpreted() -> bool:
    """Whether Triton interprets its kernels on the CPU, which tests of the bits use."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def installed() -> bool:
    """Whether the Triton package is there."""
    return find_spec("triton") is not None


def is_for(out: Tensor, base: Tensor | None, noise: TensorNoise) -> bool:
    """Whether a slice is made by the kernel.

    Rows of new words are not, they are few. Copied units read the base at places of their own, and a split compares two
    tables of places: `expand.py` makes them on any device, and numba's loop only adds their noise. Noise that is the same for
    all units is that of a small tensor.
    """
    if (noise.split, noise.apart) != (None, None) or (
        noise.zeros is not None and (noise.zeros.copied or noise.zeros.mean is not None)
    ):
        return False
    if out.device.type != ("cpu" if interpreted() else "cuda") or chosen_kernel() != "triton":
        return False
    if not installed():
        fault = Fault(
            "extra.missing", "triton", "is not installed", f"pip install triton, or unset {VARIABLE}"
        )
        raise MupscaleError("the Triton kernel was asked for and cannot be used", [fault])
    kinds = [out.dtype] if base is None else [out.dtype, base.dtype]
    return all(kind in _TYPES for kind in kinds) and out.dim() > 0


def expand_noisy_(
    out: Tensor,
    base: Tensor | None,
    making: Making,
    out_at: Sequence[int],
    base_at: Sequence[int],
    noise: TensorNoise,
) -> Tensor:
    """The slice of `making` with its noise at `out_at`; `base` is the slice of the base tensor at `base_at`."""
    source = None if base is None else base.contiguous()
    for region in regions(noise, making.axes, out_at, out.shape):
        part = out
        for dim, (low, length) in enumerate(zip(region.start, region.shape, strict=True)):
            part = part.narrow(dim, low - out_at[dim], length)
        _launch(part, source, making, region, base_at, noise.stream)
    return out


def _launch(
    out: Tensor, base: Tensor | None, making: Making, region: Region, base_at: Sequence[int], stream: Stream
) -> None:
    """One region, as a matrix of rows: the dimensions before `split` and those from it on."""
    from . import kernel

    if not out.numel():
        return
    device, axes = out.device, making.axes
    split = _split(making, region)
    rows, columns = prod(out.shape[:split]), prod(out.shape[split:])
    matrix = _as_matrix(out, rows, columns)
    made = torch.empty(rows, columns, dtype=out.dtype, device=device) if matrix is None else matrix
    strides = [prod(axis.wide for axis in axes[dim + 1 :]) for dim in range(len(axes))]
    firsts = _sums([_along(region, dim, strides[dim], device) for dim in range(split)], device)
    firsts += sum(region.start[dim] * strides[dim] for dim in range(split, len(axes)))
    base_rows = base_columns = paired_rows = paired_columns = nothing = firsts[:1]
    if base is not None:
        places = [
            _places(making, dim, region, base_at[dim], base.stride(dim), device) for dim in range(len(axes))
        ]
        base_rows, base_columns = _sums(places[:split], device), _sums(places[split:], device)
    copies = 0
    if region.paired is not None:
        copies = int(axes[region.paired].k)
        away = [_away(making, dim, region, copies, strides[dim], device) for dim in range(len(axes))]
        paired_rows, paired_columns = (
            _distances(away[:split], copies, device),
            _distances(away[split:], copies, device),
        )
    operand, divides = making.scale.operand
    numbers = [
        operand,
        float(making.fill_(torch.empty((), dtype=torch.float32, device="cpu"))) if base is None else 0.0,
        region.level,
        float(copies),
        centred_spread(copies) if copies > 1 else 0.0,
    ]
    # Three more than the columns, since a row may begin in the middle of a counter.
    block = max(_LEAST_BLOCK, min(_BLOCK, 1 << (columns + 2).bit_length()))
    kernel.make_slice[rows, -(-(columns + 3) // block)](
        _bits(made),
        nothing if base is None else _bits(base),
        base_rows,
        base_columns,
        firsts,
        _stds(region, rows, device),
        paired_rows,
        paired_columns,
        torch.tensor(stream.words, dtype=torch.int64, device="cpu").to(device, non_blocking=True),
        quantiles(str(device)),
        torch.tensor(numbers, dtype=torch.float32, device="cpu").to(device, non_blocking=True),
        columns,
        made.stride(0),
        filled=base is None,
        scale="one" if making.scale.is_one else "quotient" if divides else "product",
        shift=0 if making.scale.is_one else making.shift,
        noisy=any(region.std) if isinstance(region.std, tuple) else bool(region.std),
        copies=copies,
        levelled=bool(region.level),
        base_bf16=base is not None and base.dtype == torch.bfloat16,
        out_bf16=out.dtype == torch.bfloat16,
        block=block,
        enable_fp_fusion=False,
    )
    if matrix is None:
        out.copy_(made.view(out.shape))


def _split(making: Making, region: Region) -> int:
    """The first dimension of the columns: the last one, and those before it as long as rows are short and whole.

    The rows of a convolution (64, 32, 3, 3) would have 3 columns; taken together they have 32 · 3 · 3 = 288.
    """
    split = len(making.axes) - 1
    columns, wide = region.shape[split], making.wide_shape
    first = 1 if isinstance(region.std, tuple) else 0
    while split > first and region.shape[split] == wide[split] and columns < _BLOCK:
        split -= 1
        columns *= region.shape[split]
        if columns > _MOST_COLUMNS:
            return split + 1
    return split


def _as_matrix(out: Tensor, rows: int, columns: int) -> Tensor | None:
    """The tensor as a matrix in its own memory; None where its strides do not allow it."""
    try:
        matrix = out.view(rows, columns)
    except RuntimeError:
        return None
    return matrix if columns == 1 or matrix.stride(1) == 1 else None


def _bits(tensor: Tensor) -> Tensor:
    """bfloat16 as integers, which the kernel rounds and grows itself."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _along(region: Region, dim: int, stride: int, device: torch.device) -> Tensor:
    return (torch.arange(region.shape[dim], device=device) + region.start[dim]) * stride


def _sums(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of one entry of each part, for all combinations in row-major order; negative where one of them is.

    >>> _sums([torch.tensor([0, 10, -1]), torch.tensor([0, 1])], torch.device("cpu")).tolist()
    [0, 1, 10, 11, -1, -1]
    """
    found = torch.zeros(1, dtype=torch.int64, device=device)
    for part in parts:
        outer, inner = found[:, None], part[None, :]
        found = torch.where((outer < 0) | (inner < 0), -1, outer + inner).flatten()
    return found


def _distances(parts: Sequence[Tensor], copies: int, device: torch.device) -> Tensor:
    """The sum of one row of each part, for all combinations in row-major order: a distance for each copy."""
    found = torch.zeros(1, copies, dtype=torch.int64, device=device)
    for part in parts:
        found = (found[:, None] + part[None]).flatten(0, 1)
    return found.contiguous()


def _places(
    making: Making, dim: int, region: Region, base_at: int, stride: int, device: torch.device
) -> Tensor:
    """For every index of a region along a dimension, how far its base entry lies into the base slice; -1 for zeros."""
    low, length = region.start[dim], region.shape[dim]
    found = torch.full((length,), -1, dtype=torch.int64, device=device)
    for piece in making.axes[dim].pieces(low, low + length):
        if piece.factors is None:
            continue
        indices = torch.arange(piece.base_length, device=device).view([size for size, _ in piece.factors])
        for d, (_, k) in enumerate(piece.factors):
            # expanded and not repeated: repeat_interleave waits for the device
            indices = indices.unsqueeze(d + 1).expand(*indices.shape[: d + 1], k, *indices.shape[d + 1 :])
            indices = indices.flatten(d, d + 1)
        at = piece.start - low
        found[at : at + piece.length] = (indices.flatten() + (piece.base_start - base_at)) * stride
    return found


def _away(making: Making, dim: int, region: Region, copies: int, stride: int, device: torch.device) -> Tensor:
    """For every index of a region along a dimension, how many elements away each of its copies is."""
    low, length = region.start[dim], region.shape[dim]
    if dim != region.paired:
        return torch.zeros(length, copies, dtype=torch.int64, device=device)
    by_unit = copies_of(making.axes[dim])
    table = torch.zeros(making.axes[dim].wide, copies, dtype=torch.int64, device="cpu")
    for copy in range(copies):
        table[by_unit[:, copy]] = by_unit
    distance = table[low : low + length] - torch.arange(low, low + length, device="cpu")[:, None]
    return (distance * stride).to(device, non_blocking=True)


def _stds(region: Region, rows: int, device: torch.device) -> Tensor:
    """The size of the noise of each row, in float32."""
    if not isinstance(region.std, tuple):
        return torch.full((rows,), region.std, dtype=torch.float32, device=device)
    low, count = region.start[0], region.shape[0]
    sizes = torch.tensor(region.std[low : low + count], dtype=torch.float32, device="cpu")
    sizes = sizes.to(device, non_blocking=True)
    return sizes[:, None].expand(-1, rows // count).contiguous().flatten()
