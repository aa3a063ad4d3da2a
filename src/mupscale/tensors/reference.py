"""The slow, obvious twin of the kernel: one entry at a time, straight from the definition.

Shares nothing with `expand.py` but the definition of an axis. It is the oracle of the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from ..rules.axes import Axis
from ..rules.scale import ONE, Scale


def expand_reference(base: Tensor, axes: Sequence[Axis], scale: Scale = ONE) -> Tensor:
    """W'[i, j, …] = s · W[source(i), source(j), …], and zero where an index is padding."""
    out = torch.zeros([axis.wide for axis in axes], dtype=base.dtype)
    ratio = scale.fraction
    for index in product(*(range(axis.wide) for axis in axes)):
        source = [axis.source(i) for axis, i in zip(axes, index, strict=True)]
        if None in source:
            continue
        entry = base[tuple(source)]
        if not scale.is_one:
            entry = entry.float() if entry.itemsize < 4 else entry
            exact_quotient = ratio is not None and ratio.numerator == 1
            entry = entry / ratio.denominator if exact_quotient else entry * float(scale)  # type: ignore[union-attr]
        out[index] = entry
    return out
