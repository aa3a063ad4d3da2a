"""One worker's share of a 70-billion-parameter job costs what one worker's share costs.

A checkpoint with the headers of a Llama of 70 billion parameters (80 layers, bfloat16, 30 shards) whose weights are
holes in its files grows twice: to double width, which is 560 GB with noise on every matrix, and to 96 layers and a
hidden size of 10,240 with heads and feed-forward to match, planned from its configuration as `--to` does, with noise on
new blocks and on zeros. Each job is planned whole, its output files are laid out, and worker 37 of 512 really does its
share, about 1.1 and 0.5 GB; nothing else touches the disk. What it wrote is then compared with noise drawn directly, at
the start of every block.

    python benchmarks/scale_70b.py [--worker 37] [--workers 512] [--dir FOLDER]

Prints tensors, units, seconds and peak memory (VmHWM, most of which is torch and numba themselves); the exit code
is 1 when a bound fails: 1.1 times the memory of a worker that grows a small model in the same way, measured in
the same run (1.2 for the deeper job, whose plan this process has read from the one that made it), 10 CPU seconds to
plan the wide model, and 30 to plan the deeper one, where a new process imports transformers and tries the new blocks on
a small copy. The aim there is 15, which an idle machine reaches; CPU seconds grow with what else runs on the cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import mupscale as mu
from harness.limited import peak_mib
from harness.llama_files import Llama, job_for, write_directory
from harness.program import Outcome, option, run
from mupscale.files.directory import Directory
from mupscale.jobs.job import Job
from mupscale.jobs.journal.journals import read_journals
from mupscale.jobs.partial import partial
from mupscale.jobs.work_units import Block, WorkUnits
from mupscale.jobs.worker import run_worker

LLAMA_70B = Llama(hidden=8192, ffn=28672, heads=64, kv_heads=8, layers=80, vocabulary=128256)
K, SHARDS, THREADS = 2, 30, min(2, os.cpu_count() or 1)
SMALL = Llama(hidden=1024, ffn=2816, heads=8, kv_heads=8, layers=2, vocabulary=32000)
TO = "layers=96,hidden=10240,heads=80,kv_heads=10,ffn=36864"
RSS = {"wider": 1.1, "deeper": 1.2}
PLANNING = {"wider": 10.0, "deeper": 30.0}


def on_disk(folder: Path) -> int:
    """Bytes of a folder that really lie on the disk."""
    return sum(file.stat().st_blocks * 512 for file in folder.iterdir())


def matches(job: Job, block: Block) -> bool:
    """Whether the first entries of a block, as written, are the noise of zeros, or the ones of a new gain."""
    target, making = block.move.target, block.move.making
    corner = [1] * (len(block.shape) - 1) + [min(64, block.shape[-1])]
    place = sum(s * w for s, w in zip(block.start, _strides(target.shape), strict=True))
    with open(partial(job.folder) / f"{target.file}.partial", "rb") as file:
        file.seek(target.offset + 2 * place)
        found = torch.frombuffer(bytearray(file.read(2 * corner[-1])), dtype=torch.bfloat16)
    want = torch.full(corner, 1.0 if making.fill == "one" else 0.0)
    if making.noise is not None:
        want = making.noise.slice(making.axes, list(block.start), corner, want)
    return torch.equal(found, want.flatten().bfloat16())


def small_worker(folder: Path) -> None:
    """Grow a small model with the same threads and noise, and print this process's peak memory in MiB."""
    directory = write_directory(folder / "base", SMALL.shapes(), "BF16", 1, holes=True)
    plan = SMALL.plan(K)
    run_worker(job_for(plan, directory, folder / "wide", SMALL.noise(plan)), 0, 1, threads=THREADS)
    print(peak_mib())


def small_peak(folder: Path) -> float:
    """The peak memory of a worker on a small model, in a process of its own."""
    command = [sys.executable, __file__, "--small", "--dir", str(folder)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _strides(shape: tuple[int, ...]) -> list[int]:
    return list(torch.empty(shape, device="meta").stride())


def cpu_seconds() -> float:
    """CPU seconds of this process and of those that it has waited for, so that other load does not count."""
    return sum(os.times()[:4])


def planned(case: str) -> mu.Plan:
    """Twice as wide by hand, or deeper and wider by a quarter as the command line plans it."""
    return LLAMA_70B.plan(K) if case == "wider" else LLAMA_70B.grown("1", TO)


@dataclass(frozen=True)
class Done:
    """One worker's share of one job, and what is wrong with it."""

    items: int
    gigabytes: float
    seconds: float
    planning: float
    peak: float
    """Peak memory of this process so far, in MiB."""
    faults: tuple[str, ...]


def work(case: str, directory: Directory, before: float, folder: Path, worker: int, workers: int) -> Done:
    """Plan a job, of which the directory already took `before` CPU seconds, and do one worker's share of it."""
    started = cpu_seconds() - before
    plan = planned(case)
    job = job_for(plan, directory, folder / case, LLAMA_70B.noise(plan))
    job = Job.from_json(job.to_json().encode())  # as a worker on another machine reads it
    units = WorkUnits(job)
    share = list(units.share(worker, workers))
    planning = cpu_seconds() - started
    blocks = [block for unit in share if unit < units.blocks and isinstance(block := units[unit], Block)]
    size = sum(block.bytes for block in blocks)
    print(f"{case}: {sum(file.size for file in job.files) / 1e9:.0f} GB in {len(job.files)} files")
    print(f"planned in {planning:.2f} s: {len(units)} units, the job is {len(job.to_json()) / 1e6:.2f} MB")
    clock = time.perf_counter()
    run_worker(job, worker, workers, threads=THREADS)
    seconds = time.perf_counter() - clock
    journals = read_journals(partial(job.folder), len(units))
    only = [unit for unit, is_done in enumerate(journals.units) if is_done] == sorted(share)
    written = on_disk(partial(job.folder))
    noisy = [block for block in blocks if block.move.making.noise is not None]
    checks = {
        f"planning took {planning:.1f} s, the bound is {PLANNING[case]:.0f}": planning > PLANNING[case],
        "the journal does not say exactly this worker's share": not only,
        f"{written / 1e9:.2f} GB on the disk for a share of {size / 1e9:.2f} GB": not size
        <= written
        < 1.1 * size,
        "what was written is not the noise of zeros": not all(matches(job, block) for block in blocks),
        "no block of the share has noise, so that nothing was compared": not noisy,
    }
    shutil.rmtree(partial(job.folder))
    found = tuple(f"{case}: {text}" for text, holds in checks.items() if holds)
    return Done(len(share), size / 1e9, seconds, planning, peak_mib(), found)


def measure(chosen: argparse.Namespace) -> Outcome:
    if chosen.small:
        small_worker(chosen.dir)
        return Outcome("")
    with tempfile.TemporaryDirectory(dir=chosen.dir) as name:
        folder, shapes = Path(name), LLAMA_70B.shapes()
        started = cpu_seconds()
        directory = write_directory(folder / "base", shapes, "BF16", SHARDS, holes=True)
        opened = cpu_seconds() - started
        parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
        files = len(directory.weights)
        print(f"{parameters / 1e9:.1f} billion parameters in {files} files, {len(shapes)} tensors")
        done = {
            case: work(case, directory, opened, folder, chosen.worker, chosen.workers) for case in PLANNING
        }
        (folder / "small").mkdir()
        small = small_peak(folder / "small")
    failed = [fault for share in done.values() for fault in share.faults]
    failed += [
        f"{case}: peak memory of {share.peak:.0f} MiB, {small:.0f} for a small model, the bound is {RSS[case]}"
        for case, share in done.items()
        if share.peak > RSS[case] * small
    ]
    wide, deep = done["wider"], done["deeper"]
    return Outcome(
        f"worker={chosen.worker}/{chosen.workers} items={wide.items} gb={wide.gigabytes:.2f} "
        f"seconds={wide.seconds:.1f} rss_mib={wide.peak:.0f} rss_growth={wide.peak / small:.2f} planning_s={wide.planning:.2f} "
        f"deeper_items={deep.items} deeper_gb={deep.gigabytes:.2f} deeper_rss_growth={deep.peak / small:.2f} "
        f"deeper_planning_s={deep.planning:.2f}",
        failed,
    )


OPTIONS = (
    option("--worker", type=int, default=37),
    option("--workers", type=int, default=512),
    option("--dir", type=Path, help="a folder on a disk with about 1.5 GB free"),
    option("--small", action="store_true", help="only the small model the memory is compared with"),
)

if __name__ == "__main__":
    sys.exit(run(measure, *OPTIONS, doc=__doc__))
