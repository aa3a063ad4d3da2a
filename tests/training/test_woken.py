"""Waking moves no loss, what would never learn is named, and a plan that does not grow as was asked is refused."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale as mu
from harness.refusals import refusal
from mupscale.rules.products import By
from mupscale.training.grow import prove

X = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))


def loss(model: nn.Module) -> Tensor:
    out: Tensor = model(X.to(next(model.parameters()).dtype))
    return (out - 1).square().mean()


def plain(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, n), nn.GELU(), nn.Linear(n, 1))


class UnitLength(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, n), nn.Parameter(torch.randn(5, n))

    def forward(self, x: Tensor) -> Any:
        return F.normalize(F.gelu(self.a(x)), dim=-1) @ F.normalize(self.b, dim=-1).T


class Masked(nn.Module):
    """Zeros behind a buffer of ones turn new units off."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, n), nn.Linear(n, 1)
        self.register_buffer("mask", torch.ones(n))

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x).tanh() * self.mask)


class First(nn.Module):
    """Only the first units are used, whatever the width."""

    def __init__(self, n: int, used: int = 4) -> None:
        super().__init__()
        self.a, self.b, self.used = nn.Linear(3, n), nn.Linear(n, 1), used

    def forward(self, x: Tensor) -> Any:
        hidden = self.a(x).tanh()
        return self.b(hidden * (torch.arange(hidden.shape[-1]) < self.used))


def weight_normed(n: int) -> nn.Module:
    normed = nn.utils.parametrizations.weight_norm
    return nn.Sequential(nn.Linear(3, n), nn.GELU(), normed(nn.Linear(n, n)), nn.GELU(), nn.Linear(n, 1))


def test_a_loss_that_waking_would_move_is_refused_and_units_that_never_learn_are_named() -> None:
    with pytest.warns(UserWarning, match="4 -> 6 get no gradient"):
        mu.upscale(Masked(4), lambda: Masked(6), loss=loss)
    base = weight_normed(4)
    refusal(lambda: mu.upscale(base, lambda: weight_normed(8), loss=loss), "growth.waking_moves_loss")
    error = refusal(
        lambda: mu.upscale(UnitLength(4), lambda: UnitLength(6), loss=loss), "axis.not_whole_copies"
    )
    assert "search.waking_moves_loss" in error.codes
    refusal(lambda: mu.upscale(plain(4), lambda: plain(8), mu.NewUnits(size=0.0)), "argument.not_a_number")


@pytest.mark.parametrize("large", [False, True])
def test_a_given_plan_is_woken_before_anything_is_grown(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the plan that cuts the zeros on the other side wakes. In float64 a loss that moves by 1e-7 is seen too."""

    def hardly(model: nn.Module) -> Tensor:
        return 1 + 1e-6 * loss(model)

    torch.manual_seed(0)
    base = UnitLength(4)
    padded = mu.infer_plan(base, UnitLength(6), loss=loss, by="padded")
    cut = mu.infer_plan(plain(4), plain(6), loss=loss, by="units")
    if large:
        monkeypatch.setattr(prove, "FLOAT64_BYTES", 0)
    for measure in (loss,) if large else (loss, hardly):
        upscaled = partial(mu.upscale, base, lambda: UnitLength(6), plan=padded, loss=measure)
        refusal(upscaled, "growth.waking_moves_loss")
    assert "unlearned" not in mu.upscale(plain(4), lambda: plain(6), plan=cut, loss=loss).provenance["proof"]


def test_copies_that_stay_equal_are_warned_of_and_the_remedy_parts_them() -> None:
    torch.manual_seed(0)
    base = UnitLength(4)
    optimizer = torch.optim.SGD(base.parameters(), lr=0.3)
    for _ in range(20):  # noise is a share of what was learned
        optimizer.zero_grad()
        loss(base).backward()
        optimizer.step()
    with pytest.warns(UserWarning, match="4 -> 8"):
        mu.upscale(base, lambda: UnitLength(8), loss=loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wide = mu.upscale(base, lambda: UnitLength(8), by="copies", loss=loss).model
    assert not torch.equal(wide.a.weight[::2], wide.a.weight[1::2])  # type: ignore[union-attr, index]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_units_that_would_never_learn_are_named_in_large_models_too(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: where the model uses all units, nothing is named."""
    monkeypatch.setattr(prove, "FLOAT64_BYTES", 0)
    base = First(4).to(dtype)
    with pytest.warns(UserWarning, match="4 -> 8 get no gradient"):
        wide = mu.upscale(base, lambda: First(8).to(dtype), loss=loss)
    assert wide.provenance["proof"]["unlearned"] == ("4 -> 8",)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        used = mu.upscale(base, lambda: First(8, used=8).to(dtype), loss=loss)
    assert used.provenance["proof"]["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(("by", "other"), [("copies", "units"), ("units", "copies")])
def test_a_plan_of_the_other_way_is_refused(by: By, other: By) -> None:
    """Control: the plan alone, and with the way in which it grows."""
    base, wide = plain(4), lambda: plain(8)
    plans: dict[str, mu.Plan] = {way: mu.infer_plan(base, plain(8), by=way) for way in (by, other)}
    refusal(lambda: mu.upscale(base, wide, by=by, plan=plans[other], loss=loss), "plan.of_another_way")
    noise = mu.NewUnits() if by == "units" else mu.SignalNoise(0.01)
    mu.upscale(base, wide, noise, by=by, plan=plans[by], loss=loss)
    mu.upscale(base, wide, mu.NewUnits(), plan=plans[by], loss=loss)
    mu.grow(base, wide, by=by, plan=plans[by])
    mu.grow(base, wide, plan=plans["units"])
    refusal(lambda: mu.grow(base, wide, by="units", plan=plans["copies"]), "plan.of_another_way")
