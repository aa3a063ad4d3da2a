"""The matrices that an optimizer sees in a tensor, and how their sizes and number change.

Muon and its relatives make each matrix orthogonal. So their rates depend on the copies inside one matrix, not on those of
whole matrices: experts in a stack, heads that are stepped one by one, copies that lie in other tensors.
Knows: axes and shapes, in integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod

from .axes import Axis
from .units import Change

Shape = tuple[int, ...]


def short_dimension(shape: Sequence[int]) -> int:
    """The dimension, -1 or -2, along which a matrix is shorter; -1 for a square one.

    >>> short_dimension((8, 4)), short_dimension((4, 8)), short_dimension((4, 4))
    (-1, -2, -1)
    """
    return -1 if shape[-2] >= shape[-1] else -2


def copied_blocks(axis: Axis, blocks: int) -> int | None:
    """How many times each of the equal blocks of an axis is copied as a whole; None if blocks do not stay whole.

    Two heads of three rows, each head twice, have blocks that are copied twice. Six rows, each row twice, have two blocks
    that are copied once and are twice as long:

    >>> copied_blocks(Axis.parse("out: 2x2 * 3"), 2), copied_blocks(Axis.parse("out: 6x2"), 2)
    (2, 1)
    >>> copied_blocks(Axis.parse("out: 3x2 * 2"), 2) is None          # a block of one and a half units
    True
    """
    if blocks < 1 or axis.base % blocks or axis.k.denominator != 1:
        return None
    size, k = axis.base // blocks, int(axis.k)
    sources = [axis.source(i) for i in range(axis.wide)]
    for copies in (copies for copies in range(k, 0, -1) if k % copies == 0):
        if axis.wide % (blocks * copies):
            continue
        length = axis.wide // (blocks * copies)
        found = [
            {i for i in sources[start : start + length] if i is not None}
            for start in range(0, axis.wide, length)
        ]
        if all(
            rows == set(range(b // copies * size, (b // copies + 1) * size)) for b, rows in enumerate(found)
        ):
            return copies
    return None


def with_matrices(change: Change, axes: Sequence[Axis], blocks: int = 1, copies: int = 1) -> Change:
    """The change of a tensor whose last two dimensions are matrices, or rows of `blocks` matrices copied `copies` times.

    >>> from mupscale.rules import Scale
    >>> axes = Axis.parse("out: 8x2"), Axis.parse("in: 4x3")
    >>> seen = with_matrices(Change(Scale.of("1/3"), Fraction(6)), axes)
    >>> tuple(map(str, (seen.rows, seen.columns, seen.short, seen.blocks)))
    ('2', '3', '3', '1')
    """
    rows, columns = axes[-2:]
    before, after = (rows.base // blocks, columns.base), (rows.wide // (blocks * copies), columns.wide)
    inside = prod((axis.k for axis in axes[-2:]), start=Fraction(1, copies))
    return replace(
        change,
        rows=Fraction(after[0], before[0]),
        columns=Fraction(after[1], before[1]),
        short=Fraction(min(after), min(before)),
        blocks=change.c / inside,
    )
