"""What a finished base may become, and the runs that choose the rate of each: the tuning seed chooses, others are reported.

Every arm spends as many FLOPs as the base has cost. It tries two rates, a quarter and a half of the base's where it starts
from the base, a half and the whole from scratch; the better of the two asks for one factor of two beyond it. Copies of a
width also try two sizes of noise. Stack order tries no rate: it takes a quarter of the base's peak. What sleeps is woken by
noise of the size of the trained weights, so there is nothing to tune.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ...scale import powers
from ..choose import Arm, Known, best, runs_of, search
from ..settings.stock import MIXTRAL, SHARED
from ..sizes import STEP_LLAMA
from ..spec import Spec

AWAKE = 0.1
"""t where something sleeps. It wakes what sleeps whatever its value, and nothing else has copies to part."""


MORE = 8
"""Experts of a mixture that has grown."""
QUARTER = 0.25
"""Of the base's peak: what every other way to double the layers chose on the first base."""


@dataclass(frozen=True)
class Direction:
    """One arm: how it is made, and how it differs from the base."""

    label: str
    of: str
    """The direction it belongs to, or "" for the base itself."""
    width: float = 1.0
    """Over that of the base."""
    layers: float = 1.0
    experts: int = 0
    top_k: int = 0
    method: str = "ours"
    scratch: bool = False
    share: float | None = None
    """The peak over that of the base, where it is not tuned."""


ARMS: Mapping[str, Direction] = {
    "goes on": Direction("the base goes on", ""),
    "stacked": Direction(
        "twice the layers in stack order, woken as copies that write nothing",
        "depth",
        layers=2,
        method="copied_readers",
        share=QUARTER,
    ),
    "deeper": Direction("a new layer behind each, woken with random readers", "depth", layers=2),
    "llama_pro": Direction(
        "LLaMA Pro: copied blocks that write nothing", "depth", layers=2, method="llama_pro"
    ),
    "stack": Direction("G_stack: the blocks on top of themselves", "depth", layers=2, method="stack"),
    "deep scratch": Direction("from scratch", "depth", layers=2, scratch=True),
    "pads": Direction("half as wide again, by zeros that are woken", "width", width=1.5),
    "copies": Direction("twice as wide, by copies with noise", "width", width=2),
    "pads scratch": Direction("from scratch, half as wide again", "width", width=1.5, scratch=True),
    "copies scratch": Direction("from scratch, twice as wide", "width", width=2, scratch=True),
    "experts": Direction("eight experts beside the dense layer, asleep and woken", "experts", experts=SHARED),
    "upcycling": Direction(
        "sparse upcycling: four copies behind a random router", "experts", experts=MIXTRAL, method="upcycling"
    ),
    "experts scratch": Direction("from scratch", "experts", experts=SHARED, scratch=True),
    "stack_third": Direction(
        "G_stack with new writers × 0.3", "order", layers=2, method="stack_third", share=QUARTER
    ),
    "half_steps": Direction(
        "each block twice, all writers halved", "order", layers=2, method="half_steps", share=QUARTER
    ),
    "interposed": Direction("each block twice", "order", layers=2, method="interposed", share=QUARTER),
    "mixture goes on": Direction("the base goes on", "mixture", experts=MIXTRAL),
    "apart": Direction(
        "eight experts, two per token: copies that part along a plane", "mixture", experts=MORE, top_k=2
    ),
    "doubled": Direction(
        "eight experts, four per token: copies with split writers", "mixture", experts=MORE, top_k=4
    ),
    "expert upcycling": Direction(
        "Expert Upcycling: copies, noise on scores",
        "mixture",
        experts=MORE,
        top_k=2,
        method="expert_upcycling",
    ),
    "mixture scratch": Direction(
        "eight experts from scratch", "mixture", experts=MORE, top_k=2, scratch=True
    ),
}
"""By name, in the order of the table."""


@dataclass(frozen=True)
class Sizes:
    """How large the study is, here and in the smoke test."""

    budget: int = 4000 * STEP_LLAMA
    """FLOPs of the base, and of every arm."""
    width: int = 32
    layers: int = 2
    rates: tuple[float, ...] = powers(-8, -6)
    noises: tuple[float, ...] = (0.1, 0.2)
    extend: int = 1
    tuning_seed: int = 0
    seeds: tuple[int, ...] = (1, 2)
    arms: tuple[str, ...] = tuple(name for name, made in ARMS.items() if made.of not in ("order", "mixture"))
    experts: int = 0
    """Of the base; 0 is a dense one."""
    share: float | None = None
    """The peak over that of the base in all arms, where it is not tuned."""


MIXTURE = Sizes(
    arms=tuple(name for name, made in ARMS.items() if made.of == "mixture"),
    experts=MIXTRAL,
    seeds=(1,),
    extend=0,
)
"""From a Mixtral with four experts: two seeds, two rates for each arm."""
DEEP = ("stacked", "llama_pro", "stack")
"""Blocks in stack order that write nothing, copied blocks behind each, and the blocks on top of themselves."""
ORDER = Sizes(arms=tuple(name for name, made in ARMS.items() if made.of == "order"))
"""Other orders and sizes of copied blocks, at the peak that the stored ones have."""
LARGER = Sizes(width=64, arms=DEEP, share=QUARTER)
"""Depth from a base of twice the width, where the peak of no arm is tuned."""
ALL = (Sizes(), LARGER, MIXTURE, ORDER)


def base(known: Known, sizes: Sizes) -> Arm:
    """The base, whose rate is tuned first."""
    make = Spec(sizes.width, sizes.budget, 1.0, sizes.tuning_seed, sizes.layers, sizes.experts)
    return search(known, lambda lr: replace(make, lr=lr), sizes.rates, sizes.extend)


def arm(known: Known, sizes: Sizes, name: str) -> Arm:
    """The runs of an arm, as far as what is stored decides them."""
    started = base(known, sizes)
    if started.chosen is None:
        return started
    told = ARMS[name]
    spec = replace(
        started.chosen,
        width=round(sizes.width * told.width),
        layers=round(sizes.layers * told.layers),
        experts=told.experts,
        top_k=told.top_k,
        method=told.method,
        start=None if told.scratch else started.chosen,
    )
    if spec.grows and spec.method == "ours" and not sizes.experts:
        spec = replace(spec, noise=AWAKE)
    if spec.grows and told.width == 2:
        noise = best(known, [replace(spec, noise=t) for t in sizes.noises])
        if noise.chosen is None:
            return started.then(noise)
        started, spec = started.then(noise), noise.chosen
    share = told.share if sizes.share is None else sizes.share
    if share is not None:
        return started.then(Arm((), replace(spec, lr=share * spec.lr)))
    top = spec.lr if told.scratch else spec.lr / 2
    rates = (top / 2, top)
    return started.then(search(known, lambda lr: replace(spec, lr=lr), rates, sizes.extend))


def specs(known: Known, sizes: Sizes) -> Iterator[Spec]:
    """Every run of the study: the tuning of every arm, then what it chose with all seeds."""
    arms = [base(known, sizes), *(arm(known, sizes, name) for name in sizes.arms)]
    yield from runs_of(arms, (sizes.tuning_seed, *sizes.seeds))


def missing(known: Known, sizes: Sizes) -> Spec | None:
    """The next run to make, or None when all are stored."""
    return next((spec for spec in specs(known, sizes) if known(spec) is None), None)
