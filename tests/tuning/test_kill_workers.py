"""Workers that are killed, and a database that restarts, change nothing of what a study finds.

Four workers share a study in a real PostgreSQL on loopback; every few seconds one of them is ended with SIGKILL and
another started in its place, and once the database is restarted. Then every leg must have exactly one COMPLETE
trial, all others must be marked, runs must have gone on from their checkpoints, and the recipe must equal, byte for
byte, that of a run that nobody disturbed. The same with a journal file and two workers. The control is the number of
steps: without checkpoints each kill would cost half a run, with them it costs no more than the time between two.

    python benchmarks/kill_workers.py [--kills 12] [--seed 0]

The last line counts; the exit code is 1 when anything fails, 2 without PostgreSQL. Workers are forked, so that none
spends its time on importing torch.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import optuna
import torch
from torch import nn

import mupscale as mu
from harness.postgres import Server, postgres, programs
from mupscale.tuning.engine import again, open_storage
from mupscale.tuning.proxy import Proxy, ReportLoss
from mupscale.tuning.settings import Settings
from mupscale.tuning.tune import tune

EVERY, PAUSE = 0.25, 0.02  # seconds between checkpoints, and for which a step pretends to compute
STUDY = Settings(
    width=8,
    k=2,
    steps=300,
    lrs=(2e-3, 4e-3, 8e-3),
    noises=(0.1, 0.2),
    factors=(0.5, 1.0, 2.0),
    extend=1,
    rungs=(0.5,),
)


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


def fork(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


@dataclass
class Tally:
    """What was done, and what should not have been seen."""

    kills: int = 0
    failures: list[str] = field(default_factory=list)

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.failures.append(what)
            print(f"FAILED: {what}", flush=True)


def disturbed(
    storage: str,
    folder: Path,
    workers: int,
    kills: int,
    dice: random.Random,
    tally: Tally,
    restart: Callable[[], None],
) -> int:
    """Run a study whose workers are killed; how many kills there were."""
    counted = folder / "steps"

    def work() -> None:
        known = proxy(counted, PAUSE)
        tune(known, STUDY, storage=storage, folder=folder, every=EVERY, beat=1.0)

    alive = [fork(work) for _ in range(workers)]
    done = 0
    while not (folder / "recipe.json").exists() and done < kills:
        time.sleep(dice.uniform(2.0, 4.0))
        victim = alive.pop(dice.randrange(len(alive)))
        ended, status = os.waitpid(victim, os.WNOHANG)
        if ended:
            tally.expect(status == 0, f"a worker ended by itself with status {status}")
        else:
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
            done += 1
        alive.append(fork(work))
        if done == kills // 2:
            restart()
    for worker in alive:
        tally.expect(os.waitpid(worker, 0)[1] == 0, "a worker that nobody killed failed")
    tally.kills += done
    return done


def judge(
    storage: str, folder: Path, kills: int, expected: bytes, plain_steps: int, tally: Tally
) -> tuple[int, int]:
    """Hold the study against the undisturbed one; runs that went on from a checkpoint, steps done twice."""
    study = again(lambda: optuna.load_study(study_name="mupscale", storage=open_storage(storage)))
    trials = study.get_trials(deepcopy=False)
    complete = [t for t in trials if t.state == optuna.trial.TrialState.COMPLETE]
    counts = Counter(t.user_attrs["stretch"] for t in complete)
    tally.expect(all(n == 1 for n in counts.values()), f"legs that count twice: {counts.most_common(3)}")
    others = [t for t in trials if t.state != optuna.trial.TrialState.COMPLETE]
    tally.expect(
        all(t.state == optuna.trial.TrialState.FAIL and "extra" in t.user_attrs for t in others),
        "a trial that does not count is not marked",
    )
    tally.expect(
        (folder / "recipe.json").read_bytes() == expected, "the recipe differs from the undisturbed run's"
    )
    resumed = sum(t.user_attrs["told"]["resumed_at"] > t.user_attrs["begin"] for t in complete)
    redone = (folder / "steps").stat().st_size - plain_steps
    allowed = kills * (round(EVERY / PAUSE) + 15)
    tally.expect(redone <= allowed, f"{redone} steps were done twice, allowed {allowed}")
    print(
        f"  {len(complete)} legs, {len(others)} given up, {resumed} went on from a checkpoint",
        flush=True,
    )
    return resumed, redone


def with_database(
    server: Server, folder: Path, kills: int, dice: random.Random, tally: Tally, expected: bytes, steps: int
) -> tuple[int, int]:
    restarts: list[float] = []

    def restart() -> None:
        if not restarts:
            restarts.append(time.monotonic())
            server.control("restart")

    done = disturbed(server.url, folder, 4, kills, dice, tally, restart)
    tally.expect(bool(restarts), "the study ended before the database was restarted")
    tally.expect(done >= kills, f"the study ended after {done} of {kills} kills")
    return judge(server.url, folder, done, expected, steps, tally)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if programs() is None:
        print("needs PostgreSQL's server: apt-get install postgresql")
        return 2
    torch.set_num_threads(1)
    began, tally, dice = time.monotonic(), Tally(), random.Random(chosen.seed)
    with tempfile.TemporaryDirectory() as name:
        room = Path(name)
        (room / "plain").mkdir()
        tune(proxy(room / "plain" / "steps"), STUDY, folder=room / "plain")
        expected, steps = (
            (room / "plain" / "recipe.json").read_bytes(),
            (room / "plain" / "steps").stat().st_size,
        )
        print(f"undisturbed: {steps} steps, {time.monotonic() - began:.0f} s", flush=True)
        (room / "many").mkdir()
        with postgres() as server:
            resumed, redone = with_database(server, room / "many", chosen.kills, dice, tally, expected, steps)
        print(f"database: {time.monotonic() - began:.0f} s", flush=True)
        folder = room / "journal"
        folder.mkdir()
        storage = str(folder / "study.journal")
        done = disturbed(storage, folder, 2, 4, dice, tally, lambda: None)
        more, again_redone = judge(storage, folder, done, expected, steps, tally)
        tally.expect(resumed > 0 and more > 0, "no run went on from a checkpoint")
    print(
        f"kills={tally.kills} resumed={resumed + more} redone_steps={redone + again_redone} of={2 * steps} "
        f"failures={len(tally.failures)} seconds={time.monotonic() - began:.0f}"
    )
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
