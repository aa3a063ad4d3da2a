"""Safetensors headers, read strictly and written as `save_file` writes them.

A file is `length (8 bytes) | JSON, padded with spaces | data`, so every offset follows from names, dtypes and
shapes, and a header can be written before any data. Does not know directories or what tensors mean; reads no data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ..errors import Fault, MupscaleError
from ..storage.location import Location, location
from .opened import open_file
from .places import RANK, Place, item_size
from .strict import LONGEST_TEXT, Reason, os_errors, parse_json, printable, raise_few, text_fault

_METADATA = "__metadata__"
_MOST_DIMS = 64  # numpy's limit


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file, checked against the size of the file."""

    tensors: dict[str, Place]
    metadata: dict[str, str]
    data: int
    """Where the data begins, in bytes."""
    size: int
    """The size of the whole file, in bytes."""


def header_bytes(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The first bytes of the file that `save_file` would write for these names, dtypes and shapes.

    >>> header_bytes({"w": ("F32", (2,))}).rstrip()[8:]
    b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    """
    entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name in sorted(tensors, key=lambda name: (-RANK[tensors[name][0]], name)):
        dtype, shape = tensors[name]
        end = offset + prod(shape) * item_size(dtype)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LONGEST_TEXT:
        raise MupscaleError(
            f"a header of {len(text)} bytes is longer than safetensors allows; use more shards",
            code="header.too_long_to_write",
        )
    return len(text).to_bytes(8, "little") + text


def read_header(path: Location | str) -> Header:
    """Read the header of a safetensors file; every fault raises `MupscaleError`."""
    path = location(path)
    where = f"the safetensors file {printable(path.name)}"
    with open_file(path) as file, os_errors(path):
        size = file.size
        length = int.from_bytes(file.read(0, 8), "little")
        if size < 8 or length > size - 8:
            raise MupscaleError(
                f"{where} is truncated, or not a safetensors file: {size} bytes, and its first 8 call for "
                f"{8 + length}; copy or download it again",
                code="file.cut_short",
            )
        if length > LONGEST_TEXT:
            raise MupscaleError(
                f"{where} says its header has {length} bytes; at most {LONGEST_TEXT} are allowed",
                code="header.too_long",
            )
        raw = file.read(8, length)
    if len(raw) != length:
        raise MupscaleError(
            f"{where} changed while it was read; wait until it is written, and run again",
            code="file.changed_while_read",
        )
    return parse_header(raw, path.name, size)


def parse_header(raw: bytes, file: str, size: int) -> Header:
    """Read the JSON of a header that belongs to a file of `size` bytes.

    >>> raw = header_bytes({"w": ("F32", (2,))})
    >>> parse_header(raw[8:], "w.safetensors", len(raw) + 8).tensors["w"]
    Place(file='w.safetensors', offset=64, dtype='F32', shape=(2,))
    """
    where = f"the header of {printable(file)}"
    if raw[:1] != b"{":
        raise MupscaleError(
            f"{where} is not valid: it begins with {raw[:1]!r}, not with '{{'", code="header.not_an_object"
        )
    entries = parse_json(raw, where)
    metadata = entries.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise MupscaleError(
            f"{where} is not valid: its metadata are not texts by name", code="header.metadata_not_texts"
        )
    data = 8 + len(raw)
    faults: list[Fault] = []
    tensors: dict[str, Place] = {}
    for name, entry in entries.items():
        wrong = text_fault(name) or _entry_fault(entry)
        if wrong is not None:
            faults.append(Fault(wrong.code, printable(name), wrong.what))
            continue
        begin = entry["data_offsets"][0]
        tensors[name] = Place(file, data + begin, entry["dtype"], tuple(entry["shape"]))
    raise_few(f"{where} is not valid", faults)
    at = data
    for name, place in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].end)):
        if place.offset != at:
            how = "overlaps the tensor before it" if place.offset < at else "leaves a gap before it"
            faults.append(
                Fault(
                    "header.tensors_overlap" if place.offset < at else "header.gap_between_tensors",
                    printable(name),
                    f"begins at byte {place.offset - data} and {how}, which ends at {at - data}",
                )
            )
        at = place.end
    if at != size and not faults:
        faults.append(
            Fault(
                "header.other_file_size",
                printable(file),
                f"{size} bytes, its header describes {at}",
                "copy or download the file again",
            )
        )
    raise_few(f"{where} does not fit its data", faults)
    return Header(tensors, metadata, data, size)


def _entry_fault(entry: Any) -> Reason | None:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return Reason("header.other_keys", "dtype, shape and data_offsets are expected, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in RANK:
        return Reason("file.unknown_dtype", f"dtype {printable(dtype)} is not known")
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
            return Reason("header.not_whole_numbers", f"{what} must be a list of whole numbers")
    if len(offsets) != 2 or len(shape) > _MOST_DIMS:
        return Reason("header.too_many_numbers", f"{len(offsets)} offsets and {len(shape)} dimensions")
    needs = prod(shape) * item_size(dtype)
    if offsets[1] - offsets[0] != needs:
        what = f"{dtype} of shape {shape} takes {needs} bytes, its offsets span {offsets[1] - offsets[0]}"
        return Reason("header.offsets_unlike_shape", what)
    return None
