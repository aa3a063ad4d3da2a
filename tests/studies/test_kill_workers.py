"""Workers that are killed, and a database that restarts, change nothing of what a study finds.

Four workers share a study in a real PostgreSQL on loopback; every few seconds one of them is ended with SIGKILL and
another started in its place, and once the database is restarted. Then every leg must have exactly one COMPLETE
trial, all others must be marked, runs must have continued from their checkpoints, and the recipe must equal, byte for
byte, that of a run that nobody disturbed. The same with a journal file and two workers. The control is the number of
steps: without checkpoints each kill would cost half a run, with them it costs no more than the time between two.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import mupscale as mu
from harness.forks import fork
from harness.postgres import postgres, programs
from mupscale.studies.engine import again, open_storage
from mupscale.studies.proxy import Proxy, ReportLoss
from mupscale.studies.settings import Settings
from mupscale.studies.tune import tune

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.nightly

EVERY, PAUSE = 0.25, 0.02  # seconds between checkpoints, and for which a step pretends to compute
STUDY = Settings(
    width=8, k=2, steps=300, lrs=(2e-3, 4e-3, 8e-3), noises=(0.1, 0.2), factors=(0.5, 1.0, 2.0), extend=1,
    rungs=(0.5,),
)  # fmt: skip


def build(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )


def proxy(steps_taken: Path | None = None, pause: float = 0.0) -> Proxy:
    """A small task; every step is counted in a file, whoever takes it."""

    def train(run: mu.Run, steps: int, report: ReportLoss) -> None:
        for step in range(run.steps, steps):
            x = torch.randn(16, 4)  # from the global generator, which a checkpoint must carry
            loss = (run.model(x) - (2 * x[:, :1]).sin() * x[:, 1:2]).square().mean()
            run.model.zero_grad()
            loss.backward()
            run.optimizers[0].step()
            if steps_taken is not None:
                with steps_taken.open("ab") as file:
                    file.write(b".")
            time.sleep(pause)
            report(step, loss)

    return Proxy(build, train)


def disturbed(
    storage: str, folder: Path, workers: int, kills: int, restart: Callable[[], None] = lambda: None
) -> int:
    """Run a study whose workers are killed; how many kills there were. `restart` is called halfway, once."""
    counted, dice = folder / "steps", random.Random(0)
    folder.mkdir(exist_ok=True)

    def work() -> None:
        known = proxy(counted, PAUSE)
        tune(known, STUDY, storage=storage, folder=folder, every=EVERY, beat=1.0)

    alive = [fork(work) for _ in range(workers)]
    done, restarted = 0, False
    while not (folder / "recipe.json").exists() and done < kills:
        time.sleep(dice.uniform(2.0, 4.0))
        victim = alive.pop(dice.randrange(len(alive)))
        ended, status = os.waitpid(victim, os.WNOHANG)
        if ended:
            assert status == 0, "a worker ended by itself"
        else:
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
            done += 1
        alive.append(fork(work))
        if done == kills // 2 and not restarted:
            restart()
            restarted = True
    for worker in alive:
        assert os.waitpid(worker, 0)[1] == 0, "a worker that nobody killed failed"
    assert restarted, "the study ended before it was disturbed"
    return done


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The study that nobody disturbs: its recipe, and how many steps it takes."""
    torch.set_num_threads(1)  # forked processes cannot use the threads of this one
    folder = tmp_path_factory.mktemp("plain")
    tune(proxy(folder / "steps"), STUDY, folder=folder)
    return (folder / "recipe.json").read_bytes(), (folder / "steps").stat().st_size


def expect_the_same(storage: str, folder: Path, kills: int, plain: tuple[bytes, int]) -> None:
    opened = open_storage(storage)
    study = again(lambda: optuna.load_study(study_name="mupscale", storage=opened))
    trials = study.get_trials(deepcopy=True)
    if isinstance(opened, optuna.storages.RDBStorage):  # its connections would be collected in another test
        opened.remove_session()
        opened.engine.dispose()
    complete = [t for t in trials if t.state == optuna.trial.TrialState.COMPLETE]
    counts = Counter(t.user_attrs["stretch"] for t in complete)
    assert set(counts.values()) == {1}, "every leg counts once"
    others = [t for t in trials if t.state != optuna.trial.TrialState.COMPLETE]
    assert all(t.state == optuna.trial.TrialState.FAIL and "extra" in t.user_attrs for t in others)
    assert (folder / "recipe.json").read_bytes() == plain[0]
    assert any(t.user_attrs["told"]["resumed_at"] > t.user_attrs["begin"] for t in complete)
    redone = (folder / "steps").stat().st_size - plain[1]
    assert redone <= kills * (round(EVERY / PAUSE) + 15), "steps that were done twice"


@pytest.mark.skipif(programs() is None, reason="needs PostgreSQL's server: apt-get install postgresql")
def test_workers_of_a_database_that_restarts_find_the_same_recipe(plain, tmp_path):
    with postgres() as server:
        done = disturbed(server.url, tmp_path / "many", 4, 12, lambda: server.control("restart"))
        assert done == 12, "the study ended too early"
        expect_the_same(server.url, tmp_path / "many", done, plain)


def test_workers_of_a_journal_find_the_same_recipe(plain, tmp_path):
    storage = str(tmp_path / "study.journal")
    done = disturbed(storage, tmp_path / "two", 2, 4)
    expect_the_same(storage, tmp_path / "two", done, plain)
