"""torch.save files without their tensors: where the bytes of each lie, and new files with room for them.

Reading loads no tensor and executes no pickle beyond torch's `weights_only` allow-list. Writing returns the bytes
around the tensors and the place of each, so state of any size can be streamed. Checksums of the reserved room
are zero, as after `torch.serialization.set_crc32_options(False)`: torch.load does not check them.
Knows: the archive. Does not know: optimizers, plans.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ...errors import Fault, MupscaleError
from ...storage.location import Location, Url, location
from ..opened import file_size, open_file, open_stream
from ..places import OutFile, Place, dtype_name, torch_dtype
from ..strict import os_errors, printable, raise_few
from .archives import SAVE_AGAIN, data_start, survey_archive


@dataclass(frozen=True)
class Room:
    """A tensor that is not written yet: space in a file is reserved for it."""

    dtype: str
    shape: tuple[int, ...]


def read_tree(path: Location | str) -> Any:
    """The content of a torch.save file, with a `Place` for every tensor; no tensor is read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"a": torch.ones(2, 3), "n": 1}, f"{folder}/x.pt")
    ...     tree = read_tree(f"{folder}/x.pt")
    ...     tree["a"].shape, tree["n"], read_tensor(folder, tree["a"])[0]
    ((2, 3), 1, tensor([1., 1., 1.]))
    """
    path = location(path)
    size, stored = _check_archive(path)
    try:
        source: Any = open_stream(path) if isinstance(path, Url) else str(path)
        with FakeTensorMode():
            tree = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's reader raises many kinds, and all mean this
        lines = str(error).strip().splitlines()
        raise MupscaleError(
            f"{printable(str(path))} holds more than tensors and plain values, or is damaged (torch.load with "
            f"weights_only=True): {printable(lines[0] if lines else type(error).__name__)}",
            code="archive.more_than_tensors",
        ) from None
    return _described(tree, path.name, size, stored)


def read_tensor(folder: Location | str, place: Place) -> Tensor:
    """Read one tensor of a file into new memory."""
    path = location(folder) / place.file
    with open_file(path) as file, os_errors(path):
        data = bytearray(file.read(place.offset, place.bytes))
    if len(data) != place.bytes:
        raise MupscaleError(f"{printable(str(path))} ends inside a tensor", code="file.cut_short")
    if not data:
        return torch.empty(place.shape, dtype=torch_dtype(place.dtype), device="cpu")
    return torch.frombuffer(data, dtype=torch_dtype(place.dtype)).reshape(place.shape)


def lay_out(name: str, tree: Any) -> tuple[OutFile, Any]:
    """The torch.save file of a tree in which every `Room` is a tensor whose bytes are still to be written.

    Returns the file, with all bytes except those of tensors, and the tree with a `Place` for every room.

    >>> file, tree = lay_out("x.pt", {"a": Room("F32", (1000, 1000))})
    >>> file.size > tree["a"].bytes == 4_000_000, sum(len(data) for _, data in file.chunks) < 3000
    (True, True)
    """
    sheet = _Sheet()
    rooms: list[Room] = []

    def empty(_: str, room: Room) -> Tensor:
        rooms.append(room)
        return torch.empty(room.shape, dtype=torch_dtype(room.dtype), device="cpu")

    with FakeTensorMode():
        blank = map_leaves(tree, "", Room, empty)
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(blank, cast(IO[bytes], sheet))
    # A pickle meets leaves in the order in which the tree is walked, and torch.save writes them in that order.
    holes = iter(sheet.holes)
    places = iter([_hole(name, room, holes) for room in rooms])
    if next(holes, None) is not None:
        raise MupscaleError(
            f"torch {torch.__version__} lays out {name} in a way that is not known here",
            code="archive.unknown_torch_layout",
        )
    laid = map_leaves(tree, "", Room, lambda *_: next(places))
    return OutFile(name, sheet.size, tuple(sheet.joined())), laid


def _hole(name: str, room: Room, holes: Iterator[tuple[int, int]]) -> Place:
    place = Place(name, 0, room.dtype, room.shape)
    if not place.bytes:
        return place
    offset, count = next(holes, (0, 0))
    if count != place.bytes:
        raise MupscaleError(
            f"torch {torch.__version__} left {count} bytes for a tensor of {place.bytes}",
            code="archive.other_room_for_tensor",
        )
    return Place(name, offset, room.dtype, room.shape)


def _described(tree: Any, file: str, size: int, stored: Mapping[int, int]) -> Any:
    """The tree with a place for each tensor.

    torch computes where bytes lie from the order in which the pickle names them, and does not look. Both that order and the
    archive's (the keys of `stored`) are increasing, so if the same places occur in both, each is that of the same tensor.
    """
    starts = list(stored)
    faults: list[Fault] = []
    seen: set[int] = set()

    def place(where: str, tensor: Tensor) -> Place | None:
        if hasattr(tensor, "__tensor_flatten__"):
            what = f"a {type(tensor).__name__}, which is made of several tensors"
            faults.append(
                Fault(
                    "archive.made_of_several_tensors",
                    f"{file}{where}",
                    what,
                    "grow the run in memory with mu.grow",
                )
            )
            return None
        try:
            found, start = _place(tensor, file, size, stored)
            seen.add(start)
            return found
        except MupscaleError as error:
            faults.append(Fault(error.code, f"{file}{where}", error.claim, SAVE_AGAIN))
            return None

    described = map_leaves(tree, "", Tensor, place)
    if not faults and (seen != set(starts) or starts != sorted(starts)):
        faults.append(
            Fault(
                "archive.tensors_misplaced",
                file,
                "its tensors do not lie where torch.save puts them",
                SAVE_AGAIN,
            )
        )
    raise_few(f"the tensors of {printable(file)} cannot be streamed", faults)
    return described


def _place(tensor: Tensor, file: str, size: int, stored: Mapping[int, int]) -> tuple[Place, int]:
    """Where a tensor lies, and where its storage begins."""
    storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
    start = getattr(storage, "_checkpoint_offset", None)  # noted by torch when it loads in fake mode
    if storage is None or start is None:
        raise MupscaleError(
            f"torch {torch.__version__} does not tell where its bytes lie; 2.7 and later do",
            code="archive.offsets_not_told",
        )
    if not tensor.is_contiguous():
        raise MupscaleError(
            f"its strides {tensor.stride()} are not contiguous", code="archive.not_contiguous"
        )
    skipped = int(tensor.storage_offset()) * tensor.dtype.itemsize
    place = Place(file, start + skipped, dtype_name(tensor.dtype), tuple(tensor.shape))
    said = storage.nbytes() // _times_its_bytes(tensor.dtype)
    held = stored.get(start, said)
    if start < 0 or place.end > size or skipped < 0 or skipped + place.bytes > held:
        raise MupscaleError("its bytes lie outside of the file", code="archive.bytes_outside")
    if held != said:
        what = f"its storage has {held} bytes, its pickle says {said}"
        raise MupscaleError(what, code="archive.other_storage_size")
    return place, start


@cache
def _times_its_bytes(dtype: torch.dtype) -> int:
    """How large torch makes a storage in fake mode: torch 2.9 multiplies its bytes by the size of an element once more.

    >>> _times_its_bytes(torch.uint8)
    1
    """
    saved = io.BytesIO()
    torch.save(torch.zeros(1, dtype=dtype, device="cpu"), saved)
    saved.seek(0)
    with FakeTensorMode():
        tensor: Tensor = torch.load(saved, map_location="cpu", weights_only=True)
    return tensor.untyped_storage().nbytes() // dtype.itemsize


def map_leaves(tree: Any, where: str, kind: type, change: Callable[[str, Any], Any]) -> Any:
    """The same tree of dicts, lists and tuples with `change(where, leaf)` for every leaf of a kind."""
    if isinstance(tree, kind):
        return change(where, tree)
    if isinstance(tree, dict):
        return {key: map_leaves(value, f"{where}[{key!r}]", kind, change) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [map_leaves(value, f"{where}[{i}]", kind, change) for i, value in enumerate(tree)]
        return items if isinstance(tree, list) else tuple(items)
    return tree


def _check_archive(path: Location) -> tuple[int, dict[int, int]]:
    """The size of an archive whose tensors can be read in place, and where the bytes of each begin and how many there are."""
    with os_errors(path), open_stream(path) as file:
        size = file_size(file)
        try:
            with zipfile.ZipFile(file) as archive:
                named = [archive.getinfo(name) for name in survey_archive(archive, printable(str(path)))]
                stored = {data_start(file, record): record.file_size for record in named}
                orders = [r for r in archive.infolist() if r.filename.endswith("/byteorder")]
                big = any(r.file_size < 16 and archive.read(r) != b"little" for r in orders)
        except MupscaleError:
            raise
        except Exception as error:  # damaged archives raise many kinds
            raise MupscaleError(
                f"{printable(str(path))} is not an archive of torch.save: {printable(str(error))}; {SAVE_AGAIN}",
                code="archive.not_torch_save",
            ) from None
    if big:
        raise MupscaleError(
            f"{printable(str(path))} is from a big-endian machine, so its tensors cannot be read in place; {SAVE_AGAIN}",
            code="archive.big_endian",
        )
    return size, stored


class _Sheet(io.RawIOBase):
    """A file object to which torch.save writes everything except tensors; skipped bytes take no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0
        self.holes: list[tuple[int, int]] = []
        self._chunks: list[tuple[int, bytes]] = []

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self._chunks.append((self.size, piece))
        self.size += len(piece)
        return len(piece)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_CUR or offset < 0:
            raise MupscaleError(
                f"torch {torch.__version__} does not write archives from front to back",
                code="archive.torch_seeks_back",
            )
        if offset:
            self.holes.append((self.size, offset))
            self.size += offset
        return self.size

    def tell(self) -> int:
        return self.size

    def joined(self) -> Iterator[tuple[int, bytes]]:
        """The written bytes in order, adjacent chunks joined."""
        start, data = 0, bytearray()
        for at, piece in self._chunks:
            if at != start + len(data):
                if data:
                    yield start, bytes(data)
                start, data = at, bytearray()
            data += piece
        if data:
            yield start, bytes(data)
