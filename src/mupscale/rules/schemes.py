"""The noise schemes by name: what their sizes mean, in words, and the largest size that is accepted.

The command line and the settings of a study need the names before torch is imported; `noise/kinds.py` has the
class of each scheme.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import NamedTuple

from .noise_defaults import LARGEST_T


class Scheme(NamedTuple):
    """One way to give the size of noise: its name in files and on the command line, and its words."""

    name: str
    label: str
    """How a report labels the axis of sizes."""
    size: str
    """What the size is, in help texts."""
    largest: float = inf
    """The largest size that is accepted."""


SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme(
            "t",
            "noise t, of each weight's spectral norm",
            "relative to each weight's spectral norm",
            LARGEST_T,
        ),
        Scheme("sigma", "noise σ̄, at the reference", "σ̄ itself"),
        Scheme("paired", "paired noise σ̄, at the reference", "σ̄ of noise that sums to zero over copies"),
    )
}
"""Every noise scheme by name; the first is the default."""
RISE = Scheme(
    "rise",
    "noise, as the rise of the loss in shares of what was learned",
    "the share of what the base has learned by which the loss rises",
)
"""A size that is measured on each base instead of given: only studies and recipes write it."""
TUNED: Mapping[str, Scheme] = {**SCHEMES, RISE.name: RISE}
"""The noise that a study can tune."""
UNITS = Scheme("units", "1: new units · no noise: the base, trained on", "new units", largest=0.0)
"""Growth by new units, which have no noise to tune: their one size is 1, and a grid is not extended beyond it."""
STUDIED: Mapping[str, Scheme] = {UNITS.name: UNITS, **TUNED}
"""What a study can grow by; the first is the default."""
