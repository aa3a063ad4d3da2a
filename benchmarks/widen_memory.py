"""Widening costs little more than writing its result: time against a copy, memory against the bytes kept.

GPT-2 small (124 M parameters, float32) with AdamW state is doubled in width: 1.5 GB become 5.0 GB.

time_ratio   `mu.grow`, construction of the wide model included, over `torch.empty` + `copy_` of all
             tensors it returned (weights and state) into new memory, same threads, same process. The two
             take turns and the median of the ratios of neighbours counts, because the speed of a shared
             machine drifts. What was made is freed and given back to the system before each, so that
             both write to new pages. The plan is made beforehand and timed apart.
rss_ratio    the peak resident memory of a fresh process (VmHWM) that makes the base and its state, plans
             and grows, interpreter and libraries included (about 0.3 GB), over the bytes of weights and
             state of base and wide.

What limits the time is the first touch of new memory: the kernel writes warm memory more than twice as
fast as pages can be had from the system, and the copy waits for the same pages. On a machine that is busy
with other work it is the threads' waiting for each other, about three times per 32 MB here and once per
tensor in the copy; `--threads 1` measures the work without the waiting.

    python benchmarks/widen_memory.py [--threads N]

The last line is `time_ratio=… rss_ratio=…`; the exit code is 1 when a bound fails.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

import mupscale as mu
from harness.gpt2 import GPT2, VOCABULARY, declared_plan
from harness.limited import peak_mib
from harness.program import Outcome, option, run

BASE, WIDE = 768, 1536
REPEATS = 5
TIME, RSS, LOGITS = 2.0, 1.10, 1e-4  # a wrong result is not worth timing


def make_run() -> mu.Run:
    """GPT-2 small in the middle of training, as far as memory can tell."""
    torch.manual_seed(0)
    model = GPT2(BASE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(1000.0),
            "exp_avg": torch.rand_like(parameter) - 0.5,
            "exp_avg_sq": torch.rand_like(parameter),
        }
    return mu.Run(model, optimizer)


def make_wide() -> GPT2:
    return GPT2(WIDE)


def tensors_of(run: mu.Run) -> list[Tensor]:
    """All that a run keeps: every weight once, and the state of every optimizer."""
    states = [state for optimizer in run.optimizers for state in optimizer.state.values()]
    return [
        *(parameter.detach() for parameter in run.model.parameters()),
        *(value for state in states for value in state.values() if isinstance(value, Tensor)),
    ]


def bytes_of(run: mu.Run) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(run))


def give_back() -> None:
    """Return freed memory to the system; glibc would otherwise hand out warm pages again."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def seconds(work: Callable[[], object]) -> float:
    """How long `work` takes with nothing warm; what it returns is kept until the clock has stopped."""
    give_back()
    start = time.perf_counter()
    result = work()
    taken = time.perf_counter() - start
    del result
    return taken


def measure_time(run: mu.Run, plan: mu.Plan) -> tuple[list[float], list[float]]:
    """Seconds of every widening and of every copy of what it makes, in turn."""
    sources = tensors_of(mu.grow(run, make_wide, plan=plan, prove=False))
    widened, copied = [], []
    for _ in range(REPEATS):
        widened.append(seconds(lambda: mu.grow(run, make_wide, plan=plan, prove=False)))
        copied.append(seconds(lambda: [torch.empty_like(source).copy_(source) for source in sources]))
    return widened, copied


def print_peak() -> None:
    """Grow once; print this process's peak memory, the bytes it had to keep, and the error of the logits."""
    run = make_run()
    wide = mu.grow(run, make_wide, plan=declared_plan(BASE, WIDE), prove=False)
    peak = peak_mib() * 2**20
    text = torch.randint(VOCABULARY, (1, 16))
    with torch.no_grad():
        want, found = run.model(text), wide.model(text)
    error = float((found - want).abs().max() / want.abs().max())
    print(int(peak), bytes_of(run) + bytes_of(wide), error)


def measure_peak() -> tuple[int, int, float]:
    """What `print_peak` finds in a process of its own, where no copy has touched memory before."""
    done = subprocess.run([sys.executable, __file__, "--peak"], stdout=subprocess.PIPE, text=True, check=True)
    peak, kept, error = done.stdout.split()
    return int(peak), int(kept), float(error)


def measure(arguments: argparse.Namespace) -> Outcome:
    torch.set_num_threads(arguments.threads)
    if arguments.peak:
        print_peak()
        return Outcome("")
    peak, kept, error = measure_peak()
    start = time.perf_counter()
    plan = declared_plan(BASE, WIDE)
    planned = time.perf_counter() - start
    run = make_run()
    widened, copied = measure_time(run, plan)
    time_ratio = median(a / b for a, b in zip(widened, copied, strict=True))
    rss_ratio = peak / kept
    made = kept - bytes_of(run)
    print(f"base {bytes_of(run) / 1e9:.2f} GB, wide {made / 1e9:.2f} GB, {torch.get_num_threads()} threads")
    for name, seconds in (("grow", widened), ("copy", copied)):
        every = " ".join(f"{s:.2f}" for s in seconds)
        print(f"{name:6} best {min(seconds):.2f} s = {made / min(seconds) / 1e9:.2f} GB/s   all: {every}")
    print(f"plan   {planned:.2f} s with torch's first use of the meta device, not part of the ratio")
    print(f"peak   {peak / 1e9:.2f} GB for {kept / 1e9:.2f} GB kept")
    print(f"logits differ by {error:.0e}")
    figures = (("time_ratio", time_ratio, TIME), ("rss_ratio", rss_ratio, RSS), ("logits", error, LOGITS))
    failed = [
        f"{name} = {value:.3g}, the bound is {bound:g}"
        for name, value, bound in figures
        if not value <= bound
    ]
    return Outcome(f"time_ratio={time_ratio:.2f} rss_ratio={rss_ratio:.3f}", failed)


if __name__ == "__main__":
    peak = option("--peak", action="store_true", help="grow once and print what it took, in bytes")
    threads = option("--threads", type=int, default=torch.get_num_threads(), help="for both sides")
    sys.exit(run(measure, peak, threads, doc=__doc__))
