"""Streaming a wide checkpoint takes about as long as copying it, in memory that does not grow with it.

A base with the tensors of a Llama is doubled in width, without noise and with noise on every matrix. Every job
runs in a new process, which measures itself.

vs_copy        wall time of the whole job (output synced, digests of the base and the atomic finish included;
               python's start and `import torch` not) over `cp` of the same output and an fsync of every copied
               file. The two take turns, and the median of the ratios of neighbours counts, because the speed of
               a shared machine drifts.
vs_copy_noise  the same with noise; compiling the noise kernel is part of it
rss_mib        the largest peak of resident memory (VmHWM) of a process that writes, interpreter and torch
               included (about 230 MiB)
rss_growth     that peak for the whole output over the peak for 1 GB of output

    python benchmarks/stream.py [--gb 8] [--workers 2] [--repeats 3] [--dir FOLDER]
    python benchmarks/stream.py --fingerprints [--gb 2] …

With `--fingerprints` it measures instead what the fingerprints of blocks and base cost, in CPU seconds, by jobs that take
turns: `checked` is the job as it is, `trusted` the one with --trust-base, each over a job without any fingerprint and second
read; the median of the ratios counts. Otherwise the last line is `vs_copy=… vs_copy_noise=… rss_mib=… rss_growth=…` for float32; the line for bfloat16 stands
above it. The exit code is 1 when a bound fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.llama_files import Llama, job_for, peak_mib, write_directory
from mupscale.files.directory import Directory, read_directory
from mupscale.files.places import item_size
from mupscale.jobs import worker as worker_module
from mupscale.jobs.blocks import Reader
from mupscale.jobs.worker import run_job

K = 2
HIDDEN, FFN, HEADS, KV_HEADS, VOCABULARY = 2048, 5632, 32, 8, 4096
BOUNDS = {"vs_copy": 1.25, "vs_copy_noise": 2.5, "rss_mib": 400.0, "rss_growth": 1.10}


def model_with(layers: int) -> Llama:
    return Llama(HIDDEN, FFN, HEADS, KV_HEADS, layers, VOCABULARY)


def wide_bytes(layers: int, dtype: str) -> int:
    shapes = [entry.wide_shape for entry in model_with(layers).plan(K).tensors.values()]
    return sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes) * item_size(dtype)


def layers_for(gigabytes: float, dtype: str) -> int:
    """How many layers give about so many bytes of output."""
    one, two = wide_bytes(1, dtype), wide_bytes(2, dtype)
    return max(1, 1 + round((gigabytes * 1e9 - one) / (two - one)))


@dataclass(frozen=True)
class Measured:
    """One job in a process of its own."""

    seconds: float
    cpu: float
    rss_mib: float


def write(base: Path, out: Path, layers: int, noisy: bool, workers: int, mode: str) -> None:
    """The process that is measured: one job; prints its seconds and its peak memory."""
    model = model_with(layers)
    plan = model.plan(K)
    job = job_for(plan, read_directory(base), out, model.noise(plan) if noisy else None)
    if mode != "checked":
        job = replace(job, trust_base=True)
    if mode == "bare":
        leave_out_fingerprints()
    start, cpu = time.perf_counter(), time.process_time()
    run_job(job, workers)
    print(time.perf_counter() - start, time.process_time() - cpu, peak_mib())


def leave_out_fingerprints() -> None:
    """Blocks are written and journalled without a fingerprint, and the base is read without one."""

    class Plain(Reader):
        def __init__(self, folder: Path, sizes: object) -> None:
            super().__init__(folder)

        def taken(self) -> list[object]:
            return []

    for name, changed in (
        ("BaseReader", Plain),
        ("block_sum", lambda block, raw: "0" * 16),
        ("base_fingerprints", lambda job, *_: {file.name: "" for file in job.sources}),
    ):
        setattr(worker_module, name, changed)


def measure_job(
    directory: Directory, out: Path, layers: int, noisy: bool, workers: int, mode: str = "checked"
) -> Measured:
    os.sync()  # what others left unwritten is no part of this
    command = [
        sys.executable,
        __file__,
        "--write",
        str(directory.path),
        str(out),
        str(layers),
        str(int(noisy)),
        str(workers),
        mode,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Measured(*map(float, done.stdout.split()))


def measure_copy(source: Path, target: Path) -> float:
    """Seconds of `cp`, and of fsync of everything it wrote."""
    os.sync()
    start = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", source, target], check=True)
    for path in (*target.iterdir(), target):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - start


def measure(folder: Path, gigabytes: float, dtype: str, workers: int, repeats: int) -> dict[str, float]:
    """All figures of one dtype."""
    small = peak(folder / "small", layers_for(1, dtype), dtype, workers)
    layers = layers_for(gigabytes, dtype)
    directory = write_directory(folder / "base", model_with(layers).shapes(), dtype, 2)
    size = wide_bytes(layers, dtype)
    ratios: dict[bool, list[float]] = {False: [], True: []}
    largest = 0.0
    for _ in range(repeats):
        for noisy in (False, True):
            job = measure_job(directory, folder / "wide", layers, noisy, workers)
            copy = measure_copy(folder / "wide", folder / "copy")
            for used in ("wide", "copy"):
                shutil.rmtree(folder / used)
            ratios[noisy].append(job.seconds / copy)
            largest = max(largest, job.rss_mib)
            print(
                f"{dtype:4} {'noise' if noisy else 'exact'}  {size / 1e9:.2f} GB  job {job.seconds:6.2f} s = "
                f"{size / job.seconds / 1e9:.2f} GB/s, {job.cpu:.1f} s of CPU   copy {copy:6.2f} s = {size / copy / 1e9:.2f} GB/s   "
                f"peak {job.rss_mib:.0f} MiB",
                flush=True,
            )
    shutil.rmtree(folder / "base")
    return {
        "vs_copy": median(ratios[False]),
        "vs_copy_noise": median(ratios[True]),
        "rss_mib": max(largest, small),
        "rss_growth": largest / small,
    }


def peak(folder: Path, layers: int, dtype: str, workers: int) -> float:
    """The larger peak of an exact and a noisy job."""
    directory = write_directory(folder / "base", model_with(layers).shapes(), dtype, 2)
    peaks = []
    for noisy in (False, True):
        peaks.append(measure_job(directory, folder / "wide", layers, noisy, workers).rss_mib)
        shutil.rmtree(folder / "wide")
    shutil.rmtree(folder)
    return max(peaks)


def measure_fingerprints(folder: Path, gigabytes: float, dtype: str, workers: int, repeats: int) -> None:
    """What fingerprints and the second read cost, over jobs that take turns."""
    layers = layers_for(gigabytes, dtype)
    directory = write_directory(folder / "base", model_with(layers).shapes(), dtype, 2)
    for noisy in (False, True):
        ratios: dict[str, list[float]] = {"checked": [], "trusted": []}
        for _ in range(repeats):
            cpu = {}
            for mode in ("bare", "checked", "trusted"):
                cpu[mode] = measure_job(directory, folder / "wide", layers, noisy, workers, mode).cpu
                shutil.rmtree(folder / "wide")
            for mode, found in ratios.items():
                found.append(cpu[mode] / cpu["bare"])
        told = " ".join(f"{mode}={median(found):.2f}" for mode, found in ratios.items())
        print(
            f"{dtype:4} {'noise' if noisy else 'exact'}: {told}  ({cpu['bare']:.1f} CPU s without)",
            flush=True,
        )
    shutil.rmtree(folder / "base")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gb", type=float, default=8, help="output of each job, in GB")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="a folder on the disk to be measured")
    parser.add_argument(
        "--fingerprints", action="store_true", help="measure what fingerprints cost, and nothing else"
    )
    parser.add_argument("--write", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        base, out, layers, noisy, workers, mode = arguments.write
        write(Path(base), Path(out), int(layers), noisy == "1", int(workers), mode)
        return 0
    figures = {}
    for dtype in ("BF16", "F32"):
        folder = Path(tempfile.mkdtemp(dir=arguments.dir))
        try:
            if arguments.fingerprints:
                measure_fingerprints(folder, arguments.gb, dtype, arguments.workers, arguments.repeats)
                continue
            figures[dtype] = measure(folder, arguments.gb, dtype, arguments.workers, arguments.repeats)
        finally:
            shutil.rmtree(folder)
    failed = False
    for dtype, found in figures.items():
        for name, bound in BOUNDS.items():
            if not found[name] <= bound:
                print(f"FAILED: {dtype} {name} = {found[name]:.3g}, the bound is {bound:g}")
                failed = True
    for dtype, found in figures.items():
        line = "vs_copy={vs_copy:.2f} vs_copy_noise={vs_copy_noise:.2f} rss_mib={rss_mib:.0f} rss_growth={rss_growth:.3f}"
        print(f"{'bf16: ' if dtype == 'BF16' else ''}{line.format(**found)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
