"""The Triton kernel: widening, noise and rounding of one slice in one pass, with the bits of the CPU.

Imported by `launch.py` alone, since it needs triton. Three things keep the bits: sums and products are not fused
(`enable_fp_fusion=False` at the launch), quotients are rounded to nearest, and bfloat16 is rounded in integers.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..philox import MULTIPLIERS, ROUNDS, WEYL

M0, M1 = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
W0, W1 = tl.constexpr(WEYL[0]), tl.constexpr(WEYL[1])
TURNS = tl.constexpr(ROUNDS)


@triton.jit  # type: ignore[untyped-decorator]
def philox(counter: Any, key: Any) -> Any:
    """Four words of 32 random bits for each 64-bit counter; `key` points at the four words of a stream."""
    c0 = (counter & 0xFFFFFFFF).to(tl.uint32)
    c1 = (counter >> 32).to(tl.uint32)
    zero = c0 ^ c0
    k0 = zero + (tl.load(key) & 0xFFFFFFFF).to(tl.uint32)
    k1 = zero + (tl.load(key + 1) & 0xFFFFFFFF).to(tl.uint32)
    c2 = zero + (tl.load(key + 2) & 0xFFFFFFFF).to(tl.uint32)
    c3 = zero + (tl.load(key + 3) & 0xFFFFFFFF).to(tl.uint32)
    m0, m1 = zero + M0, zero + M1
    for _ in tl.static_range(TURNS):
        high0, low0 = tl.umulhi(c0, m0), c0 * m0
        high1, low1 = tl.umulhi(c2, m1), c2 * m1
        c0, c1 = high1 ^ c1 ^ k0, low1
        c2, c3 = high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + W0, k1 + W1
    return c0, c1, c2, c3


@triton.jit  # type: ignore[untyped-decorator]
def normal(word: Any, table: Any) -> Any:
    """A standard normal number from 32 random bits: the sum of two entries of the table of quantiles."""
    return tl.load(table + (word & 0xFFFF).to(tl.int32)) + tl.load(table + (word >> 16).to(tl.int32))


@triton.jit  # type: ignore[untyped-decorator]
def normal_of(element: Any, key: Any, table: Any) -> Any:
    """The standard normal number of each element of a tensor."""
    c0, c1, c2, c3 = philox(element >> 2, key)
    lane = element & 3
    return normal(tl.where(lane == 0, c0, tl.where(lane == 1, c1, tl.where(lane == 2, c2, c3))), table)


@triton.jit  # type: ignore[untyped-decorator]
def make_slice(
    out: Any,
    base: Any,
    base_rows: Any,
    base_columns: Any,
    firsts: Any,
    stds: Any,
    paired_rows: Any,
    paired_columns: Any,
    key: Any,
    table: Any,
    numbers: Any,
    columns: Any,
    out_stride: Any,
    filled: tl.constexpr,
    scale: tl.constexpr,
    shift: tl.constexpr,
    noisy: tl.constexpr,
    copies: tl.constexpr,
    levelled: tl.constexpr,
    base_bf16: tl.constexpr,
    out_bf16: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One row of a slice, `block` entries of it: program (row, block).

    Entry (r, c) reads base[base_rows[r] + base_columns[c]], or is zero where one of the two is negative. Its number
    in the whole wide tensor is firsts[r] + c, and its noise has the size stds[r]. Paired noise (`copies` > 0) also
    reads the noise of its other copies, paired_rows[r, j] + paired_columns[c, j] elements away. `numbers` holds the
    scale, the filling, the level, the number of copies and √(k / (k - 1)) in float32.

    A block begins at a multiple of 4 elements, so that it uses whole counters of Philox. For a row whose first
    element is 6, block 0 draws elements 4, 5, 6, 7, … and its first two entries are masked.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(firsts + row)
    skip = first & 3
    column = tl.program_id(1) * block + tl.arange(0, block) - skip
    inside = (column >= 0) & (column < columns)
    if filled:
        y = tl.zeros((block,), tl.float32) + tl.load(numbers + 1)
    else:
        base_row = tl.load(base_rows + row) + tl.zeros((block,), tl.int64)
        base_column = tl.load(base_columns + column, mask=inside, other=-1)
        copied = inside & (base_row >= 0) & (base_column >= 0)
        x = tl.load(base + base_row + base_column, mask=copied, other=0)
        y = x.to(tl.float32)
        if base_bf16:
            y = ((x.to(tl.int32) & 0xFFFF) << 16).to(tl.float32, bitcast=True)
        if shift:
            y = y + shift
        if scale == "quotient":
            y = tl.div_rn(y, tl.zeros((block,), tl.float32) + tl.load(numbers))
        if scale == "product":
            y = y * tl.load(numbers)
        if shift:
            y = y - shift
        y = tl.where(copied, y, 0.0)
    if noisy:
        if copies:
            element = first + column
            z = normal_of(element, key, table)
            total = tl.zeros((block,), tl.float32)
            for j in tl.static_range(copies):
                away = tl.load(paired_rows + row * copies + j)
                away = away + tl.load(paired_columns + column * copies + j, mask=inside, other=0)
                other = normal_of(element + away, key, table)
                total = other if j == 0 else total + other
            total = tl.div_rn(total, tl.zeros((block,), tl.float32) + tl.load(numbers + 3))
            z = (z - total) * tl.load(numbers + 4)
        else:
            counter = (first >> 2) + tl.program_id(1) * (block // 4) + tl.arange(0, block // 4)
            c0, c1, c2, c3 = philox(counter, key)
            z = normal(tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3)), table)
        y = y + z * tl.load(stds + row)
    if levelled:
        y = y + tl.load(numbers + 2)
    place = out + row * out_stride + column
    if out_bf16:
        bits = y.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(place, tl.where(y == y, rounded, 0x7FC0).to(tl.int16), mask=inside)
    else:
        tl.store(place, y.to(out.dtype.element_ty), mask=inside)
