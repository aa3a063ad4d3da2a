"""How much noise a dtype swallows: entries whose value is the same with and without it.

Measured on a sample of every tensor that gets noise, by the same function that writes blocks.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..jobs.blocks import BlockMaker, Reader, from_files
from ..jobs.job import Job, Move
from ..jobs.units import Block, block_shape

ADVISE = 0.1
"""The share of lost entries from which a user is told."""
_SAMPLE = 1 << 18  # bytes


def lost_to_rounding(job: Job) -> dict[str, float]:
    """For every tensor with noise, the share of sampled entries that noise does not change."""
    found = {}
    with Reader(job.base) as reader:
        maker = BlockMaker(from_files(reader))
        for move in job.moves:
            if move.noise is not None and move.target.bytes:
                found[move.name] = _lost(maker, move)
    return found


def _lost(maker: BlockMaker, move: Move) -> float:
    shape = block_shape(move, _SAMPLE)
    middle = tuple((whole - part) // 2 for whole, part in zip(move.target.shape, shape, strict=True))
    noisy = maker.make(Block(move, middle, shape)).clone()
    quiet = maker.make(Block(replace(move, noise=None), middle, shape))
    return float(torch.eq(noisy, quiet).double().mean())
