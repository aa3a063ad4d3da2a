"""Spectral norms, root mean squares and means of tensors where they lie: rows are read in stretches, and no matrix of more than 16 million entries is held whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from ...noise.measures import Statistic, Wanted
from ...storage.location import Location
from ...tensors.spectral import streamed_spectral_norm
from ..bytes.base_reader import BaseReader
from ..bytes.blocks import Reader, StoredBase, finite_base, stored_base
from ..bytes.compiled_sums import expect
from ..job import Move
from ..threads import in_threads
from .norm_journal import NormJournal

_STRETCH = 1 << 24
"""Bytes of float64 that are summed over at a time."""


def measured_in(
    base: Location,
    moves: Sequence[Move],
    names: Mapping[str, str],
    wanted: Sequence[Wanted],
    *,
    journal: NormJournal | None = None,
    share: tuple[int, int] = (0, 1),
    threads: int = 1,
) -> dict[Wanted, Tensor]:
    """The norms and means of what the moves would read; `names` gives a move's planned tensor.

    With a journal, tensors that another worker has measured are skipped, and the bytes that were read are noted in it. Worker i
    of n begins at its share of the list, so that workers that start together measure different tensors: with 8 tensors and
    `share=(1, 2)` the order is 4, 5, 6, 7, 0, ….
    """
    parts: dict[str, list[Move]] = {}
    for move in moves:
        if move.sources:
            parts.setdefault(names.get(move.name, move.name), []).append(move)
    found: dict[Wanted, Tensor] = {}
    if journal is not None:
        expect(sum(journal.sizes.values()))
    first = share[0] * len(wanted) // share[1]
    order = [*range(first, len(wanted)), *range(first)]

    def measure(units: Iterator[int]) -> None:
        with Reader(base) if journal is None else BaseReader(base, journal.sizes) as reader:
            for unit in units:
                name, what = wanted[unit]
                if journal is not None:
                    found.update(journal.known())
                if wanted[unit] in found:
                    continue
                bases = ((stored_base(move, reader), move) for move in parts[name])
                stored = [finite_base(part, move) for part, move in bases if part is not None]
                found[name, what] = measured_by(stored, parts[name][0].making.base_shape, what)
                if journal is not None:
                    assert isinstance(reader, BaseReader)
                    journal.add((name, what), found[name, what], reader.taken())

    in_threads(threads, order, measure)
    return found


def measured_by(parts: Sequence[StoredBase], shape: tuple[int, ...], what: Statistic) -> Tensor:
    """A statistic of one base tensor of `shape`, from its stored parts."""
    read = _rows(parts)
    if what == "mean":
        return _total(partial(read, ()), shape) / shape[0]
    if what == "rms":
        # Part by part, because experts that are stored one by one are cut along two dimensions.
        squares = [_total(partial(_squares, part), part.shape).sum() for part in parts]
        return (torch.stack(squares).sum() / sum(prod(part.shape) for part in parts)).sqrt()
    if what == "each_rms":
        each = [read((i,), 0, shape[1]).double().square().mean() for i in range(shape[0])]
        return torch.stack(each).sqrt()
    if len(shape) < 2:
        length: Tensor = torch.linalg.vector_norm(read((), 0, prod(shape)).double())
        return length
    if what == "norm":
        return streamed_spectral_norm(partial(read, ()), (shape[0], prod(shape[1:])))
    size = (shape[1], prod(shape[2:]))
    return torch.stack([streamed_spectral_norm(partial(read, (i,)), size) for i in range(shape[0])])


def _squares(part: StoredBase, first: int, last: int) -> Tensor:
    """The squares of some rows of a stored part."""
    rows = torch.empty((last - first, *part.shape[1:]), dtype=part.dtype, device="cpu")
    part.read_([part.start[0] + first, *part.start[1:]], rows)
    return rows.double().square().view(last - first, -1)


def _total(read: Callable[[int, int], Tensor], shape: tuple[int, ...]) -> Tensor:
    """The sum of all rows, as many of them at a time as `_STRETCH` bytes of float64 hold."""
    rows, width = shape[0], prod(shape[1:])
    total = torch.zeros(width, dtype=torch.float64, device="cpu")
    step = max(1, _STRETCH // (8 * max(1, width)))
    for first in range(0, rows, step):
        total += read(first, min(rows, first + step)).double().sum(0)
    return total


def _rows(parts: Sequence[StoredBase]) -> Callable[[tuple[int, ...], int, int], Tensor]:
    """A function that reads rows of the matrix behind the indices `outer`, from however many stored parts.

    Parts may be cut along any dimension. Gate and up of a Mixtral's experts are stored one by one, so the rows of its joined tensor of
    4 experts are in 8 parts: expert 1 is filled by those that begin at (1, 0, 0) and (1, f, 0).
    """
    ends = [max(part.start[d] + part.shape[d] for part in parts) for d in range(len(parts[0].shape))]

    def read(outer: tuple[int, ...], first: int, last: int) -> Tensor:
        at = len(outer)
        rows = torch.empty((last - first, *ends[at + 1 :]), dtype=parts[0].dtype, device="cpu")
        for part in parts:
            start, shape = part.start, part.shape
            if any(not a <= i < a + n for i, a, n in zip(outer, start, shape, strict=False)):
                continue
            low, high = max(first, start[at]), min(last, start[at] + shape[at])
            if low < high:
                found = torch.empty(
                    (*(1,) * at, high - low, *shape[at + 1 :]), dtype=part.dtype, device="cpu"
                )
                part.read_([*outer, low, *start[at + 1 :]], found)
                inner = (slice(a, a + n) for a, n in zip(start[at + 1 :], shape[at + 1 :], strict=True))
                rows[(slice(low - first, high - first), *inner)] = found.view(high - low, *shape[at + 1 :])
        return rows.view(last - first, -1)

    return read
