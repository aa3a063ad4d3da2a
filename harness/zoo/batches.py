"""Small random tasks for the zoo, besides those of `harness/data.py`: sequences, pictures, graphs, tables of ids."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from harness.data import CLASSES, INPUTS, OUTPUTS, TOKENS

NODES, FIELDS, IDS = 12, 4, 10


def generator(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(3000 + number)


def labelled(number: int) -> tuple[Tensor, Tensor]:
    """Vectors with a class each."""
    g = generator(number)
    return torch.randn(NODES, INPUTS, generator=g), torch.randint(CLASSES, (NODES,), generator=g)


def paired(number: int) -> tuple[Tensor, Tensor]:
    """Vectors of which the i-th belongs to the i-th, for contrastive losses."""
    return torch.randn(NODES, INPUTS, generator=generator(number)), torch.arange(NODES)


def copied(number: int) -> tuple[Tensor, Tensor]:
    """Vectors to be reconstructed."""
    x = torch.randn(16, INPUTS, generator=generator(number))
    return x, x


def sequences(number: int) -> tuple[Tensor, Tensor]:
    """Six steps of vectors, with a vector to predict."""
    g = generator(number)
    return torch.randn(5, 6, INPUTS, generator=g), torch.randn(5, OUTPUTS, generator=g)


def pictures(size: int = 8, count: int = 6) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Square pictures with a class each."""

    def draw(number: int) -> tuple[Tensor, Tensor]:
        g = generator(number)
        return torch.randn(count, 3, size, size, generator=g), torch.randint(CLASSES, (count,), generator=g)

    return draw


def maps(size: int, out: int, channels: int = 3, count: int = 3) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Square pictures with a picture of another size to predict."""

    def draw(number: int) -> tuple[Tensor, Tensor]:
        g = generator(number)
        x = torch.randn(count, 3, size, size, generator=g)
        return x, torch.randn(count, channels, out, out, generator=g)

    return draw


def latents(number: int) -> tuple[Tensor, Tensor]:
    """Vectors from which a generator makes pictures of 8 by 8."""
    g = generator(number)
    return torch.randn(6, INPUTS, generator=g), torch.randn(6, 3, 8, 8, generator=g)


def words(number: int) -> tuple[Tensor, Tensor]:
    """One word and the word to predict from it."""
    drawn = torch.randint(TOKENS, (16, 2), generator=generator(number))
    return drawn[:, 0], drawn[:, 1]


def tables(number: int) -> tuple[Tensor, Tensor]:
    """Rows of ids, one per field, with a number to predict."""
    g = generator(number)
    return torch.randint(IDS, (16, FIELDS), generator=g), torch.randn(16, generator=g)


def translations(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two sequences of tokens for an encoder and a decoder, and the tokens to predict."""
    drawn = torch.randint(1, TOKENS, (4, 2, 7), generator=generator(number))
    return drawn[:, 0], drawn[:, 1], drawn[:, 1]


def neighbours() -> Tensor:
    """The adjacency matrix of one fixed graph, with self-loops; rows sum to one."""
    drawn = torch.rand(NODES, NODES, generator=generator(0)) > 0.7
    joined = (drawn | drawn.T | torch.eye(NODES, dtype=torch.bool)).to(torch.get_default_dtype())
    return joined / joined.sum(1, keepdim=True)
