"""One worker's share of a 70-billion-parameter job costs what one worker's share costs.

A checkpoint with the headers of a Llama of 70 billion parameters (80 layers, bfloat16, 30 shards) whose weights
are holes in its files is doubled in width: 560 GB, with noise on every matrix. The whole job is planned, its
output files are laid out, and worker 37 of 512 really does its share, about 1.1 GB; nothing else touches the disk.
Some entries of what it wrote are then compared with noise drawn directly.

    python benchmarks/scale_70b.py [--worker 37] [--workers 512] [--dir FOLDER]

Prints tensors, units, seconds and peak memory (VmHWM, most of which is torch and numba themselves); the exit code
is 1 when a bound fails: 1.1 times the memory of a worker that grows a small model in the same way, measured in
the same run, and 10 CPU seconds to plan.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from harness.llama_files import Llama, job_for, peak_mib, write_directory
from mupscale.jobs.job import Job
from mupscale.jobs.journal import read_journals
from mupscale.jobs.partial import partial
from mupscale.jobs.work_units import Block, WorkUnits
from mupscale.jobs.worker import run_worker

LLAMA_70B = Llama(hidden=8192, ffn=28672, heads=64, kv_heads=8, layers=80, vocabulary=128256)
K, SHARDS, THREADS = 2, 30, min(2, os.cpu_count() or 1)
SMALL = Llama(hidden=1024, ffn=2816, heads=8, kv_heads=8, layers=2, vocabulary=32000)
RSS, PLANNING = 1.1, 10.0


def on_disk(folder: Path) -> int:
    """Bytes of a folder that really lie on the disk."""
    return sum(file.stat().st_blocks * 512 for file in folder.iterdir())


def matches(job: Job, unit: int) -> bool:
    """Whether the first entries of a unit, as written, are the noise of zeros."""
    block = WorkUnits(job)[unit]
    assert isinstance(block, Block)
    target, noise = block.move.target, block.move.making.noise
    corner = [1] * (len(block.shape) - 1) + [min(64, block.shape[-1])]
    place = sum(s * w for s, w in zip(block.start, _strides(target.shape), strict=True))
    with open(partial(job.out) / f"{target.file}.partial", "rb") as file:
        file.seek(target.offset + 2 * place)
        found = torch.frombuffer(bytearray(file.read(2 * corner[-1])), dtype=torch.bfloat16)
    want = torch.zeros(corner)
    if noise is not None:
        want = noise.slice(block.move.making.axes, list(block.start), corner, want)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--worker", type=int, default=37)
    parser.add_argument("--workers", type=int, default=512)
    parser.add_argument("--dir", type=Path, help="a folder on a disk with about 1.5 GB free")
    parser.add_argument(
        "--small", action="store_true", help="only the small model the memory is compared with"
    )
    arguments = parser.parse_args()
    if arguments.small:
        small_worker(arguments.dir)
        return 0
    folder = Path(tempfile.mkdtemp(dir=arguments.dir))
    try:
        shapes = LLAMA_70B.shapes()
        started = time.process_time()  # this process plans alone, so other load on the machine does not count
        directory = write_directory(folder / "base", shapes, "BF16", SHARDS, holes=True)
        plan = LLAMA_70B.plan(K)
        job = job_for(plan, directory, folder / "wide", LLAMA_70B.noise(plan))
        job = Job.from_json(job.to_json().encode())  # as a worker on another machine reads it
        units = WorkUnits(job)
        share = list(units.share(arguments.worker, arguments.workers))
        planning = time.process_time() - started
        size = sum(units[unit].bytes for unit in share if unit < units.blocks)
        parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
        print(
            f"{parameters / 1e9:.1f} billion parameters in {len(directory.weights)} files, {len(shapes)} tensors"
        )
        print(f"wide: {sum(file.size for file in job.files) / 1e9:.0f} GB in {len(job.files)} files")
        print(
            f"planned in {planning:.2f} s: {len(units)} units, the job is {len(job.to_json()) / 1e6:.2f} MB"
        )
        started = time.perf_counter()
        run_worker(job, arguments.worker, arguments.workers, threads=THREADS)
        seconds = time.perf_counter() - started
        done = read_journals(partial(job.out), len(units))
        written = on_disk(partial(job.out))
        blocks = [unit for unit in share if unit < units.blocks]
        right = all(matches(job, unit) for unit in blocks[:: max(1, len(blocks) // 8)])
        (folder / "small").mkdir()
        rss, small = peak_mib(), small_peak(folder / "small")
    finally:
        shutil.rmtree(folder)
    only = [unit for unit, is_done in enumerate(done.units) if is_done] == sorted(share)
    faults = {
        f"peak memory of {rss:.0f} MiB, {small:.0f} for a small model, the bound is {RSS}": rss > RSS * small,
        f"planning took {planning:.1f} s, the bound is {PLANNING:.0f}": planning > PLANNING,
        "the journal does not say exactly this worker's share": not only,
        f"{written / 1e9:.2f} GB on the disk for a share of {size / 1e9:.2f} GB": not size
        <= written
        < 1.1 * size,
        "what was written is not the noise of zeros": not right,
    }
    for fault in (text for text, holds in faults.items() if holds):
        print(f"FAILED: {fault}")
    print(f"on the disk {written / 1e9:.2f} GB")
    print(
        f"worker={arguments.worker}/{arguments.workers} items={len(share)} gb={size / 1e9:.2f} seconds={seconds:.1f} "
        f"rss_mib={rss:.0f} rss_growth={rss / small:.2f} planning_s={planning:.2f}"
    )
    return 1 if any(faults.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
