"""Units shared by a few threads: each takes the next from one list, and the first failure ends them all.

Everything that takes time (reading, the kernel, writing, fingerprints) releases the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from threading import Event, Lock

import torch

from ..errors import MupscaleError


def check_threads(threads: int, name: str = "threads") -> None:
    if threads < 1:
        raise MupscaleError(
            f"{name}={threads}, expected 1 or more; write {name}=1", code="argument.below_one"
        )


def in_threads(count: int, todo: Sequence[int], work: Callable[[Iterator[int]], None]) -> None:
    """Call `work` in so many threads with units that they take from one list, in order."""
    if count == 1:
        work(iter(todo))
        return
    stop, lock, units = Event(), Lock(), iter(todo)

    def mine() -> Iterator[int]:
        while not stop.is_set():
            with lock:
                unit = next(units, None)
            if unit is None:
                return
            yield unit

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count, thread_name_prefix="mupscale") as pool:
            try:
                for done in as_completed([pool.submit(work, mine()) for _ in range(count)]):
                    done.result()
            finally:
                stop.set()
    finally:
        torch.set_num_threads(before)
