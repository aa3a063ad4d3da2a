"""How large the study is: widths, budgets, grids and seeds, here and in the smoke test."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..scale import powers


@dataclass(frozen=True)
class Finished:
    """A base that is trained to its end: its width, and its budget in units."""

    width: int
    units: int


@dataclass(frozen=True)
class Way:
    """A growth to twice the width in mid-run, and the widths that have the whole budget beside it."""

    narrow: int
    units: int
    widths: tuple[int, ...]
    both_rates: bool = False
    """Whether it also grows at the peak of the base; else at half of it alone."""


@dataclass(frozen=True)
class Sizes:
    """Budgets are multiples of `unit` FLOPs, so that runs from scratch serve several comparisons."""

    unit: int
    reference: int
    bases: tuple[Finished, ...]
    narrow: int
    """The width that grows in mid-run; `between` and `wide` are compared with it."""
    wide: int
    between: int | None = None
    depth: int = 4
    """Layers of the setting on which nothing was tuned, an MLP; other models have their own depth."""
    unseen_k: int = 8
    """How many times as wide the model grows on it, to `wide`."""
    ks: tuple[int, ...] = (2, 4)
    """How many times as wide a finished base may grow."""
    order: tuple[str, ...] = (
        "b, first base",
        "c",
        "b",
        "d",
        "b, noise by rule",
        "a",
        "u",
        "b, all budgets",
    )
    """What is asked of this model, the most telling first: keys of `order.PARTS`."""
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
    both_states: bool = True
    """Whether new units on the first base are also run with the moments of what was there."""
    both_rates: bool = False
    """Whether new units in mid-run are also run at the peak of the base."""
    ways: tuple[Way, ...] = ()
    """Growth in mid-run to the right width, cheapest first."""
    family: Finished = Finished(32, 4)
    """The smallest of three models that are grown from one plateau; each has twice the width and FLOPs of the last."""
    family_shares: tuple[float, ...] = (1.0, 1.1)
    """Of the FLOPs of a run from scratch, that the two grown ones get."""
    after: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    """The peak after growth over that of the base, for copies; half of it for new units."""
    rates_after: tuple[str, ...] = ("new units", "copied readers")
    """Readers of new units whose rate after growth is varied alone."""
    noise_of_states: tuple[str, ...] = ("noise", "no noise")
    """What the states that copies begin with are compared with, to the end."""
    one_rate: tuple[str, ...] = ()
    """Readers of new units that in mid-run are also run at one rate for all tensors, without the factor of a fold."""
    stop: float = 1.0
    """The share of the remaining steps that the comparison of optimizer states takes."""

    cited_bases: tuple[Finished, ...] = ()
    """What the page cites: bases of stage b with their extra budgets, stage c, and units of stage a."""
    cited_extras: tuple[float, ...] = (0.25, 1.0)
    cited_exactness: bool = True
    cited_unseen: bool = False
    centred: bool = False
    """Whether LayerNorm centres the stream, so that new channels may carry the mean of the others."""
    cited_ruled: bool = False
    """Whether the cited bases are cited with noise by the rule too."""
    cited_mid_run: tuple[int, ...] = ()
    cited_paired: tuple[str, ...] = ()
    """Stages of three paired seeds that are cited: r, s and w."""
    cited_new_units: bool = False
    """Whether the cited bases and budgets are cited with new units too."""

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(sorted({part[0] for part in self.order}))

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
    order=("b, first base", "c", "b", "d", "b, noise by rule", "a", "u", "r", "w", "f", "b, all budgets"),
    ways=(
        Way(32, 4, (32, 48, 64, 96), both_rates=True),
        Way(64, 8, (64, 96, 128, 160, 192)),
        Way(64, 16, (64, 96, 128, 160, 192)),
    ),
    cited_bases=(Finished(32, 1), Finished(32, 4), Finished(64, 16)),
    cited_unseen=True,
    cited_mid_run=(8, 16),
    cited_new_units=True,
    cited_paired=("f", "r", "w"),
)
STEP_LLAMA = 207_618_048
"""FLOPs of one step of the Llama at width 32, with 8 windows of 64 tokens."""
TEXT = Sizes(
    unit=4000 * STEP_LLAMA,
    reference=32,
    bases=(Finished(32, 1),),
    narrow=32,
    wide=64,
    unseen_k=2,
    ks=(2,),
    order=("d", "b", "a", "c", "u", "s", "r"),
    rates=powers(-8, -6),
    noises=(0.02, 0.05, 0.1),
    extras=(0.25, 1.0),
    middle=1,
    mid_run=(1,),
    shares=(0.25,),
    extend=1,
    both_rates=True,
    after=(0.5, 1.0, 2.0),
    rates_after=("copied readers",),
    one_rate=("copied readers",),
    stop=0.02,
    cited_bases=(Finished(32, 1),),
    cited_exactness=False,
    cited_unseen=True,
    cited_mid_run=(1,),
)
STEP_LARGE = 2_113_929_216
"""FLOPs of one step of the Llama at width 64 with four layers, with 8 windows of 128 tokens."""
LARGE = replace(
    TEXT,
    unit=5000 * STEP_LARGE,
    reference=64,
    order=("l",),
    bases=(),
    narrow=64,
    wide=128,
    seeds=(),
    cited_extras=(1.0,),
    cited_bases=(),
    cited_mid_run=(),
    cited_unseen=False,
    cited_paired=("l",),
)
"""Twice as wide, 279,104 parameters become 984,192. The base reads 5.1 M tokens, 18 for each of its parameters."""
STEP_GPT2 = 201_326_592
"""FLOPs of one step of the GPT-2 at width 32, with as many windows."""
LAYERNORM = replace(
    TEXT,
    unit=2000 * STEP_GPT2,
    order=("d",),
    bases=(),
    cited_bases=(),
    cited_paired=(),
    cited_unseen=True,
    cited_mid_run=(),
    cited_new_units=True,
    centred=True,
)
STEP_RESNET = 1_689_747_456
"""FLOPs of one step of the ResNet at width 8, with 128 images."""
IMAGES = Sizes(
    unit=640 * STEP_RESNET,
    reference=8,
    bases=(),
    narrow=8,
    wide=16,
    unseen_k=2,
    ks=(2,),
    order=("d",),
    rates=powers(-6, -4),
    noises=(0.05, 0.1, 0.2),
    middle=1,
    extend=1,
    cited_exactness=False,
    cited_unseen=True,
    cited_new_units=True,
)
SMOKE = Sizes(
    unit=14_000_000,
    ks=(2,),
    reference=4,
    bases=(Finished(8, 4),),
    narrow=8,
    between=16,
    wide=32,
    depth=3,
    order=("b", "c", "d", "b, noise by rule", "a", "u", "r", "s", "w"),
    ways=(Way(8, 4, (8, 16)),),
    rates=powers(-6, -6),
    noises=(0.1,),
    middle=4,
    extras=(0.25, 1.0, 2.0),
    mid_run=(2, 4),
    seeds=(1,),
    extend=0,
    cited_bases=(Finished(8, 4),),
    cited_extras=(0.25, 1.0),
    cited_unseen=True,
    cited_ruled=True,
    cited_mid_run=(2, 4),
    cited_new_units=True,
    cited_paired=("r", "s", "w"),
)
SMOKE_TEXT = replace(
    TEXT,
    unit=6 * STEP_LLAMA,
    cited_bases=(),
    cited_mid_run=(),
    order=("d",),
    cited_paired=(),
    rates=powers(-6, -6),
    noises=(0.05,),
    seeds=(0,),
    extend=0,
    cited_unseen=True,
)
SMOKE_IMAGES = replace(
    IMAGES,
    unit=4 * STEP_RESNET,
    rates=powers(-5, -5),
    noises=(0.1,),
    seeds=(0,),
    extend=0,
    cited_unseen=True,
)
