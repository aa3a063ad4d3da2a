"""The sizes of a plan that grow in another way than was asked for, by the name of the width in the configuration.

Knows plans and the fields of configurations; a size that no field has is named by a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...families.config.nested import growing_fields, nested_configs
from ...models.names import pattern_of
from ...plans.plan import Plan

_TOGETHER = {"heads", "kv_heads"}
"""Widths that grow in one way: queries stand in the groups of their keys."""


class Grown(NamedTuple):
    """One dimension of a tensor, or a part of it, with its sizes."""

    base: int
    wide: int
    tensor: str
    dim: int

    @property
    def sizes(self) -> tuple[int, int]:
        return self.base, self.wide


def mean_sizes(plan: Plan) -> list[Grown]:
    """The dimensions whose new channels carry the mean of the others.

    >>> from mupscale.plans import TensorPlan
    >>> from mupscale.rules import Axis
    >>> mean_sizes(Plan({"w": TensorPlan(("w",), (Axis.parse("out: 4+2"), Axis.parse("in: 6+6")), mean=(0,))}))
    [Grown(base=4, wide=6, tensor='w', dim=0)]
    """
    found = ((name, dim, entry.axes[dim]) for name, entry in plan.tensors.items() for dim in entry.mean)
    return [Grown(axis.base, axis.wide, name, dim) for name, dim, axis in found]


def copied_sizes(plan: Plan) -> list[Grown]:
    """The parts of dimensions that grow by copies.

    >>> from mupscale.plans import TensorPlan
    >>> from mupscale.rules import Axis
    >>> copied_sizes(Plan({"w": TensorPlan(("w",), (Axis.parse("out: 4x2 * 8"), Axis.parse("in: 6+6")))}))
    [Grown(base=4, wide=8, tensor='w', dim=0)]
    """
    return [
        Grown(factor.size, factor.wide, name, dim)
        for name, entry in plan.tensors.items()
        for dim, axis in enumerate(entry.axes)
        for segment in axis.segments
        for factor in segment
        if factor.k > 1
    ]


def in_words(found: Sequence[Grown], base: Mapping[str, Any], wide: Mapping[str, Any]) -> str:
    """Sizes by the widths of two configurations that have them; each once.

    >>> base = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 16}
    >>> wide = {"hidden_size": 32, "num_attention_heads": 8, "intermediate_size": 32}
    >>> in_words([Grown(4, 8, "blocks.0.q", 0), Grown(4, 8, "blocks.1.q", 0), Grown(16, 32, "blocks.0.up", 1)], base, wide)
    'heads 4 -> 8, dimension 1 of blocks.*.up 16 -> 32'
    """
    widths = _widths(base, wide)
    said = (f"{_name(widths.get(one.sizes, ()), one)} {one.base} -> {one.wide}" for one in _each_once(found))
    return ", ".join(said)


def _each_once(found: Iterable[Grown]) -> list[Grown]:
    """The first of those that have the same sizes."""
    first: dict[tuple[int, int], Grown] = {}
    for one in found:
        first.setdefault(one.sizes, one)
    return list(first.values())


def _name(widths: Sequence[str], one: Grown) -> str:
    """A width that alone has these sizes; else a tensor's dimension."""
    if len(widths) == 1 or {width.rpartition(".")[2] for width in widths} == _TOGETHER:
        return " and ".join(widths)
    return f"dimension {one.dim} of {pattern_of(one.tensor)}"


def _widths(base: Mapping[str, Any], wide: Mapping[str, Any]) -> dict[tuple[int, int], list[str]]:
    """Sizes before and after -> the widths that have them, with the part of the configuration that they are in."""
    parts = dict(nested_configs(wide))
    found: dict[tuple[int, int], list[str]] = {}
    for path, part in nested_configs(base):
        for width, fields in growing_fields(part).items():
            name = ".".join((*path, width))
            for field in fields:
                now, new = part[field], parts.get(path, {}).get(field)
                if type(now) is int and type(new) is int and name not in found.setdefault((now, new), []):
                    found[now, new].append(name)
    return found
