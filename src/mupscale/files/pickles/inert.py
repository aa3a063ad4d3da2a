"""Pickles of checkpoints, read without running them: known names become inert records, any other is refused.

Knows: the names in `.metadata` of torch.distributed.checkpoint, and in the head of an archive of one tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import MupscaleError
from ..places import dtype_name
from ..strict import printable
from .opcodes import Record, SafeCall, unpickled

_HEAD_NODES = 1000  # the pickle of one tensor has about ten
_SPARE_NODES = 100_000  # settings, schedules and the like, besides what belongs to a tensor
_DEEPEST = 50  # levels of lists and dicts; the state of an optimizer has about six


def read_metadata(raw: bytes, where: str) -> Any:
    """Read a `.metadata` pickle as a record with the attributes that torch gives it.

    A chunk takes about 140 bytes there, 18 nodes and 16 entries of the memo, so they are fewer than a third of the bytes.
    """
    return _read(raw, _named(_METADATA_NAMES), where, _HEAD_NODES + len(raw) // 3)


def read_head(raw: bytes, where: str) -> Any:
    """Read the pickle of a torch.save archive: a `Head` if it holds one plain tensor."""
    return _read(raw, _named(_TENSOR_NAMES), where, _HEAD_NODES, _storage)


def read_plain(raw: bytes, where: str, records: int) -> Any:
    """Read the pickle of a torch.save archive of settings: plain values, a `Head` for every tensor, and a `Record` with the
    name of its class, in `kind`, for every other object. `records` is the number of files in the archive."""
    return _read(raw, _plain_name, where, _SPARE_NODES + 64 * records, _storage)


def survey(raw: bytes, where: str, records: int) -> list[str]:
    """Raise unless torch's own reader, and a walk over what it returns, end soon on this pickle.

    Every name becomes an inert record: which of them may be used is torch's decision. `records` is the number of files in
    the archive of the pickle, which has one for every tensor. Returns the keys of storages in the order in which they are
    met.
    """
    nodes = _SPARE_NODES + 64 * records
    keys: dict[str, None] = {}

    def storage(pid: Any) -> _Opaque:
        if type(pid) is tuple and len(pid) > 2 and type(pid[2]) is str:
            keys.setdefault(pid[2])
        return _Opaque()

    tree = _read(raw, _any_name, where, nodes, storage)
    left = 4 * nodes  # what is shared counts each time a walk meets it

    def walk(value: Any, depth: int) -> None:
        nonlocal left
        left -= 1
        if left < 0 or depth > _DEEPEST:
            why = (
                f"more than {_DEEPEST} levels deep"
                if left >= 0
                else "too large when shared parts are counted"
            )
            raise MupscaleError(
                f"{where} is refused: its content is {why}",
                code="pickle.nested_too_deeply" if left >= 0 else "pickle.too_large_when_shared",
            )
        if isinstance(value, dict):
            for entry in value.values():
                walk(entry, depth + 1)
        elif isinstance(value, (list, tuple)):
            for entry in value:
                walk(entry, depth + 1)
        elif isinstance(value, _Opaque):
            for entry in value.parts:
                walk(entry, depth + 1)

    walk(tree, 0)
    return list(keys)


class _Opaque(Record):
    """An object of any class, with everything that went into it."""

    kind = "object"

    def __init__(self, *parts: Any) -> None:
        self.parts = list(parts)

    def __setstate__(self, state: Any) -> None:
        self.parts.append(state)


class _Properties(Record):
    """Dtype and layout of a tensor; only dense ones can be read."""

    kind = "TensorProperties"

    def __setstate__(self, state: Any) -> None:
        if type(state) is not tuple or len(state) < 2 or type(state[1]) is not str:
            raise MupscaleError(
                "a tensor has properties without a dtype and a layout",
                code="pickle.tensor_without_properties",
            )
        self.dtype = state[0]
        if state[1] != "torch.strided":
            raise MupscaleError(
                f"tensors of layout {printable(state[1])} cannot be read", code="pickle.layout_not_dense"
            )


def _only(kind: type, value: Any) -> Any:
    """A value of one plain type. Other types are not formatted in messages, because that may take forever."""
    if type(value) is not kind:
        raise MupscaleError(
            f"a {kind.__name__} is expected, found a {type(value).__name__}", code="pickle.unexpected_kind"
        )
    return value


def _wholes(values: Any) -> tuple[int, ...]:
    if type(values) not in (tuple, list):
        raise MupscaleError(
            f"numbers are expected, found a {type(values).__name__}", code="pickle.unexpected_kind"
        )
    return tuple(_only(int, value) for value in values)


def _path(*parts: Any) -> str:
    return "/".join(_only(str, part) for part in parts)


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


def _rebuilt(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Head:
    if type(storage) is not _Storage:
        raise MupscaleError("a tensor has no storage", code="pickle.tensor_without_storage")
    return Head(storage.key, dtype_name(storage.dtype), _only(int, offset), _wholes(shape), _wholes(stride))


@dataclass(frozen=True)
class _Storage:
    """The bytes of a tensor: the name of their file in the archive, and their dtype."""

    key: str
    dtype: torch.dtype


def _storage(pid: Any) -> _Storage:
    if type(pid) is not tuple or len(pid) != 5 or type(pid[0]) is not str or pid[0] != "storage":
        raise MupscaleError("it refers to something outside of itself", code="pickle.refers_outside")
    if type(pid[1]) is not torch.dtype:
        raise MupscaleError("a storage has no dtype", code="pickle.storage_without_dtype")
    return _Storage(_only(str, pid[2]), pid[1])


_CLASSES = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "StorageMeta",
)
_PLAN_CLASSES = ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData")
"""Who saved what: Megatron keeps it in `.metadata`, and nothing is read from it."""
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_ORDERED = SafeCall(lambda: OrderedDict())
_METADATA_NAMES: dict[tuple[str, str], Any] = {
    **{("torch.distributed.checkpoint.metadata", name): _record(name) for name in _CLASSES},
    ("torch.distributed.checkpoint.metadata", "TensorProperties"): _Properties,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): SafeCall(lambda code: _only(int, code)),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _record("_StorageInfo"),
    **{("torch.distributed.checkpoint.planner", name): _record(name) for name in _PLAN_CLASSES},
    ("torch.distributed.checkpoint.planner", "WriteItemType"): SafeCall(lambda code: _only(int, code)),
    **{(_MEGATRON, name): _record(name) for name in ("MCoreMetadata", "MCoreSavePlan")},
    ("torch", "Size"): SafeCall(lambda sizes=(): sizes),
    ("torch.serialization", "_get_layout"): SafeCall(lambda name: _only(str, name)),
    ("collections", "OrderedDict"): _ORDERED,
    **{("pathlib", name): SafeCall(_path) for name in ("PosixPath", "WindowsPath", "PurePosixPath", "Path")},
    **{("pathlib._local", name): SafeCall(_path) for name in ("PosixPath", "WindowsPath")},
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
    ("torch._utils", "_rebuild_tensor_v2"): SafeCall(_rebuilt),
    ("collections", "OrderedDict"): _ORDERED,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}


def _named(names: Mapping[tuple[str, str], Any]) -> Callable[[str, str], Any]:
    def find(module: str, name: str) -> Any:
        if (module, name) not in names:
            raise MupscaleError(
                f"it asks for {printable(f'{module}.{name}')}, which no checkpoint needs; it was not called",
                code="pickle.forbidden_name",
            )
        return names[module, name]

    return find


_PLAIN_NAMES: dict[tuple[str, str], Any] = {
    **_TENSOR_NAMES,
    ("torch._tensor", "_rebuild_from_type_v2"): SafeCall(
        lambda function, _, parts, __: function.function(*parts)
    ),
    ("torch._utils", "_rebuild_parameter"): SafeCall(lambda tensor, *_: tensor),
    ("torch", "Size"): SafeCall(lambda sizes=(): sizes),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): SafeCall(lambda stage: _only(int, stage)),
}


def _plain_name(module: str, name: str) -> Any:
    return _PLAIN_NAMES.get((module, name)) or type(name, (_Opaque,), {"kind": f"{module}.{name}"})


def _any_name(module: str, name: str) -> Any:
    if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
        return SafeCall(_tensor)
    return SafeCall(_mapping) if module == "collections" else _Opaque


def _tensor(*parts: Any) -> _Opaque:
    """A tensor whose sizes and strides are numbers from 0 on; torch takes any stride below that for the usual one."""
    for numbers in parts[1:4]:
        for number in numbers if type(numbers) is tuple else (numbers,):
            if type(number) is int and number < 0:
                raise MupscaleError(
                    f"a tensor has {number} as a size, a stride or an offset", code="pickle.negative_size"
                )
    return _Opaque(*parts)


def _mapping(*parts: Any) -> dict[str, Any]:
    """A dict of the collections module; what it was made from is walked with it."""
    return {str(at): part for at, part in enumerate(parts)}


def _read(
    raw: bytes,
    find: Callable[[str, str], Any],
    where: str,
    nodes: int,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    try:
        return unpickled(raw, find, nodes, persistent)
    except MupscaleError as error:
        raise MupscaleError(f"{where} is refused: {error.claim}", code=error.code) from None
    except Exception as error:  # damaged pickles raise many kinds
        raise MupscaleError(
            f"{where} is damaged: {type(error).__name__}: {printable(str(error))}", code="pickle.is_damaged"
        ) from None
