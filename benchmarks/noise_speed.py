"""How fast noise is drawn and added, by the portable code and by the compiled kernel, and what each weighs.

Each kernel runs in a process of its own, on one thread, as a writer of checkpoints does: `expand_` fills 8 MiB of a
wide tensor, block after block, and the resident memory is read before anything is drawn and at its peak.

normals    M normals a second, drawn and added to 256 Ki numbers in float32
float32    ns an entry of `expand_` with noise into float32, and, in brackets, without noise
bfloat16   the same into bfloat16
load       seconds until the kernel is ready: numba's import, then its cache or its compiler
rss        MiB at the peak, and, in brackets, before the first number was drawn

CPU seconds count, and the fastest of many turns: whatever else a shared machine does can only add time.

    python benchmarks/noise_speed.py

The last line is `portable=… compiled=… ratio=… rss_mib=… equal=…`; the exit code is 1 when a bit differs.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mupscale as mu
from mupscale.rules.scale import Scale
from mupscale.tensors.compiled import VARIABLE, kernel_for
from mupscale.tensors.expand import expand_
from mupscale.tensors.making import Making
from mupscale.tensors.noise import TensorNoise, rectangle
from mupscale.tensors.philox import Stream

RUN, TURNS, SECONDS = 1 << 18, 60, 6.0
COLUMNS, OUTPUT, BLOCKS = 4096, 1 << 23, 6


def resident(field: str) -> float:
    """MiB of VmRSS or VmHWM; nan where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return float("nan")
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def fastest(work: Callable[[], object]) -> float:
    """The least CPU seconds of up to `TURNS` turns."""
    best, until = float("inf"), time.monotonic() + SECONDS
    for turn in range(TURNS):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
        if turn > 2 and time.monotonic() > until:
            break
    return best


def writer(dtype: torch.dtype) -> tuple[Tensor, Callable[[int, TensorNoise | None], Tensor]]:
    """8 MiB of output, and what fills it with the block of that number of a wide matrix."""
    rows = OUTPUT // dtype.itemsize // COLUMNS
    axes = (mu.rules.Axis.parse(f"out: {BLOCKS * rows // 2}x2"), mu.rules.Axis.parse(f"in: {COLUMNS // 2}x2"))
    shape = [rows // 2, COLUMNS // 2]
    base = rectangle(Stream(0, "base"), shape, [0, 0], shape, torch.device("cpu")).to(dtype)
    out = torch.empty(rows, COLUMNS, dtype=dtype)

    def fill(block: int, noise: TensorNoise | None) -> Tensor:
        at: Any = {"out_start": [block * rows, 0], "base_start": [block * rows // 2, 0]}
        return expand_(out, base, Making(axes, Scale.of("1/3"), noise=noise), **at)

    return out, fill


def measure() -> dict[str, Any]:
    """The figures of the kernel that the environment asks for, and a digest of what it drew."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"before": resident("VmRSS")}
    start = time.perf_counter()
    kernel_for(RUN)
    found["load"] = time.perf_counter() - start
    stream, cpu, digest = Stream(1, "speed"), torch.device("cpu"), hashlib.sha256()
    noise, run = TensorNoise(stream, 0.02), torch.zeros(RUN)
    found["normals"] = (
        RUN / fastest(lambda: noise.add_(run, [mu.rules.Axis.fixed(1 << 40)], [(1 << 36) + 5])) / 1e6
    )
    for name, (out, fill) in ((d, writer(getattr(torch, d))) for d in ("float32", "bfloat16")):
        for block in range(BLOCKS):
            digest.update(fill(block, noise).view(torch.uint8).numpy().data)
        found[name] = fastest(partial(fill, 1, noise)) / out.numel() * 1e9
        found[f"{name} bare"] = fastest(partial(fill, 1, None)) / out.numel() * 1e9
    odd = rectangle(stream, [70001, 70001], [60000, 7], [999, 1001], cpu)
    digest.update(odd.numpy().data)
    return {**found, "peak": resident("VmHWM"), "bits": digest.hexdigest()}


def in_a_process(kernel: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--one"],
        env={**os.environ, VARIABLE: kernel},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> int:
    if sys.argv[1:] == ["--one"]:
        print(json.dumps(measure()))
        return 0
    figures = {kernel: in_a_process(kernel) for kernel in ("portable", "compiled")}
    for kernel, found in figures.items():
        print(
            f"{kernel:9} normals {found['normals']:4.0f} M/s"
            + "".join(f"  {d} {found[d]:5.2f} ns ({found[d + ' bare']:.2f})" for d in ("float32", "bfloat16"))
            + f"  load {found['load']:.2f} s  rss {found['peak']:.0f} MiB ({found['before']:.0f})"
        )
    portable, compiled = figures["portable"], figures["compiled"]
    equal = portable["bits"] == compiled["bits"]
    if not equal:
        print("FAILED: the two kernels give different bits")
    print(
        f"\nportable={portable['normals']:.0f} compiled={compiled['normals']:.0f} "
        f"ratio={compiled['normals'] / portable['normals']:.1f} rss_mib={compiled['peak']:.0f} equal={equal}"
    )
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
