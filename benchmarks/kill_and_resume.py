"""A writer that is killed at any moment loses time and nothing else.

A small checkpoint is upscaled, with noise, to twice its width, to new blocks, to both, to sizes that leave zeros
behind the copies, and to new units with the readers of trained ones, by processes that are ended with SIGKILL, the whole group at once, at random moments: one worker,
one worker with two threads, two workers. After each kill the unfinished directory must
not be loadable as a model: no config, no weight file under its own name, unless all bytes are already there. Then
the job is resumed and must give, byte for byte, the directory of a run that nobody disturbed. The same bytes must
come from 1, 2 and 3 workers, from other block sizes, and from a base that is sharded differently.

    python benchmarks/kill_and_resume.py [--kills 30] [--seed 0]

The last line counts; the exit code is 1 when anything differs. Workers are forked, so that none of them spends
its time on importing torch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import mupscale as mu
from harness.forks import contents, fork, wait
from harness.llama_files import Llama, job_for, write_directory
from harness.program import Outcome, option, run
from mupscale.files.directory import Directory, read_directory
from mupscale.jobs.bytes import output_files
from mupscale.jobs.job import PAGE, Job
from mupscale.jobs.journal.journals import read_journals
from mupscale.jobs.partial import partial
from mupscale.jobs.work_units import WorkUnits
from mupscale.jobs.worker import run_job, run_worker
from mupscale.noise.resolve import resolve_noise
from mupscale.noise.resolved import NoisePlan
from mupscale.plans.new_blocks import order_of

MODEL = Llama(hidden=128, ffn=352, heads=8, kv_heads=2, layers=4, vocabulary=500)
ORDER = order_of(4, 6)
BLOCK, SHARD = 64 << 10, 3_000_000
output_files.LEAST = PAGE  # so that these small blocks are written past the page cache, as large ones are
PROVENANCE = ("mupscale.json",)
"""What says how the base was sharded, and so differs when it is sharded differently."""


GOALS: dict[str, Callable[[], mu.Plan]] = {
    "wider": lambda: MODEL.plan(2),
    "deeper": lambda: MODEL.plan(1, ORDER),
    "both": lambda: MODEL.plan(2, ORDER),
    "zeros": lambda: MODEL.grown("ffn=2", "layers=6,hidden=192,heads=12,kv_heads=3"),
    "awake": lambda: MODEL.grown("2", None, by="units"),
}


@cache
def plan_of(goal: str) -> mu.Plan:
    return GOALS[goal]()


def make_job(directory: Directory, out: Path, block_bytes: int = BLOCK, goal: str = "wider") -> Job:
    plan = plan_of(goal)
    noise = awake(Path(str(directory.path))) if goal == "awake" else MODEL.noise(plan)
    return job_for(plan, directory, out, noise, shard_bytes=SHARD, block_bytes=block_bytes)


@cache
def awake(base: Path) -> NoisePlan:
    """New units that read what trained ones read, in sizes of the base's own weights."""
    weights = {n: t for file in base.glob("*.safetensors") for n, t in load_file(file).items()}
    return resolve_noise(weights, mu.NewUnits(), plan=plan_of("awake"))


Mode = Callable[[Job], list[int]]


def one_worker(job: Job) -> list[int]:
    return [fork(lambda: run_job(job))]


def two_threads(job: Job) -> list[int]:
    return [fork(lambda: run_job(job, workers=2))]


def two_workers(job: Job) -> list[int]:
    first = fork(lambda: run_worker(job, 0, 2))
    return [first, fork(lambda: run_worker(job, 1, 2), first)]


MODES: dict[str, Mode] = {"one worker": one_worker, "two threads": two_threads, "two workers": two_workers}


@dataclass
class Tally:
    """What was seen, and what should not have been."""

    kills: int = 0
    cut: int = 0
    """Kills that found the work begun and not done."""
    loadable: int = 0
    different: int = 0
    failed: list[str] = field(default_factory=list)


def kill_once(job: Job, mode: str, seconds: float, want: dict[str, bytes], tally: Tally) -> None:
    """Start, kill after `seconds`, look, resume, compare."""
    processes = MODES[mode](job)
    time.sleep(seconds)
    os.killpg(processes[0], signal.SIGKILL)
    wait(processes)
    tally.kills += 1
    folder, units = partial(job.folder), WorkUnits(job)
    done = 0
    if folder.exists():
        names = {file.name for file in folder.iterdir()}
        journals = read_journals(folder, len(units))
        done = sum(journals.units)
        visible = "config.json" in names or any(name.endswith(".safetensors") for name in names)
        complete = all(_is_complete(folder, name, want) for name in want if name.endswith(".safetensors"))
        if visible and not complete:
            tally.loadable += 1
            tally.failed.append(f"{mode}: loadable although unfinished after {seconds:.2f} s")
    tally.cut += 0 < done < len(units)
    if not wait(MODES[mode](job)) or not job.folder.exists() or contents(job.folder) != want:
        tally.different += 1
        tally.failed.append(f"{mode}: killed after {seconds:.2f} s, resumed, and not the same directory")
    shutil.rmtree(job.folder, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def _is_complete(folder: Path, name: str, want: dict[str, bytes]) -> bool:
    """Whether a weight file has all its bytes, under whichever of its two names."""
    found = next((p for p in (folder / name, folder / f"{name}.partial") if p.exists()), None)
    return found is not None and found.read_bytes() == want[name]


def resharded(directory: Directory, path: Path, shards: int) -> Directory:
    """The same tensors in other files."""
    path.mkdir()
    tensors = {n: t for file in directory.weights for n, t in load_file(f"{directory.path}/{file}").items()}
    parts = [dict(list(tensors.items())[i::shards]) for i in range(shards)]
    for number, part in enumerate(parts):
        save_file(part, path / f"part{number}.safetensors")
    where = {name: f"part{number}.safetensors" for number, part in enumerate(parts) for name in part}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(f"{directory.path}/{name}", path)
    return read_directory(path)


def same_bytes(folder: Path, directory: Directory, goal: str, want: dict[str, bytes], tally: Tally) -> int:
    """Workers, blocks and shards that must not matter; how many ways were compared."""
    out = folder / "way"
    ways = [(f"{workers} workers", make_job(directory, out, goal=goal), workers) for workers in (1, 2, 3)]
    ways += [(f"blocks of {size}", make_job(directory, out, size, goal), 1) for size in (5_000, 1 << 20)]
    for shards in (1, 5):
        other = resharded(directory, folder / f"{goal}{shards}", shards)
        ways.append((f"a base of {shards} shards", make_job(other, out, goal=goal), 1))
    for label, job, workers in ways:
        for worker in range(workers):
            run_worker(job, worker, workers)
        left_out = PROVENANCE if "shards" in label else ()
        if contents(out, left_out) != {name: raw for name, raw in want.items() if name not in left_out}:
            tally.failed.append(f"{goal}, {label}: not the same directory")
        shutil.rmtree(out)
    return len(ways)


def measure(chosen: argparse.Namespace) -> Outcome:
    torch.set_num_threads(1)  # forked processes cannot use the threads of this one
    draw, tally = random.Random(chosen.seed), Tally()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        directory = write_directory(folder / "base", MODEL.shapes(), "F32", 3)
        usual, want = {}, {}
        for goal in GOALS:
            for mode, start in MODES.items():
                job = make_job(directory, folder / "want", goal=goal)
                began = time.perf_counter()
                if not wait(start(job)):
                    tally.failed.append(f"{goal}, {mode}: failed without a kill")
                usual[goal, mode] = time.perf_counter() - began
                want[goal] = contents(job.folder)
                shutil.rmtree(job.folder)
            size = sum(map(len, want[goal].values()))
            print(f"{goal}: {len(WorkUnits(job))} units, {size / 1e6:.1f} MB, undisturbed: ", end="")
            print(", ".join(f"{mode} {usual[goal, mode]:.2f} s" for mode in MODES), flush=True)
        cases = list(product(GOALS, MODES))
        for number in range(chosen.kills):
            goal, mode = cases[number % len(cases)]
            job = make_job(directory, folder / "wide", goal=goal)
            kill_once(job, mode, draw.random() * usual[goal, mode], want[goal], tally)
        ways = sum(
            same_bytes(folder, directory, goal, want[goal], tally) for goal in ("wider", "both", "awake")
        )
    line = (
        f"kills={tally.kills} cut_short={tally.cut} loadable={tally.loadable} different={tally.different} "
        f"ways={ways} failed={len(tally.failed)}"
    )
    if not tally.cut:
        tally.failed.append("no kill came in the middle of the work")
    return Outcome(line, tally.failed)


if __name__ == "__main__":
    kills, seed = option("--kills", type=int, default=30), option("--seed", type=int, default=0)
    sys.exit(run(measure, kills, seed, doc=__doc__))
