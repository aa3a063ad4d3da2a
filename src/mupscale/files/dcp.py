"""A `torch.distributed.checkpoint` directory: which part of which tensor lies where, without loading any.

Its `.metadata` is a pickle, and it is read without running it. Knows: the directory. Does not know: plans,
optimizers, process groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, combinations
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import Fault, MupscaleError
from ..tensors.parts import Rectangle
from .inert import Record, read_metadata
from .places import KNOWN, dtype_name
from .strict import name_fault, printable, raise_few, read_regular

METADATA = ".metadata"
_MOST_PAIRED = 512  # chunks compared pair by pair, 130,816 pairs; a regular grid needs no pairs
_LONGEST = 1 << 31  # bytes; the record of a model of a million tensors on a thousand ranks stays below it


@dataclass(frozen=True, slots=True)
class Chunk:
    """A rectangle of a tensor, and the bytes of a file that hold it as one torch.save archive."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ChunkedTensor:
    """A tensor, and the chunks that make it up."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class DcpDirectory:
    """The content of a directory that `torch.distributed.checkpoint` wrote, under its own names."""

    path: Path
    tensors: Mapping[str, ChunkedTensor]
    values: Mapping[str, tuple[str, int, int]]
    """Everything that is not a tensor: file, offset and length of its archive."""


def read_dcp(path: Path | str) -> DcpDirectory:
    """Read the `.metadata` of a directory; raises one error with all faults."""
    path = Path(path)
    raw = read_regular(path / METADATA, _LONGEST)
    metadata = read_metadata(raw, printable(str(path / METADATA)))
    try:
        return _described(path, metadata)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise MupscaleError(
            f"{printable(str(path / METADATA))} is not what torch.distributed.checkpoint writes: "
            f"{type(error).__name__}: {printable(str(error))}"
        ) from None


def _described(path: Path, metadata: Any) -> DcpDirectory:
    stored: dict[tuple[str, tuple[int, ...] | None], Any] = {}
    for index, info in metadata.storage_data.items():
        offset = getattr(index, "offset", None)  # values have none
        stored[index.fqn, None if offset is None else tuple(offset)] = info
    tensors: dict[str, ChunkedTensor] = {}
    values: dict[str, tuple[str, int, int]] = {}
    faults: list[Fault] = []
    for name, entry in metadata.state_dict_metadata.items():
        kind = entry.kind if isinstance(entry, Record) else ""
        if kind not in (
            "TensorStorageMetadata",
            "BytesStorageMetadata",
        ):
            faults.append(Fault(printable(name), "neither a tensor nor a value"))
        elif kind == "BytesStorageMetadata":
            if (found := stored.get((name, None))) is not None:
                values[name] = _bytes_of(name, found, faults)
        else:
            shape, chunks = tuple(entry.size), []
            for chunk in entry.chunks:
                start, part = tuple(chunk.offsets), tuple(chunk.sizes)
                found = stored.get((name, start))
                inside = all(
                    min(a, n) >= 0 and a + n <= m for a, n, m in zip(start, part, shape, strict=True)
                )
                if found is None or not inside:
                    faults.append(
                        Fault(
                            printable(name),
                            f"its chunk at {start} {'is not stored' if inside else 'sticks out'}",
                        )
                    )
                else:
                    chunks.append(Chunk(start, part, *_bytes_of(name, found, faults)))
            chunks = [chunk for chunk in chunks if prod(chunk.shape)]
            if not _tiles(chunks, shape):
                faults.append(Fault(printable(name), f"its chunks do not make up its shape {shape}"))
            tensors[name] = ChunkedTensor(_dtype(entry.properties.dtype), shape, tuple(chunks))
    raise_few(f"{printable(str(path))} cannot be read", faults)
    return DcpDirectory(path, tensors, values)


def _bytes_of(name: str, info: Any, faults: list[Fault]) -> tuple[str, int, int]:
    file, offset, length = str(info.relative_path), int(info.offset), int(info.length)
    if not _inside(file):
        faults.append(
            Fault(
                printable(name), f"it points to {printable(file)}, which is not a file inside the directory"
            )
        )
    if offset < 0 or length < 0:
        faults.append(Fault(printable(name), f"it lies at byte {offset} and has {length} bytes"))
    if getattr(info, "transform_descriptors", None):
        remedy = "save it again without compression"
        faults.append(
            Fault(printable(name), "it is compressed, or stored in another way than torch's own", remedy)
        )
    return file, offset, length


@lru_cache(maxsize=1024)
def _inside(file: str) -> bool:
    """Whether a path stays in the directory it is relative to."""
    path = PurePosixPath(file)
    return not path.is_absolute() and all(name_fault(part) is None for part in path.parts)


def _dtype(dtype: Any) -> str:
    """The name of a dtype, even of one that cannot be widened: a tensor that the plan does not need may have it."""
    return dtype_name(dtype) if dtype in KNOWN else f"{dtype}"


def _tiles(chunks: list[Chunk], shape: tuple[int, ...]) -> bool:
    """Whether chunks make up a tensor without holes and overlaps: a grid, or few enough to compare all pairs."""
    if sum(prod(chunk.shape) for chunk in chunks) != prod(shape):
        return False
    grid = 1
    for dim, size in enumerate(shape):
        cuts = sorted({(chunk.start[dim], chunk.shape[dim]) for chunk in chunks})
        if [low for low, _ in cuts] != [0, *accumulate(n for _, n in cuts)][: len(cuts)] or sum(
            n for _, n in cuts
        ) != size:
            break
        grid *= len(cuts)
    else:
        return len({chunk.start for chunk in chunks}) == len(chunks) == grid
    parts = [Rectangle(chunk.start, chunk.shape) for chunk in chunks]
    return len(parts) <= _MOST_PAIRED and not any(a.meet(b).numel for a, b in combinations(parts, 2))
