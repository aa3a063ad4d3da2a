"""Random slices of random wide tensors, made on a device and compared, bit by bit, with the portable code on the CPU.

Each slice is a rectangle of a tensor that is copied, padded, blocked or stacked, in float32, bfloat16 or float16, with a
scale, and with noise of one size, one size for each expert, paired noise, noise that wakes zeros and leaves out a
padding row, or far from the tensor's start.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...rules.axes import Axis
from ...rules.scale import Scale
from ..compiled import VARIABLE
from ..expand import expand_
from ..making import Making
from ..noise import TensorNoise, Waking
from ..parts import Rectangle
from ..philox import Stream
from . import launch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ("plain", "stacked", "paired", "waking", "new", "far")
SHAPES = {
    "vector": ("out: 7x3",),
    "matrix": ("out: 10x2", "in: 13x3"),
    "blocks": ("out: 3x2 * 5", "in: 2x4 * 3"),
    "padded": ("out: 6x2+5", "in: 9x2+4"),
    "convolution": ("out: 5x2", "in: 4x3", "3", "3"),
    "stack": ("3", "out: 6x2", "in: 7x2"),
    "long": ("out: 2x2", "in: 700x2"),
}


@dataclass(frozen=True)
class SliceCase:
    """One slice: how the tensor is made, and which rectangle of it."""

    kind: str
    shape: str
    making: Making
    base_dtype: torch.dtype
    dtype: torch.dtype
    start: tuple[int, ...]
    size: tuple[int, ...]


def draw_case(draw: random.Random, number: int) -> SliceCase:
    """A random making and a random rectangle of it."""
    kind = KINDS[number % len(KINDS)]
    shape = "stack" if kind == "stacked" else draw.choice(list(SHAPES))
    if kind == "waking":
        shape = "padded"
    if kind == "paired":
        shape = draw.choice(("matrix", "blocks", "convolution", "stack", "long"))
    axes = tuple(map(Axis.parse, SHAPES[shape]))
    scale = Scale.of(draw.choice(("1", "1/2", "1/3", "2/3", "3")))
    std: float | tuple[float, ...] = draw.choice((0.3, 1e-3, 1.7))
    noise = TensorNoise(Stream(draw.randrange(1 << 32), f"w{number}"), std)
    shift = 0
    if kind == "stacked":
        noise = replace(noise, std=tuple(draw.random() for _ in range(axes[0].wide)))
    if kind == "paired":
        noise = replace(noise, paired=next(d for d, axis in enumerate(axes) if axis.role == "in"))
    if kind == "waking":
        cut, level = draw.choice(((), (0,), (1,))), draw.choice((0.0, 0.5))
        noise = replace(noise, zeros=Waking(0.7, cut, level), without_row=draw.randrange(axes[0].wide))
    start: tuple[int, ...]
    size: tuple[int, ...]
    if kind == "far":
        # Elements beyond 2**34, where a counter of Philox has a second word.
        axes, shape, shift = (Axis.fixed(1 << 20), Axis.parse("in: 4096x8")), "far", 1
        start = (draw.randrange(1 << 19, (1 << 20) - 4), draw.randrange(20000))
        size = (draw.randint(1, 3), draw.randint(1, 3000))
    else:
        start = tuple(draw.randrange(axis.wide) for axis in axes)
        size = tuple(draw.randint(1, axis.wide - at) for axis, at in zip(axes, start, strict=True))
        if draw.random() < 0.3:
            start, size = (0,) * len(axes), tuple(axis.wide for axis in axes)
    fill = "one" if kind == "new" else None
    making = Making(axes, scale, shift, noise, fill)  # type: ignore[arg-type]
    return SliceCase(kind, shape, making, draw.choice(DTYPES), draw.choice(DTYPES), start, size)


@dataclass(frozen=True)
class Compared:
    """How many slices were compared, and how many of them have another bit somewhere."""

    slices: int
    different: tuple[str, ...]
    """Those that differ, in words."""
    control: int
    """Slices that differ when product and sum are rounded once, as a fused multiply-add does."""
    kernel: int
    """Slices that the Triton kernel made; the others were made by torch's own operations."""


def compare_slices(slices: int, device: str, seed: int = 0, kernel: str = "portable") -> Compared:
    """Make random slices on a device by `kernel`, portable or triton, and on the CPU by the portable code; compare them.

    >>> found = compare_slices(6, "cpu")
    >>> found.slices, found.different, found.control > 0
    (6, (), True)
    """
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    different: list[str] = []
    control = launched = 0
    for number in range(slices):
        case = draw_case(draw, number)
        read = case.making.reads.cover(Rectangle(tuple(case.start), tuple(case.size)))
        lows = list(read.start)
        base = torch.randn(read.shape, generator=generator, device="cpu").to(case.base_dtype)
        with _choosing("portable"):
            want = _made(case, base, lows, case.dtype)
            fused = _made(case, base.double(), lows, torch.float64).float().to(case.dtype)
        place = base.to(device)
        assert case.making.noise is not None
        with _choosing(kernel):
            got = _made(case, place, lows, case.dtype)
            launched += launch.is_for(got, place, case.making.noise)
        control += not torch.equal(fused, want)
        if not torch.equal(got.cpu(), want):
            off = int((got.cpu() != want).sum())
            kinds = f"{case.kind} {case.shape} {case.base_dtype} to {case.dtype}"
            different.append(f"{kinds}: {off} of {want.numel()} entries")
    return Compared(slices, tuple(different), control, launched)


def _made(case: SliceCase, base: Tensor, lows: list[int], dtype: torch.dtype) -> Tensor:
    out = torch.empty(case.size, dtype=dtype, device=base.device)
    source = None if case.making.fill else base
    return expand_(out, source, case.making, out_start=case.start, base_start=lows)


@contextmanager
def _choosing(kernel: str) -> Iterator[None]:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = kernel
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before
