"""Which parameters can absorb a factor of a tensor: walk back through the calls that made it.

How a call passes a factor on is measured: it is called again with some inputs multiplied by a number. `linear(x, W, b)`
is multiplied by t when W and b are, or when x and b are; `matmul(q, k)` when q is, or k, or both by the root of t; gelu
by none. So the factor of `gelu(x) @ W` can be absorbed by W alone:

>>> import torch
>>> from mupscale.models.calls import traced
>>> layer, x = torch.nn.Linear(2, 3).double(), torch.ones(1, 2).double()
>>> trace = traced(layer, lambda: torch.nn.functional.gelu(layer(x)).mul(3).sum())[1]
>>> Absorbers(trace).ways(0, Scale.of("1/2"))[0] == {"weight": Scale.of("1/2"), "bias": Scale.of("1/2")}
True
>>> Absorbers(trace).ways(len(trace.calls) - 1, Scale.of("1/2"))  # gelu lets no factor through
[]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from itertools import combinations

import torch

from ...models.attempts import attempted
from ...models.calls import Call, Trace
from ...rules.scale import Scale

Way = dict[str, Scale]
"""Factors by the name of a tensor."""

_TEST = 1.7
"""A factor that no code multiplies by."""
_DEGREES = (*map(Fraction, (1, 2, -1, -2, 3)), Fraction(1, 2))
_TOLERANCE = 1e-9
_WAYS = 4
"""Ways kept per tensor: the likeliest ones. A residual stream has as many as products of those of its writers."""
_JOINED = 64
"""Ways kept while the inputs of a call are joined: all those of three inputs with four ways each, as later inputs forbid some."""
_DEPTH = 150
"""Calls between a factor and the parameter that absorbs it."""


class Absorbers:
    """The ways in which factors of a traced model can be absorbed."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._groups: dict[int, list[tuple[tuple[int, ...], Fraction]]] = {}
        self._known: dict[tuple[int, Scale], list[Way]] = {}

    def ways(self, index: int, scale: Scale, depth: int = 0) -> list[Way]:
        """Ways to multiply the output of a call by `scale`, the likeliest first."""
        key = (index, scale)
        if key not in self._known:
            self._known[key] = []  # what leads back to itself is no way
            if depth < _DEPTH:
                self._known[key] = self._found(index, scale, depth)
        return self._known[key]

    def of_inputs(self, index: int, scales: Mapping[int, Scale], depth: int = 0) -> list[Way]:
        """Ways to multiply several inputs of a call at once."""
        return _together([self._input(index, i, scale, depth) for i, scale in scales.items()])

    def _input(self, index: int, position: int, scale: Scale, depth: int) -> list[Way]:
        call = self.trace.calls[index]
        leaf, parent = call.leaves[position], call.parents[position]
        if leaf is not None:
            return [{leaf: scale}]
        return [] if parent is None else self.ways(parent, scale, depth + 1)

    def _found(self, index: int, scale: Scale, depth: int) -> list[Way]:
        call = self.trace.calls[index]
        plans: list[Mapping[int, Scale]] = []
        groups = self.groups(index)
        singles = [(g[0], d) for g, d in groups if len(g) == 1]
        splits = [
            {i: scale ** (1 / d / 2), j: scale ** (1 / e / 2)}
            for (i, d), (j, e) in combinations(singles, 2)
            if self.trace.weight(call, i) == self.trace.weight(call, j)
        ]
        plans += splits
        ordered = sorted(groups, key=lambda group: self._rank(call, group[0]))
        plans += [dict.fromkeys(group, scale ** (1 / degree)) for group, degree in ordered]
        found: list[Way | None] = []
        for plan in plans:
            found += self.of_inputs(index, plan, depth)
        return _distinct(found)

    def _rank(self, call: Call, group: tuple[int, ...]) -> tuple[bool, int]:
        """Weights of the call itself before the data that they multiply, matrices before vectors."""
        return not all(self.trace.weight(call, i) for i in group), -max(call.inputs[i].dim() for i in group)

    def groups(self, index: int) -> list[tuple[tuple[int, ...], Fraction]]:
        """Smallest sets of inputs by which a call is homogeneous, with the degree; measured once."""
        if index not in self._groups:
            self._groups[index] = list(_homogeneous(self.trace.calls[index]))
        return self._groups[index]


def _homogeneous(call: Call) -> Iterable[tuple[tuple[int, ...], Fraction]]:
    floating = [i for i, t in enumerate(call.inputs) if t.is_floating_point()]
    value = call.value
    if value is None or not floating:
        return
    found: list[set[int]] = []
    sizes = range(1, len(floating) + 1) if len(floating) <= 4 else (1, len(floating))
    for size in sizes:
        for group in combinations(floating, size):
            if any(known <= set(group) for known in found):
                continue
            degree = _degree(call, value, group)
            if degree is not None:
                found.append(set(group))
                yield group, degree


def _degree(call: Call, value: torch.Tensor, group: tuple[int, ...]) -> Fraction | None:
    # A function may refuse to be called again; then no factor passes it.
    got = attempted(lambda: call.again({i: call.inputs[i].detach() * _TEST for i in group}))
    if got is None or got.shape != value.shape:
        return None
    x, y = value.detach(), got
    finite = x.isfinite() & y.isfinite()
    x, y = x[finite], y[finite]
    size = float(y.abs().max()) if y.numel() else 0.0
    if not size:
        return None
    for degree in _DEGREES:
        if float((y - x * _TEST ** float(degree)).abs().max()) <= _TOLERANCE * size:
            return degree
    return None


def _together(each: Iterable[list[Way]]) -> list[Way]:
    """Ways that serve several inputs at once; the inputs are joined one by one.

    Each of the 11 pieces of a stack may be multiplied by `a` or by `b`. The 2^11 combinations are three ways, which are
    known after the second piece:

    >>> half = Scale.of("1/2")
    >>> [sorted(way) for way in _together([[{"a": half}, {"b": half}]] * 11)]
    [['a'], ['a', 'b'], ['b']]
    """
    found: list[Way] = [{}]
    for ways in each:
        found = _distinct((_merged(one, other) for one in found for other in ways), _JOINED)
    return found[:_WAYS]


def _merged(one: Way, other: Way) -> Way | None:
    """Two ways at once; None if they ask for different factors of one tensor."""
    differ = any(one.get(name, scale) != scale for name, scale in other.items())
    return None if differ else {**one, **other}


def _distinct(ways: Iterable[Way | None], most: int = _WAYS) -> list[Way]:
    found: list[Way] = []
    for way in ways:
        if way and way not in found:
            found.append(way)
        if len(found) == most:
            break
    return found
