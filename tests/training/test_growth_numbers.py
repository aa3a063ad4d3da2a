"""The numbers of growth are those of the two runs."""

import pytest
import torch
from torch import nn

import mupscale as mu
from harness.refusals import refused
from mupscale.diagnostics import growth_numbers, reference_lr
from mupscale.training.check.symmetry import awake, noise_shares, symmetry
from mupscale.training.units.clip import grad_norm

X = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))


def make(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))


def loss(model: nn.Module) -> torch.Tensor:
    value: torch.Tensor = (model(X.to(next(model.parameters()).dtype)) - 1).square().mean()
    return value


@pytest.fixture
def base() -> mu.Run:
    torch.manual_seed(0)
    model = make(4)
    run = mu.Run(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for _ in range(5):
        run.optimizer.zero_grad()
        loss(run.model).backward()
        run.optimizer.step()
    run.optimizer.zero_grad()  # gradients that are there are carried
    return run


def test_growth_in_numbers_is_what_it_was(base):
    """Controls: a run without noise has none to log, and its loss and its norm do not change."""
    wide = mu.upscale(base, lambda: make(8), mu.SignalNoise(0.2), loss=loss)
    told = growth_numbers(base, wide, loss=loss)
    assert all(type(value) is float for value in told.values())
    assert all(p.grad is None for p in base.model.parameters()), "gradients are as before"
    for when, value in wide.provenance["loss"].items():
        assert told[f"loss_{when}"] == pytest.approx(value, rel=1e-6)
    assert told["noise"] == max(found.share for found in noise_shares(base, wide).values())
    assert told["symmetry"] == max(symmetry(wide).values()) > 0
    assert told["lr_after"] == told["lr_before"] == reference_lr(wide.optimizer) == 0.01
    loss(wide.model).backward()
    assert told["grad_norm_after"] == pytest.approx(float(grad_norm(wide.model, wide)), rel=1e-6)
    exact = growth_numbers(base, mu.grow(base, lambda: make(8)), loss=loss)
    assert "noise" not in exact
    assert exact["symmetry"] == 0
    for name in ("loss", "grad_norm"):
        assert exact[f"{name}_after"] == pytest.approx(exact[f"{name}_before"], rel=1e-5)
        assert told[f"{name}_after"] != pytest.approx(told[f"{name}_before"], rel=1e-5)


def test_without_a_loss_what_upscale_recorded_is_told(base):
    wide = mu.upscale(base, lambda: make(8), mu.SignalNoise(0.2), loss=loss)
    told = growth_numbers(base, wide)
    assert told["loss_after"] == wide.provenance["loss"]["after"]
    assert "grad_norm_after" not in told


def test_new_units_are_told_by_how_awake_they_are(base):
    wide = mu.upscale(base, lambda: make(8))
    assert growth_numbers(base, wide)["awake"] == max(awake(wide).values()) > 0


def test_numbers_of_every_tensor_and_of_a_wide_run_alone(base):
    """Control: the numbers of two tensors differ."""
    wide = mu.upscale(base, lambda: make(8), mu.SignalNoise(0.2), loss=loss)
    numbers = growth_numbers(base, wide, tensors=True)
    for name, found in noise_shares(base, wide).items():
        assert (numbers[f"noise/{name}"], numbers[f"lost/{name}"]) == found
    parted = {f"symmetry/{name}": value for name, value in symmetry(wide).items()}
    assert parted.items() <= numbers.items()
    assert len({*parted.values()}) > 1
    assert growth_numbers(None, wide, tensors=True) == {"symmetry": max(parted.values()), **parted}


def test_what_is_no_run_is_refused(base):
    wide = mu.grow(base, lambda: make(8))
    with refused("argument.wrong_type", where="base"):
        growth_numbers(base.model, wide)
