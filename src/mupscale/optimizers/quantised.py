"""State in 8 or 4 bits: for every entry a number of a table, times one scale for every block of neighbouring entries.

Copies lie in other blocks than the entries they are copies of. A wide block that reads one scale keeps that scale and the
codes, so it is exact. A block that reads several gets a scale of its own and is rounded again, and the rounding is measured.

Blocks of 4 entries, with a table of 5 values. Every block of the copied columns reads one scale, and nothing is rounded. Were
the rows columns, each block would read two scales: its new scale is that of its largest entry, and the others move to the
nearest value of the table, by up to a quarter of it:

>>> codes, table = torch.tensor([[0, 4, 2, 3], [4, 0, 3, 3]]), torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0])
>>> coded = Coded(codes, torch.tensor([2.0, 0.5]), table, (2, 4), 4, ("state1", "absmax1", "qmap1"))
>>> values, scales = coded.read()
>>> values.tolist()
[[-2.0, 2.0, 0.0, 1.0], [0.5, -0.5, 0.25, 0.25]]
>>> state, apart = coded.write(values.repeat_interleave(2, 1), scales.repeat_interleave(2, 1))
>>> state["state1"][0].tolist(), state["absmax1"].tolist(), apart
([0, 0, 4, 4, 2, 2, 3, 3], [2.0, 2.0, 0.5, 0.5], 0.0)
>>> state, apart = coded.write(values.T, scales.T)
>>> state["state1"].tolist(), state["absmax1"].tolist(), apart
([[0, 3], [4, 2], [2, 3], [4, 3]], [2.0, 1.0], 0.25)

Knows: how bitsandbytes and torchao keep such state. Imports neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..errors import Fault, MupscaleError
from ..files.places import Place
from ..rules.axes import Axis
from ..rules.products import Factor
from ..tensors.differences import difference, relative
from ..tensors.making import Making

Shape = tuple[int, ...]
_WRAPPED = "__bnb_optimizer_quant_state__"
_SIZES = (256, 2048)
"""The blocks of bitsandbytes: those of today, and those of old versions."""
_KEPT = 1e-6
"""A larger relative difference is a code that changed; a scale alone is rounded to 6e-8."""


@dataclass(frozen=True)
class Coded:
    """A state tensor in 8 or 4 bits, in memory or in a file."""

    codes: Any
    """One for every entry, or two in a byte; tensors, or places in a file."""
    scales: Any
    table: Any
    """What a code stands for, in ascending order; None if codes are numbers themselves."""
    shape: Shape
    size: int
    """How many neighbours share a scale."""
    keys: tuple[str, ...]
    """Under which keys codes, scales and table are kept; one key for all of them in torchao."""
    whole: Callable[[Tensor, Tensor, Shape], Any] | None = None
    """Makes the one value of torchao from codes, scales and shape."""
    dtype: torch.dtype = torch.float32

    def read(self) -> tuple[Tensor, Tensor]:
        """The values, and the scale of every entry, in float32."""
        codes = self.codes
        if codes.numel() < prod(self.shape):
            codes = torch.stack([codes >> 4, codes & 15], -1)
        units = codes.float() if self.table is None else self.table[codes.long()]
        rows = self.scales.reshape(-1, self.scales.shape[-1]).repeat_interleave(self.size, 1)
        scales = rows[:, : prod(self.shape) // len(rows)].reshape(self.shape)
        return units.reshape(self.shape) * scales, scales

    def write(self, values: Tensor, scales: Tensor) -> tuple[dict[str, Any], float]:
        """Values with the scales that they came with as state, and how far it is from them, relative to the largest."""
        many, shape = self.scales.shape[:-1].numel(), tuple(values.shape)
        if self.whole is not None and values.numel() % self.size:
            return {self.keys[0]: values.to(self.dtype)}, 0.0
        entries, read = (_in_blocks(part.reshape(many, -1), self.size) for part in (values, scales))
        high = read.amax(-1)
        low = torch.where(read == 0, high.unsqueeze(-1), read).amin(-1)  # only zeros have the scale zero
        top = torch.finfo(self.codes.dtype).max if self.table is None else float(self.table[-1])
        new = torch.where(low == high, high, entries.abs().amax(-1) / top)
        units = entries / torch.where(new == 0, 1, new).unsqueeze(-1)
        if self.table is None:
            codes = units.to(self.codes.dtype)
            back = codes.float()
        else:
            codes = torch.bucketize(units, (self.table[1:] + self.table[:-1]) / 2, right=True)
            back = self.table[codes]
            codes = codes.to(torch.uint8)
        found = difference(back * new.unsqueeze(-1), entries)
        apart = relative(found.gap, found.size, unit=found.size)
        flat = codes.reshape(many, -1)[:, : values.numel() // many].reshape(-1)
        if self.codes.numel() < prod(self.shape):
            flat = flat[::2] << 4 | flat[1::2]
        kept = new.reshape(*self.scales.shape[:-1], -1)
        if self.whole is not None:
            return {self.keys[0]: self.whole(flat, kept, shape)}, apart
        return dict(zip(self.keys, (flat.reshape(shape), kept, self.table.clone()), strict=True)), apart

    def moves(self, making: Making, name: str) -> dict[str, tuple[Any, Making]]:
        """Key -> a part that lies in a file, and how it moves; raises if it does not move without being rounded."""
        stack = len(self.scales.shape) - 1
        axes = making.axes[stack:]
        scales = None if any(axis.padded for axis in axes) else block_axis(axes, self.size)
        if scales is None or not isinstance(self.codes, Place):
            what = f"its state {self.keys[0]!r} has one scale for {self.size} neighbouring entries, and these blocks do not move as wholes"
            remedy = (
                "grow the run in memory with mu.grow, which rounds such blocks again and says by how much"
            )
            raise MupscaleError(
                "this state cannot be carried", [Fault("state.blocks_not_whole", name, what, remedy)]
            )
        own = (
            Making(making.axes),
            Making((*making.axes[:stack], scales), making.scale),
            Making((Axis.fixed(self.table.shape[0]),)),
        )
        return dict(zip(self.keys, zip((self.codes, self.scales, self.table), own, strict=True), strict=True))


@cache
def block_axis(axes: tuple[Axis, ...], size: int) -> Axis | None:
    """How the blocks of a tensor move if each wide block reads one of them; None otherwise.

    >>> str(block_axis((Axis.parse("out: 3x2"), Axis.parse("in: 512x2")), 256))
    '3x2 * 2x2'
    >>> block_axis((Axis.parse("out: 3x2"), Axis.parse("in: 100x2")), 256) is None
    True
    """
    last = axes[-1]
    if last.base % size or last.wide % size or any(len(axis.segments) > 1 for axis in axes[:-1]):
        return None
    blocks = Axis.of((Factor(last.base // size, last.k),))
    read = [{(last.source(i) or 0) // size for i in range(b, b + size)} for b in range(0, last.wide, size)]
    if any(found != {blocks.source(b)} for b, found in enumerate(read)):
        return None
    return Axis.of([factor for axis in axes[:-1] for factor in axis.segments[0]] + list(blocks.segments[0]))


def _in_blocks(rows: Tensor, size: int) -> Tensor:
    """Rows cut in blocks, the last of them filled up with zeros."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % size)).reshape(len(rows), -1, size)


def folded(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one parameter with a `Coded` for every tensor that is quantised, under one key."""
    inner = state.get(_WRAPPED)
    wrapped = inner if isinstance(inner, Mapping) else {}
    found = {**{k: v for k, v in state.items() if k != _WRAPPED or v is not wrapped}, **wrapped}
    for number in [key[6:] for key in found if key.startswith("absmax")]:
        keys = (f"state{number}", f"absmax{number}", f"qmap{number}")
        shape, scales, table = (tuple(getattr(found.get(key), "shape", ())) for key in keys)
        if keys[0] in found and scales and len(table) == 1:
            entries = prod(shape) // max(prod(scales[:-1]), 1)
            size = next((size for size in _SIZES if -(-entries // size) == scales[-1]), None)
            if size is not None:
                codes, own, numbers = map(found.pop, keys)
                found[keys[0]] = Coded(codes, own, numbers, shape, size, keys)
    return {
        key: _of_torchao(key, value) if hasattr(value, "block_size") else value
        for key, value in found.items()
    }


def _of_torchao(key: str, value: Any) -> Coded:
    names, context = value.__tensor_flatten__()

    def whole(codes: Tensor, scales: Tensor, shape: Shape) -> Any:
        packed = value.codes.numel() < value.numel()
        made = {"codes": codes if packed else codes.reshape(shape), "scale": scales}
        about = [shape if isinstance(part, (tuple, torch.Size)) else part for part in context]
        return type(value).__tensor_unflatten__(
            {name: made[name] if name in made else getattr(value, name).clone() for name in names}, about
        )

    table = value.qmap if "qmap" in names else None
    return Coded(
        value.codes, value.scale, table, tuple(value.shape), value.block_size, (key,), whole, value.dtype
    )


def overridden(optimizer: Any, where: str) -> list[Fault]:
    """A fault if bitsandbytes' manager holds settings for single parameters, which the groups do not show."""
    manager = getattr(optimizer, "mng", None)
    held = [config for by in ("index2config", "pid2config") for config in getattr(manager, by, {}).values()]
    keys = sorted({key for config in held for key in config} - {"optim_bits"})
    what = f"GlobalOptimManager overrides {', '.join(keys)} for single parameters, whose units are not applied there"
    remedy = "put these parameters in a group with these settings, and remove the override"
    return [Fault("optimizer.overridden_settings", where, what, remedy)] if keys else []


def rounding_warning(label: str, rounded: Mapping[str, float]) -> str:
    """What to tell about an optimizer with quantised state, given how far each tensor was rounded again."""
    where, largest = max(rounded.items(), key=lambda found: found[1])
    again = sum(apart > _KEPT for apart in rounded.values())
    return (
        f"{label} keeps quantised state, so the run follows its base up to rounding and not exactly. {again} of the "
        f"{len(rounded)} quantised tensors were rounded again"
        + (f", by up to {largest:.1e} of the largest entry ({where})" if again else "")
        + "; later steps round in blocks that hold other entries than those of the base"
    )
