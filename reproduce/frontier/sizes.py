"""How large the study is: widths, budgets, grids and seeds, here and in the smoke test."""

from __future__ import annotations

from dataclasses import dataclass

from ..scale import powers


@dataclass(frozen=True)
class Finished:
    """A base that is trained to its end: its width, and its budget in units."""

    width: int
    units: int


@dataclass(frozen=True)
class Sizes:
    """Budgets are multiples of `unit` FLOPs, so that runs from scratch serve several comparisons."""

    unit: int
    reference: int
    bases: tuple[Finished, ...]
    narrow: int
    """The width that grows in mid-run; `between` and `wide` are compared with it."""
    between: int
    wide: int
    depth: int
    """Layers of the setting on which nothing was tuned."""
    rates: tuple[float, ...] = powers(-7, -5)
    noises: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2)
    extras: tuple[float, ...] = (0.25, 1.0, 4.0)
    """What a finished base may still spend, as multiples of its own budget."""
    middle: int = 4
    """Units at which rates are tuned."""
    mid_run: tuple[int, ...] = (8, 16, 32)
    """Units of the comparison in mid-run, around the budget at which narrow and wide tie."""
    shares: tuple[float, ...] = (0.1, 0.25, 0.5)
    tuning_seed: int = 0
    seeds: tuple[int, ...] = (1, 2)
    """Seeds that are reported; choices look at the tuning seed alone."""
    extend: int = 2
    """How often a grid grows when its best point is at its edge."""

    cited_bases: tuple[Finished, ...] = ()
    """What the page cites: bases of stage b with their extra budgets, stage c, and units of stage a."""
    cited_extras: tuple[float, ...] = (0.25, 1.0)
    cited_exactness: bool = True
    cited_mid_run: tuple[int, ...] = ()

    def flops(self, units: float) -> int:
        return round(self.unit * units)


STEP_32 = 10_518_528
"""FLOPs of one step at width 32 with four layers and batches of 512."""
HERE = Sizes(
    unit=10_000 * STEP_32,
    reference=32,
    bases=(Finished(32, 1), Finished(32, 4), Finished(64, 16), Finished(64, 4)),
    narrow=64,
    between=128,
    wide=256,
    depth=3,
    cited_bases=(Finished(32, 1),),
)
SMOKE = Sizes(
    unit=30_000_000,
    reference=4,
    bases=(Finished(8, 8),),
    narrow=8,
    between=16,
    wide=32,
    depth=3,
    rates=powers(-6, -6),
    noises=(0.1,),
    middle=4,
    mid_run=(4, 8, 16),
    extend=0,
    cited_bases=(Finished(8, 8),),
    cited_extras=(0.25, 1.0, 4.0),
    cited_mid_run=(4, 8, 16),
)
