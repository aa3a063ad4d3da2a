"""The shards of a wide run, filled block by block from a source: the kernel and the bits of every other path.

Beside the shards themselves a rank holds one block and the base slice behind it. Knows: one rank. Talks to nobody
(a live source does, when it is told to hold a tensor).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import Fault
from ..files.places import Place, dtype_name
from ..jobs.blocks import BlockMaker
from ..jobs.job import BLOCK_BYTES, Move
from ..jobs.units import Block, block_shape
from ..plans.plan import TensorPlan
from ..rules.axes import Axis
from ..rules.optimizers import OptimizerRule
from ..rules.scale import ONE, Scale
from ..tensors.noise import TensorNoise
from ..tensors.parts import Rectangle, held, is_sharded, local_of
from ..training.ledger import Ledger
from ..training.state import carry_state
from .source import AnySource


@dataclass(frozen=True)
class Filling:
    """One wide tensor of this rank: how it is made, from what, and where it goes."""

    move: Move
    stored: Any
    wide: Tensor


class Filler:
    """Fills wide tensors from one source."""

    def __init__(self, source: AnySource) -> None:
        self._source = source
        self._stored: Any = None
        self._maker = BlockMaker(lambda move, lows, room: source.read(self._stored, lows, room))

    @property
    def room_bytes(self) -> int:
        """Memory beside the shards, in bytes."""
        return self._maker.room_bytes

    def fill_all_(self, fillings: Iterable[Filling]) -> None:
        """Fill this rank's part of every tensor.

        A rank that fails goes on giving others what they wait for, and raises when all have been served.
        """
        failure: Exception | None = None
        for filling in fillings:
            try:
                if filling.stored is not None:
                    self._source.hold(filling.stored, filling.move, filling.wide)
                if failure is None:
                    self.fill_(filling)
            except Exception as error:
                failure = failure or error
                if not self._source.others_wait:
                    break
        if failure is not None:
            raise failure

    def fill_(self, filling: Filling) -> None:
        """Fill this rank's part of a tensor from what the source holds."""
        move, wide = filling.move, filling.wide
        local, part = local_of(wide.detach()), held(wide)
        self._stored = filling.stored
        for block in _cut(move, part):
            made = self._maker.make(Block(move, block.start, block.shape))
            block.within(local, part.start).copy_(made)


def weight_filling(
    name: str, entry: TensorPlan, stored: Any, wide: Tensor, source: AnySource, noise: TensorNoise | None
) -> Filling:
    """How a weight or buffer is made."""
    move = _move(
        name,
        wide,
        entry.axes,
        source.kind_of(stored) if stored is not None else None,
        entry.change.s if entry.kind == "parameter" else ONE,
    )
    made = replace(move, shift=entry.shift, noise=noise, fill="one" if entry.fill == "one" else "zero")
    return Filling(made, stored, wide)


def state_fillings(
    optimizer: Optimizer,
    parameter: Tensor,
    name: str,
    source: AnySource,
    rule: OptimizerRule,
    settings: Mapping[str, Any],
    ledger: Ledger,
) -> tuple[dict[str, Any], list[Filling], list[Fault]]:
    """The optimizer state of one parameter, still empty, what will fill it, and what could not be carried.

    Moments have the placement of their parameter; single numbers are there already.
    """
    found = source.states[name]
    numbers = {key: _is_number(value, source) for key, value in found.items()}
    there = {
        key: source.number(value)
        if numbers[key] == "tensor"
        else value
        if numbers[key]
        else _stand_in(value, source)
        for key, value in found.items()
    }
    carried, faults = carry_state(rule, settings, there, name, ledger, parameter.requires_grad)
    fillings = []
    for key, value in carried.items():
        noted = ledger.noted.get(id(value))
        if noted is None:
            carried[key] = _counter(key, value, parameter, settings)
            continue
        made, axes, scale = noted
        if is_sharded(parameter) and made.shape != parameter.shape:
            what = f"its state {key!r} has shape {tuple(made.shape)}, which has no placement on the parameter's mesh"
            faults.append(
                Fault(name, what, f"{type(optimizer).__name__} cannot go on with sharded parameters")
            )
            continue
        room = _like(parameter, made)
        carried[key] = room
        kind = source.kind_of(found[key])
        fillings.append(Filling(_move(f"{name}: {key}", room, axes, kind, scale), found[key], room))
    return carried, fillings, faults


def _move(
    name: str,
    wide: Tensor,
    axes: tuple[Axis, ...],
    kind: tuple[torch.dtype, tuple[int, ...]] | None,
    scale: Scale,
) -> Move:
    target = Place("", 0, dtype_name(wide.dtype), tuple(wide.shape))
    sources = () if kind is None else (Place("", 0, dtype_name(kind[0]), kind[1]),)
    return Move(name, target, sources, axes, scale)


def _is_number(value: Any, source: AnySource) -> str:
    """ "tensor" for a tensor without dimensions, "plain" for a Python number, nothing for any other tensor."""
    if value is None or isinstance(value, (bool, int, float)):
        return "plain"
    return "" if source.kind_of(value)[1] else "tensor"


def _stand_in(value: Any, source: AnySource) -> Tensor:
    dtype, shape = source.kind_of(value)
    return torch.empty(shape, dtype=dtype, device="meta")


def _counter(key: str, value: Any, parameter: Tensor, settings: Mapping[str, Any]) -> Any:
    """A number where torch's own optimizers keep it: beside the parameter for fused and capturable ones."""
    if isinstance(value, Tensor) and key == "step" and (settings.get("fused") or settings.get("capturable")):
        return value.to(local_of(parameter).device)
    return value


def _like(parameter: Tensor, made: Tensor) -> Tensor:
    """Room for a moment, placed like its parameter."""
    local = local_of(parameter.detach())
    if not is_sharded(parameter):
        return torch.empty(made.shape, dtype=made.dtype, device=local.device)
    from torch.distributed.tensor import DTensor

    sharded: Any = parameter
    room = torch.empty(local.shape, dtype=made.dtype, device=local.device)
    return DTensor.from_local(
        room,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )


def _cut(move: Move, part: Rectangle) -> Iterator[Rectangle]:
    """Blocks of a rectangle, small enough to be made in a few buffers."""
    if not part.numel:
        return
    steps = block_shape(replace(move, target=replace(move.target, shape=part.shape)), BLOCK_BYTES)
    for corner in product(*(range(0, n, step) for n, step in zip(part.shape, steps, strict=True))):
        sizes = zip(corner, steps, part.shape, strict=True)
        start = tuple(a + b for a, b in zip(part.start, corner, strict=True))
        yield Rectangle(start, tuple(min(step, n - at) for at, step, n in sizes))
