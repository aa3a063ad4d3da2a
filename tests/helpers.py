"""What the defect tests share: small models, side-by-side training in float64, and comparisons that assert."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale as mu
from mupscale.rules.optimizers import RULES

EXACT = 1e-12
"""The largest relative difference of outputs that still counts as the same training."""
BROKEN = 1e-6
"""The smallest relative difference that a control must show."""

VOCABULARY = 7
Batches = list[tuple[Tensor, Tensor]]


def mlp(n: int, m: int) -> nn.Sequential:
    """Two hidden layers of their own widths, so that one matrix grows by different k in and out."""
    return nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, m), nn.Tanh(), nn.Linear(m, 2))


MLP = (4, 6)
WIDE_MLP = (8, 24)


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
    generator = torch.Generator().manual_seed(seed)

    def draw(size: int) -> Tensor:
        return torch.randn(8, size, generator=generator, dtype=torch.float64)

    return [(draw(3), draw(2)) for _ in range(count)]


def tokens(count: int = 10, seed: int = 1) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(VOCABULARY, (8,), generator=generator),
            torch.randn(8, VOCABULARY, generator=generator, dtype=torch.float64),
        )
        for _ in range(count)
    ]


def loss_on(batches: Batches) -> Callable[[nn.Module], Tensor]:
    """A loss for plans: the first batch, in the dtype of the model."""
    x, y = batches[0]
    return lambda model: F.mse_loss(out := model(x), y.to(out.dtype))


def train(run: mu.Run, batches: Batches, clip: Callable[[nn.Module], Any] | None = None) -> Tensor:
    """Train on each batch once; the outputs before every step, stacked."""
    outputs = []
    for x, y in batches:
        for optimizer in run.optimizers:
            optimizer.zero_grad()
        out = run.model(x)
        F.mse_loss(out, y).backward()
        if clip is not None:
            clip(run.model)
        for part in (*run.optimizers, *run.schedulers):
            part.step()
        outputs.append(out.detach())
    return torch.stack(outputs)


def trained(
    model: nn.Module, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], batches: Batches
) -> mu.Run:
    """A float64 run with optimizer state: the model after a few steps."""
    model = model.double()
    run = mu.Run(model, make_optimizer(model))
    train(run, batches)
    return run


def weighted_clip(weights: Mapping[str, float], limit: float) -> Callable[[nn.Module], None]:
    """Clipping by the root of a weighted sum of squared gradient norms, which must be above the limit."""

    def clip(model: nn.Module) -> None:
        total = torch.zeros((), dtype=torch.float64)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            total += weights[name] * parameter.grad.square().sum()
        assert total.sqrt() > 2 * limit, "clipping must be active"
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), limit, total.sqrt())

    return clip


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest entry of `a`; not a number if either is not."""
    assert a.shape == b.shape
    return float((a - b).detach().abs().max() / a.detach().abs().max())


def assert_exact(gap: float) -> None:
    assert gap <= EXACT, f"off by {gap:.1e}, allowed {EXACT:.0e}"


def assert_broken(gap: float) -> None:
    """For controls: the defect must be seen, and not because everything became infinite."""
    assert math.isfinite(gap), f"the control gave {gap}"
    assert gap >= BROKEN, f"the control moved by {gap:.1e} only, expected {BROKEN:.0e}"


def without(optimizer: type, **changes: Any) -> dict[str, mu.OptimizerRule]:
    """The registry with one row altered: the nearest wrong rule."""
    name = f"torch.optim.{optimizer.__name__}"
    return {**RULES, name: replace(RULES[name], **changes)}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by name, detached."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named}


def assert_same_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """The same names with the same bits."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.data_ptr() for tensor in tensors}
