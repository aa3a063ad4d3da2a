"""Sizes of the MLP experiment: a smoke test, what one core does in an afternoon, the paper's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..scale import Scale, powers

EPOCH = 232
"""Steps in an epoch of the full data."""
PEERS = (
    "our_rate",
    "continue",
    "net2wider",
    "tiling",
    "zero_padding",
    "paper_code",
    "ours_paired",
    "ours_muon",
)

_smoke = Scale(
    proxy=32,
    base=48,
    k=2,
    steps=12,
    seeds=2,
    peer_seeds=1,
    lrs=powers(-6, -5),
    noises=(0.1,),
    factors=(0.5, 1.0),
    paired=(0.1,),
    peers=PEERS,
    points=6,
    extend=0,
    sizes={"rows": 20_000, "watched": 2_000},
)
_here = Scale(
    proxy=32,
    base=64,
    k=4,
    steps=30 * EPOCH,
    seeds=5,
    peer_seeds=3,
    lrs=powers(-7, -3),
    noises=powers(-5, -1),
    paired=powers(-4, 0),
    peers=PEERS,
    sizes={"watched": 20_000},
    bars={"base sunk": 2.0, "base charged": 1.5},
)
_paper = Scale(
    proxy=100,
    base=500,
    k=4,
    steps=500 * EPOCH,
    seeds=5,
    peer_seeds=3,
    lrs=powers(-7, -2),
    noises=powers(-4, 2),
    paired=powers(-4, 0),
    peers=PEERS,
    points=500,
    device="cuda",
)


def _sgd(scale: Scale, **changes: object) -> Scale:
    """SGD has a control beside it and no peers: they are compared on AdamW."""
    return replace(scale, peers=("our_rate",), paired=(), **changes)  # type: ignore[arg-type]


SCALES: Mapping[str, Mapping[str, Scale]] = {
    "smoke": {"adamw": _smoke, "sgd": _sgd(_smoke, lrs=powers(-2, -1))},
    "here": {"adamw": _here, "sgd": _sgd(_here, lrs=powers(-3, 1), noises=powers(-4, 0))},
    "paper": {"adamw": _paper, "sgd": _sgd(_paper, lrs=powers(-4, 1))},
}
