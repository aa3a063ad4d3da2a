"""Buffers that forward writes are part of a proof: they follow the base's after the loss too."""

from typing import Any

import torch
from torch import Tensor, nn

import mupscale as mu
from harness.refusals import refused

X = torch.randn(16, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def loss(model: nn.Module) -> Tensor:
    out: Tensor = model(X)
    return out.square().mean()


class Delayed(nn.Module):
    """Divides by the norm or the root mean square of the activations, as it was in earlier batches."""

    scale: Tensor

    def __init__(self, width: int, mean: bool) -> None:
        super().__init__()
        self.first, self.last, self.mean = nn.Linear(6, width), nn.Linear(width, 2), mean
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        found = self.last(hidden / self.scale.clone())
        size = hidden.detach().square()
        with torch.no_grad():
            self.scale.copy_(0.5 * self.scale + 0.5 * (size.mean() if self.mean else size.sum()).sqrt())
        return found


def test_a_written_norm_gets_its_own_factor_and_a_plan_without_it_is_refused():
    base = Delayed(8, mean=False).double()
    shapes = mu.infer_plan(base, lambda: Delayed(32, mean=False).double())
    with refused("proof.run_deviates", where="step 0, scale"):
        mu.grow(base, lambda: Delayed(32, mean=False).double(), plan=shapes, loss=loss)
    wide = mu.grow(base, lambda: Delayed(32, mean=False).double(), loss=loss)
    for _ in range(3):
        assert torch.allclose(loss(base), loss(wide.model), rtol=1e-12)
    assert wide.plan is not None
    assert str(wide.plan["scale"].change.s) == "2", "a norm over 4 times as many features"


def test_running_statistics_follow_the_base():
    def make(width: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2)
        ).double()

    base = make(8)
    wide = mu.grow(base, lambda: make(24), loss=loss)
    for _ in range(3):
        assert torch.allclose(loss(base), loss(wide.model), rtol=1e-12)
    assert torch.allclose(base.eval()(X), wide.model.eval()(X), rtol=1e-12)


class Normalised(nn.Module):
    """Subtracts a mean of its inputs that was collected in training."""

    mean: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, width), nn.Linear(width, 2)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
        return self.last(torch.tanh(self.first(x - self.mean)))


def test_with_a_loss_a_collected_buffer_of_fixed_size_is_copied():
    base = Normalised(4).double()
    loss(base)
    wide = mu.grow(base, lambda: Normalised(8).double(), loss=loss)
    assert torch.equal(wide.model.get_buffer("mean"), base.mean)
    assert torch.allclose(loss(base), loss(wide.model), rtol=1e-12)
