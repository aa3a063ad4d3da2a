"""Sizes of the GPT-2 experiment: heads that grow in size, as in the paper, and heads that grow in number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..scale import Scale, powers

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
    proxy=16,
    base=16,
    k=2,
    steps=3,
    seeds=1,
    peer_seeds=1,
    lrs=powers(-7, -7),
    noises=(0.05,),
    factors=(0.5,),
    paired=(0.05,),
    peers=PEERS,
    points=3,
    extend=0,
    sizes={"layers": 1, "context": 16, "batch": 2, "words": 512, "reference": 16},
)
_here = Scale(
    proxy=32,
    base=64,
    k=2,
    steps=4000,
    seeds=1,
    peer_seeds=1,
    lrs=powers(-8, -6),
    noises=powers(-5, -3),
    factors=(0.25, 0.5, 1.0),
    paired=powers(-5, -3),
    peers=PEERS,
    points=50,
    sizes={"batch": 4},
)
_paper = Scale(
    proxy=192,
    base=1920,
    k=2,
    steps=10_000,
    seeds=1,
    peer_seeds=1,
    lrs=powers(-10, -5),
    noises=powers(-9, -4),
    paired=powers(-8, -4),
    peers=PEERS,
    sizes={
        "layers": 12,
        "heads": 12,
        "context": 1024,
        "batch": 8,
        "parts": 64,
        "words": 50_257,
        "reference": 192,
        "source": "fineweb",
    },
    device="cuda",
)


def _heads(scale: Scale, **sizes: int) -> Scale:
    """The second run, without peers, which are compared on the first."""
    fewer = scale.noises[-3:]
    return replace(scale, peers=(), paired=(), noises=fewer, seeds=1, sizes={**scale.sizes, **sizes})


SCALES: Mapping[str, Mapping[str, Scale]] = {
    "smoke": {"size": _smoke, "heads": _heads(_smoke, head_size=8)},
    "here": {"size": _here, "heads": _heads(_here, head_size=16)},
    "paper": {"size": _paper, "heads": _heads(_paper, head_size=16)},
}
