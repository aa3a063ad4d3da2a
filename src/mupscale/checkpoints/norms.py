"""Spectral norms of tensors where they lie: rows are read in stretches, no tensor is held whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ..jobs.blocks import BlockMaker, Reader, from_files
from ..jobs.job import Move
from ..jobs.units import Block
from ..rules.axes import Axis
from ..rules.scale import ONE
from ..tensors.spectral import streamed_spectral_norm
from ..training.noises import Measure


def measured_in(base: Path, moves: Sequence[Move], names: Mapping[str, str]) -> Measure:
    """A measure for `resolve_noise` that reads what the moves would read; `names` gives a move's planned tensor."""
    parts: dict[str, list[Move]] = {}
    for move in moves:
        if move.sources:
            parts.setdefault(names.get(move.name, move.name), []).append(as_stored(move))

    def measure(name: str, stacked: bool) -> Tensor:
        with Reader(base) as reader:
            return measured_by(BlockMaker(from_files(reader)), parts[name], stacked)

    return measure


def measured_by(maker: BlockMaker, parts: Sequence[Move], stacked: bool) -> Tensor:
    """The norm of one base tensor, or of every matrix along dimension 0, from moves that change nothing."""
    shape = tuple(axis.base for axis in parts[0].axes)
    read = _rows(maker, parts)
    if len(shape) < 2:
        length: Tensor = torch.linalg.vector_norm(read((), 0, prod(shape)).double())
        return length
    if not stacked:
        return streamed_spectral_norm(partial(read, ()), (shape[0], prod(shape[1:])))
    size = (shape[1], prod(shape[2:]))
    return torch.stack([streamed_spectral_norm(partial(read, (i,)), size) for i in range(shape[0])])


def as_stored(move: Move) -> Move:
    """The move that changes nothing: what is stored of the base tensor, sources joined, as it is."""
    axes = tuple(Axis.fixed(axis.base) for axis in move.axes)
    plain = replace(move, axes=axes, scale=ONE, shift=0, noise=None)
    return replace(
        plain, target=replace(move.target, dtype=move.sources[0].dtype, shape=tuple(plain.window("wide")[1]))
    )


def _rows(maker: BlockMaker, parts: Sequence[Move]) -> Callable[[tuple[int, ...], int, int], Tensor]:
    """A function that reads rows of the matrix behind the indices `outer`, from however many stored parts."""

    def read(outer: tuple[int, ...], first: int, last: int) -> Tensor:
        found: dict[int, Tensor] = {}
        for move in parts:
            start, shape = move.window("wide")
            at = len(outer)
            if any(not a <= i < a + n for i, a, n in zip(outer, start, shape, strict=False)):
                continue
            low, high = max(first, start[at]), min(last, start[at] + shape[at])
            if low < high:
                inside = (
                    *(i - a for i, a in zip(outer, start, strict=False)),
                    low - start[at],
                    *(0,) * (len(shape) - at - 1),
                )
                block = Block(move, inside, (*(1,) * at, high - low, *shape[at + 1 :]))
                found[low] = maker.make(block).reshape(high - low, prod(shape[at + 1 :])).clone()
        return torch.cat([found[low] for low in sorted(found)])

    return read
