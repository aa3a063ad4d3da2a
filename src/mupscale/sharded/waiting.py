"""Wait for slow ranks as long as they live, outside of the backend's collectives, whose timeout ends the whole job.

Ranks that are ready say so in the job's key-value store, and enter a collective only when all are there. Until then
every rank counts up a number in the store, its heartbeat, and those that wait watch the number of the next rank. A rank
that is slow keeps counting and is waited for; one whose number stands still is lost. Whoever finds that tells the store, and
all that wait raise. Each watches one other, so the store is asked a few times a second by each rank, however many there are.

Example with four ranks: 0 and 3 have read their files and wait, 1 still reads, 2 dies. 3 watches 0 and 0 watches 1, which
both count on. When 1 has read its file it watches 2, whose number stands at 41. `SILENT` seconds later 1 writes that 2 is lost;
0 and 3 read it, and all three raise.
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
"""Seconds between two looks at whether all are there: at first, and after doubling."""

_ALL = "all"
"""What the last rank writes when everybody is here."""
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
        # The store is gone with the rank that kept it; whoever meets next is refused.
        with suppress(RuntimeError):
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
    over = f"{here}/over"
    if store.add(here, 1) == world:
        store.compare_set(over, "", _ALL)
    watch, wait = _Watch(store, rank, (rank + 1) % world), LOOK[0]
    while not store.check([over]):
        if watch.stands_still():
            store.compare_set(over, "", str(watch.next))  # the first who says something is heard by all
        time.sleep(wait)
        wait = min(2 * wait, LOOK[1])
    if (lost := store.get(over).decode()) != _ALL:
        raise MupscaleError(
            f"another rank stopped or never started: rank {lost} has given no sign of life for {SILENT:g} seconds; "
            "nothing that was loaded may be used: start the job again",
            code="rank.no_sign_of_life",
        )


class _Watch:
    """Beats for a rank that waits, and looks at the beats of the next one, each every `BEAT` seconds.

    Silence is counted in looks and not read off a clock: a rank that was itself paused for minutes has looked once.
    """

    def __init__(self, store: Any, rank: int, after: int) -> None:
        self.next, self._rank, self._store = after, rank, store
        self._beats, self._still, self._looked = -1, 0, time.monotonic()

    def stands_still(self) -> bool:
        """Whether the next rank has not counted for `SILENT` seconds of looks."""
        now = time.monotonic()
        if now - self._looked < BEAT:
            return False
        self._looked = now
        self._store.add(_beats(self._rank), 1)
        before, self._beats = self._beats, self._store.add(_beats(self.next), 0)
        self._still = self._still + 1 if self._beats == before else 0
        return self._still * BEAT > SILENT


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
