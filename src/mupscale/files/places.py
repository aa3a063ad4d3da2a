"""Where a tensor lies: a file, a byte offset, a dtype and a shape; and the contiguous runs of a rectangle of it.

Knows: the dtypes of safetensors with their sizes, and arithmetic of offsets. Opens nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch

from ..errors import MupscaleError

_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
RANK = {name: rank for rank, name in enumerate(_DTYPES)}
"""The order in which safetensors sorts dtypes; files hold the last of them first."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
KNOWN = frozenset(_NAMES)
"""The dtypes of torch that have a name here."""


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that safetensors calls `name`.

    >>> torch_dtype("BF16"), item_size("BF16")
    (torch.bfloat16, 2)
    """
    if name not in _DTYPES:
        raise MupscaleError(
            f"{name!r} is not a dtype of tensors here; known: {', '.join(_DTYPES)}", code="file.unknown_dtype"
        )
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a dtype."""
    if dtype not in _NAMES:
        raise MupscaleError(f"safetensors has no {dtype}", code="file.dtype_not_in_safetensors")
    return _NAMES[dtype]


def is_dtype(name: str) -> bool:
    """Whether safetensors has a dtype of this name."""
    return name in _DTYPES


def item_size(name: str) -> int:
    return torch_dtype(name).itemsize


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in a file, row-major, starting at byte `offset`.

    >>> Place("model.safetensors", 80, "F32", (2, 3)).end
    104
    """

    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * item_size(self.dtype)

    @property
    def end(self) -> int:
        return self.offset + self.bytes

    def as_json(self) -> list[Any]:
        return [self.file, self.offset, self.dtype, list(self.shape)]


@dataclass(frozen=True, slots=True)
class OutFile:
    """A file to be written: its size, and the bytes of it that no move writes."""

    name: str
    size: int
    chunks: tuple[tuple[int, bytes], ...]


def runs(
    whole: Sequence[int], start: Sequence[int], room: Sequence[int], at: Sequence[int], shape: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Copy a rectangle of `shape` from `start` of a tensor `whole` to `at` of a tensor `room`, run by run.

    Yields (first element in `whole`, first element in `room`, number of elements), in row-major order.

    >>> list(runs((4, 3), (1, 0), (2, 3), (0, 0), (2, 3)))          # whole rows are one run
    [(3, 0, 6)]
    >>> list(runs((4, 3), (1, 1), (2, 2), (0, 0), (2, 2)))
    [(4, 0, 2), (7, 2, 2)]
    """
    dims = len(shape)
    if 0 in shape:
        return
    inner = dims
    while inner and (inner == dims or shape[inner] == whole[inner] == room[inner]):
        inner -= 1
    far = [prod(whole[d + 1 :]) for d in range(dims)]
    near = [prod(room[d + 1 :]) for d in range(dims)]
    first_far = sum(a * b for a, b in zip(start, far, strict=True))
    first_near = sum(a * b for a, b in zip(at, near, strict=True))
    length = prod(shape[inner:])
    for index in product(*map(range, shape[:inner])):
        yield (
            first_far + sum(i * far[d] for d, i in enumerate(index)),
            first_near + sum(i * near[d] for d, i in enumerate(index)),
            length,
        )
