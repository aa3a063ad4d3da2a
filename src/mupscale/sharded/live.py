"""A running base as a source: every rank receives only the slices that it lacks, from the ranks that hold them.

All transfers follow from shapes, placements and the plan, so no requests are sent. Where the boundaries of base and
wide shards align, nothing is sent. Ranks in a replica receive from ranks of the same replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import MupscaleError
from ..plans.plan import Plan
from ..runs.provenance import Provenance
from ..tensors.entry_sources import Reads
from ..tensors.making import Making
from ..tensors.parts import Rectangle, is_sharded, local_of, local_rectangle, rank_rectangle
from .agreement import device_of

Message = tuple[int, Rectangle]
"""A rank, and the rectangle of the base tensor that goes there or comes from there."""


@dataclass(frozen=True)
class Sharding:
    """How a tensor is cut over ranks."""

    shape: tuple[int, ...]
    mesh: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    placements: tuple[Any, ...] = ()

    @staticmethod
    def of(tensor: Tensor) -> Sharding:
        if not is_sharded(tensor):
            return Sharding(tuple(tensor.shape))
        sharded: Any = tensor
        mesh = sharded.device_mesh
        return Sharding(
            tuple(tensor.shape), tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()), sharded.placements
        )

    def coordinate(self, rank: int) -> tuple[int, ...]:
        if rank not in self.ranks:
            raise MupscaleError(
                f"rank {rank} holds nothing of a base tensor of shape {self.shape}: base and wide model are on different "
                "ranks; load from a checkpoint instead",
                code="rank.base_on_other_ranks",
            )
        index = self.ranks.index(rank)
        found: list[int] = []
        for size in reversed(self.mesh):
            index, digit = divmod(index, size)
            found.insert(0, digit)
        return tuple(found)

    def held_by(self, rank: int) -> Rectangle:
        if not self.ranks:
            return Rectangle((0,) * len(self.shape), self.shape)
        return rank_rectangle(self.shape, self.mesh, self.placements, self.coordinate(rank))

    def replica(self, rank: int) -> tuple[int, ...]:
        """Which copy of the tensor a rank holds a part of."""
        pairs = zip(self.coordinate(rank), self.placements, strict=True)
        return tuple(at for at, placement in pairs if placement.is_replicate())


@lru_cache(maxsize=4096)
def held_and_wanted(
    base: Sharding, wide: Sharding, reads: Reads
) -> Mapping[int, tuple[Rectangle, Rectangle]]:
    """The parts of the base tensor that every rank holds and needs; equal layers share one cached result."""
    if wide.ranks and set(wide.ranks) != set(base.ranks):
        raise MupscaleError(
            "base and wide model are sharded over different ranks; load from a checkpoint instead",
            code="rank.base_on_other_ranks",
        )
    return {rank: (base.held_by(rank), reads.cover(wide.held_by(rank))) for rank in base.ranks}


@lru_cache(maxsize=4096)
def messages(
    base: Sharding, wide: Sharding, reads: Reads, me: int
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """What this rank sends, and what it receives."""
    everyone, mine = held_and_wanted(base, wide, reads), base.replica(me)
    owned, wanted = everyone[me]
    sends, receives = [], []
    for rank, (theirs, want) in everyone.items():
        if rank != me and base.replica(rank) == mine:
            if (part := owned.meet(want)).numel:
                sends.append((rank, part))
            if (part := theirs.meet(wanted)).numel:
                receives.append((rank, part))
    return tuple(sends), tuple(receives)


@lru_cache(maxsize=4096)
def is_aligned(base: Sharding, wide: Sharding, reads: Reads) -> bool:
    """Whether every rank holds all it needs."""
    return all(
        not want.numel or owned.meet(want) == want
        for owned, want in held_and_wanted(base, wide, reads).values()
    )


@dataclass
class LiveSource:
    """The tensors and moments of a base that runs on the same ranks."""

    identity: str
    weights: Mapping[str, Tensor]
    states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    since: Plan | None = None
    provenance: Provenance = field(default_factory=Provenance)
    messages: int = 0
    """How many were received."""
    bytes: int = 0
    """How many were received from other ranks."""

    others_wait: bool = True
    _buffer: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    _origin: tuple[int, ...] = (0,)

    def close(self) -> None:
        self._buffer = torch.empty(0, device="cpu")

    def lies(self, stored: Tensor, wanted: Rectangle) -> tuple[str, int]:
        return "", 0  # in no file; and all ranks must hold tensors in the same order

    def ahead(self, stored: Tensor, wanted: Rectangle) -> None:
        pass

    def whole(self, stored: Tensor) -> Tensor | None:
        sharded: Any = stored.detach()
        full: Tensor = sharded.full_tensor() if is_sharded(stored) else sharded
        return full

    def kind_of(self, stored: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
        return stored.dtype, tuple(stored.shape)

    def number(self, stored: Tensor) -> Tensor:
        return local_of(stored).detach().cpu().clone()

    def aligned(self, stored: Tensor, making: Making, wide: Tensor) -> bool:
        return not is_sharded(stored) or is_aligned(Sharding.of(stored), Sharding.of(wide), making.reads)

    def hold(self, stored: Tensor, making: Making, wide: Tensor) -> None:
        """Receive the slices of a base tensor that this rank needs, and send others the slices they need."""
        local = local_of(stored).detach()
        if not is_sharded(stored):
            self._buffer, self._origin = local.cpu().contiguous(), (0,) * local.dim()
            return
        shardings, me = (Sharding.of(stored), Sharding.of(wide)), dist.get_rank()
        sends, receives = messages(*shardings, making.reads, me)
        own, wanted = local_rectangle(stored), making.reads.cover(local_rectangle(wide))
        self._buffer, self._origin = torch.empty(wanted.shape, dtype=local.dtype, device="cpu"), wanted.start
        mine = own.meet(wanted)
        if mine.numel:
            mine.within(self._buffer, wanted.start).copy_(mine.within(local, own.start))
        device = device_of()
        rooms = [torch.empty(part.shape, dtype=local.dtype, device=device) for _, part in receives]
        operations = [
            dist.P2POp(dist.isend, part.within(local, own.start).contiguous().to(device), rank)
            for rank, part in sends
        ]
        operations += [
            dist.P2POp(dist.irecv, room, rank) for (rank, _), room in zip(receives, rooms, strict=True)
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for (_, part), room in zip(receives, rooms, strict=True):
            part.within(self._buffer, wanted.start).copy_(room)
            self.bytes += room.nbytes
        self.messages += len(receives)

    def read(self, stored: Tensor, lows: list[int], room: Tensor) -> None:
        room.copy_(Rectangle(tuple(lows), tuple(room.shape)).within(self._buffer, self._origin))
