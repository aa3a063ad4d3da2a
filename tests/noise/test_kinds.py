"""Sizes by name pattern, relative paired noise, and noise that is added to a run that is wide already."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mupscale as mu
from harness.refusals import refusal
from mupscale.tensors.spectral import spectral_norms

X = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
    )


@pytest.fixture
def base() -> nn.Sequential:
    torch.manual_seed(0)
    return mlp(8)


def moved(noisy: nn.Module, exact: nn.Module, name: str) -> float:
    """The spectral norm of the noise over that of the weight."""
    a, b = noisy.get_parameter(name), exact.get_parameter(name)
    return float(spectral_norms((a - b).detach(), False) / spectral_norms(b.detach(), False))


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).detach().norm() / wanted.detach().norm())


def test_sizes_by_pattern_are_those_of_the_first_that_matches(base):
    exact = mu.grow(base, lambda: mlp(64)).model
    run = mu.upscale(base, lambda: mlp(64), mu.SignalNoise({"2.*": 0.2, "[0-2].*": 0.05}))
    assert moved(run.model, exact, "2.weight") == pytest.approx(0.2, rel=0.15)
    assert moved(run.model, exact, "0.weight") == pytest.approx(0.05, rel=0.3)
    assert torch.equal(run.model.get_parameter("4.weight"), exact.get_parameter("4.weight")), (
        "no pattern matches"
    )
    assert "4.weight" in run.provenance["noise"]["without"]
    plain = mu.upscale(base, lambda: mlp(64), mu.SignalNoise({"*": 0.05}))
    one = mu.upscale(base, lambda: mlp(64), mu.SignalNoise(0.05))
    for name, parameter in one.model.named_parameters():
        assert torch.equal(parameter, plain.model.get_parameter(name))


def test_wrong_sizes_by_pattern_are_refused(base):
    refusal(
        lambda: mu.upscale(base, lambda: mlp(64), mu.SignalNoise({"5.*": 0.1})),
        "noise.pattern_matches_nothing",
        where=["5.*", "0.weight"],
    )
    refusal(
        lambda: mu.upscale(base, lambda: mlp(64), mu.SignalNoise({"0.*": 1.5})),
        "noise.above_norm",
        where="0.*",
    )
    refusal(lambda: mu.upscale(base, lambda: mlp(64), mu.PairedNoise()), "noise.sigma_or_t")
    refusal(lambda: mu.upscale(base, lambda: mlp(64), mu.PairedNoise(1.0, t=0.1)), "noise.sigma_or_t")


def test_paired_noise_has_a_relative_size_and_moves_outputs_by_rounding_only(base):
    exact = mu.grow(base, lambda: mlp(64)).model
    run = mu.upscale(base, lambda: mlp(64), mu.PairedNoise(t=0.2))
    assert moved(run.model, exact, "2.weight") == pytest.approx(0.2, rel=0.2)
    assert torch.allclose(run.model(X), base(X), atol=1e-5)
    plain = mu.upscale(base, lambda: mlp(64), mu.SignalNoise(0.2)).model
    change = relative(plain(X), base(X))
    assert change > 0.05, "control: plain noise of the same size moves them"
    half = mu.upscale(base.bfloat16(), lambda: mlp(64).bfloat16(), mu.PairedNoise(t=0.2)).model
    low = relative(half(X.bfloat16()), base(X.bfloat16()))
    assert 1e-4 < low < 0.05, "in bfloat16 by its rounding"


def test_noise_can_be_added_to_a_run_that_is_wide(base):
    optimizer = torch.optim.AdamW(base.parameters(), lr=1e-2)
    run = mu.Run(base, optimizer)
    base(X).square().mean().backward()
    optimizer.step()
    exact = mu.grow(run, lambda: mlp(64))
    noisy = mu.add_noise(exact, mu.SignalNoise(0.1), seed=3)
    assert moved(noisy.model, exact.model, "2.weight") == pytest.approx(0.1, rel=0.15)
    at_once = mu.upscale(run, lambda: mlp(64), mu.SignalNoise(0.1), seed=3)
    for name, parameter in at_once.model.named_parameters():
        assert torch.allclose(parameter, noisy.model.get_parameter(name), atol=1e-6), "as if added by upscale"
    assert noisy.plan == exact.plan
    assert noisy.since == exact.since
    for old, new in zip(exact.optimizer.param_groups, noisy.optimizer.param_groups, strict=True):
        assert old["lr"] == new["lr"]
        for p, q in zip(old["params"], new["params"], strict=True):
            assert torch.equal(exact.optimizer.state[p]["exp_avg"], noisy.optimizer.state[q]["exp_avg"])
    for late in (mu.PairedNoise(t=0.1), mu.SplitNoise(), mu.NewUnits()):
        refusal(lambda late=late: mu.add_noise(exact, late), "noise.only_at_growth")


def test_a_run_that_never_grew_gets_none(base):
    refusal(lambda: mu.add_noise(mu.Run(base), mu.SignalNoise(0.1)), "plan.not_given")
