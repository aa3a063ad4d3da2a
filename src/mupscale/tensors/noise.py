"""Noise for any slice of a wide tensor, the same bits however the tensor is cut.

Element i of the wide tensor, in row-major order, gets σ · z_i with z from the tensor's own stream. Paired noise
is made zero-sum over the copies along one dimension, so that it does not change a layer's output. A split gives every entry
whole to one of its copies along a dimension. Noise that is the same for all units parts copies along one hyperplane. Knows how a rectangle is divided into runs of elements; `philox.py` and,
compiled, `compiled.py` draw a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod, sqrt
from typing import Literal

import torch
from torch import Tensor

from ..errors import MupscaleError
from ..rules.axes import Axis
from .compiled import kernel_for
from .entry_sources import copies_of, numbered
from .philox import Stream, normals, uniforms

_BLOCK = 1 << 16  # numbers drawn at a time: the integer temporaries stay in cache


Region = Literal["copies", "wakes", "row", "asleep"]
"""What a rectangle of a tensor is: copies, zeros that wake, zeros of a new row, or zeros that stay."""


@dataclass(frozen=True)
class Waking:
    """What the zeros of a tensor get, in place of the noise of its copies."""

    std: float | tuple[float, ...] = 0.0
    cut: tuple[int, ...] = ()
    """Dimensions whose zeros stay zero."""
    level: float = 0.0
    """A number that is added to every zero: what a gain is when it wakes."""
    mean: tuple[float, ...] | None = None
    """What zeros along dimension 0 become, with one number for every index of the rest of the tensor: the row of a new word.
    They get no noise. Of a vector it is one number."""
    copied: bool = False
    """Whether the other zeros are made as copies of trained units, which `expand.py` does, before they get noise."""

    def regions(
        self, out: Tensor, axes: Sequence[Axis], start: Sequence[int]
    ) -> Iterator[tuple[Tensor, list[int], Region]]:
        """`out`, the rectangle at `start`, cut where zeros begin: its parts, where they start, and what they are."""
        by_dim = [runs(axis, at, n) for axis, at, n in zip(axes, start, out.shape, strict=True)]
        for region in product(*by_dim):
            part = out
            for dim, (first, length, _) in enumerate(region):
                part = part.narrow(dim, first - start[dim], length)
            padded = [dim for dim, (_, _, zero) in enumerate(region) if zero]
            kind: Region = "wakes"
            if not padded:
                kind = "copies"
            elif self.mean is not None and padded == [0]:
                kind = "row"
            elif set(padded) & set(self.cut):
                kind = "asleep"
            yield part, [first for first, _, _ in region], kind


@dataclass(frozen=True)
class TensorNoise:
    """The noise of one tensor: its stream, its absolute size, the dimension it is paired along, a row without."""

    stream: Stream
    std: float | tuple[float, ...]
    """One number, or one for every index of dimension 0 (stacked experts)."""
    paired: int | None = None
    without_row: int | None = None
    """An index of dimension 0 that gets no noise: the padding row of an embedding."""
    zeros: Waking | None = None
    """What zeros behind copies get; None for the same noise everywhere."""
    split: int | None = None
    """The dimension along which each entry goes whole to one of its copies, before noise is added."""
    apart: int | None = None
    """The dimension along which all units have the same noise, one draw for every number of a copy, which sums to zero over
    the copies."""

    def slice(self, axes: Sequence[Axis], start: Sequence[int], shape: Sequence[int], like: Tensor) -> Tensor:
        """The noise of the rectangle at `start`, on the device of `like`, in float32 or its wider dtype."""
        if self.zeros is not None:
            dtype = torch.promote_types(like.dtype, torch.float32)
            return self.add_(torch.zeros(list(shape), dtype=dtype, device=like.device), axes, start)
        if self.apart is not None:
            return self._same_for_units(axes, start, shape, like, self.apart)
        lows, sizes = list(start), list(shape)
        if self.paired is not None:
            copies = copies_of(axes[self.paired])
            copies, low, high = _together(copies, start[self.paired], shape[self.paired])
            lows[self.paired], sizes[self.paired] = low, high - low
        z = rectangle(self.stream, [axis.wide for axis in axes], lows, sizes, like.device)
        z = z.to(torch.promote_types(like.dtype, torch.float32))
        if self.paired is not None:
            z = pair(z, copies - low, self.paired)
            z = z.narrow(self.paired, start[self.paired] - low, shape[self.paired])
        if isinstance(self.std, float):
            z = z * self.std
        else:
            part = self.std[start[0] : start[0] + shape[0]]
            z = z * z.new_tensor(part).view(-1, *[1] * (z.dim() - 1))
        if (row := self._row(start, shape)) is not None:
            z[row] = 0
        return z

    def _same_for_units(
        self, axes: Sequence[Axis], start: Sequence[int], shape: Sequence[int], like: Tensor, dim: int
    ) -> Tensor:
        """`slice` of noise that depends on the number of the copy and not on the unit.

        >>> axes, noise = [Axis.parse("out: 3x2"), Axis.fixed(4)], TensorNoise(Stream(0, "w"), 0.1, apart=0)
        >>> found = noise.slice(axes, [0, 0], [6, 4], torch.empty(0))
        >>> torch.equal(found[:2], found[4:]), torch.equal(found[0], -found[1])
        (True, True)
        """
        k = int(axes[dim].k)
        whole, lows, sizes = [axis.wide for axis in axes], list(start), list(shape)
        whole[dim], lows[dim], sizes[dim] = k, 0, k
        with (
            torch._C.DisableTorchFunction()
        ):  # drawn in float32, also where a proof makes every tensor float64
            z = rectangle(self.stream, whole, lows, sizes, like.device)
        z = pair(z.to(torch.promote_types(like.dtype, torch.float32)), torch.arange(k).view(1, k), dim)
        numbers = numbered(axes[dim])[1][start[dim] : start[dim] + shape[dim]]
        assert isinstance(self.std, float), "one size for all units"
        return z.index_select(dim, numbers.to(z.device)) * self.std

    def _row(self, start: Sequence[int], shape: Sequence[int]) -> int | None:
        """The row without noise as an index of the rectangle; None if it is not in it."""
        if self.without_row is None or not start[0] <= self.without_row < start[0] + shape[0]:
            return None
        return self.without_row - start[0]

    def add_(self, out: Tensor, axes: Sequence[Axis], start: Sequence[int]) -> Tensor:
        """Add the noise of the rectangle at `start` to `out`, which holds it in float32 or wider, and return it.

        For a split, `out` holds every entry whole in each of its copies, and all but one of them become zero.

        >>> axes, noise = [Axis.fixed(4), Axis.fixed(9)], TensorNoise(Stream(0, "w"), 0.1)
        >>> part = noise.add_(torch.ones(2, 9), axes, [1, 0])
        >>> torch.equal(part, 1 + noise.slice(axes, [1, 0], [2, 9], part))
        True
        """
        if self.zeros is not None:
            return self._add_apart_(out, axes, start, self.zeros)
        if self.split is not None:
            self._keep_one_(out, axes, start, self.split)
        if self.std == 0:
            return out
        if (row := self._row(start, out.shape)) is not None:
            # The row is not touched at all: adding 0 would turn -0.0 into 0.0.
            self.add_(out[:row], axes, start)
            self.add_(out[row + 1 :], axes, [start[0] + row + 1, *start[1:]])
            return out
        if out.numel() == 0:
            return out
        plain = out.device.type == "cpu" and out.dtype == torch.float32 and out.is_contiguous()
        kernel = (
            kernel_for(0) if plain and self.paired is None and self.apart is None else None
        )  # `rectangle` counts what is drawn
        if kernel is None:
            return out.add_(self.slice(axes, start, out.shape, out))
        starts, run, stds = self._rows(out, axes, start)
        kernel.add_(out.view(len(starts), run), self.stream, starts, stds)
        return out

    def rounds(self, out: Tensor, start: Sequence[int]) -> bool:
        """Whether `round_` can be used: for bfloat16 in plain memory, compiled, with noise of one kind everywhere."""
        plain = out.device.type == "cpu" and out.dtype == torch.bfloat16 and out.is_contiguous()
        special = (self.paired, self.zeros, self.split, self.apart, self._row(start, out.shape)) != (
            None,
        ) * 5
        return plain and not special and self.std != 0 and out.numel() > 0 and kernel_for(0) is not None

    def round_(
        self, out: Tensor, axes: Sequence[Axis], start: Sequence[int], scale: float, *, divides: bool
    ) -> bool:
        """out · scale, or out / scale, plus the noise of the rectangle at `start`, where it `rounds`: rounded once, in place.

        False if a number was not finite; then `out` holds anything.
        """
        kernel = kernel_for(0)
        if kernel is None:
            return False
        starts, run, stds = self._rows(out, axes, start)
        return kernel.round_(out.view(len(starts), run), self.stream, starts, stds, scale, divides=divides)

    def _rows(self, out: Tensor, axes: Sequence[Axis], start: Sequence[int]) -> tuple[Tensor, int, Tensor]:
        """The runs of a rectangle: the first element of each, their common length, and the size of noise in each."""
        stacked = isinstance(self.std, tuple)
        starts, run = _runs([axis.wide for axis in axes], start, out.shape, out.device, least=int(stacked))
        if isinstance(self.std, float):
            return (
                starts,
                run,
                torch.full((len(starts),), self.std, dtype=torch.float32, device=starts.device),
            )
        part = torch.tensor(
            self.std[start[0] : start[0] + out.shape[0]], dtype=torch.float32, device=starts.device
        )
        return starts, run, part.repeat_interleave(len(starts) // max(1, len(part)))

    def _add_apart_(self, out: Tensor, axes: Sequence[Axis], start: Sequence[int], zeros: Waking) -> Tensor:
        """`add_` where zeros get something else than copies: the rectangle is cut where zeros begin."""
        copies = replace(self, zeros=None)
        new = replace(self, zeros=None, std=zeros.std, paired=None, split=None, apart=None)
        for part, at, kind in zeros.regions(out, axes, start):
            if kind == "copies":
                copies.add_(part, axes, at)
            elif kind == "row":
                assert zeros.mean is not None
                part.add_(_within(zeros.mean, axes, at, part))
            elif kind == "wakes":
                new.add_(part, axes, at)
                if zeros.level:
                    part.add_(zeros.level)
        return out

    def _keep_one_(self, out: Tensor, axes: Sequence[Axis], start: Sequence[int], dim: int) -> None:
        """Make all copies along `dim` zero but one, which is drawn by the index of the first copy.

        Of k copies it is number ⌊k u⌋ with u in (0, 1), so every slice draws the same one.
        """
        axis, whole, k = axes[dim], [axis.wide for axis in axes], int(axes[dim].k)
        if not out.numel():
            return
        firsts, numbers = numbered(axis)
        shape = [-1 if d == dim else 1 for d in range(out.dim())]
        # Piece by piece: the first copies of one lie close together, those of two may be far apart.
        for piece in axis.pieces(start[dim], start[dim] + out.shape[dim]):
            if piece.factors is None:
                continue
            here = slice(piece.start, piece.start + piece.length)
            first, number = firsts[here], numbers[here].to(out.device).view(shape)
            lows, sizes = list(start), list(out.shape)
            lows[dim] = int(first.min())
            sizes[dim] = int(first.max()) + 1 - lows[dim]
            u = rectangle(self.stream, whole, lows, sizes, out.device, uniforms)
            u = u.index_select(dim, (first - lows[dim]).to(out.device))
            drawn = (u * k).long().clamp_(max=k - 1)  # the largest u is rounded to 1
            out.narrow(dim, piece.start - start[dim], piece.length).masked_fill_(drawn != number, 0)


def _within(row: tuple[float, ...], axes: Sequence[Axis], start: Sequence[int], like: Tensor) -> Tensor:
    """The part of a row of the wide tensor that lies in the rectangle at `start`, of the shape of `like`."""
    whole = like.new_tensor(row).view([axis.wide for axis in axes[1:]])
    for dim, size in enumerate(like.shape[1:]):
        whole = whole.narrow(dim, start[dim + 1], size)
    return whole


def runs(axis: Axis, start: int, length: int) -> list[tuple[int, int, bool]]:
    """A range of a wide axis as (start, length, whether it is zeros), as few as there are.

    >>> runs(Axis.parse("4x2+3"), 6, 4)
    [(6, 2, False), (8, 2, True)]
    """
    found: list[tuple[int, int, bool]] = []
    for piece in axis.pieces(start, start + length):
        zeros = piece.factors is None
        if found and found[-1][2] == zeros:
            first, so_far, _ = found.pop()
            found.append((first, so_far + piece.length, zeros))
        else:
            found.append((piece.start, piece.length, zeros))
    return found


def rectangle(
    stream: Stream,
    whole: Sequence[int],
    start: Sequence[int],
    shape: Sequence[int],
    device: torch.device,
    draw: Callable[[Stream, Tensor, int], Tensor] = normals,
) -> Tensor:
    """Random numbers, standard normal by default, for the rectangle `start`, `shape` of a tensor of shape `whole`.

    >>> stream, cpu = Stream(0, "w"), torch.device("cpu")
    >>> full = rectangle(stream, (5, 7), (0, 0), (5, 7), cpu)
    >>> torch.equal(rectangle(stream, (5, 7), (1, 2), (3, 4), cpu), full[1:4, 2:6])
    True
    """
    starts, run = _runs(whole, start, shape, device)
    kernel = kernel_for(prod(shape)) if draw is normals and device.type == "cpu" else None
    if kernel is not None:
        return kernel.normals(stream, starts, run).view(list(shape))
    out = torch.empty(len(starts), run, dtype=torch.float32, device=device)
    if run > _BLOCK:
        for row in range(len(starts)):
            for at in range(0, run, _BLOCK):
                size = min(_BLOCK, run - at)
                out[row, at : at + size] = draw(stream, starts[row : row + 1] + at, size)[0]
    else:
        step = max(1, _BLOCK // max(1, run))
        for row in range(0, len(starts), step):
            out[row : row + step] = draw(stream, starts[row : row + step], run)
    return out.view(list(shape))


def _runs(
    whole: Sequence[int], start: Sequence[int], shape: Sequence[int], device: torch.device, least: int = 0
) -> tuple[Tensor, int]:
    """The first elements of the runs a rectangle consists of, in row-major order, and their common length.

    Runs lie within one index of each of the first `least` dimensions.
    """
    strides = [prod(whole[d + 1 :]) for d in range(len(whole))]
    inner = max(0, len(whole) - 1)
    while inner and shape[inner] == whole[inner]:
        inner -= 1  # dimensions after `inner` are taken whole, so a run continues through them
    inner = max(inner, least)
    starts = torch.zeros(1, dtype=torch.int64, device=device)
    for d in range(inner):
        along = (torch.arange(shape[d], device=device) + start[d]) * strides[d]
        starts = (starts[:, None] + along).flatten()
    if inner < len(whole):
        starts = starts + start[inner] * strides[inner]
    return starts, prod(shape[inner:])


def _together(copies: Tensor, start: int, length: int) -> tuple[Tensor, int, int]:
    """Of a table of copies, the rows that meet a range of the wide axis, and the range that holds them and it."""
    stop = start + length
    met = copies[((copies >= start) & (copies < stop)).any(1)]
    if not met.numel():
        return met, start, stop
    return met, min(start, int(met.min())), max(stop, int(met.max()) + 1)


def pair(z: Tensor, copies: Tensor, dim: int) -> Tensor:
    """Subtract the mean over the copies along `dim`, and restore the variance; what has no copies is left alone.

    Row b of `copies` lists the indices that copy one unit of the base.
    """
    k = copies.shape[1]
    if k < 2:
        raise MupscaleError(
            f"dimension {dim} has {k} of each unit, expected copies to pair; use MupNoise for this tensor",
            code="noise.no_copies_to_pair",
        )
    copies = copies.to(z.device)
    total = z.index_select(dim, copies[:, 0])
    for copy in range(1, k):  # in a fixed order, so that the bits do not depend on threads
        total = total + z.index_select(dim, copies[:, copy])
    out = z.clone()
    # The divisor is a tensor because CUDA turns division by a plain number into a product with its reciprocal.
    mean = total / total.new_full((), k)
    for copy in range(k):
        centred = z.index_select(dim, copies[:, copy]) - mean
        out.index_copy_(dim, copies[:, copy], centred * centred_spread(k))
    return out


def centred_spread(k: int) -> float:
    """What numbers that are centred over k copies are multiplied by, to have the variance they had before."""
    return sqrt(k / (k - 1))
