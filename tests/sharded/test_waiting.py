"""Ranks that wait for one another: the slow are waited for, the dead are found, and each rank watches one other only."""

import re
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import mupscale as mu
from mupscale.sharded import waiting


class Watched:
    """A store in memory that notes which thread asked for which key."""

    def __init__(self) -> None:
        self.store, self.asked = HashStore(), set[tuple[str, str]]()

    def __getattr__(self, name: str) -> Any:
        def ask(key: Any, *arguments: Any) -> Any:
            self.asked.add((threading.current_thread().name, str(key)))
            return getattr(self.store, name)(key, *arguments)

        return ask


def together(
    monkeypatch: pytest.MonkeyPatch, ranks: dict[int, float | None], world: int
) -> tuple[dict[int, mu.MupscaleError | None], Watched]:
    """What each rank of `world` met, None for all others: rank r arrives after `ranks[r]` seconds and beats until then; None waits for nobody.

    A rank that is not in `ranks` is dead. One with None has arrived, and then died.
    """
    store, met = Watched(), dict[int, mu.MupscaleError | None]()
    here = threading.local()
    monkeypatch.setattr(waiting, "several", lambda group=None: True)
    monkeypatch.setattr(waiting, "_store", lambda group: store)
    monkeypatch.setattr(waiting, "_name", lambda group: f"{here.rank}")
    monkeypatch.setattr(dist, "get_rank", lambda group=None: here.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: world)
    monkeypatch.setattr(waiting, "_meetings", Counter())
    for name, value in {"BEAT": 0.02, "SILENT": 1.0, "LOOK": (0.01, 0.02)}.items():
        monkeypatch.setattr(waiting, name, value)

    def live(rank: int, after: float | None) -> None:
        here.rank = rank
        if after is None:
            store.add("here/1", 1)
            return
        until = time.monotonic() + after
        while time.monotonic() < until:
            store.add(waiting._beats(rank), 1)
            time.sleep(0.02)
        try:
            waiting.meet()
            met[rank] = None
        except mu.MupscaleError as error:
            met[rank] = error

    threads = [threading.Thread(target=live, args=pair, name=str(pair[0])) for pair in ranks.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return met, store


def test_a_slow_rank_is_waited_for(monkeypatch):
    met, _ = together(monkeypatch, {0: 0.0, 1: 2.5, 2: 0.1}, 3)
    assert met == dict.fromkeys(range(3))


def assert_rank_2_is_missed(met: dict[int, mu.MupscaleError | None]) -> None:
    """All errors have the code, and the first number in their words is the rank."""
    for error in met.values():
        assert error is not None
        assert error.code == "rank.no_sign_of_life"
        assert re.findall(r"\d+", str(error))[0] == "2"


def test_a_dead_rank_is_found_and_everybody_hears_of_it(monkeypatch):
    met, _ = together(monkeypatch, {0: 0.0, 1: 0.5, 3: 0.0}, 4)
    assert set(met) == {0, 1, 3}
    assert_rank_2_is_missed(met)


def test_a_node_that_dies_with_one_rank_waiting_and_one_reading_is_found(monkeypatch):
    """Ranks 2 and 3 die: 2 had arrived, 3 had not. 1 watches 2, and what it finds is heard by 0."""
    met, _ = together(monkeypatch, {0: 0.0, 1: 0.0, 2: None}, 4)
    assert set(met) == {0, 1}
    assert_rank_2_is_missed(met)


def test_a_rank_watches_the_next_one_only(monkeypatch):
    """A thousand ranks that all look at each other would ask the store a million times a second."""
    _, store = together(monkeypatch, {0: 0.5, **dict.fromkeys(range(1, 8), 0.0)}, 8)
    watched = {(int(by), key) for by, key in store.asked if key.startswith("beats/") and by != "0"}
    assert watched == {(by, f"beats/{rank % 8}") for by in range(1, 8) for rank in (by, by + 1)}
