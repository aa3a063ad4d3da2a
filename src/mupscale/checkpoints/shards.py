"""A plan and a directory become files and moves: which wide tensor lies where in which shard.

Knows: tied names, shards and their Hugging Face names, headers, the index. Reads no weight, except to compare
tied tensors that were stored twice.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from ..errors import Fault, MupscaleError
from ..families.record import FamilyPlan, Part
from ..files.directory import SINGLE, Directory
from ..files.floats import FLOATS
from ..files.headers import header_bytes, parse_header
from ..files.places import OutFile, Place, item_size
from ..files.strict import printable, raise_few
from ..jobs.bytes.blocks import Reader
from ..jobs.job import Job, Move, window
from ..models.names import pattern_of
from ..plans.plan import Plan
from ..plans.tensor_plan import TensorPlan
from ..tensors.entry_sources import models_of
from ..tensors.making import Making
from .request import SHARD_BYTES

if TYPE_CHECKING:
    from ..noise.resolved import NoisePlan

_COMPARED = 4 << 20  # bytes compared at a time


@dataclass(frozen=True)
class Spelling:
    """How a directory calls the tensors of a plan, where it does not call them by their own names."""

    parts: Mapping[str, Part] = field(default_factory=dict)
    """Stored name -> which part of which tensor."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Stored name -> the tensor it is read as, where the two differ."""
    left_out: Collection[str] = ()
    """Stored names that no tensor of the model is read from."""

    @staticmethod
    def of(family: FamilyPlan) -> Spelling:
        return Spelling(family.stored, family.reading.names, family.reading.left_out)


def weight_moves(
    plan: Plan,
    directory: Directory,
    noise: NoisePlan | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    written: Mapping[str, str] | None = None,
    tensors: Iterable[StoredTensor] | None = None,
) -> tuple[tuple[OutFile, ...], tuple[Move, ...], str | None]:
    """The weight files of the wide model, the moves that fill them, and their index (None for a single file).

    `dtype` ("BF16", "F32", …) casts parameters; buffers keep theirs. Tensors are stored as the directory stores
    them; noise goes by the planned name. Tensors that the wide model computes by itself are left out. Shards are filled in
    the order of the plan, unless `written` says which tensor lies in which file. `tensors` are those that were found already.
    """
    if dtype is not None and dtype not in FLOATS:
        raise MupscaleError(
            f"dtype {dtype!r} cannot hold weights; use one of {', '.join(FLOATS)}",
            code="argument.not_a_float_dtype",
        )
    usual = Counter(place.dtype for place in directory.tensors.values() if place.dtype in FLOATS)
    if tensors is None:
        tensors = stored_tensors(plan, directory, Spelling(), written or {})
    stored, planned = list(tensors), []
    same = {(found.tensor, found.cells): found for found in stored}
    for found in stored:
        entry = plan.tensors[found.tensor]
        if noise is not None and (entry := noise.woken(found.tensor, entry)).sources and not found.places:
            from ..noise.measures import measured

            like = same[measured(found.tensor, plan), found.cells]
            found = replace(found, places=like.places, base_cells=like.base_cells)
        kept = found.places[0].dtype if found.places else usual.most_common(1)[0][0] if usual else "F32"
        cast = dtype if dtype is not None and entry.kind == "parameter" and kept in FLOATS else kept
        making = entry.making(noise.tensor(found.tensor) if noise is not None else None)
        planned.append(_Unplaced(found, making, cast))
    return _lay_out(planned, shard_bytes, written)


def written_by(job: Job) -> dict[str, str]:
    """Stored name -> the weight file that it lies in, by the headers that a job writes."""
    return {
        name: file.name
        for file in job.files
        if file.name.endswith(".safetensors") and "/" not in file.name
        for name in parse_header(file.chunks[0][1][8:], file.name, file.size).tensors
    }


def planned_names(tensors: Iterable[StoredTensor]) -> dict[str, str]:
    """Name in the directory -> the tensor of the plan that is stored there, whole or in part."""
    return {found.label: found.tensor for found in tensors}


def stored_plan(family: FamilyPlan) -> Plan:
    """The plan of the tensors that the directory holds."""
    return plan_without(family.plan, [*family.not_stored, *family.reading.absent])


def plan_without(plan: Plan, names: Iterable[str]) -> Plan:
    """The plan of what lies on disk: buffers that the model computes for itself are left out."""
    gone = set(names)
    return Plan(
        {n: t for n, t in plan.tensors.items() if n not in gone},
        {alias: n for alias, n in plan.ties.items() if alias not in gone},
        plan.needs,
        plan.proof,
    )


@dataclass(frozen=True)
class StoredTensor:
    """The name a wide tensor, or a part of one, is stored under, and where its sources lie."""

    name: str
    tensor: str
    places: tuple[Place, ...]
    cells: tuple[tuple[int, int], ...] = ()
    dropped: tuple[int, ...] = ()
    row: tuple[int, int] = (0, 1)
    """Which of how many tensors it is whose rows are stored under the name."""
    base_cells: tuple[tuple[int, int], ...] = ()
    """As in `Move`."""

    @property
    def label(self) -> str:
        """The stored name, or where others share it, the planned one."""
        return self.name if self.row == (0, 1) else self.tensor


def stored_tensors(
    plan: Plan, directory: Directory, spelling: Spelling, written: Collection[str] = ()
) -> list[StoredTensor]:
    """What the directory holds for every planned tensor; what is missing, left over or misshapen is a fault.

    Of several names of one tensor the first is used, or that in `written`.
    """
    faults: list[Fault] = []
    found: list[StoredTensor] = []
    used: set[str] = set()
    others: dict[str, list[str]] = {}
    for alias, name in plan.ties.items():
        others.setdefault(name, []).append(alias)
    parts: dict[str, dict[str, Part]] = {}
    for stored, part in spelling.parts.items():
        for tensor in part.tensors:
            parts.setdefault(tensor, {})[stored] = part
    held: dict[str, list[str]] = {}
    for stored in directory.tensors:
        held.setdefault(spelling.names.get(stored, stored), []).append(stored)
    apart = {
        pattern_of(source)
        for entry in plan.tensors.values()
        for source in entry.sources
        if source in parts and not any(n in held for n in (source, *others.get(source, [])))
    }
    for name, entry in plan.tensors.items():
        options = [
            [stored for n in (source, *others.get(name, [])) for stored in held.get(n, ())]
            for source in entry.sources
        ]
        used.update(n for present in options for n in present)
        missing = [s for s, present in zip(entry.sources, options, strict=True) if not present]
        if entry.fill == "own":
            used.update(parts.get(name, ()))
            continue  # each model computes it for itself
        if name in parts and pattern_of(name) in apart and len(entry.sources) < 2:
            read = parts[entry.sources[0]] if entry.sources else {}
            used.update(read)
            made, what = _in_parts(name, entry, parts[name], read, directory)
            faults += what
            found += made
            continue
        for source in missing:
            faults.append(
                Fault(
                    "checkpoint.tensor_missing",
                    printable(source),
                    "the plan needs this tensor, the directory does not have it",
                )
            )
        if missing:
            continue
        faults += [fault for present in options for fault in _torn(directory, present)]
        chosen = [next((n for n in present if n in written), present[0]) for present in options]
        places = tuple(directory.tensors[n] for n in chosen)
        # A tensor keeps the name under which its source was found; a new one has its own.
        same = len(chosen) == 1 and entry.sources == (name,)
        found.append(StoredTensor(chosen[0] if same else name, name, places))
        faults += _misshapen(name, entry, places)
    for n in directory.tensors:
        if n not in used and n not in spelling.left_out:
            faults.append(
                Fault(
                    "checkpoint.tensor_not_in_plan",
                    printable(n),
                    "the directory has this tensor, and no tensor of the plan is made from it",
                )
            )
    raise_few("the plan does not fit the directory", faults)
    return found


def _in_parts(
    name: str,
    entry: TensorPlan,
    parts: Mapping[str, Part],
    read: Mapping[str, Part],
    directory: Directory,
) -> tuple[list[StoredTensor], list[Fault]]:
    """The stored parts of a tensor: each is made from the same part of its source, which is another block's in a deeper model."""
    found: list[StoredTensor] = []
    faults: list[Fault] = []
    sources = {part.cells: (stored, part) for stored, part in read.items()}
    for stored, part in parts.items():
        if not entry.sources:
            row = part.tensors.index(name), len(part.tensors)
            found += _copies(StoredTensor(stored, name, (), part.cells, part.dropped, row), entry, parts)
            continue
        made, what = _part(*sources[part.cells], entry.sources[0], entry, directory)
        faults += what
        for one in made:
            found += _copies(replace(one, name=stored, tensor=name), entry, parts)
    return found, faults


def _part(
    stored: str, part: Part, name: str, entry: TensorPlan, directory: Directory
) -> tuple[list[StoredTensor], list[Fault]]:
    """One stored part of a tensor, with the dimensions that storing it left out."""
    place = directory.tensors.get(stored)
    if place is None:
        return [], [
            Fault(
                "checkpoint.part_missing",
                printable(stored),
                f"{name} is stored in parts, and this one is missing",
            )
        ]
    shape = tuple(n // count for n, (_, count) in zip(entry.base_shape, part.cells, strict=True))
    kept = tuple(n for d, n in enumerate(shape) if d not in part.dropped)
    count, at = len(part.tensors), part.tensors.index(name)
    if place.shape != (kept := _stacked(kept, count)):
        return [], [
            Fault(
                "checkpoint.shape_differs",
                printable(stored),
                f"shape {place.shape} in the directory, {kept} in the plan",
            )
        ]
    whole = replace(place, shape=shape, offset=place.offset + at * (place.bytes // count))
    return [StoredTensor(stored, name, (whole,), part.cells, part.dropped, (at, count))], []


def _copies(found: StoredTensor, entry: TensorPlan, parts: Mapping[str, Part]) -> Iterator[StoredTensor]:
    """What a stored part becomes in the wide model: one part, or where experts are stored one by one, one for every copy.

    New experts are like those of the base in turn. The names of copies follow from those of the base's experts:

    >>> from mupscale.rules.axes import Axis
    >>> entry = TensorPlan(("up",), tuple(map(Axis.parse, ("out: 2x2", "3"))))
    >>> parts = {f"{e}.up": Part("up", ((e, 2), (0, 1)), (0,)) for e in range(2)}
    >>> found = StoredTensor("1.up", "up", (), parts["1.up"].cells, (0,))
    >>> [(copy.name, copy.cells[0]) for copy in _copies(found, entry, parts)]
    [('2.up', (2, 4)), ('3.up', (3, 4))]
    """
    alone = [
        dim
        for dim, (axis, (_, count)) in enumerate(zip(entry.axes, found.cells, strict=True))
        if axis.grows and axis.base == count > 1
    ]
    if len(alone) != 1:
        yield found
        return
    (dim,) = alone
    axis, (which, _) = entry.axes[dim], found.cells[dim]
    siblings = {
        part.cells[dim][0]: stored
        for stored, part in parts.items()
        if (*part.cells[:dim], *part.cells[dim + 1 :]) == (*found.cells[:dim], *found.cells[dim + 1 :])
    }
    for copy in (w for w, like in enumerate(models_of(axis).tolist()) if like == which):
        cells = (*found.cells[:dim], (copy, axis.wide), *found.cells[dim + 1 :])
        name = _numbered(siblings[0], siblings[1], copy)
        yield replace(found, name=name, cells=cells, base_cells=found.cells)


def _numbered(first: str, second: str, number: int) -> str:
    """The name with a number in the place in which two names have 0 and 1.

    >>> _numbered("h.1.experts.0.up", "h.1.experts.1.up", 12)
    'h.1.experts.12.up'
    """
    words = zip(re.split(r"(\d+)", first), re.split(r"(\d+)", second), strict=True)
    return "".join(a if a == b else str(number) for a, b in words)


def _stacked(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The shape of so many tensors below each other."""
    return shape if count == 1 else (count * shape[0], *shape[1:])


def _torn(directory: Directory, present: Sequence[str]) -> Iterator[Fault]:
    """A tensor that is stored under several names must be the same under all of them."""
    first = directory.tensors[present[0]]
    with Reader(directory.path) as reader:
        for name in present[1:]:
            if not _same_bytes(reader, first, directory.tensors[name]):
                remedy = "save the checkpoint with its ties, or use a plan of the untied model"
                yield Fault(
                    "checkpoint.tie_not_equal",
                    f"{present[0]} = {name}",
                    "tied in the plan, stored twice and not equal",
                    remedy,
                )


def _same_bytes(reader: Reader, a: Place, b: Place) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    for at in range(0, a.bytes, _COMPARED):
        left, right = (bytearray(min(_COMPARED, a.bytes - at)) for _ in range(2))
        reader.read_(a.file, a.offset + at, memoryview(left))
        reader.read_(b.file, b.offset + at, memoryview(right))
        if left != right:
            return False
    return True


def _misshapen(name: str, entry: TensorPlan, places: Sequence[Place]) -> Iterator[Fault]:
    if entry.cat is None and places and places[0].shape != entry.source_shape:
        yield Fault(
            "checkpoint.shape_differs",
            name,
            f"shape {places[0].shape} in the directory, {entry.source_shape} in the plan",
        )


@dataclass(frozen=True)
class _Unplaced:
    """A wide tensor that has no place in a file yet."""

    stored: StoredTensor
    making: Making
    dtype: str

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """What is stored of it, with the dimensions that storing leaves out."""
        return tuple(window(self.making.wide_shape, self.stored.cells)[1])

    @property
    def bytes(self) -> int:
        return prod(self.shape) * item_size(self.dtype)

    @property
    def header(self) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of what is stored under its name, as the file's header says them."""
        kept = tuple(n for d, n in enumerate(self.shape) if d not in self.stored.dropped)
        return self.dtype, _stacked(kept, self.stored.row[1])

    def at(self, place: Place) -> Move:
        found = self.stored
        target = replace(place, shape=self.shape, offset=place.offset + found.row[0] * self.bytes)
        return Move(found.label, self.making, found.places, target, found.cells, found.base_cells)


def _lay_out(
    tensors: Sequence[_Unplaced], shard_bytes: int, written: Mapping[str, str] | None
) -> tuple[tuple[OutFile, ...], tuple[Move, ...], str | None]:
    """Put tensors into shards, give each its header, and put every tensor at its offset."""
    together: dict[str, list[_Unplaced]] = {}
    for tensor in tensors:
        together.setdefault(tensor.stored.name, []).append(tensor)
    for name, group in together.items():
        if len({tensor.shape for tensor in group}) > 1:
            raise MupscaleError(
                f"{name} holds several tensors of one shape, and they would grow differently",
                code="checkpoint.stacked_grow_differently",
            )
    shards = _filled(together, shard_bytes) if written is None else _as_written(together, written)
    count = len(shards)
    files, moves, where = [], [], {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        headers = {tensor.stored.name: tensor.header for tensor in shard}
        raw = header_bytes(headers, {"format": "pt"})
        size = len(raw) + sum(tensor.bytes for tensor in shard)
        places = parse_header(raw[8:], file, size).tensors
        files.append(OutFile(file, size, ((0, raw),)))
        placed = (tensor.at(places[tensor.stored.name]) for tensor in shard)
        moves += sorted(placed, key=lambda move: move.target.offset)
        where.update(dict.fromkeys(headers, file))
    if count <= 1:
        return tuple(files), tuple(moves), None
    total = sum(move.target.bytes for move in moves)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return tuple(files), tuple(moves), json.dumps(index, indent=2) + "\n"


def _filled(together: Mapping[str, list[_Unplaced]], shard_bytes: int) -> list[list[_Unplaced]]:
    """Shards that are filled in order."""
    shards: list[list[_Unplaced]] = []
    room = 0
    for group in together.values():
        size = sum(tensor.bytes for tensor in group)
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1] += group
        room -= size
    return shards


def _as_written(together: Mapping[str, list[_Unplaced]], written: Mapping[str, str]) -> list[list[_Unplaced]]:
    """The shards of a result that is there, in the order of their names."""
    raise_few(
        "the result does not hold every tensor of the plan",
        [
            Fault("checkpoint.tensor_missing", printable(name), "no weight file of the result has it")
            for name in together
            if name not in written
        ],
    )
    shards: dict[str, list[_Unplaced]] = {file: [] for file in sorted(set(written.values()))}
    for name, group in together.items():
        shards[written[name]] += group
    return list(shards.values())
