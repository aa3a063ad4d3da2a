"""The rectangle of a tensor's noise as regions in which every entry gets noise of one kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from ...rules.axes import Axis
from ..noise import TensorNoise, runs


@dataclass(frozen=True)
class Region:
    """A rectangle of the wide tensor, and the noise of its entries."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    std: float | tuple[float, ...]
    """One size, or one for every index of dimension 0 of the wide tensor; 0 for none."""
    paired: int | None = None
    level: float = 0.0
    """What is added to every entry after the noise."""


def regions(
    noise: TensorNoise, axes: Sequence[Axis], start: Sequence[int], shape: Sequence[int]
) -> Iterator[Region]:
    """Cut a rectangle where zeros begin and around the row that gets no noise.

    >>> from ..noise import Waking
    >>> from ..philox import Stream
    >>> noise = TensorNoise(Stream(0, "w"), 0.1, zeros=Waking(0.2))
    >>> [(r.start, r.shape, r.std) for r in regions(noise, [Axis.parse("2x2+1")], [1], [4])]
    [((1,), (3,), 0.1), ((4,), (1,), 0.2)]
    """
    zeros, row = noise.zeros, noise.without_row
    by_dim = [runs(axis, at, n) for axis, at, n in zip(axes, start, shape, strict=True)]
    if zeros is None:
        by_dim = [[(at, n, False)] for at, n in zip(start, shape, strict=True)]
    if row is not None:
        by_dim[0] = [part for piece in by_dim[0] for part in _around(row, piece)]
    for region in product(*by_dim):
        lows, sizes = tuple(low for low, _, _ in region), tuple(n for _, n, _ in region)
        padded = {dim for dim, (_, _, zero) in enumerate(region) if zero}
        if lows[:1] == (row,):
            quiet = zeros is None or not padded or padded & set(zeros.cut)
            yield Region(lows, sizes, 0.0, level=0.0 if quiet or zeros is None else zeros.level)
        elif zeros is None or not padded:
            yield Region(lows, sizes, noise.std, noise.paired)
        elif padded & set(zeros.cut):
            yield Region(lows, sizes, 0.0)
        else:
            yield Region(lows, sizes, zeros.std, level=zeros.level)


def _around(row: int, piece: tuple[int, int, bool]) -> list[tuple[int, int, bool]]:
    """A range of dimension 0 cut before and after a row, which is a part of its own."""
    low, length, zero = piece
    if not low <= row < low + length:
        return [piece]
    parts = [(low, row - low, zero), (row, 1, zero), (row + 1, low + length - row - 1, zero)]
    return [part for part in parts if part[1]]
