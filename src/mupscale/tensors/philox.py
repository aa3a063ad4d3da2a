"""Random numbers that depend on (seed, name, element index) and on nothing else.

Philox4x32-10 in integer arithmetic, so any slice, order, device, dtype, number of threads or ranks gives
the same bits. Normals are the sum of two table look-ups: no logarithm or cosine whose last bit depends on
the machine. The stream is versioned in the key; changing anything here changes `STREAM`. This is the portable
code, which defines what is right; `compiled.py` gives the same bits faster.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import torch
from torch import Tensor

STREAM = b"mupscale noise 1"  # hashed into every key, so that another stream of noise can have the number 2

_MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # this line and the next two: Philox 4x32-10 as published
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_GRID = 2.0**-22  # quantiles are rounded to this, so that no libm can move the last bit of the table

Words = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Stream:
    """The random numbers of one tensor: element i is a pure function of this and i."""

    seed: int
    name: str

    @property
    def words(self) -> tuple[int, int, int, int]:
        """Two key words and the two upper counter words, from a hash of seed and name."""
        text = f"{self.seed}\0{self.name}".encode()
        digest = hashlib.blake2b(text, digest_size=16, person=STREAM).digest()
        return tuple(int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8, 12))  # type: ignore[return-value]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Ten rounds of Philox4x32 on counters of four 32-bit words, held in int64.

    >>> zero = torch.zeros(1, dtype=torch.int64)
    >>> [hex(int(word)) for word in philox((zero,) * 4, (0, 0))]        # Random123's known answer
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = (word.clone() for word in counter)
    p0, p1 = torch.empty_like(c0), torch.empty_like(c0)
    k0, k1 = key
    for _ in range(ROUNDS):
        # int64 wraps and keeps the low 64 bits, which are what we want; c1 and c3 carry a product's upper half along
        torch.mul(c0, MULTIPLIERS[0], out=p0)
        torch.mul(c2, MULTIPLIERS[1], out=p1)
        c0 = torch.bitwise_right_shift(p1, 32, out=c0).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK)
        c2 = torch.bitwise_right_shift(p0, 32, out=c2).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK)
        c1, p1, c3, p0 = p1, c1, p0, c3
        k0, k1 = (k0 + WEYL[0]) & _MASK, (k1 + WEYL[1]) & _MASK
    return c0, c1.bitwise_and_(_MASK), c2, c3.bitwise_and_(_MASK)


def uniform_bits(stream: Stream, starts: Tensor, length: int) -> Tensor:
    """32 random bits for each element of runs of equal length: row i holds elements starts[i], starts[i]+1, …"""
    k0, k1, high0, high1 = stream.words
    first = starts >> 2
    blocks = first[:, None] + torch.arange((length + 6) // 4, device=starts.device)
    words = philox(
        (blocks & _MASK, blocks >> 32, torch.full_like(blocks, high0), torch.full_like(blocks, high1)),
        (k0, k1),
    )
    lanes = torch.stack(words, dim=-1).flatten(1)
    offset = starts - 4 * first
    if bool((offset == offset[:1]).all()):
        skip = int(offset[0]) if len(offset) else 0
        return lanes[:, skip : skip + length]
    return lanes.gather(1, offset[:, None] + torch.arange(length, device=starts.device))


@lru_cache(maxsize=8)
def quantiles(device: str = "cpu") -> Tensor:
    """65,536 mid-point normal quantiles, scaled so that the sum of two independent ones has variance 1."""
    normal = NormalDist()
    half = [normal.inv_cdf((i + 0.5) / 65536) for i in range(32768)]
    size = (2 * sum(q * q for q in half) / 32768) ** 0.5
    rounded = torch.tensor([round(q / size / _GRID) * _GRID for q in half], dtype=torch.float64, device="cpu")
    return torch.cat([rounded, -rounded.flip(0)]).float().to(device)


def normals(stream: Stream, starts: Tensor, length: int) -> Tensor:
    """Standard normal float32 numbers for runs of elements, one run per row."""
    bits = uniform_bits(stream, starts, length)
    words, table = bits.flatten(), quantiles(str(starts.device))
    z = table.index_select(0, words & 0xFFFF).add_(table.index_select(0, words >> 16))
    return z.view(bits.shape)


def uniforms(stream: Stream, starts: Tensor, length: int) -> Tensor:
    """Float32 numbers in (0, 1), on a grid of 2^-24 shifted by half a step."""
    return ((uniform_bits(stream, starts, length) >> 8).float() + 0.5) * 2.0**-24
