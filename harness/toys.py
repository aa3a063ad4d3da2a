"""Two models of a few lines with batches in float64: an MLP with two widths, and a readout tied to its embedding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale as mu
from harness.runs import Batches, Loss, trained

VOCABULARY = 7


def mlp(n: int, m: int) -> nn.Sequential:
    """Two hidden layers of their own widths, so that one matrix grows by different k in and out."""
    return nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, m), nn.Tanh(), nn.Linear(m, 2))


MLP = (4, 6)
WIDE_MLP = (8, 24)


def wide_mlp() -> nn.Sequential:
    return mlp(*WIDE_MLP)


class TiedModel(nn.Module):
    """Embedding, residual block, RMSNorm, and a readout with bias that reads the embedding."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, n)
        self.hidden = nn.Linear(n, n)
        self.norm = nn.RMSNorm(n)
        self.readout = nn.Linear(n, VOCABULARY)
        self.readout.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = h + torch.tanh(self.hidden(h))
        out: Tensor = self.readout(self.norm(h))
        return out


def vectors(count: int = 10, seed: int = 1) -> Batches:
    """Batches for the MLP."""
    generator = torch.Generator().manual_seed(seed)

    def draw(size: int) -> Tensor:
        return torch.randn(8, size, generator=generator, dtype=torch.float64)

    return [(draw(3), draw(2)) for _ in range(count)]


def tokens(count: int = 10, seed: int = 1) -> Batches:
    """Batches for the tied model."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(VOCABULARY, (8,), generator=generator),
            torch.randn(8, VOCABULARY, generator=generator, dtype=torch.float64),
        )
        for _ in range(count)
    ]


def loss_on(batches: Batches) -> Loss:
    """A loss for plans: the first batch, in the dtype of the model."""
    x, y = batches[0]
    return lambda model: F.mse_loss(out := model(x), y.to(out.dtype))


def trained_mlp(make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> mu.Run:
    """The MLP after three steps."""
    torch.manual_seed(0)
    return trained(mlp(*MLP), make_optimizer, vectors(3, seed=0))
