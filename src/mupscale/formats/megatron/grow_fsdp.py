"""A checkpoint of Megatron-FSDP at the wide end: files and moves, weights and moments each in their units.

Gated units are stored in halves. Each half is a part of one tensor of the plan, and is made from the same part of the base:

    decoder.layers.0.mlp.linear_fc1.weight (192, 32) of the plan
    -> …weight_w (96, 32), its rows 0 to 95, and …weight_v (96, 32), its rows 96 to 191

Knows: what Megatron reads from where. Does not know: exponents, how bytes are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...errors import Fault
from ...files.dcp.table import Chunk, ChunkedTensor, FileNames, chunked
from ...files.elsewhere import DCP_METADATA, MEGATRON_LATEST
from ...files.pickles.torch_file import Room
from ...files.places import Place
from ...files.strict import printable, raise_few
from ...jobs.job import Cells, Move, Text, window
from ...optimizers.named import Moment
from ...plans.plan import Plan
from ...tensors.making import Making
from ..common import NEW_TENSOR, OTHER_PLAN, Growing, NamedState, WideFiles, archive_of, fixed_file
from .fsdp_dtensor import HALVES, FsdpDtensor
from .groups import NAMES, group_faults, groups_of, settings_of_groups, warming, wide_groups
from .grow_torch_dist import kept_values
from .parts import CLAIM, Parts, Spot, parts_of, refuse_experts
from .torch_dist import lay_out_chunks, metadata_bytes

Endings = tuple[str, ...]


@dataclass(frozen=True)
class WholeOrHalves:
    """A tensor of the plan as it is stored: whole, or in halves along its first dimension."""

    parts: tuple[Parts, ...]
    shape: tuple[int, ...]

    def cells(self, at: int) -> Cells:
        count = len(self.parts)
        return () if count == 1 else ((at, count), *((0, 1),) * (len(self.shape) - 1))

    def moves(self, name: str, making: Making) -> list[Move]:
        """Moves whose targets are where the base lies: enough to measure it."""
        return [
            replace(parts.move(name, making, parts.places[0]), cells=self.cells(at))
            for at, parts in enumerate(self.parts)
        ]


def endings_of(checkpoint: FsdpDtensor, plan: Plan) -> dict[str, Endings]:
    """How every tensor of the plan is stored: as one, or in halves; raises for missing ones and for those that are left over."""
    refuse_experts(checkpoint.stored)
    found: dict[str, Endings] = {}
    faults: list[Fault] = []
    for name, entry in plan.tensors.items():
        spelled = [
            ends
            for ends in (("",), HALVES)
            if all(checkpoint.model + name + e in checkpoint.stored.tensors for e in ends)
        ]
        if entry.sources != (name,) or entry.join is not None:
            faults.append(
                Fault("checkpoint.grows_in_width_only", printable(name), NEW_TENSOR, "grow the width alone")
            )
        elif spelled:
            found[name] = spelled[0]
        elif entry.kind == "parameter":
            what = "the plan needs it, and the checkpoint does not have it"
            faults.append(Fault("checkpoint.tensor_missing", printable(name), what, OTHER_PLAN))
    known = {name + ending for name, endings in found.items() for ending in endings}
    for key in checkpoint.stored.tensors:
        owner = (
            key.removeprefix(checkpoint.model) if key.startswith(checkpoint.model) else checkpoint.owner(key)
        )
        if owner is not None and owner not in known:
            faults.append(
                Fault(
                    "checkpoint.tensor_not_in_plan",
                    printable(key),
                    "no tensor of the plan is made from it",
                    OTHER_PLAN,
                )
            )
    raise_few(CLAIM, faults)
    return found


def weights_of(
    checkpoint: FsdpDtensor, plan: Plan, endings: Mapping[str, Endings]
) -> dict[str, WholeOrHalves]:
    """Where the weights of the base lie."""
    return {
        name: _stored(checkpoint, [checkpoint.model + name + e for e in ends], plan[name].base_shape)
        for name, ends in endings.items()
    }


def _stored(checkpoint: FsdpDtensor, keys: list[str], shape: tuple[int, ...]) -> WholeOrHalves:
    if not shape:
        keys = keys[:1]  # halves have the same number of steps
    part = (shape[0] // len(keys), *shape[1:]) if shape else shape
    return WholeOrHalves(tuple(parts_of(checkpoint.stored, Spot(key, None), part) for key in keys), shape)


def _states(
    checkpoint: FsdpDtensor, plan: Plan, endings: Mapping[str, Endings]
) -> dict[str, dict[str, WholeOrHalves]]:
    """The state of every tensor, by its key."""
    found: dict[str, dict[str, WholeOrHalves]] = {}
    for name, ends in endings.items():
        first = f"{checkpoint.state}{name}{ends[0]}."
        for kind in (key.removeprefix(first) for key in checkpoint.stored.tensors if key.startswith(first)):
            keys = [f"{checkpoint.state}{name}{e}.{kind}" for e in ends]
            if lost := [key for key in keys if key not in checkpoint.stored.tensors]:
                raise_few(
                    CLAIM,
                    [
                        Fault(
                            "megatron.half_missing",
                            printable(lost[0]),
                            "the other half of it is stored, and this one is not",
                        )
                    ],
                )
            shape = plan[name].base_shape if checkpoint.stored.tensors[keys[0]].shape else ()
            found.setdefault(name, {})[kind] = _stored(checkpoint, keys, shape)
    return found


def wide_fsdp(
    checkpoint: FsdpDtensor,
    growing: Growing,
    endings: Mapping[str, Endings],
    weights: Mapping[str, WholeOrHalves],
) -> WideFiles:
    """Everything that writes the wide checkpoint."""
    plan = growing.plan
    out = WideFiles()
    for entry in checkpoint.others:
        out.not_carried[printable(entry)] = "it holds tensors that belong to no weight"
    if growing.names is not None:
        raise_few(
            CLAIM,
            [
                Fault(
                    "megatron.names_not_needed",
                    "names=",
                    "every tensor names its group in this format",
                    "leave names= out",
                )
            ],
        )
    held = {name: {"": (stored, growing.making(name))} for name, stored in weights.items()}
    metas: dict[str, Any] = {}
    groups, members = groups_of(checkpoint)
    states = _states(checkpoint, plan, endings)
    if groups or states:
        raise_few(CLAIM, group_faults(groups, checkpoint.schedule))
        named = NamedState(settings_of_groups(groups), members, states, "optimizer")
        carried = named.carried(growing, CLAIM)
        out.not_carried.update(warming(checkpoint.schedule))
        for name, state in carried.state.items():
            held[name] |= {
                key: (value.source, value.making) if isinstance(value, Moment) else (value, Making(()))
                for key, value in state.items()
            }
        for group in wide_groups(carried.groups, groups, checkpoint.schedule, plan):
            settings = {key: value for key, value in group.items() if key != NAMES}
            metas |= {
                f"{checkpoint.meta}{name}.{key}": value
                for name in group[NAMES]
                for key, value in settings.items()
            }
    _write(out, checkpoint, endings, held, metas)
    return out


def _write(
    out: WideFiles,
    checkpoint: FsdpDtensor,
    endings: Mapping[str, Endings],
    held: Mapping[str, Mapping[str, tuple[WholeOrHalves, Making]]],
    metas: Mapping[str, Any],
) -> None:
    """A file for every tensor of the plan with its state, one for values, and the file that says where they are."""
    folder = f"{checkpoint.tag}/" if checkpoint.tag else ""
    files, tensors = FileNames(), dict[str, ChunkedTensor]()
    for number, (name, entries) in enumerate(held.items()):
        file = f"__0_{number}.distcp"
        laid = list(_laid(checkpoint, name, endings[name], entries))
        rooms = [Room(checkpoint.stored.tensors[key].dtype, shape) for key, shape, _ in laid]
        made, places, archives = lay_out_chunks(folder + file, rooms)
        out.files.append(made)
        for (key, shape, move), place, where in zip(laid, places, archives, strict=True):
            out.moves.append(replace(move, target=Place(place.file, place.offset, place.dtype, shape)))
            chunk = Chunk((0,) * len(shape), shape, file, *where)
            tensors[key] = chunked(place.dtype, shape, [chunk], files)
    kept = {
        key: where
        for key, where in checkpoint.stored.values.items()
        if not key.startswith(checkpoint.meta) and key.partition(".")[0] not in checkpoint.others
    }
    fresh = {key: archive_of(value) for key, value in metas.items()}
    values = kept_values(out, checkpoint.path, kept, folder, f"__0_{len(held)}.distcp", fresh)
    out.files.append(fixed_file(folder + DCP_METADATA, metadata_bytes(tensors, values)))
    if checkpoint.tag:
        out.texts.append(Text(MEGATRON_LATEST, checkpoint.tag.removeprefix("iter_").lstrip("0") or "0"))


def _laid(
    checkpoint: FsdpDtensor, name: str, endings: Endings, entries: Mapping[str, tuple[WholeOrHalves, Making]]
) -> Iterator[tuple[str, tuple[int, ...], Move]]:
    """The key, the shape and the move of everything that is stored for one tensor of the plan."""
    for kind, (stored, making) in entries.items():
        for at, ending in enumerate(endings):
            key = f"{checkpoint.state}{name}{ending}.{kind}" if kind else checkpoint.model + name + ending
            part = stored.moves(f"{name}{ending}: {kind}" if kind else name + ending, making)
            move = part[min(at, len(part) - 1)]
            yield key, tuple(window(making.wide_shape, move.cells)[1]), move
