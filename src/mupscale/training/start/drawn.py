"""Which entries of a freshly built model are drawn at random, each by itself, and which have a structure of their own.

A model that is built several times with different seeds shows it: entries that are equal in all builds are not random
(an identity, a padding row, a forget gate's bias of one). A matrix with orthogonal rows is random, but its entries
are not drawn one by one. A single build shows less: constants, few values that repeat, padding rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...models.kinds import padding_rows
from ...models.names import named_tensors
from ...plans.tensor_plan import TensorPlan
from ...tensors.devices import exact
from ...tensors.parts import is_sharded
from ...tensors.random_states import forked

_BUILDS = 3
"""In bfloat16 about one random entry of a thousand is equal in two builds; in three builds, one of a million."""
_ORTHOGONAL = 1e-3
"""Largest cosine between two rows of an orthogonal matrix in bfloat16; random rows of a thousand entries have 0.03."""
_REPEATS = 64
"""A value that is more than one of 64 entries is no random number; in bfloat16 the most frequent one is 1 of 1000."""


def builds_of(make: Callable[[], nn.Module]) -> list[nn.Module]:
    """The reference built several times with different seeds; the caller's random state is left as it was."""
    built = []
    for seed in range(_BUILDS):
        with forked(seed=seed):
            built.append(make())
    return built


def fixed_entries(builds: Sequence[nn.Module]) -> dict[str, Tensor]:
    """For every parameter a mask of the entries that are not drawn one by one."""
    several = [{n: whole(t) for n, kind, t in named_tensors(m) if kind == "parameter"} for m in builds]
    rows = padding_rows(builds[0])
    found: dict[str, Tensor] = {}
    for name, first in several[0].items():
        if _is_orthogonal(first):
            mask = torch.ones_like(first, dtype=torch.bool)
        elif len(builds) > 1:
            mask = torch.stack([first == other[name] for other in several[1:]]).all(0)
        else:
            mask = torch.full_like(first, _repeats(first), dtype=torch.bool)
        if name in rows:
            mask[rows[name]] = True
        found[name] = mask
    return found


def alike(tensor: Tensor, entry: TensorPlan) -> Tensor | None:
    """A tensor that is the same for all units of every growing axis, at the wide size; None if units differ.

    >>> from mupscale.rules import Axis
    >>> entry = TensorPlan(("w",), (Axis.fixed(2), Axis.parse("out: 2x3/2")))
    >>> alike(torch.tensor([[1, 1], [0, 0]]), entry).tolist()
    [[1, 1, 1], [0, 0, 0]]
    >>> alike(torch.tensor([[1, 0], [0, 0]]), entry) is None
    True
    """
    for dim, axis in enumerate(entry.axes):
        if axis.grows and tensor.shape[dim]:
            first = tensor.narrow(dim, 0, 1)
            if not torch.equal(first.expand_as(tensor), tensor):
                return None
            tensor = first.repeat_interleave(axis.wide, dim)
    return tensor


def stretched(tensor: Tensor, entry: TensorPlan) -> Tensor:
    """A tensor whose parts along growing axes are stretched to the wide size.

    The four gates of an LSTM's bias, of 2 units each at the reference and of 3 in the model:

    >>> from mupscale.rules import Axis
    >>> entry = TensorPlan(("b",), (Axis.parse("out: 8x3/2"),))
    >>> stretched(torch.tensor([0, 0, 1, 1, 0, 0, 0, 0]), entry).tolist()
    [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    """
    for dim, axis in enumerate(entry.axes):
        if axis.grows:
            tensor = tensor.index_select(
                dim, torch.arange(axis.wide, device=tensor.device) * axis.base // axis.wide
            )
    return tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor without its graph. A sharded one is gathered, so that its size has the same bits as in one process."""
    found: Tensor = tensor.detach()
    return found.full_tensor() if is_sharded(found) else found  # type: ignore[attr-defined]


def _repeats(tensor: Tensor) -> bool:
    """Whether one value is too frequent for random numbers."""
    if tensor.numel() == 0:
        return True
    values: Any = tensor.float().flatten()
    _, counts = values.unique(return_counts=True)
    return int(counts.max()) > max(2, tensor.numel() / _REPEATS)


def _is_orthogonal(tensor: Tensor) -> bool:
    """Whether the rows of a matrix, or its columns if there are fewer, are orthogonal and equally long."""
    if tensor.dim() < 2 or min(tensor.shape[0], tensor[0].numel()) < 2:
        return False
    matrix = exact(tensor).flatten(1)
    matrix = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    gram = matrix @ matrix.T
    size = float(gram.diagonal().mean())
    one = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return size > 0 and bool(((gram / size - one).abs() < _ORTHOGONAL).all())
