"""What counts as equal: one relative difference, the bounds it is held against, and assertions that use them.

A difference is always relative to the largest entry that was wanted. Training in float64 is the same up to `EXACT`; a
control must move by `BROKEN` at least; numbers that two formulas compute from the same inputs agree to `LAST_PLACES`.
Bitwise comparisons have no bound.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from harness.tensors import tensors_of

EXACT = 1e-12
"""The largest relative difference of outputs that counts as the same training.

Rounding in float64 is 1e-16 per operation and grows to about 1e-14 over the steps that tests take.
"""
BROKEN = 1e-6
"""The smallest relative difference that a control must show: far above rounding, far below any real defect."""
SINGLE = 1e-5
"""The largest relative difference of outputs when weights are stored in float32 and rounded on the way."""
LAST_PLACES = 4 * sys.float_info.epsilon
"""For scalars that two formulas give: each side rounds at most four times (two roots, two products), by half an eps."""


def largest(values: Iterable[float]) -> float:
    """The largest value; infinite if one is not finite, which `max` can pass over.

    >>> largest([1.0, float("nan"), 2.0])
    inf
    """
    found = list(values)
    return max(found) if all(map(math.isfinite, found)) else math.inf


def difference(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest entry wanted; infinite when anything is not finite.

    >>> difference(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]))
    0.25
    >>> difference(torch.tensor([float("nan")]), torch.tensor([1.0]))
    inf
    """
    assert found.shape == wanted.shape, f"shapes {tuple(found.shape)} and {tuple(wanted.shape)}"
    size = float(wanted.detach().abs().max())
    assert size != 0, "nothing to compare with"
    gap = float((found.detach() - wanted.detach()).abs().max()) / size
    return gap if math.isfinite(gap) else math.inf


def largest_difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The largest difference of any tensor, each relative to its own largest entry."""
    assert found.keys() == wanted.keys()
    return max(difference(found[name], tensor) for name, tensor in wanted.items())


def assert_close(found: Tensor, wanted: Tensor, bound: float, what: str = "tensor") -> None:
    gap = difference(found, wanted)
    assert gap <= bound, f"{what}: off by {gap:.1e}, allowed {bound:.0e}"


def assert_exact(gap: float) -> None:
    assert gap <= EXACT, f"off by {gap:.1e}, allowed {EXACT:.0e}"


def assert_broken(gap: float) -> None:
    """For controls: the defect must be seen, and not because everything became infinite."""
    assert math.isfinite(gap), f"the control gave {gap}"
    assert gap >= BROKEN, f"the control moved by {gap:.1e} only, expected {BROKEN:.0e}"


def assert_bitwise(found: Tensor, wanted: Tensor, what: str = "tensor") -> None:
    assert found.dtype == wanted.dtype, what
    assert torch.equal(found, wanted), f"{what}: not the same bits"


def assert_same_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """The same names with the same bits."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_bitwise(found[name], tensor, name)


def assert_same_model(found: nn.Module, wanted: nn.Module) -> None:
    """The same parameters and buffers, bit for bit."""
    assert_same_tensors(tensors_of(found), tensors_of(wanted))


def largest_gaps(
    step: Callable[[Any, int], float], base: Any, others: Mapping[str, Any], steps: Iterable[int]
) -> dict[str, float]:
    """The largest difference of a loss from the base's, by name, when all are trained on with `step(run, i)`."""
    gaps = dict.fromkeys(others, 0.0)
    for i in steps:
        loss = step(base, i)
        gaps = {name: max(gaps[name], abs(step(other, i) - loss)) for name, other in others.items()}
    return gaps
