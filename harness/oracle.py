"""Copying and the gradient identity from their definitions, index by index: slow, and independent of the kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

import mupscale as mu


def copied(base: Tensor, axes: Sequence[mu.rules.Axis]) -> Tensor:
    """dup(base), index by index from the definition of an axis; zero where an index is padding."""
    for dim, axis in enumerate(axes):
        sources = [axis.source(i) for i in range(axis.wide)]
        live = torch.tensor([source is not None for source in sources])
        shape = [-1 if d == dim else 1 for d in range(len(axes))]
        base = base.index_select(dim, torch.tensor([s or 0 for s in sources])) * live.view(shape)
    return base


def identity_error(
    base: Mapping[str, Tensor], wide: Mapping[str, Tensor], plan: mu.Plan, only: str = ""
) -> float:
    """Gradients against the definition: r · dup(G) on the image and zero off it; of every tensor, or of one.

    Relative to the largest entry wanted, or to 1e-5 of the largest gradient of the base where a tensor has hardly any.
    """
    assert base.keys() == wide.keys()
    largest = max(float(g.abs().max()) for g in base.values())
    worst = 0.0
    for name in [only] if only else wide:
        entry = plan[name]
        want = copied(base[entry.sources[0]], entry.axes) * float(entry.change.r)
        size = max(float(want.abs().max()), 1e-5 * largest * float(entry.change.r))
        worst = max(worst, float((wide[name] - want).abs().max()) / size)
    return worst
