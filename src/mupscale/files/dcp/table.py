"""The chunks of a `torch.distributed.checkpoint` directory as rows of numbers, in memory or in a file that processes share.

A chunk takes 56 bytes here if its tensor is a matrix, and about 2,500 as Python objects; a checkpoint of thousands of ranks has
millions of them. A rank makes objects of those only that it reads. Knows: the table. Does not know: pickles, plans.

    a (6, 4) tensor in two chunks    start  shape  file  offset  length
                                     0, 0   3, 4      0       0    1200
                                     3, 0   3, 4      1       0    1200
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from ...storage.location import Location
from ..strict import open_regular

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A rectangle of a tensor, and the bytes of a file that hold it as one torch.save archive."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class ChunkedTensor:
    """A tensor, and the chunks that make it up."""

    dtype: str
    shape: tuple[int, ...]
    rows: Rows
    """For every chunk its start, its shape, the number of its file, and offset and length there."""
    files: FileNames
    """All files of the directory."""

    @property
    def chunks(self) -> list[Chunk]:
        return self._made(self.rows)

    def meeting(self, start: Sequence[int], shape: Sequence[int]) -> list[Chunk]:
        """The chunks that hold something of the rectangle `shape` from `start`.

        >>> tensor = chunked("F32", (6, 4), [Chunk((0, 0), (3, 4), "a", 0, 9), Chunk((3, 0), (3, 4), "b", 0, 9)], FileNames())
        >>> [chunk.file for chunk in tensor.meeting((2, 1), (1, 2))], [chunk.file for chunk in tensor.meeting((2, 1), (2, 2))]
        (['a'], ['a', 'b'])
        """
        dims, low = len(self.shape), np.array(start, np.int64)
        lows, sizes = self.rows[:, :dims], self.rows[:, dims : 2 * dims]
        met = (lows < low + np.array(shape, np.int64)) & (lows + sizes > low)
        return self._made(self.rows[met.all(1)])

    def _made(self, rows: Rows) -> list[Chunk]:
        dims = len(self.shape)
        return [
            Chunk(tuple(row[:dims]), tuple(row[dims : 2 * dims]), self.files.names[row[-3]], row[-2], row[-1])
            for row in rows.tolist()
        ]


@dataclass(frozen=True)
class DcpDirectory:
    """The content of a directory that `torch.distributed.checkpoint` wrote, under its own names."""

    path: Location
    tensors: Mapping[str, ChunkedTensor]
    values: Mapping[str, tuple[str, int, int]]
    """Everything that is not a tensor: file, offset and length of its archive."""
    digest: str
    """Of the `.metadata` that this was read from."""


class FileNames:
    """The files of a directory, numbered as they are met."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = list(names)
        self._numbers = {name: number for number, name in enumerate(self.names)}

    def number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self.names)
            self.names.append(name)
        return self._numbers[name]


def chunked(dtype: str, shape: tuple[int, ...], chunks: Sequence[Chunk], files: FileNames) -> ChunkedTensor:
    """A tensor from its chunks."""
    rows = [(*c.start, *c.shape, files.number(c.file), c.offset, c.length) for c in chunks]
    return ChunkedTensor(dtype, shape, np.array(rows, np.int64).reshape(len(rows), _width(shape)), files)


def write_table(directory: DcpDirectory, file: BinaryIO) -> None:
    """Write everything but the path of a directory: a line of JSON, then the rows of all tensors from a multiple of 8 on."""
    tensors, files = directory.tensors, next((t.files.names for t in directory.tensors.values()), [])
    head = {
        "digest": directory.digest,
        "files": files,
        "values": dict(directory.values),
        "tensors": {name: [t.dtype, t.shape, len(t.rows)] for name, t in tensors.items()},
    }
    raw = json.dumps(head).encode()
    file.write(raw + b" " * (-(len(raw) + 1) % 8) + b"\n")
    for tensor in tensors.values():
        file.write(tensor.rows.tobytes())


def map_table(table: Path, path: Location) -> DcpDirectory:
    """The directory at `path` from a table that a process of the same node has written; its rows stay in the file."""
    with open(open_regular(table), "rb") as file:
        raw = file.readline()
        head, at = json.loads(raw), 0
        mapped = np.memmap(file, np.int64, "r", offset=len(raw)) if file.read(1) else np.empty(0, np.int64)
    files, tensors = FileNames(head["files"]), {}
    for name, (dtype, shape, count) in head["tensors"].items():
        rows = mapped[at : at + count * _width(shape)].reshape(count, _width(shape))
        tensors[name] = ChunkedTensor(dtype, tuple(shape), rows, files)
        at += rows.size
    values = {name: (where[0], where[1], where[2]) for name, where in head["values"].items()}
    return DcpDirectory(path, tensors, values, head["digest"])


def _width(shape: Sequence[int]) -> int:
    return 2 * len(shape) + 3
