"""A `torch.distributed.checkpoint` directory: which part of which tensor lies where, without loading any.

Its `.metadata` is a pickle, and it is read without running it. Knows: the directory. Does not know: plans,
optimizers, process groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import accumulate
from math import prod
from pathlib import PurePosixPath
from typing import Any, TypeVar

import numpy as np
import torch

from ...errors import Fault, MupscaleError
from ...storage.location import Location, location
from ...storage.looking import sizes_in
from ..directory import foreign_links
from ..elsewhere import DCP_METADATA
from ..pickles.inert import read_metadata
from ..pickles.opcodes import Record, uncollected
from ..places import KNOWN, dtype_name
from ..strict import name_fault, os_errors, printable, raise_few, read_regular
from .table import Chunk, ChunkedTensor, DcpDirectory, FileNames, Rows, chunked

T = TypeVar("T")
_MOST_PAIRED = 512  # chunks of a tensor compared pair by pair; a regular grid needs no pairs
_MOST_COMPARED = 1 << 26  # pairs of all tensors together, for each dimension: a tenth of a second
_MOST_DIMS = 64  # torch's own limit
_LARGEST = 1 << 63
_SPARE = 1 << 20  # bytes that `.metadata` may have besides what its files explain
_EACH = 32 << 20  # bytes for each file next to it; AdamW of 70B parameters on 1,024 ranks has 0.3 MB for each


def read_dcp(path: Location | str) -> DcpDirectory:
    """Read the `.metadata` of a directory; raises one error with all faults."""
    path = location(path)
    raw = read_regular(path / DCP_METADATA, longest_metadata(path))
    metadata = read_metadata(raw, printable(str(path / DCP_METADATA)))
    try:
        with uncollected():
            return _described(path, metadata, hashlib.sha256(raw).hexdigest())
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise MupscaleError(
            f"{printable(str(path / DCP_METADATA))} is not what torch.distributed.checkpoint writes: "
            f"{type(error).__name__}: {printable(str(error))}",
            code="dcp.malformed_metadata",
        ) from None


def longest_metadata(path: Location) -> int:
    """How many bytes the `.metadata` of a directory can have, from the files next to it.

    It takes about 140 bytes to say where a chunk lies, and the archive of a chunk has a thousand bytes or more.
    """
    with os_errors(path):
        sizes = [size for name, size in sizes_in(path) if name != DCP_METADATA]
    return _SPARE + min(_EACH * len(sizes), sum(sizes))


def _described(path: Location, metadata: Any, digest: str) -> DcpDirectory:
    stored: dict[tuple[str, tuple[int, ...] | None], Any] = {}
    for index, info in _dict(metadata.storage_data).items():
        offset = getattr(index, "offset", None)  # values have none
        stored[_only(str, index.fqn), None if offset is None else _wholes(offset)] = info
    tensors: dict[str, ChunkedTensor] = {}
    files = FileNames()
    values: dict[str, tuple[str, int, int]] = {}
    faults: list[Fault] = []
    for name, entry in _dict(metadata.state_dict_metadata).items():
        kind = entry.kind if isinstance(entry, Record) and type(name) is str else ""
        if kind == "BytesStorageMetadata":
            if (found := stored.get((name, None))) is not None:
                values[name] = _bytes_of(name, found, faults)
        elif kind == "TensorStorageMetadata":
            tensors[name] = _tensor(name, entry, stored, files, faults)
        else:
            label = name if type(name) is str else type(name).__name__
            faults.append(Fault("dcp.unknown_entry", printable(label), "neither a tensor nor a value"))
    faults += _gaps(tensors)
    if not faults:
        held = {*files.names, *(file for file, _, _ in values.values())}
        faults += foreign_links(path, sorted({DCP_METADATA, *held}))
    raise_few(f"{printable(str(path))} cannot be read", faults)
    return DcpDirectory(path, tensors, values, digest)


def _tensor(
    name: str,
    entry: Any,
    stored: Mapping[tuple[str, tuple[int, ...] | None], Any],
    files: FileNames,
    faults: list[Fault],
) -> ChunkedTensor:
    shape, chunks = _wholes(entry.size), []
    for chunk in _only(list, entry.chunks):
        start, part = _wholes(chunk.offsets), _wholes(chunk.sizes)
        found = stored.get((name, start))
        inside = all(min(a, n) >= 0 and a + n <= m for a, n, m in zip(start, part, shape, strict=True))
        if found is None or not inside:
            what = f"its chunk at {start} {'is not stored' if inside else 'sticks out'}"
            faults.append(
                Fault("dcp.chunk_not_stored" if inside else "dcp.chunk_sticks_out", printable(name), what)
            )
        else:
            chunks.append(Chunk(start, part, *_bytes_of(name, found, faults)))
    chunks = [chunk for chunk in chunks if prod(chunk.shape)]
    return chunked(_dtype(entry.properties.dtype), shape, chunks, files)


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"a dict is expected, found a {type(value).__name__}")
    return value


def _only(kind: type[T], value: Any) -> T:
    """A value of one plain type; others are not formatted, because that may take forever."""
    if type(value) is not kind:
        raise TypeError(f"a {kind.__name__} is expected, found a {type(value).__name__}")
    return value


def _wholes(values: Any) -> tuple[int, ...]:
    """Sizes or offsets: few, and no larger than a file can be."""
    if type(values) is not tuple or len(values) > _MOST_DIMS:
        raise TypeError(f"at most {_MOST_DIMS} whole numbers are expected, found a {type(values).__name__}")
    for value in values:
        if type(value) is not int or not -_LARGEST < value < _LARGEST:
            raise TypeError("whole numbers below 2^63 are expected")
    return values


def _bytes_of(name: str, info: Any, faults: list[Fault]) -> tuple[str, int, int]:
    file = _only(str, info.relative_path)
    offset, length = _wholes((info.offset, info.length))
    if not _inside(file):
        faults.append(
            Fault(
                "dcp.file_outside_directory",
                printable(name),
                f"it points to {printable(file)}, which is not a file inside the directory",
            )
        )
    if offset < 0 or length < 0:
        faults.append(
            Fault("dcp.negative_offset", printable(name), f"it lies at byte {offset} and has {length} bytes")
        )
    if getattr(info, "transform_descriptors", None):
        remedy = "save it again without compression"
        faults.append(
            Fault(
                "dcp.compressed_entry",
                printable(name),
                "it is compressed, or stored in another way than torch's own",
                remedy,
            )
        )
    return file, offset, length


@lru_cache(maxsize=1024)
def _inside(file: str) -> bool:
    """Whether a path stays in the directory it is relative to."""
    path = PurePosixPath(file)
    return not path.is_absolute() and all(name_fault(part) is None for part in path.parts)


def _dtype(dtype: Any) -> str:
    """The name of a dtype, even of one that cannot be widened: a tensor that the plan does not need may have it."""
    if type(dtype) is not torch.dtype:
        raise TypeError(f"a dtype is expected, found a {type(dtype).__name__}")
    return dtype_name(dtype) if dtype in KNOWN else f"{dtype}"


def _gaps(tensors: Mapping[str, ChunkedTensor]) -> Iterator[Fault]:
    """Tensors whose chunks do not make them up without holes and overlaps, or are too many and irregular to be compared."""
    left = _MOST_COMPARED
    for name, tensor in tensors.items():
        dims, shape = len(tensor.shape), tensor.shape
        starts, sizes = tensor.rows[:, :dims], tensor.rows[:, dims : 2 * dims]
        tiles = sum(map(prod, sizes.tolist())) == prod(shape)
        if tiles and not _is_grid(starts.tolist(), sizes.tolist(), shape):
            count = len(starts)
            left -= count * count * dims
            tiles = count <= _MOST_PAIRED and left >= 0 and not _overlap(starts, starts + sizes)
        if not tiles:
            what = f"its chunks do not make up its shape {shape}"
            yield Fault("dcp.chunks_do_not_tile", printable(name), what)


def _is_grid(starts: list[list[int]], sizes: list[list[int]], shape: tuple[int, ...]) -> bool:
    """Whether chunks that have as many entries as their tensor are the cells of a regular grid."""
    grid = 1
    for dim, size in enumerate(shape):
        cuts = sorted({(start[dim], part[dim]) for start, part in zip(starts, sizes, strict=True)})
        if [low for low, _ in cuts] != [0, *accumulate(n for _, n in cuts)][: len(cuts)] or sum(
            n for _, n in cuts
        ) != size:
            return False
        grid *= len(cuts)
    return len(set(map(tuple, starts))) == len(starts) == grid


def _overlap(lows: Rows, highs: Rows) -> bool:
    """Whether any two of some rectangles that are not empty have an entry in common."""
    met = np.ones((len(lows), len(lows)), bool)
    for low, high in zip(lows.T, highs.T, strict=True):
        met &= (low[:, None] < high) & (low < high[:, None])
    return int(met.sum()) > len(lows)
