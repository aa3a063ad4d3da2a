"""Wait for slow ranks as long as they live, outside of the backend's collectives, whose timeout ends the whole job.

Ranks that are ready say so in the job's key-value store, and enter a collective only when all are there. Until then
everybody's thread counts up a number in the store, the heartbeat of its rank. A rank that is slow keeps counting and is waited
for; one whose number stands still is lost, and everybody raises.

Example with three ranks: 0 and 2 have read their files, 1 still reads. 0 and 2 look at `here` (2 of 3) once a second,
and at the beats of rank 1, which go 40, 41, …: they wait. If they stand at 41 for `SILENT` seconds, 0 and 2 raise.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from ..errors import MupscaleError

Ranks = dist.ProcessGroup | None
BEAT = 5.0
"""Seconds between two beats: a thousand ranks then ask the store for 200 small operations a second."""
SILENT = 120.0
"""Seconds without a beat after which a rank is lost. A rank that is paused or swapped out needs some; a dead one costs them."""
LOOK = (0.01, 1.0)
"""Seconds between two looks at who is there: at first, and after doubling."""

_meetings: Counter[str] = Counter()
"""How often the ranks of a group have met, by the group; all of its ranks count the same."""


class Heartbeat:
    """Counts up this rank's number in the store for as long as the block runs."""

    def __init__(self, group: Ranks = None) -> None:
        self._group, self._over = group, threading.Event()

    def __enter__(self) -> Heartbeat:
        if several(self._group):
            threading.Thread(target=self._beat, name="mupscale heartbeat", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    def _beat(self) -> None:
        store, key = _store(self._group), _beats(dist.get_rank(self._group))
        with suppress(
            RuntimeError
        ):  # the store is gone with the rank that kept it; whoever meets next is told
            while not self._over.is_set():
                store.add(key, 1)
                self._over.wait(BEAT)


def meet(group: Ranks = None) -> None:
    """Return when every rank of the group is here; raise if one of them gives no sign of life."""
    if not several(group):
        return
    store, rank, world = _store(group), dist.get_rank(group), dist.get_world_size(group)
    _meetings[_name(group)] += 1
    here = f"here/{_meetings[_name(group)]}"
    store.set(f"{here}/{rank}", "")
    if store.add(here, 1) == world:
        store.set(f"{here}/all", "")
    wait, heard = LOOK[0], dict.fromkeys(range(world), (-1, time.monotonic()))
    while not store.check([f"{here}/all"]):
        time.sleep(wait)
        wait = min(2 * wait, LOOK[1])
        if wait == LOOK[1]:  # those that are nearly there need no watching
            _listen(store, here, heard)


def _listen(store: Any, here: str, heard: dict[int, tuple[int, float]]) -> None:
    """Note the beats of the ranks that are missing; raise if those of one stand still."""
    now = time.monotonic()
    for rank in list(heard):
        if store.check([f"{here}/{rank}"]):
            del heard[rank]
            continue
        beats = store.add(_beats(rank), 0)
        if beats != heard[rank][0]:
            heard[rank] = (beats, now)
        elif now - heard[rank][1] > SILENT:
            raise MupscaleError(
                f"another rank stopped or never started: rank {rank} has given no sign of life for {SILENT:g} seconds; "
                "nothing that was loaded may be used: start the job again"
            )


def several(group: Ranks = None) -> bool:
    """Whether there are other ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def _name(group: Ranks) -> str:
    """A short text that stands for the ranks of a group."""
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    return hashlib.blake2b(str(ranks).encode(), digest_size=8).hexdigest()


def _beats(rank: int) -> str:
    return f"beats/{rank}"


def _store(group: Ranks) -> Any:
    """The job's store, which every launcher sets up for torch, with keys of our own."""
    return PrefixStore(f"mupscale/{_name(group)}", _get_default_store())
