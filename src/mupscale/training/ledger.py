"""A direction that moves nothing: it notes how every moment would be made, for whoever makes it elsewhere.

So the units of optimizer state are read in one place, whether the state is live, on a disk or on other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..rules.axes import Axis
from ..rules.scale import Scale
from .direction import Direction


@dataclass(frozen=True)
class Ledger(Direction):
    """A direction whose moments are stand-ins without memory, each noted with its axes and scale."""

    noted: dict[int, tuple[Tensor, tuple[Axis, ...], Scale]] = field(default_factory=dict)

    def moment(self, value: Tensor, axes: Sequence[Axis], scale: Scale) -> Tensor:
        made = torch.empty([axis.wide for axis in axes], dtype=value.dtype, device="meta")
        self.noted[id(made)] = (made, tuple(axes), scale)  # kept, so that its id stays its own
        return made
