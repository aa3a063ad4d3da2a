"""Spectral norms of tensors where they lie: rows are read in stretches, no tensor is held whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ..jobs.blocks import Reader, StoredBase, stored_base
from ..jobs.job import Move
from ..tensors.spectral import streamed_spectral_norm
from ..training.noises import Measure


def measured_in(base: Path, moves: Sequence[Move], names: Mapping[str, str]) -> Measure:
    """A measure for `resolve_noise` that reads what the moves would read; `names` gives a move's planned tensor."""
    parts: dict[str, list[Move]] = {}
    for move in moves:
        if move.sources:
            parts.setdefault(names.get(move.name, move.name), []).append(move)

    def measure(name: str, stacked: bool) -> Tensor:
        with Reader(base) as reader:
            stored = [part for move in parts[name] if (part := stored_base(move, reader)) is not None]
            return measured_by(stored, parts[name][0].making.base_shape, stacked)

    return measure


def measured_by(parts: Sequence[StoredBase], shape: tuple[int, ...], stacked: bool) -> Tensor:
    """The norm of one base tensor of `shape`, or of every matrix along dimension 0, from its stored parts."""
    read = _rows(parts)
    if len(shape) < 2:
        length: Tensor = torch.linalg.vector_norm(read((), 0, prod(shape)).double())
        return length
    if not stacked:
        return streamed_spectral_norm(partial(read, ()), (shape[0], prod(shape[1:])))
    size = (shape[1], prod(shape[2:]))
    return torch.stack([streamed_spectral_norm(partial(read, (i,)), size) for i in range(shape[0])])


def _rows(parts: Sequence[StoredBase]) -> Callable[[tuple[int, ...], int, int], Tensor]:
    """A function that reads rows of the matrix behind the indices `outer`, from however many stored parts."""

    def read(outer: tuple[int, ...], first: int, last: int) -> Tensor:
        found: dict[int, Tensor] = {}
        at = len(outer)
        for part in parts:
            start, shape = part.start, part.shape
            if any(not a <= i < a + n for i, a, n in zip(outer, start, shape, strict=False)):
                continue
            low, high = max(first, start[at]), min(last, start[at] + shape[at])
            if low < high:
                rows = torch.empty((*(1,) * at, high - low, *shape[at + 1 :]), dtype=part.dtype)
                part.read_([*outer, low, *start[at + 1 :]], rows)
                found[low] = rows.view(high - low, prod(shape[at + 1 :]))
        return torch.cat([found[low] for low in sorted(found)])

    return read
