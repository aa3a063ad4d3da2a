"""Where the tensors of a plan lie in a torch_dist checkpoint of Megatron.

Megatron stacks the layers of a block in one tensor, and ranks cut it into chunks:

    decoder.layers.mlp.linear_fc2.weight (2, 32, 96), in chunks (1, 32, 48) of two ranks
    -> decoder.layers.0.mlp.linear_fc2.weight and …1… of the plan, each joined from two chunks
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from ...errors import Fault
from ...files.dcp.chunks import chunk_place
from ...files.dcp.table import Chunk, DcpDirectory
from ...files.places import Place, item_size
from ...files.strict import printable, raise_few
from ...jobs.job import Move
from ...plans.plan import Plan
from ...tensors.making import Join, Making
from ..common import NEW_TENSOR, OTHER_PLAN
from .torch_dist import TorchDist

CLAIM = "this checkpoint of Megatron cannot be widened"
STATE = "optimizer.state."
COPIES = ("fp32_param", "param")
"""Names of float32 copies of the weights, as its optimizers save them."""
_LAYER = re.compile(r"(.*\blayers)\.(\d+)\.(.*)")
_EXPERTS = re.compile(r".*\.mlp\.experts\.(experts|local_experts|linear_fc\d)\b.*")
_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Modules whose tensors are saved under the names that fused layers of Transformer Engine give them."""


@dataclass(frozen=True)
class Spot:
    """Where a tensor of the plan lies: the name of a stored tensor, and which layer of it."""

    key: str
    layer: int | None

    def state(self, state: str) -> Spot:
        return replace(self, key=f"{STATE}{state}.{self.key}")


@dataclass(frozen=True)
class Parts:
    """A tensor in pieces that lie one behind the other along a dimension."""

    places: tuple[Place, ...]
    dim: int | None
    shape: tuple[int, ...]

    def move(self, label: str, making: Making, target: Place) -> Move:
        join = None if self.dim is None else Join(self.dim)
        return Move(label, replace(making, join=join), self.places, target)


def spots_of(checkpoint: TorchDist, plan: Plan) -> dict[str, Spot]:
    """Where every tensor of the plan lies; raises for those that are missing, and for stored ones that it does not know."""
    refuse_experts(checkpoint.stored)
    spots: dict[str, Spot] = {}
    faults: list[Fault] = []
    for name, entry in plan.tensors.items():
        spot = _spot(name, checkpoint)
        if spot is None and entry.kind == "parameter":
            faults.append(
                Fault(
                    "checkpoint.tensor_missing",
                    printable(name),
                    "the plan needs it, and the checkpoint does not have it",
                    OTHER_PLAN,
                )
            )
        elif entry.sources != (name,) or entry.join is not None:
            faults.append(
                Fault("checkpoint.grows_in_width_only", printable(name), NEW_TENSOR, "grow the width alone")
            )
        elif spot is not None:
            spots[name] = spot
    layers: dict[str, set[int | None]] = {}
    for spot in spots.values():
        layers.setdefault(spot.key, set()).add(spot.layer)
    for key, tensor in checkpoint.stored.tensors.items():
        weight = key.removeprefix(STATE).partition(".")[2] if key.startswith(STATE) else key
        if weight not in layers:
            faults.append(_unknown(key))
        elif layers[weight] not in ({None}, set(range(tensor.shape[0] if tensor.shape else 0))):
            what = f"it has shape {tensor.shape}, the plan has {len(layers[weight])} layers"
            faults.append(Fault("checkpoint.other_layer_count", printable(key), what, OTHER_PLAN))
    raise_few(CLAIM, faults)
    return spots


def refuse_experts(stored: DcpDirectory) -> None:
    """Raise for experts as Megatron's own layers store them: one by one in the model, joined over ranks in the checkpoint."""
    found = next((key for key in stored.tensors if _EXPERTS.fullmatch(key)), None)
    what = "experts of Megatron's mixtures, which are parameters of their own in the model and lie in one tensor here"
    faults = [] if found is None else [Fault("megatron.experts_not_read", printable(found), what)]
    raise_few(CLAIM, faults)


def spellings(name: str) -> list[str]:
    """A name, and the one that fused layers of Transformer Engine give the same tensor.

    >>> spellings("layers.0.input_layernorm.weight")
    ['layers.0.input_layernorm.weight', 'layers.0.self_attention.linear_qkv.layer_norm_weight']
    """
    return [name, *(name.replace(own, saved) for own, saved in _NORMS.items() if own in name)]


def plain_spelling(name: str) -> str:
    """A name as plain norms have it.

    >>> plain_spelling("layers.0.self_attention.linear_qkv.layer_norm_weight")
    'layers.0.input_layernorm.weight'
    """
    for own, saved in _NORMS.items():
        name = name.replace(saved, own)
    return name


def _spot(name: str, checkpoint: TorchDist) -> Spot | None:
    for spelling in spellings(name):
        if spelling in checkpoint.stored.tensors:
            return Spot(spelling, None)
        if (found := _LAYER.fullmatch(spelling)) and f"{found[1]}.{found[3]}" in checkpoint.stored.tensors:
            return Spot(f"{found[1]}.{found[3]}", int(found[2]))
    return None


def _unknown(key: str) -> Fault:
    if "optimizer.distributed." in key or "optimizer.state." in key.removeprefix(STATE):
        what = "the distributed optimizer saved it in buckets that ranks have cut, or for one of several optimizers"
        return Fault(
            "megatron.buckets_not_read",
            printable(key),
            what,
            "save with distrib_optim_sharding_type = 'fully_reshardable'",
        )
    return Fault(
        "checkpoint.tensor_not_in_plan", printable(key), "no tensor of the plan is made from it", OTHER_PLAN
    )


def parts_of(stored: DcpDirectory, spot: Spot, shape: tuple[int, ...]) -> Parts:
    """The pieces of a stored tensor, or of one layer of it, which must have this shape."""
    tensor, first = stored.tensors[spot.key], 0 if spot.layer is None else 1
    start, size = [0] * len(tensor.shape), [*tensor.shape]
    if spot.layer is not None:
        start[0], size[0] = spot.layer, 1
    chunks = sorted(tensor.meeting(start, size), key=lambda chunk: chunk.start)
    cut = {d for chunk in chunks for d, n in enumerate(tensor.shape[first:]) if chunk.shape[first + d] != n}
    faults = []
    if tensor.shape[first:] != shape:
        what = f"shape {tensor.shape[first:]}, {shape} at the plan's base end"
        faults.append(Fault("checkpoint.shape_differs", printable(spot.key), what, OTHER_PLAN))
    if len(cut) > 1:
        what = f"ranks have cut it along dimensions {sorted(cut)}, and chunks are joined along one"
        faults.append(
            Fault(
                "megatron.cut_along_several",
                printable(spot.key),
                what,
                "save it from ranks that cut it along one",
            )
        )
    raise_few(CLAIM, faults)
    places = tuple(_place(stored, chunk, spot.layer, tensor.dtype) for chunk in chunks)
    return Parts(places, next(iter(cut), None), shape)


def _place(stored: DcpDirectory, chunk: Chunk, layer: int | None, dtype: str) -> Place:
    place = chunk_place(stored.path, chunk, dtype)
    if layer is None:
        return place
    before = (layer - chunk.start[0]) * prod(chunk.shape[1:])
    return Place(place.file, place.offset + before * item_size(dtype), dtype, chunk.shape[1:])


def weight_parts(checkpoint: TorchDist, plan: Plan, spots: Mapping[str, Spot]) -> dict[str, Parts]:
    """Every tensor of the plan in the most precise copy that is stored: the optimizer's own, if it has one."""
    found = {}
    for name, spot in spots.items():
        copies = (spot.state(key) for key in COPIES)
        best = next((copy for copy in copies if copy.key in checkpoint.stored.tensors), spot)
        found[name] = parts_of(checkpoint.stored, best, plan[name].base_shape)
    return found


def state_parts(checkpoint: TorchDist, plan: Plan, spots: Mapping[str, Spot]) -> dict[str, dict[str, Parts]]:
    """The state of every tensor, without copies of the weights. Steps are kept elsewhere, one number for all."""
    saved = [key.removeprefix(STATE) for key in checkpoint.stored.tensors if key.startswith(STATE)]
    kinds = sorted({key.partition(".")[0] for key in saved} - {*COPIES})
    found: dict[str, dict[str, Parts]] = {}
    for name, spot in spots.items():
        for kind in kinds:
            if (own := spot.state(kind)).key in checkpoint.stored.tensors:
                found.setdefault(name, {})[kind] = parts_of(checkpoint.stored, own, plan[name].base_shape)
    return found
