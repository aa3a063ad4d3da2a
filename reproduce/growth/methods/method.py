"""What a way of growing says about itself, and what it begins with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import mupscale as mu
from mupscale.proofs.identity import Loss

from ...setting import Setting
from ..spec import Spec, State

Kind = Literal["width", "depth", "experts", "mixture"]
OURS = "this library"


@dataclass(frozen=True)
class Growth:
    """What a method begins with. The base has the peak rate of the spec, in the units of its own width."""

    setting: Setting
    """Of the wide model."""
    base: mu.Run
    spec: Spec
    start: Spec
    """What the base was trained by."""
    steps: int
    """Steps that follow."""
    loss: Loss
    """Of the next training batches."""

    def fresh(self) -> mu.Run:
        """A wide run before its first step, at the peak rate."""
        return self.setting.fresh(self.spec.width, self.spec.lr, self.spec.seed)


@dataclass(frozen=True)
class Method:
    """One way of growing."""

    name: str
    label: str
    source: str
    """Where it was published; `OURS`, or a variant of ours, counts as no method of others."""
    kind: Kind
    make: Callable[[Growth], mu.Run]
    """The run that is ready to train, with the state its optimizer keeps."""
    state: State = "carried"
    """What is asked of the optimizer's state, where the method leaves a choice; `spec.WARMED_UP_AGAIN` says which begin
    with a warm-up in mid-run. After a finished base everybody warms up."""
    rates: tuple[float, ...] = (0.5, 1.0)
    """Peaks over that of the base, of which the tuning seed chooses; the grid grows where its edge is best. One is no choice."""
    noise: float = 0.0

    @property
    def published(self) -> bool:
        return OURS not in self.source

    def of(self, base: Spec, budget: int) -> Spec:
        """The run of a finished base with so many more FLOPs, at the base's peak: twice as wide or deep, or with experts."""
        grown = replace(base, budget=budget, start=base, method=self.name, state=self.state, noise=self.noise)
        if self.kind == "width":
            return replace(grown, width=2 * base.width)
        if self.kind == "depth":
            return replace(grown, layers=2 * base.layers)
        if self.kind == "experts":
            return replace(grown, experts=4)
        return replace(grown, experts=2 * base.experts, top_k=2)
