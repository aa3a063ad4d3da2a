"""Random axes as Hypothesis strategies, every number of copies split in several ways, and makings of such axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

import mupscale as mu
from mupscale.tensors.making import Making

FACTORISATIONS = {
    1: [(1,), (1, 1), (1, 1, 1)],
    2: [(2,), (2, 1), (1, 2), (1, 2, 1)],
    3: [(3,), (3, 1), (1, 3), (1, 3, 1)],
    4: [(4,), (2, 2), (4, 1), (2, 1, 2)],
    6: [(6,), (2, 3), (3, 2), (6, 1), (2, 1, 3)],
}
"""Copies -> the multipliers of up to three factors whose product they are."""


@st.composite
def axes(
    draw: Callable[..., Any], size: int = 3, segments: int = 3, pads: bool = True, longest: int = 60
) -> mu.rules.Axis:
    """Random axes: up to `segments` products of up to three factors, all parts copied equally often."""
    k = draw(st.sampled_from(sorted(FACTORISATIONS)))
    parts = []
    for _ in range(draw(st.integers(1, segments))):
        ks = draw(st.sampled_from(FACTORISATIONS[k]))
        pad = st.integers(0, 2) if pads and draw(st.booleans()) else st.just(0)
        parts.append([mu.rules.Factor(draw(st.integers(1, size)), Fraction(k), draw(pad)) for k in ks])
    role = draw(st.sampled_from(["in", "out"]))
    axis = mu.rules.Axis.of(*parts, role=role)
    assume(axis.wide <= longest)
    return axis


def making(axes: Sequence[mu.rules.Axis], scale: str | mu.rules.Scale = "1", **options: Any) -> Making:
    """How a tensor with these axes is made."""
    return Making(tuple(axes), mu.rules.Scale.of(scale), **options)
