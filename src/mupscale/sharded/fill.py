"""The shards of a wide run, filled block by block from a source: the kernel and the bits of every other path.

In addition to its shards a rank holds one block and the base slice that it is made from, on the device of its shards.
Knows: one rank.
Communicates with no other rank (a live source does, when it holds a tensor).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..errors import Fault
from ..jobs.bytes.blocks import BlockMaker, StoredBase
from ..jobs.job import BLOCK_BYTES
from ..jobs.work_units import block_shape
from ..optimizers.named import Moment
from ..optimizers.quantised import Coded
from ..tensors.making import Making
from ..tensors.parts import Rectangle, is_sharded, local_of, local_rectangle
from .source import AnySource


@dataclass(frozen=True)
class Filling:
    """One wide tensor of this rank: how it is made, from what, and where it goes."""

    making: Making
    stored: Any
    """The source's handle of its base tensor; None for a new tensor."""
    wide: Tensor


class Filler:
    """Fills wide tensors from one source."""

    def __init__(self, source: AnySource) -> None:
        self._source = source
        self._makers: dict[torch.device, BlockMaker] = {}

    @property
    def room_bytes(self) -> int:
        """Memory in addition to the shards, in bytes."""
        return sum(maker.room_bytes for maker in self._makers.values())

    def fill_all_(self, fillings: Iterable[Filling]) -> None:
        """Fill this rank's part of every tensor.

        A rank that fails continues to send other ranks the slices they wait for, and raises after the last one.
        """
        failure: Exception | None = None
        ordered = sorted(fillings, key=self._lies)  # as they are, if the source has no files
        for at, filling in enumerate(ordered):
            try:
                self._ahead(ordered[at + 1 : at + 2])
                if filling.stored is not None:
                    self._source.hold(filling.stored, filling.making, filling.wide)
                if failure is None:
                    self.fill_(filling)
            except Exception as error:
                failure = failure or error
                if not self._source.others_wait:
                    break
        if failure is not None:
            raise failure

    def _lies(self, filling: Filling) -> tuple[str, int]:
        wanted = _covered(filling)
        return ("", 0) if wanted is None else self._source.lies(filling.stored, wanted)

    def _ahead(self, fillings: Iterable[Filling]) -> None:
        """The storage reads for the next tensor while this one is made."""
        for filling in fillings:
            if (wanted := _covered(filling)) is not None:
                self._source.ahead(filling.stored, wanted)

    def fill_(self, filling: Filling) -> None:
        """Fill this rank's part of a tensor from what the source holds."""
        making, stored, wide = filling.making, filling.stored, filling.wide
        local, part = local_of(wide.detach()), local_rectangle(wide)
        base = None
        if stored is not None:
            dtype, shape = self._source.kind_of(stored)
            base = StoredBase(dtype, (0,) * len(shape), shape, partial(self._source.read, stored))
        maker = self._makers.setdefault(local.device, BlockMaker(local.device))
        for block in _cut(making, part, wide.element_size()):
            made = maker.make(making, base, block.start, block.shape, wide.dtype)
            block.within(local, part.start).copy_(made)


def _covered(filling: Filling) -> Rectangle | None:
    """What this rank needs of the base tensor; None if it needs nothing."""
    part = local_rectangle(filling.wide)
    if filling.stored is None or not part.numel:
        return None
    return filling.making.reads.cover(part)


def state_fillings(
    label: str,
    parameter: Tensor,
    name: str,
    carried: Mapping[str, Any],
    settings: Mapping[str, Any],
    source: AnySource,
) -> tuple[dict[str, Any], list[Filling], list[Fault]]:
    """The empty optimizer state of one parameter, the targets that will be filled, and faults for what does not fit.

    `carried` is its state in new units. Moments have the placement of their parameter; numbers are set already.
    """
    state: dict[str, Any] = {}
    fillings: list[Filling] = []
    faults: list[Fault] = []
    for key, value in carried.items():
        if not isinstance(value, Moment):
            state[key] = _counter(key, value, parameter, settings)
            continue
        shape = value.making.wide_shape
        if isinstance(value.source, Coded):
            what = f"its state {key!r} is quantised in blocks, which are not loaded by parts"
            faults.append(
                Fault(
                    "state.quantised_in_blocks",
                    name,
                    what,
                    "load the model alone, then build the optimizer from it",
                )
            )
            continue
        if is_sharded(parameter) and shape != parameter.shape:
            what = f"its state {key!r} has shape {shape}, which has no placement on the parameter's mesh"
            faults.append(
                Fault(
                    "state.without_placement", name, what, f"{label} cannot continue with sharded parameters"
                )
            )
            continue
        state[key] = _like(parameter, shape, source.kind_of(value.source)[0])
        fillings.append(Filling(value.making, value.source, state[key]))
    return state, fillings, faults


def _counter(key: str, value: Any, parameter: Tensor, settings: Mapping[str, Any]) -> Any:
    """A number on the device where torch's optimizers keep it: the parameter's for fused and capturable ones."""
    if isinstance(value, Tensor) and key == "step" and (settings.get("fused") or settings.get("capturable")):
        return value.to(local_of(parameter).device)
    return value


def _like(parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Room for a moment, placed like its parameter."""
    local = local_of(parameter.detach())
    if not is_sharded(parameter):
        return torch.empty(shape, dtype=dtype, device=local.device)
    from torch.distributed.tensor import DTensor

    sharded: Any = parameter
    room = torch.empty(local.shape, dtype=dtype, device=local.device)
    return DTensor.from_local(
        room,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )


def _cut(making: Making, part: Rectangle, item_bytes: int) -> Iterator[Rectangle]:
    """Blocks of a rectangle, small enough to be made in a few buffers."""
    if not part.numel:
        return
    steps = block_shape(making, part.shape, item_bytes, BLOCK_BYTES)
    for corner in product(*(range(0, n, step) for n, step in zip(part.shape, steps, strict=True))):
        sizes = zip(corner, steps, part.shape, strict=True)
        start = tuple(a + b for a, b in zip(part.start, corner, strict=True))
        yield Rectangle(start, tuple(min(step, n - at) for at, step, n in sizes))
