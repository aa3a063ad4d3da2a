"""Functions of a test module run on several ranks: real processes, one start for all of them.

Starting torch costs seconds, so a module names all its cases and launches them once for each number of ranks:

    def sums() -> float:                                   # a case: no arguments, called on every rank
        t = torch.ones(1)
        dist.all_reduce(t)
        return float(t)

    @pytest.fixture(scope="module")
    def two():
        return launch(__name__, ["sums"], world=2)

    def test_sums(two):
        assert two["sums"] == [2.0, 2.0]                   # what each rank returned, in the order of ranks

A case may return anything that pickles (tensors too, DTensors not) and finds `folder()`, a directory shared by all
ranks and kept when the caller names it. A case that raises on any rank raises here when it is asked for, with that
rank's traceback; the cases after it run in a new start. Ranks that wait for a dead one are ended after a moment,
and all of them at the timeout, with the line where each stood.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
_FOLDER, _BACKEND = "MUPSCALE_TEST_FOLDER", "MUPSCALE_TEST_BACKEND"
_GRACE = 5.0  # seconds that ranks get to end by themselves when one of them has failed


class Launched(Mapping[str, list[Any]]):
    """What the cases returned, by name: a list with one entry for every rank."""

    def __init__(self, values: Mapping[str, list[Any]], failures: Mapping[str, str]) -> None:
        self.values_by_case, self.failures = dict(values), dict(failures)

    def __getitem__(self, case: str) -> list[Any]:
        if case in self.failures:
            raise AssertionError(f"the case {case} failed\n{self.failures[case]}")
        return self.values_by_case[case]

    def __iter__(self) -> Iterator[str]:
        yield from (*self.values_by_case, *self.failures)

    def __len__(self) -> int:
        return len(self.values_by_case) + len(self.failures)


def launch(
    module: str,
    cases: Sequence[str],
    world: int,
    *,
    timeout: float = 300.0,
    folder: Path | None = None,
    backend: str = "gloo",
) -> Launched:
    """Run the functions `cases` of `module` on `world` ranks, one after the other, and collect what they return.

    `timeout` is for all of them together, in seconds. `folder` is what the cases see as `folder()`; without it
    they see one that is removed at the end. With the backend nccl, rank i has the device cuda:i.
    """
    deadline = time.monotonic() + timeout
    values: dict[str, list[Any]] = {}
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        shared = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rest = list(cases)
        while rest:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            left = deadline - time.monotonic()
            if left <= 0:
                failures.update(dict.fromkeys(rest, f"not run: {timeout:.0f} seconds had passed"))
                break
            outputs = _start(module, rest, world, left, scratch, shared, backend)
            done = [case for case in rest if all((scratch / f"{case}.{r}").exists() for r in range(world))]
            for case in done:
                values[case] = [pickle.loads((scratch / f"{case}.{r}").read_bytes()) for r in range(world)]
            rest = rest[len(done) :]
            if not all((scratch / f"ready.{rank}").exists() for rank in range(world)):
                failures.update(dict.fromkeys(rest, outputs))
                break
            if rest:
                failures[rest.pop(0)] = outputs
    return Launched(values, failures)


def folder() -> Path:
    """The directory that all ranks of this launch share."""
    return Path(os.environ[_FOLDER])


def _start(
    module: str, cases: Sequence[str], world: int, timeout: float, scratch: Path, shared: Path, backend: str
) -> str:
    """Start the ranks, wait for them, and return what those that failed have said."""
    until = time.time() + timeout
    with ExitStack() as stack:
        logs: list[IO[bytes]] = []
        ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(world):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                _FOLDER: str(shared),
                _BACKEND: backend,
            }
            log = stack.enter_context((scratch / f"log.{rank}").open("w+b"))
            command = [sys.executable, "-m", "harness.launched", module, str(scratch), str(until), *cases]
            ranks.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log))
            logs.append(log)
        try:
            _wait(ranks, time.monotonic() + until - time.time())
        finally:
            ended = [rank.poll() for rank in ranks]
            for rank_process in ranks:
                rank_process.kill()
                rank_process.wait()
        said = []
        for rank, (code, written) in enumerate(zip(ended, logs, strict=True)):
            written.seek(0)
            text = written.read().decode(errors="replace")
            state = "was waiting and has been ended" if code is None else f"exit code {code}"
            if code != 0:
                when = os.fstat(written.fileno()).st_mtime
                said.append((code is None, when, f"rank {rank}: {state}\n{text[-6000:]}"))
        return "\n".join(text for *_, text in sorted(said))  # the rank that failed first comes first


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        if any(rank.poll() for rank in ranks):
            deadline = min(deadline, time.monotonic() + _GRACE)
        time.sleep(0.05)


def _rank(module: str, scratch: Path, until: float, cases: Sequence[str]) -> None:
    """One rank's life: join the group, run the cases, leave what they return as files."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = max(until - time.time(), 4.0)
    faulthandler.dump_traceback_later(timeout - 2)  # where it stood, if it has to be ended
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = os.environ[_BACKEND]
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{scratch / 'store'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    functions = importlib.import_module(module)
    (scratch / f"ready.{rank}").touch()
    for case in cases:
        torch.manual_seed(0)
        try:
            value = pickle.dumps(getattr(functions, case)())
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # not by an exception: leaving the group would wait for the others
        (scratch / f"{case}.{rank}.part").write_bytes(value)
        (scratch / f"{case}.{rank}.part").rename(scratch / f"{case}.{rank}")
    faulthandler.cancel_dump_traceback_later()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
