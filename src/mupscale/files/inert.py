"""Pickles of checkpoints, read without running them: known names become inert records, any other is refused.

Knows: the names in `.metadata` of torch.distributed.checkpoint, and in the head of an archive of one tensor.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import MupscaleError
from .opcodes import check_memo
from .places import dtype_name
from .strict import printable


def read_metadata(raw: bytes, where: str) -> Any:
    """Read a `.metadata` pickle as a record with the attributes that torch gives it."""
    return _unpickled(raw, _METADATA_NAMES, where)


def read_head(raw: bytes, where: str) -> Any:
    """Read the pickle of a torch.save archive: a `Head` if it holds one plain tensor."""
    return _unpickled(raw, _TENSOR_NAMES, where, tensor=True)


class Record:
    """An inert stand-in for an instance of one of torch's metadata classes: a name and attributes."""

    kind = ""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        values = state if isinstance(state, dict) else {"state": state}
        self.__dict__.update({str(key): value for key, value in values.items()})

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.kind} without {name}")

    def __hash__(self) -> int:
        return id(self)  # keys of the pickled dict; they are compared by what they hold later


class _Properties(Record):
    """Dtype and layout of a tensor; only dense ones can be read."""

    kind = "TensorProperties"

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0]
        if state[1] != "torch.strided":
            raise MupscaleError(f"tensors of layout {printable(str(state[1]))} cannot be read")


class _Call:
    """A function that a pickle may call but not modify."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise MupscaleError("it modifies a function")


def _only(kind: type, value: Any) -> Any:
    """A value of one plain type. Other types are not formatted in messages, because that may take forever."""
    if type(value) is not kind:
        raise MupscaleError(f"a {kind.__name__} is expected, found a {type(value).__name__}")
    return value


def _record(kind: str) -> type[Record]:
    return type(kind, (Record,), {"kind": kind})


@dataclass(frozen=True)
class Head:
    """Dtype, shape, strides and storage of the tensor in a torch.save archive."""

    storage: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _rebuilt(storage: Any, offset: int, shape: Any, stride: Any, *_: Any) -> Head:
    key, dtype = storage
    return Head(str(key), dtype_name(dtype), int(offset), tuple(shape), tuple(stride))


_CLASSES = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "StorageMeta",
)
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_METADATA_NAMES: dict[tuple[str, str], Any] = {
    **{("torch.distributed.checkpoint.metadata", name): _record(name) for name in _CLASSES},
    ("torch.distributed.checkpoint.metadata", "TensorProperties"): _Properties,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _Call(lambda code: _only(int, code)),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _record("_StorageInfo"),
    ("torch", "Size"): _Call(lambda sizes=(): tuple(_only(int, n) for n in sizes)),
    ("torch.serialization", "_get_layout"): _Call(lambda name: _only(str, name)),
    ("collections", "OrderedDict"): OrderedDict,
    **{("pathlib", name): _Call(lambda *parts: "/".join(_only(str, p) for p in parts)) for name in ("PosixPath", "WindowsPath", "PurePosixPath", "Path")},
    **{("pathlib._local", name): _Call(lambda *parts: "/".join(_only(str, p) for p in parts)) for name in ("PosixPath", "WindowsPath")},
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
}  # fmt: skip
_STORAGES = {
    f"{name}Storage": dtype
    for name, dtype in (
        ("Double", torch.float64), ("Float", torch.float32), ("Half", torch.float16), ("BFloat16", torch.bfloat16),
        ("Long", torch.int64), ("Int", torch.int32), ("Short", torch.int16), ("Char", torch.int8), ("Byte", torch.uint8),
        ("Bool", torch.bool), ("ComplexFloat", torch.complex64),
    )
}  # fmt: skip
_TENSOR_NAMES: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _Call(_rebuilt),
    ("collections", "OrderedDict"): OrderedDict,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}


class _Unpickler(pickle.Unpickler):
    """Makes records of the names it knows and refuses every other one."""

    def __init__(self, raw: bytes, names: Mapping[tuple[str, str], Any], tensor: bool) -> None:
        super().__init__(io.BytesIO(raw))
        self._names, self._tensor = names, tensor

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._names:
            raise MupscaleError(
                f"it asks for {printable(f'{module}.{name}')}, which no checkpoint needs; it was not called"
            )
        return self._names[module, name]

    def persistent_load(self, pid: Any) -> Any:
        if not self._tensor or not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise MupscaleError("it refers to something outside of itself")
        return pid[2], pid[1]


def _unpickled(raw: bytes, names: Mapping[tuple[str, str], Any], where: str, tensor: bool = False) -> Any:
    try:
        check_memo(raw)
        return _Unpickler(raw, names, tensor).load()
    except MupscaleError as error:
        raise MupscaleError(f"{where} is refused: {error.claim}") from None
    except Exception as error:  # damaged pickles raise many kinds
        raise MupscaleError(f"{where} is damaged: {type(error).__name__}: {printable(str(error))}") from None
