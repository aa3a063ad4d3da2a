"""How one wide tensor is made, as one frozen value: the kernel's only input besides tensors and slice starts.

A plan's entry produces it for weights and buffers, the units of a state key for optimizer state. Live models expand
it at once, files add places to it (`jobs/job.py`), shards add tensors (`sharded/fill.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import MupscaleError
from ..rules.axes import Axis
from ..rules.scale import ONE, Scale
from .entry_sources import Reads
from .noise import TensorNoise

Fill = Literal["zero", "one", "minus_one", "own"]
_FILLINGS = {"zero": 0, "one": 1, "minus_one": -1}  # -1 is a gain of zero that is used as (1 + w)


@dataclass(frozen=True, slots=True)
class Join:
    """How several sources become one base tensor: concatenated along `dim`, or stacked along a new dimension there.

    >>> Join(0).part((2, 3)), Join(1, stacked=True).part((2, 3)), Join(1, under=0).part((2, 3))
    ((2, 3), (2, 1, 3), (1, 2, 3))
    """

    dim: int
    stacked: bool = False
    under: int | None = None
    """A new dimension of size 1 that sources get before they are concatenated."""

    def part(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one source as a part of the joined tensor: stacking gives it a dimension of size 1."""
        at = self.dim if self.stacked else self.under
        return shape if at is None else (*shape[:at], 1, *shape[at:])


@dataclass(frozen=True, slots=True)
class Making:
    """W' = s · dup(W) plus noise, or a filling where there is no W.

    >>> grown = Making((Axis.parse("out: 4x2"), Axis.parse("in: 3x2")), Scale.of("1/2"), join=Join(0, stacked=True))
    >>> grown.base_shape, grown.wide_shape
    ((4, 3), (8, 6))
    >>> grown.source([torch.zeros(3)] * 4).shape
    torch.Size([4, 3])
    >>> Making((Axis.fixed(2),), fill="one").fill_(torch.empty(2))
    tensor([1., 1.])
    >>> Making((Axis.fixed(2),), Scale.of("1/2"), fill="one").fill_(torch.empty(2))  # a fresh gain absorbs its fold
    tensor([0.5000, 0.5000])
    """

    axes: tuple[Axis, ...]
    scale: Scale = ONE
    shift: int = 0
    """1 for gains that the model uses as (1 + w)."""
    noise: TensorNoise | None = None
    """Added after the scale, or the filling, and before the one rounding."""
    fill: Fill | None = None
    """What a tensor without a source holds; "own" is what the wide model computes by itself, source or not."""
    join: Join | None = None
    """How several sources become one base tensor; None for a single source."""
    mean: tuple[int, ...] = ()
    """Dimensions whose new entries are s times the mean of the base's along them, in place of zeros (`mean_along`)."""
    pad: int = 0
    """What stands behind the base's entries, where it is not zero."""

    @property
    def base_shape(self) -> tuple[int, ...]:
        """The shape of the base tensor, sources joined."""
        return tuple(axis.base for axis in self.axes)

    @property
    def wide_shape(self) -> tuple[int, ...]:
        """The shape of the wide tensor."""
        return tuple(axis.wide for axis in self.axes)

    @property
    def reads(self) -> Reads:
        """What any slice of the wide tensor reads of the base tensor, where there is one.

        >>> from mupscale.tensors.noise import Waking
        >>> from mupscale.tensors.philox import Stream
        >>> noise = TensorNoise(Stream(0, "w"), 0.0, zeros=Waking(cut=(1,), copied=True))
        >>> Making((Axis.parse("out: 2+2"), Axis.parse("in: 2+2")), noise=noise).reads.copied
        (0,)
        """
        zeros = None if self.noise is None else self.noise.zeros
        if zeros is None or not zeros.copied:
            return Reads(self.axes, mean=self.mean)
        woken = (dim for dim, axis in enumerate(self.axes) if axis.padded and dim not in zeros.cut)
        return Reads(self.axes, tuple(woken), self.mean)

    def source(self, tensors: Sequence[Tensor]) -> Tensor:
        """The base tensor: the single source itself, or several joined into new memory."""
        if self.join is not None:
            parts = [tensor.reshape(self.join.part(tuple(tensor.shape))) for tensor in tensors]
            return torch.cat(parts, self.join.dim)
        if len(tensors) != 1:
            raise MupscaleError(
                f"{len(tensors)} sources and no dimension to join them along, expected 1; write join=Join(dim)",
                code="plan.sources_without_join",
            )
        return tensors[0]

    def fill_(self, out: Tensor) -> Tensor:
        """Fill any slice of a wide tensor that has no source, and return it."""
        if self.fill not in _FILLINGS:
            what = "computed by the wide model itself" if self.fill == "own" else "made from a source"
            raise MupscaleError(
                f"a tensor {what} cannot be filled, expected one number; leave it out",
                code="plan.fill_without_number",
            )
        return out.fill_((_FILLINGS[self.fill] + self.shift) * float(self.scale) - self.shift)
