"""A chunk of a tensor in a `torch.distributed.checkpoint` file: an archive whose entries are read in place.

Reading a slice costs the bytes of the slice, not those of the chunk. Knows: the archive. Runs no pickle.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from math import prod
from typing import IO, Any

import torch

from ...errors import Fault, MupscaleError
from ...storage.location import Location
from ..elsewhere import DCP_METADATA
from ..opened import file_size, open_file, open_stream
from ..pickles.archives import data_start, survey_archive
from ..pickles.inert import Head, read_head
from ..places import Place, item_size
from ..strict import os_errors, printable, raise_few
from .table import Chunk

_LONGEST_HEAD = 1 << 16  # bytes; the pickle of one plain tensor has a few hundred
_LONGEST_VALUE = 1 << 24  # bytes; what is saved without being a tensor is settings and counters
_DAMAGED = (
    zipfile.BadZipFile, KeyError, ValueError, EOFError, OSError, NotImplementedError, struct.error, OverflowError,
)  # fmt: skip


def chunk_place(directory: Location, chunk: Chunk, dtype: str) -> Place:
    """Where the entries of a chunk lie, row-major, in its file."""
    where = f"{printable(chunk.file)} at byte {chunk.offset}"
    with os_errors(directory / chunk.file), open_stream(directory / chunk.file) as file:
        if file_size(file) < chunk.offset + chunk.length:
            raise MupscaleError(
                f"{where}: the file ends before the chunk does; it was cut short", code="file.cut_short"
            )
        region = _Region(file, chunk.offset, chunk.length)
        head, records = _archive(region, where)
        tensor = read_head(head, where)
        if not isinstance(tensor, Head) or tensor.storage not in records:
            raise MupscaleError(f"{where}: no archive of one plain tensor", code="dcp.not_one_plain_tensor")
        offset, size = records[tensor.storage]
    skipped = tensor.offset * item_size(dtype)
    place = Place(chunk.file, chunk.offset + offset + skipped, dtype, chunk.shape)
    dense = _dense(chunk.shape)
    faults = []
    if tensor.dtype != dtype or tensor.shape != chunk.shape or len(tensor.stride) != len(chunk.shape):
        what = f"{tensor.dtype} of shape {tensor.shape}, {DCP_METADATA} says {dtype} of {chunk.shape}"
        faults.append(Fault("dcp.chunk_unlike_metadata", where, what))
    elif prod(chunk.shape) and any(
        a != b for a, b, n in zip(tensor.stride, dense, chunk.shape, strict=True) if n > 1
    ):
        faults.append(
            Fault(
                "archive.not_contiguous",
                where,
                f"its strides {tensor.stride} are not contiguous",
                "save contiguous tensors",
            )
        )
    elif tensor.offset < 0 or skipped + place.bytes > size or offset + size > chunk.length:
        faults.append(Fault("archive.bytes_outside", where, "its entries lie outside of its archive"))
    raise_few(f"{printable(str(directory))} is damaged", faults)
    return place


def read_value(directory: Location, where: tuple[str, int, int]) -> Any:
    """A plain value (a number, a string, a list of them) that was saved with the tensors.

    Read with torch's `weights_only` allow-list.
    """
    file, offset, length = where
    if length > _LONGEST_VALUE:
        raise MupscaleError(
            f"{printable(file)} holds a value of {length:,} bytes, too long for a setting",
            code="dcp.value_too_long",
        )
    with open_file(directory / file) as opened, os_errors(directory / file):
        data = opened.read(offset, length)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            survey_archive(archive, f"{printable(file)} at byte {offset}")
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except MupscaleError:
        raise
    except Exception as error:  # torch's reader raises many kinds, and all mean this
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise MupscaleError(
            f"{printable(file)} at byte {offset} holds no plain value: {printable(reason)}",
            code="dcp.not_a_plain_value",
        ) from None


class _Region(io.RawIOBase):
    """A byte range of a file, as a file object."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._offset + self._at)
        data = self._file.read(left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data


def _archive(region: _Region, where: str) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The pickle of an archive, and where in it the bytes of every storage lie."""
    try:
        with zipfile.ZipFile(region) as archive:
            records = {r.filename.partition("/")[2]: r for r in archive.infolist()}
            if any(r.compress_type != zipfile.ZIP_STORED or r.flag_bits & 1 for r in records.values()):
                raise MupscaleError(
                    f"{where}: the archive is compressed, so its tensor cannot be read in place",
                    code="archive.is_compressed",
                )
            if records["data.pkl"].file_size > _LONGEST_HEAD:
                raise MupscaleError(
                    f"{where}: no archive of one plain tensor", code="dcp.not_one_plain_tensor"
                )
            if "byteorder" in records and archive.read(records["byteorder"]) != b"little":
                raise MupscaleError(f"{where}: saved on a big-endian machine", code="archive.big_endian")
            head = archive.read(records["data.pkl"])
            found = {}
            for name, record in records.items():
                if name.startswith("data/"):
                    found[name.removeprefix("data/")] = (data_start(region, record), record.file_size)
    except _DAMAGED as error:
        raise MupscaleError(
            f"{where} is not an archive of torch.save: {printable(str(error))}", code="archive.not_torch_save"
        ) from None
    return head, found


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
