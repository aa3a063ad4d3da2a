"""Sizes of the ResNet experiment; a width of 64 is the standard model ("1x")."""

from __future__ import annotations

from collections.abc import Mapping

from ..scale import Scale, powers

EPOCH, PAPER_EPOCH = 125, 390
"""Steps in an epoch of 16,000 and of 50,000 images."""
PEERS = ("our_rate", "continue", "net2wider", "tiling", "zero_padding", "paper_code")

SCALES: Mapping[str, Mapping[str, Scale]] = {
    "smoke": {
        "sgd": Scale(
            proxy=4,
            base=6,
            k=2,
            steps=3,
            seeds=1,
            peer_seeds=1,
            lrs=powers(-4, -4),
            noises=(0.2,),
            factors=(0.5,),
            scheme="t",
            control_at_base=False,
            peers=PEERS,
            points=3,
            extend=0,
            sizes={"reference": 4, "stem": 2, "rows": 512, "watched": 100},
        )
    },
    "here": {
        "sgd": Scale(
            proxy=8,
            base=16,
            k=2,
            steps=3 * EPOCH,
            seeds=2,
            peer_seeds=1,
            lrs=powers(-7, -3),
            noises=(0.1, 0.2, 0.4),
            factors=(0.25, 0.5, 1.0),
            scheme="t",
            control_at_base=False,
            peers=PEERS,
            points=50,
            sizes={"reference": 8, "stem": 2, "watched": 1_000},
        )
    },
    "paper": {
        "sgd": Scale(
            proxy=32,
            base=128,
            k=2,
            steps=100 * PAPER_EPOCH,
            seeds=5,
            peer_seeds=3,
            lrs=powers(-9, -3),
            noises=(0.1, 0.2, 0.4, 0.8),
            scheme="t",
            control_at_base=False,
            peers=PEERS,
            sizes={"dataset": "cifar100", "reference": 64},
            device="cuda",
        )
    },
}
