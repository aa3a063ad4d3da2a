"""`mupscale doctor --device`: every proof on one device, with its control, as a report to paste into an issue."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn

from ..errors import MupscaleError
from ..proofs.slices import compare_slices
from ..rules.axes import Axis
from ..rules.scale import Scale
from ..runs.run import Run
from ..tensors.differences import curve_gap
from ..tensors.expand import expand, expand_
from ..tensors.making import Making
from ..tensors.noise import TensorNoise
from ..tensors.philox import Stream
from ..training.widen import widen
from .demo import DIFFERENT, train

_SLICES = 60  # ten of every kind
_STEPS = 30
_EXACT = 1e-9  # relative, in float64: kernels of a GPU add in other orders for other widths
_AUTOCAST = 5e-2  # relative, in bfloat16, whose rounding is 4e-3
_TIMED = (4096, 4096)  # a wide bfloat16 matrix, 34 MB
_REPEATS = 5
_TESTS = "tests that need a GPU: in a clone of the repository, python -m pytest -m gpu"


@dataclass(frozen=True)
class Check:
    """One proof: what was found, and what its control gave."""

    name: str
    found: str
    holds: bool


def refuse_missing(device: str) -> None:
    """An error when torch has no such device."""
    if device == "cuda" and not torch.cuda.is_available():
        raise MupscaleError(
            f"--device cuda: torch {torch.__version__} finds no CUDA device; install a CUDA build of torch on a "
            "machine with a GPU, or write --device cpu",
            code="option.no_such_device",
        )


def run(device: str) -> bool:
    """Print the report; whether every proof holds."""
    refuse_missing(device)
    print(f"\n```\nmupscale device report: {_name(device)}")
    found = []
    for check in _checks(device):
        found.append(check)
        print(f"{check.name:18} {'holds' if check.holds else 'FAILS'}  {check.found}", flush=True)
    print(f"time: {_timing(device)}")
    print(f"{_TESTS}\n```")
    return all(check.holds for check in found)


def _name(device: str) -> str:
    what = [f"torch {torch.__version__}", f"triton {_version('triton')}"]
    if device == "cuda":
        what = [torch.cuda.get_device_name(), f"CUDA {torch.version.cuda}", *what]
    return ", ".join([device, *what])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _checks(device: str) -> Iterator[Check]:
    slices = compare_slices(_SLICES, device)
    made = f"{slices.kernel} by the Triton kernel"
    found = f"{len(slices.different)} of {slices.slices} noisy slices differ from the CPU's, {made}"
    control = f"; rounded once, {slices.control} do"
    yield Check("noise bits", found + control, not slices.different and slices.control > 0)
    yield _exact_bits(device)
    options = {"plain": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    if device == "cuda":
        options["capturable"] = {"capturable": True}
    for name, chosen in options.items():
        _, base, wide, broken = train(_STEPS, before=30, device=device, **chosen)
        exact, different = curve_gap(base, wide), curve_gap(base, broken)
        found = f"losses differ by {exact:.0e}, without the new units by {different:.0e}"
        yield Check(f"AdamW, {name}", found, exact <= _EXACT and different >= DIFFERENT)
    gap = _autocast(device)
    yield Check("autocast", f"losses differ by {gap:.0e} in bfloat16", gap <= _AUTOCAST)


def _exact_bits(device: str) -> Check:
    """Widening without noise, in four types and with three scales."""
    axes = (Axis.parse("out: 64x2"), Axis.parse("in: 3x2 * 16"))
    different = total = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        base = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
        for scale in ("1", "1/2", "1/3"):
            making = Making(axes, Scale.of(scale))
            total += 1
            different += not torch.equal(expand(base, making), expand(base.to(device), making).cpu())
    return Check("exact bits", f"{different} of {total} widened tensors differ from the CPU's", not different)


def _autocast(device: str) -> float:
    """The largest relative difference of a loss in ten steps of bfloat16 autocast after widening."""

    def mlp(width: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 2)
        )

    def step(run: Run) -> float:
        run.optimizers[0].zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = (run.model(x) - 1).square().mean()
        loss.backward()
        run.optimizers[0].step()
        return float(loss.detach())

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = mlp(64).to(device)
        x = torch.randn(256, 8).to(device)
        run = Run(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        for _ in range(5):
            step(run)
        wide = widen(run, lambda: mlp(128))
        base, grown = ([step(side) for _ in range(10)] for side in (run, wide))
    return curve_gap(base, grown)


def _timing(device: str) -> str:
    """Seconds to widen a bfloat16 matrix with noise, over those to copy as many bytes on the device."""
    rows, width = _TIMED
    base = torch.randn(rows // 2, width // 2).bfloat16().to(device)
    out, other = (torch.empty(rows, width, dtype=torch.bfloat16, device=device) for _ in range(2))
    axes = (Axis.between(rows // 2, rows, "out"), Axis.between(width // 2, width, "in"))
    making = Making(axes, Scale.of("1/2"), noise=TensorNoise(Stream(0, "w"), 0.01))
    made, copied = (
        _best(work, device) for work in (lambda: expand_(out, base, making), lambda: other.copy_(out))
    )
    size = out.numel() * out.element_size() / 1e9
    return f"widening with noise {size / made:.2f} GB/s, {made / copied:.1f} times a copy on the device"


def _best(work: Callable[[], object], device: str) -> float:
    """The shortest of some repeats, after one that compiles; CPU seconds on the CPU."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    times = []
    for _ in range(_REPEATS + 1):
        _finish(device)
        began = clock()
        work()
        _finish(device)
        times.append(clock() - began)
    return max(min(times[1:]), 1e-9)


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
