"""What a torch.save file holds besides tensors: settings, counters, groups. No pickle is executed: objects become inert records."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from typing import IO, Any

import torch

from ...errors import MupscaleError
from ...storage.location import Location
from ..elsewhere import UNIVERSAL_SETTINGS, tag_in
from ..opened import open_stream
from ..places import torch_dtype
from ..strict import os_errors, printable
from .archives import PICKLE, survey_archive
from .inert import Head, read_plain
from .torch_file import map_leaves


def read_settings(path: Location) -> Any:
    """The settings in a torch.save file; single numbers are read, other tensors stay a `Head`."""
    where = printable(str(path))
    with os_errors(path), open_stream(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                survey_archive(archive, where)
                records = {r.filename.partition("/")[2]: r for r in archive.infolist()}
                tree = read_plain(archive.read(records[PICKLE]), where, len(records))
                return map_leaves(tree, "", Head, lambda _, head: _number(archive, records, head))
        except (zipfile.BadZipFile, KeyError, ValueError, NotImplementedError) as error:
            raise MupscaleError(
                f"{where} is not an archive of torch.save: {printable(str(error))}",
                code="archive.not_torch_save",
            ) from None


def universal_settings(folder: Location) -> dict[str, Any]:
    """The groups of the optimizer, and what else a universal checkpoint of DeepSpeed keeps beside its tensors."""
    read: dict[str, Any] = read_settings(folder / tag_in(folder) / "zero" / UNIVERSAL_SETTINGS)
    return read


def _number(archive: zipfile.ZipFile, records: Mapping[str, zipfile.ZipInfo], head: Head) -> Any:
    record = records[f"data/{head.storage}"]
    size = torch_dtype(head.dtype).itemsize
    if head.shape or record.file_size > size or head.offset:
        return head
    stream: IO[bytes]
    with archive.open(record) as stream:
        return torch.frombuffer(bytearray(stream.read(size)), dtype=torch_dtype(head.dtype)).reshape(())


def strange(tree: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Where in a tree of settings something else than plain values lies, and what it is."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from strange(value, f"{where}.{key}" if where else str(key))
    elif isinstance(tree, (list, tuple)):
        for at, value in enumerate(tree):
            yield from strange(value, f"{where}[{at}]")
    elif isinstance(tree, Head):
        yield where, f"a tensor of shape {tree.shape}"
    elif not isinstance(tree, (str, int, float, bool, bytes, type(None), torch.Tensor, torch.dtype)):
        yield where, f"an object of {getattr(tree, 'kind', type(tree).__name__)}"
