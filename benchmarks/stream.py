"""Streaming a wide checkpoint takes about as long as copying it, in memory that does not grow with it.

A base with the tensors of a Llama is doubled in width, without noise and with noise on every matrix. Every job
runs in a new process, which measures itself. Jobs and copies take turns, and the best of each counts: whatever
else a shared machine does can only add time.

f32, bf16    wall time of the whole job (output synced and read back, digests of the base and the atomic finish included; python's
             start and `import torch` not) over `cp` of the same output and an fsync of every copied file
…_noise      the same with noise; loading the noise kernel is part of it
t_noise      the same for bf16 with the norms measured first that `--noise t=…` is relative to. The weights are random, so every
             matrix takes the most passes
read_…       wall time of reading the output once from the disk with `cat`, over the same copy: about what publishing adds,
             because nothing is published that was not read from the disk
cpu_…        CPU time of the job over that of the copy; says what the machine does not blur
rss_growth   the largest peak of resident memory (VmHWM) of a process that writes the whole output, over the peak for 1 GB

    python benchmarks/stream.py [--gb 4] [--workers 2] [--repeats 3] [--dir FOLDER] [--quick] [--unread]
    python benchmarks/stream.py --fingerprints [--gb 2] …

`--quick` is 1 GB once, and fails for nothing: so little time says nothing on a busy machine. With `--unread` results are
published without being read back: what is saved is the price of it. Aims are those of a job that is not read back, and bounds
allow once and a half the time of reading the output besides. With `--fingerprints` it measures
instead what the fingerprints of blocks and base cost, and reading back, in CPU seconds, by jobs that take turns: `checked` is
the job as it is, `trusted` the one with --trust-base, each over a job without any fingerprint, second read and reading back;
the median of the ratios counts.

The last line is `f32=… f32_noise=… bf16=… bf16_noise=… t_noise=… read_f32=… read_bf16=… cpu_f32=… … rss_growth=…`. The exit code is 1 when a
bound fails; an aim that is missed is printed.
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

from harness.limited import peak_mib
from harness.llama_files import Llama, job_for, write_directory
from harness.program import Outcome, option, run
from mupscale.files.directory import Directory, read_directory
from mupscale.files.places import item_size
from mupscale.jobs import worker as worker_module
from mupscale.jobs.bytes.blocks import Reader
from mupscale.jobs.norms.measured import measured_in
from mupscale.jobs.norms.norm_journal import NormJournal
from mupscale.jobs.publish import publish as publish_module
from mupscale.jobs.publish.read_back import forget
from mupscale.jobs.worker import run_job
from mupscale.noise.measures import Statistic

K = 2
HIDDEN, FFN, HEADS, KV_HEADS, VOCABULARY = 2048, 5632, 32, 8, 4096
AIMS = {"f32": 0.85, "f32_noise": 1.1, "bf16": 0.95, "bf16_noise": 1.4, "t_noise": 1.9}
BOUNDS = {"f32": 1.25, "f32_noise": 2.0, "bf16": 1.25, "bf16_noise": 2.5, "rss_growth": 1.10}
"""Without the read-back, of which the time of reading the output is known and allowed once and a half."""
ALLOWED_READS = 1.5
MOST_FOR_NORMS = 2.6  # CPU time of t_noise over that of bf16_noise: at most 15 passes over a base of a quarter of the output
CASES = {"F32": ("exact", "noise"), "BF16": ("exact", "noise", "t")}
"""What is measured of each dtype; "t" is noise with norms measured first."""


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


def write(base: Path, out: Path, layers: int, case: str, workers: int, mode: str) -> None:
    """The process that is measured: one job; prints its seconds and its peak memory."""
    model = model_with(layers)
    plan = model.plan(K)
    job = job_for(plan, read_directory(base), out, None if case == "exact" else model.noise(plan))
    if mode in ("trusted", "bare"):
        job = replace(job, trust_base=True)
    if mode == "bare":
        leave_out_fingerprints()
    if mode in ("unread", "bare"):
        vars(publish_module)["_right_files"] = lambda *_: {}
    start, cpu = time.perf_counter(), time.process_time()
    if case == "t":
        wanted: list[tuple[str, Statistic]] = [
            (move.name, "norm") for move in job.moves if move.making.noise is not None
        ]
        journal = NormJournal(out, base, [file.name for file in job.sources])
        measured_in(base, job.moves, {}, wanted, journal=journal, threads=workers)
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
    directory: Directory, out: Path, layers: int, case: str, workers: int, mode: str = "checked"
) -> Measured:
    os.sync()  # what others left unwritten is no part of this
    given = map(str, (directory.path, out, layers, case, workers, mode))
    done = subprocess.run(
        [sys.executable, __file__, "--write", *given], stdout=subprocess.PIPE, text=True, check=True
    )
    return Measured(*map(float, done.stdout.split()))


def measure_copy(source: Path, target: Path) -> tuple[float, float]:
    """Wall and CPU seconds of `cp`, and of fsync of everything it wrote."""
    os.sync()
    start, before = time.perf_counter(), os.times()
    subprocess.run(["cp", "-r", "--reflink=never", source, target], check=True)
    for path in (*target.iterdir(), target):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - start, sum(os.times()[:4]) - sum(before[:4])


def measure_read(source: Path) -> float:
    """Wall seconds of reading every file of a directory from the disk with `cat`."""
    for path in source.iterdir():
        forget(path)
    start = time.perf_counter()
    subprocess.run(["cat", *source.iterdir()], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def ratios_of(
    folder: Path, gigabytes: float, dtype: str, workers: int, repeats: int, mode: str = "checked"
) -> tuple[dict[str, tuple[float, float]], float, float]:
    """Wall and CPU time of the best job over those of the best copy, by case; of the best read; and how memory grows."""
    layers = layers_for(gigabytes, dtype)
    small = peak(folder / "small", min(layers, layers_for(1, dtype)), dtype, workers)
    directory = write_directory(folder / "base", model_with(layers).shapes(), dtype, 2)
    size = wide_bytes(layers, dtype)
    jobs: dict[str, list[Measured]] = {case: [] for case in CASES[dtype]}
    copies: list[tuple[float, float]] = []
    reads: list[float] = []
    for _ in range(repeats):
        for case, done in jobs.items():
            done.append(measure_job(directory, folder / "wide", layers, case, workers, mode))
            copies.append(measure_copy(folder / "wide", folder / "copy"))
            reads.append(measure_read(folder / "wide"))
            for used in ("wide", "copy"):
                shutil.rmtree(folder / used)
            job, (copy, copy_cpu) = done[-1], copies[-1]
            print(
                f"{dtype:4} {case:5}  {size / 1e9:.2f} GB  job {job.seconds:6.2f} s = {size / job.seconds / 1e9:.2f} GB/s, "
                f"{job.cpu:.1f} s of CPU   copy {copy:6.2f} s = {size / copy / 1e9:.2f} GB/s, {copy_cpu:.1f} s of CPU   "
                f"read {reads[-1]:.2f} s   peak {job.rss_mib:.0f} MiB",
                flush=True,
            )
    shutil.rmtree(folder / "base")
    wall, cpu = (min(column) for column in zip(*copies, strict=True))
    ratios = {
        case: (min(job.seconds for job in done) / wall, min(job.cpu for job in done) / cpu)
        for case, done in jobs.items()
    }
    grown = max(job.rss_mib for case in ("exact", "noise") for job in jobs[case]) / small
    return ratios, min(reads) / wall, grown


def peak(folder: Path, layers: int, dtype: str, workers: int) -> float:
    """The larger peak of an exact and a noisy job."""
    directory = write_directory(folder / "base", model_with(layers).shapes(), dtype, 2)
    peaks = []
    for case in ("exact", "noise"):
        peaks.append(measure_job(directory, folder / "wide", layers, case, workers).rss_mib)
        shutil.rmtree(folder / "wide")
    shutil.rmtree(folder)
    return max(peaks)


def measure_fingerprints(folder: Path, gigabytes: float, dtype: str, workers: int, repeats: int) -> None:
    """What fingerprints and the second read cost, over jobs that take turns."""
    layers = layers_for(gigabytes, dtype)
    directory = write_directory(folder / "base", model_with(layers).shapes(), dtype, 2)
    for case in ("exact", "noise"):
        ratios: dict[str, list[float]] = {"checked": [], "trusted": []}
        for _ in range(repeats):
            cpu = {}
            for mode in ("bare", "checked", "trusted"):
                cpu[mode] = measure_job(directory, folder / "wide", layers, case, workers, mode).cpu
                shutil.rmtree(folder / "wide")
            for mode, found in ratios.items():
                found.append(cpu[mode] / cpu["bare"])
        told = " ".join(f"{mode}={median(found):.2f}" for mode, found in ratios.items())
        print(
            f"{dtype:4} {case}: {told}  ({cpu['bare']:.1f} CPU s without)",
            flush=True,
        )
    shutil.rmtree(folder / "base")


def measure(chosen: argparse.Namespace) -> Outcome:
    if chosen.write:
        base, out, layers, case, workers, mode = chosen.write
        write(Path(base), Path(out), int(layers), case, int(workers), mode)
        return Outcome("")
    if chosen.quick:
        chosen.gb, chosen.repeats = 1.0, 1
    found: dict[str, float] = {}
    growth: list[float] = []
    for dtype, short in (("BF16", "bf16"), ("F32", "f32")):
        with tempfile.TemporaryDirectory(dir=chosen.dir) as name:
            given = Path(name), chosen.gb, dtype, chosen.workers, chosen.repeats
            if chosen.fingerprints:
                measure_fingerprints(*given)
                continue
            ratios, found[f"read_{short}"], grown = ratios_of(
                *given, "unread" if chosen.unread else "checked"
            )
        growth.append(grown)
        for case, (wall, cpu) in ratios.items():
            name = {"exact": short, "noise": f"{short}_noise", "t": "t_noise"}[case]
            found[name], found[f"cpu_{name}"] = wall, cpu
    if chosen.fingerprints:
        return Outcome("")
    found["rss_growth"] = max(growth)
    shown = (
        *("f32", "f32_noise", "bf16", "bf16_noise", "t_noise", "read_f32", "read_bf16"),
        *("cpu_f32", "cpu_f32_noise", "cpu_bf16", "cpu_bf16_noise", "cpu_t_noise", "rss_growth"),
    )
    line = " ".join(f"{name}={found[name]:.2f}" for name in shown)
    return Outcome(line, [] if chosen.quick else judged(found, 0.0 if chosen.unread else ALLOWED_READS))


def judged(found: dict[str, float], reads: float) -> list[str]:
    """The bounds that fail, with so many reads of the output allowed; prints aims that were missed."""
    bounds = {
        name: bound + (0 if name == "rss_growth" else reads * found[f"read_{name.partition('_')[0]}"])
        for name, bound in BOUNDS.items()
    }
    bounds["cpu_t_noise"] = MOST_FOR_NORMS * found["cpu_bf16_noise"]
    for name, aim in AIMS.items():
        if not found[name] <= aim:
            print(f"missed: {name} = {found[name]:.2f}, the aim is {aim:g}")
    return [
        f"{name} = {found[name]:.2f}, the bound is {bound:.3g}"
        for name, bound in bounds.items()
        if not found[name] <= bound
    ]


OPTIONS = (
    option("--gb", type=float, default=4, help="output of each job, in GB"),
    option("--workers", type=int, default=min(2, os.cpu_count() or 1)),
    option("--repeats", type=int, default=3),
    option("--dir", type=Path, help="a folder on the disk to be measured"),
    option("--fingerprints", action="store_true", help="measure what fingerprints cost, and nothing else"),
    option("--quick", action="store_true", help="1 GB once, without bounds"),
    option("--unread", action="store_true", help="publish without reading back"),
    option("--write", nargs=6, help=argparse.SUPPRESS),
)

if __name__ == "__main__":
    sys.exit(run(measure, *OPTIONS, doc=__doc__))
