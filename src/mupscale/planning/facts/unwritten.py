"""Check that every axis that a tensor reads is also written by some tensor in the same layout.

A flattened image, a concatenation or a grouped convolution reads entries in an order that shapes do not
show. If no tensor writes an axis of the size and layout that another one reads, the layout is open: it must
be declared, or the gradient identity decides among the layouts that the writers suggest.

Four channels of 3 x 3 pixels, flattened, are 36 units: channel 0's nine pixels, channel 1's nine pixels, and
so on. Copying each unit would put copies of a pixel next to each other, but the wide convolution writes
copies of a whole channel. The convolution writes "4x2"; with a block of 9 inside, that is the layout to try
first:

>>> from mupscale.planning.draft import draft
>>> from mupscale.rules.products import Ways
>>> def make(n: int) -> nn.Module:
...     return nn.Sequential(nn.Conv2d(1, n, 3), nn.Flatten(), nn.Linear(9 * n, 2))
>>> made, _ = draft(make(4), make(8), Ways(), None)
>>> [(reading.name, reading.dim, str(reading.axis)) for reading in unwritten(made)]
[('2.weight', 1, 'in: 36x2')]
>>> (knob,) = reader_knobs(made, set())
>>> [str(setting.apply(made).plan()["2.weight"].axes[1]) for setting in knob]
['in: 4x2 * 9', 'in: 36x2']
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from ...errors import Fault
from ...models.names import pattern_of
from ...rules.axes import Axis
from ...rules.products import Factor, Product
from ..draft import Draft, DraftEntry
from ..knobs import Knob, Setting, per_name
from .modules import ModuleFacts, row_of


@dataclass(frozen=True)
class ReadAxis:
    """An axis whose layout is open: of which tensor, along which dimension."""

    where: str
    axis: Axis
    name: str
    dim: int


def written(draft: Draft) -> dict[tuple[Product, ...], Axis]:
    """Every layout that some tensor writes."""
    found: dict[tuple[Product, ...], Axis] = {}
    for entry in draft.entries.values():
        for dim in entry.growing:
            if entry.kind == "parameter" and (entry.roles or {}).get(dim) == "out":
                axis = draft.axis(entry, dim)
                if axis is not None:
                    found.setdefault(axis.segments, axis)
    for row, base, wide in _pairs(draft):
        if (axis := row.writes(base, wide, draft.ways)) is not None:
            found.setdefault(axis.segments, axis)
    return found


def unwritten(draft: Draft, skip: set[tuple[str, int]] | None = None) -> list[ReadAxis]:
    """Axes that are read in a size or layout that no tensor writes, except those in `skip`."""
    known = written(draft)
    grouped = _grouped_sizes(draft)
    found: list[ReadAxis] = []
    for entry in draft.entries.values():
        for dim in entry.growing:
            role = (entry.roles or {}).get(dim)
            if (
                role is None
                or dim in entry.layouts
                or entry.kind == "buffer"
                or (entry.name, dim) in (skip or ())
            ):
                continue
            axis = draft.axis(entry, dim)
            if axis is None:
                continue
            # Channels of a grouped convolution may be written in the wrong layout too: whatever has their
            # size, on either side, is open.
            if (axis.base, axis.wide) in grouped:
                blocks = grouped[(axis.base, axis.wide)]
                found.append(ReadAxis(f"{pattern_of(entry.name)}, axis {dim}", blocks, entry.name, dim))
            elif role == "in" and _all_groups(entry, axis).segments not in known:
                found.append(ReadAxis(f"{pattern_of(entry.name)}, axis {dim}", axis, entry.name, dim))
    return found


def _grouped_sizes(draft: Draft) -> dict[tuple[int, int], Axis]:
    """Sizes of channels that a convolution with growing groups reads in blocks."""
    axes = (row.reads(base, wide, draft.ways) for row, base, wide in _pairs(draft))
    return {(a.base, a.wide): a for a in axes if a is not None and len(a.segments[0]) > 1}


def _all_groups(entry: DraftEntry, axis: Axis) -> Axis:
    """All the channels that a convolution reads; with fixed groups, its weight shows the channels of one group.

    `Conv2d(8, 4, 3, groups=2)` has a weight of shape (4, 4, 3, 3) and reads 2 groups of these 4 channels.
    """
    groups = getattr(entry.module[0], "groups", 1)
    per_group = isinstance(entry.module[0], _ConvNd) and not entry.module[0].transposed
    return Axis.of((Factor(groups), *axis.segments[0]), role="in") if per_group and groups > 1 else axis


def reading_faults(draft: Draft, remedy: str) -> list[Fault]:
    """A fault for every axis that is read in a layout that no tensor writes."""
    faults: dict[str, Fault] = {}
    for reading in unwritten(draft):
        what = f"{reading.axis.base} -> {reading.axis.wide} units: no tensor is known to write them in the layout in which they are read"
        faults.setdefault(reading.where, Fault("layout.read_but_not_written", reading.where, what, remedy))
    return list(faults.values())


def reader_knobs(draft: Draft, skip: set[tuple[str, int]]) -> Iterator[Knob]:
    """For every open reading, the layouts that its writers suggest; readings of equal size share one knob."""
    groups: dict[tuple[int, int], list[ReadAxis]] = {}
    for reading in unwritten(draft, skip):
        groups.setdefault((reading.axis.base, reading.axis.wide), []).append(reading)
    for readings in groups.values():
        axes = [(reading.name, reading.dim) for reading in readings]
        yield [Setting(layouts=per_name(axes, option)) for option in _suggested(draft, readings[0])]


def _suggested(draft: Draft, reading: ReadAxis) -> list[Any]:
    """Layouts to try: the reading's own, each writer's with a block inside (as flattening gives), single units."""
    found: list[Any] = [reading.axis.segments[0]] if len(reading.axis.segments[0]) > 1 else []
    # The longest writer first: it leaves the smallest block, so it explains most of the reading.
    for axis in sorted(written(draft).values(), key=lambda a: -a.base):
        times, rest = divmod(reading.axis.base, axis.base)
        if rest == 0 and axis.wide * times == reading.axis.wide and len(axis.segments) == 1:
            found.append(Axis.of((*axis.segments[0], Factor(times))).segments[0])
            if axis.padded:  # a concatenation has zeros behind each of its parts
                found.append((Factor(times), *axis.segments[0]))
        more = axis.wide - axis.base
        if axis.padded and reading.axis.base > axis.base and reading.axis.wide - reading.axis.base == more:
            # A space that grows, in front of one that does not, as in a skip connection.
            found.append(
                ((*((f.size, 1, f.pad) for f in axis.segments[0]),), ((reading.axis.base - axis.base, 1),))
            )
    return [*dict.fromkeys(found), 1]


def _pairs(draft: Draft) -> Iterator[tuple[ModuleFacts, nn.Module, nn.Module]]:
    """The modules of the two models that have the same path and are of one kind, with what is known of it."""
    wide = dict(draft.models[1].named_modules())
    for path, module in draft.models[0].named_modules():
        row = row_of(module)
        if path in wide and row is row_of(wide[path]):
            yield row, module, wide[path]
