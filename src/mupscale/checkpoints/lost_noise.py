"""How much noise a dtype swallows: entries whose value is the same with and without it.

Measured on a sample of every tensor that gets noise, by the same function that writes blocks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..files.places import item_size
from ..jobs.bytes.blocks import MoveMaker, Reader
from ..jobs.job import Job, Move
from ..jobs.work_units import Block, block_shape

ADVISE = 0.1
"""The share of lost entries from which a user is warned."""
_SAMPLE = 1 << 18  # bytes


def lost_to_rounding(job: Job) -> dict[str, float]:
    """For every tensor with noise, the share of the sampled entries that get noise and are not changed by it."""
    found = {}
    with Reader(job.base) as reader:
        maker = MoveMaker(reader)
        for move in job.moves:
            if move.making.noise is not None and move.target.bytes:
                found[move.name] = _lost(maker, move)
    return found


def _lost(maker: MoveMaker, move: Move) -> float:
    shape = block_shape(move.making, move.target.shape, item_size(move.target.dtype), _SAMPLE)
    middle = tuple((whole - part) // 2 for whole, part in zip(move.target.shape, shape, strict=True))

    def same(dtype: str) -> Tensor:
        """Which entries have one value with noise and without it, in this dtype."""
        there = replace(move, target=replace(move.target, dtype=dtype))
        noisy = maker.block(Block(there, middle, shape)).clone()
        without = replace(there, making=replace(there.making, noise=None))
        return torch.eq(noisy, maker.block(Block(without, middle, shape)))

    reached = ~same("F64")  # zeros that stay zero get none, and neither do trained entries without copies
    count = int(reached.sum())
    return float((same(move.target.dtype) & reached).sum()) / count if count else 0.0
