"""Every proof on one device, each with its control, and a timing; `mupscale doctor --device` prints them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn

from ...errors import MupscaleError
from ...rules.axes import Axis
from ...rules.scale import Scale
from ...runs.run import Run
from ...tensors.differences import curve_gap
from ...tensors.expand import expand, expand_
from ...tensors.making import Making
from ...tensors.noise import TensorNoise
from ...tensors.philox import Stream
from ...tensors.random_states import forked
from ...tensors.triton import launch
from ...tensors.triton.compare import compare_slices
from ..grow.grow import grow
from . import first_lines
from .demo import DIFFERENT, train

_SLICES = 60  # ten of every kind
_STEPS = 30
_EXACT = 1e-9  # relative, in float64: kernels of a GPU add in other orders for other widths
_EXACT32 = 1e-5  # relative, in float32, where a device has no float64; the CPU differs by 1e-7
_AUTOCAST = 5e-2  # relative, in bfloat16, whose rounding is 4e-3
_TIMED = (4096, 4096)  # a wide bfloat16 matrix, 34 MB
_REPEATS = 5


@dataclass(frozen=True)
class Check:
    """One proof: what was found, and what its control gave."""

    name: str
    found: str
    holds: bool


def found_device(name: str) -> torch.device:
    """The device of this name; an error when torch has none here."""
    try:
        device = torch.device(name)
        module = torch.get_device_module(device)
        there = device.type == "cpu" or (
            device.type != "meta" and module.is_available() and (device.index or 0) < module.device_count()
        )
    except (RuntimeError, AttributeError):  # a word that torch does not know, or a kind without a module here
        there = False
    if not there:
        raise MupscaleError(
            f"--device {name}: torch {torch.__version__} finds no such device; install a build of torch for it on a machine "
            "that has one, or write --device cpu",
            code="option.no_such_device",
        )
    return device


def described(device: torch.device) -> str:
    """The device and the versions of what drives it."""
    what = [f"torch {torch.__version__}", f"triton {_version('triton')}"]
    if device.type == "cuda":
        what = [f"CUDA {torch.version.cuda}", *what]
    if callable(named := getattr(torch.get_device_module(device), "get_device_name", None)):
        what = [str(named()), *what]
    return ", ".join([str(device), *what])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def checks(device: torch.device) -> Iterator[Check]:
    """Every proof, made when it is asked for."""
    yield _tried("noise bits", lambda: _slices(device, "portable"))
    if launch.installed() and device.type == ("cpu" if launch.interpreted() else "cuda"):
        yield _tried("Triton kernel", lambda: _slices(device, "triton"))
    yield _tried("exact bits", lambda: _exact_bits(device))
    options = {"plain": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    if device.type == "cuda":
        options["capturable"] = {"capturable": True}
    for name, chosen in options.items():
        if _is_offered(device, chosen):
            yield _tried(f"AdamW, {name}", partial(_adamw, device, chosen))
    yield _tried("autocast", lambda: _autocast_holds(device))
    yield _tried("README", lambda: first_lines.readme(device))
    yield _tried("tutorial", lambda: first_lines.tutorial(device))
    yield _tried("search", lambda: first_lines.search(device))


def _tried(name: str, check: Callable[[], tuple[str, bool]]) -> Check:
    """What a check found; one that raises fails, and the report continues."""
    try:
        return Check(name, *check())
    except Exception as error:  # whatever a device or its driver raises belongs into the report
        return Check(
            name, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}", False
        )


def _slices(device: torch.device, kernel: str) -> tuple[str, bool]:
    """Random slices with noise, made on the device by one of the two codes, against the CPU's."""
    slices = compare_slices(_SLICES, str(device), kernel=kernel)
    made = f"{slices.kernel} by the Triton kernel"
    found = f"{len(slices.different)} of {slices.slices} noisy slices differ from the CPU's, {made}"
    used = (slices.kernel > 0) is (kernel == "triton")
    return f"{found}; rounded once, {slices.control} do", not slices.different and slices.control > 0 and used


def _is_offered(device: torch.device, options: Mapping[str, bool]) -> bool:
    """Whether torch has this variant of AdamW for the device: it says so when one is made."""
    try:
        torch.optim.AdamW([nn.Parameter(torch.zeros(1, device=device))], **options)  # type: ignore[arg-type]
    except RuntimeError:
        return False
    return True


def _adamw(device: torch.device, options: Mapping[str, bool]) -> tuple[str, bool]:
    dtype, allowed = (torch.float64, _EXACT) if _has_float64(device) else (torch.float32, _EXACT32)
    _, base, wide, broken = train(_STEPS, before=30, device=device, dtype=dtype, **options)
    exact, different = curve_gap(base, wide), curve_gap(base, broken)
    found = (
        f"losses differ by {exact:.0e} in {str(dtype)[6:]}, with the base's rates and eps by {different:.0e}"
    )
    return found, exact <= allowed and different >= DIFFERENT


def _has_float64(device: torch.device) -> bool:
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def _autocast_holds(device: torch.device) -> tuple[str, bool]:
    gap = _autocast(device)
    return f"losses differ by {gap:.0e} in bfloat16", gap <= _AUTOCAST


def _exact_bits(device: torch.device) -> tuple[str, bool]:
    """Widening without noise, in every type that the device has and with three scales."""
    axes = (Axis.parse("out: 64x2"), Axis.parse("in: 3x2 * 16"))
    different = total = 0
    dtypes = [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        *([torch.float64] if _has_float64(device) else []),
    ]
    generator = torch.Generator()
    for dtype in dtypes:
        base = torch.randn(64, 48, generator=generator.manual_seed(0), device="cpu").to(dtype)
        for scale in ("1", "1/2", "1/3"):
            making = Making(axes, Scale.of(scale))
            total += 1
            different += not torch.equal(expand(base, making), expand(base.to(device), making).cpu())
    return f"{different} of {total} widened tensors differ from the CPU's", not different


def _autocast(device: torch.device) -> float:
    """The largest relative difference of a loss in ten steps of bfloat16 autocast after widening."""

    def mlp(width: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 2)
        )

    def step(run: Run) -> float:
        run.optimizers[0].zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = (run.model(x) - 1).square().mean()
        loss.backward()
        run.optimizers[0].step()
        return float(loss.detach())

    with forked(torch.empty(0, device=device), seed=0):
        model = mlp(64).to(device)
        x = torch.randn(256, 8, device="cpu").to(device)
        run = Run(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        for _ in range(5):
            step(run)
        wide = grow(run, lambda: mlp(128))
        base, grown = ([step(side) for _ in range(10)] for side in (run, wide))
    return curve_gap(base, grown)


def timing(device: torch.device) -> str:
    """Seconds to grow a bfloat16 matrix with noise, over those to copy as many bytes on the device."""
    rows, width = _TIMED
    base = torch.ones(rows // 2, width // 2, dtype=torch.bfloat16, device=device)
    out, other = (torch.empty(rows, width, dtype=torch.bfloat16, device=device) for _ in range(2))
    axes = (Axis.between(rows // 2, rows, "out"), Axis.between(width // 2, width, "in"))
    making = Making(axes, Scale.of("1/2"), noise=TensorNoise(Stream(0, "w"), 0.01))
    made, copied = (
        _best(work, device) for work in (lambda: expand_(out, base, making), lambda: other.copy_(out))
    )
    size = out.numel() * out.element_size() / 1e9
    return f"widening with noise {size / made:.2f} GB/s, {made / copied:.1f} times a copy on the device"


def _best(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of some repeats, after one that compiles; CPU seconds on the CPU."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    times = []
    for _ in range(_REPEATS + 1):
        _finish(device)
        began = clock()
        work()
        _finish(device)
        times.append(clock() - began)
    return max(min(times[1:]), 1e-9)


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
