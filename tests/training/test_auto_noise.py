"""Noise chosen by what it costs: the rise that was asked for, in few forward passes."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mupscale as mu
from harness.draws import data, seeded
from harness.refusals import refusal
from mupscale.checkpoints.noise_words import parse_noise
from mupscale.rules.noise_defaults import DEFAULT_RISE, MOST_RISE
from mupscale.training.grow.auto_noise import MOST, MOST_NOISE, chosen_size
from mupscale.training.grow.loss_rise import is_jump

CLASSES = 5


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 8, generator=g)
    return x, (x[:, :CLASSES] + 0.3 * x[:, 3:]).argmax(-1)


class Count:
    """A loss of one batch that counts how often it is asked."""

    def __init__(self) -> None:
        self.x, self.y = batch()
        self.calls = 0

    def __call__(self, model: nn.Module) -> Tensor:
        self.calls += 1
        return F.cross_entropy(model(self.x), self.y)


@pytest.fixture(scope="module")
def trained() -> nn.Sequential:
    torch.manual_seed(0)
    model = mlp(16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(150):
        x, y = batch(step % 8)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


JUMPS = pytest.mark.filterwarnings("ignore:noise raises the loss")
"""For shares that are asked for and are a jump here."""


@JUMPS
@pytest.mark.parametrize("rise", [0.02, 0.05, 0.1, 0.2])
def test_the_loss_rises_by_the_share_that_is_asked_for(trained, rise):
    loss = Count()
    torch.manual_seed(0)
    run = mu.upscale(trained, lambda: mlp(64), mu.AutoNoise(rise), loss=loss)
    auto, losses = run.provenance["auto"], run.provenance["loss"]
    with torch.no_grad():
        assert float(loss(run.model)) == pytest.approx(losses["after"], rel=1e-6), (
            "the model that is returned"
        )
    wanted = rise * (auto["untrained"] - losses["before"])
    assert losses["after"] - losses["before"] == pytest.approx(wanted, rel=0.2)
    fixed = mu.upscale(trained, lambda: mlp(64), mu.SignalNoise(auto["t"]), prove=False)
    same = (run.model.get_parameter("0.weight"), fixed.model.get_parameter("0.weight"))
    assert torch.equal(*same), "the noise is SignalNoise of that size"


def test_no_noise_given_means_the_documented_rise_and_needs_a_loss(trained):
    torch.manual_seed(0)
    loss = Count()
    run = mu.upscale(trained, lambda: mlp(64), by="copies", loss=loss)
    assert run.provenance["auto"]["rise"] == DEFAULT_RISE
    refusal(lambda: mu.upscale(trained, lambda: mlp(64), by="copies"), "noise.needs_loss")
    refusal(lambda: mu.upscale(trained, lambda: mlp(64), mu.AutoNoise()), "noise.needs_loss")
    refusal(lambda: mu.upscale(trained, lambda: mlp(64), mu.AutoNoise(0), loss=loss), "noise.zero_rise")
    refusal(
        lambda: mu.upscale(trained, lambda: mlp(64), mu.AutoNoise(-1), loss=loss),
        "argument.not_a_number",
        where="rise",
    )


@JUMPS
def test_more_steps_ask_for_more_noise(trained):
    """The control is a size that knows nothing of the steps: the documented rise."""
    torch.manual_seed(0)
    found = {
        steps: mu.upscale(trained, lambda: mlp(64), mu.AutoNoise(steps=steps), loss=Count()).provenance[
            "auto"
        ]
        for steps in (40, 400, None)
    }
    assert [found[steps]["rise"] for steps in (40, 400, None)] == [0.01, 0.1, DEFAULT_RISE]
    assert found[40]["t"] < found[None]["t"] < found[400]["t"]
    assert mu.AutoNoise(steps=10**6).share == MOST_RISE
    both = mu.AutoNoise(0.1, steps=400)
    refusal(lambda: mu.upscale(trained, lambda: mlp(64), both, loss=Count()), "noise.rise_and_steps")
    none = mu.AutoNoise(steps=0)
    refusal(
        lambda: mu.upscale(trained, lambda: mlp(64), none, loss=Count()), "argument.not_whole", where="steps"
    )


def test_the_command_line_asks_by_the_same_rule():
    assert parse_noise("auto", 400) == ("auto", mu.AutoNoise(steps=400).share)
    refusal(lambda: parse_noise("t=0.05", 400), "option.steps_need_auto")
    refusal(lambda: parse_noise("auto=0.2", 400), "option.steps_need_auto")
    refusal(lambda: parse_noise("auto", 0), "option.below_one")


@JUMPS
def test_at_most_twelve_forward_passes(trained, monkeypatch):
    door = importlib.import_module("mupscale.training.grow.upscale")
    counts: list[int] = []

    def counting(base: Any, wide: Any, noise: Any, loss: Any, **rest: Any) -> Any:
        before = loss.calls
        choice = chosen(base, wide, noise, loss, **rest)
        counts.append(loss.calls - before)
        return choice

    chosen = door.choose_noise
    monkeypatch.setattr(door, "choose_noise", counting)
    for rise in (0.001, 0.01, 0.1, 0.3):
        mu.upscale(trained, lambda: mlp(64), mu.AutoNoise(rise), loss=Count())
    assert len(counts) == 4
    assert max(counts) <= 12


def test_the_callers_random_state_is_kept_and_does_not_matter(trained):
    sizes = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        sizes.append(mu.upscale(trained, lambda: mlp(64), by="copies", loss=Count()).provenance["auto"]["t"])
        assert torch.equal(before, torch.get_rng_state())
    assert sizes[0] == sizes[1]


def test_a_base_that_learned_nothing_is_refused():
    torch.manual_seed(0)
    base = mlp(16)
    with torch.no_grad():
        base.get_parameter("4.weight").mul_(30)
    refusal(lambda: mu.upscale(base, lambda: mlp(64), by="copies", loss=Count()), "noise.nothing_learned")


@JUMPS
def test_the_untrained_loss_may_be_given(trained):
    run = mu.upscale(trained, lambda: mlp(64), mu.AutoNoise(0.1, untrained=math.log(CLASSES)), loss=Count())
    assert run.provenance["auto"]["untrained"] == math.log(CLASSES)


def test_noise_that_is_chosen_does_not_jump_and_a_share_that_jumps_is_warned_of():
    """Raw regression targets: an untrained model has a loss of a million, so that a twentieth of what was learned is much."""
    x, y = data(64, 6), 1e3 + 5 * data(64, 1, seed=2)

    def make(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1))

    def loss(model: nn.Module) -> Tensor:
        return F.mse_loss(model(x), y)

    base = seeded(make, 8)
    nn.init.constant_(base.get_parameter("2.bias"), 1e3)
    optimizer = torch.optim.AdamW(base.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        loss(base).backward()
        optimizer.step()
    losses = mu.upscale(base, lambda: make(16), by="copies", loss=loss).provenance[
        "loss"
    ]  # a warning would be an error
    assert losses["before"] < losses["after"]
    assert not is_jump(losses["before"], losses["after"])
    for noise in (mu.AutoNoise(DEFAULT_RISE), mu.AutoNoise(steps=1000), mu.SignalNoise(0.4)):
        with pytest.warns(UserWarning, match="raises the loss"):
            asked = mu.upscale(base, lambda: make(16), noise, loss=loss).provenance["loss"]
        assert is_jump(asked["before"], asked["after"]), "control: what is asked for is not lessened"
    mu.upscale(base, lambda: make(16), mu.AutoNoise(), loss=loss)  # the remedy


CURVES = {
    "a square": lambda t: 50 * t**2,
    "steep": lambda t: 4000 * t**4,
    "a wall": lambda t: 0.001 if t < 0.03 else 1e6,
    "flat, then steep": lambda t: max(0.0, t - 0.02) * 20,
    "breaks": lambda t: 30 * t**2 if t < 0.2 else float("inf"),
    "nan": lambda t: 30 * t**2 if t < 0.04 else float("nan"),
}


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("rise", [0.01, 0.1, 0.9])
def test_the_search_ends_near_the_rise_on_curves_of_every_shape(name, rise):
    curve = CURVES[name]
    choice = chosen_size(lambda t: 1.0 + curve(t), before=1.0, untrained=3.0, rise=rise)
    assert len(choice.tried) <= MOST
    assert math.isfinite(choice.after)
    if name in ("a square", "steep", "flat, then steep") or (name, rise) == ("breaks", 0.1):
        assert choice.after - 1.0 == pytest.approx(2.0 * rise, rel=0.2)


@pytest.mark.parametrize("name", CURVES)
def test_the_search_stays_below_the_largest_rise_where_any_size_does(name):
    choice = chosen_size(lambda t: 1.0 + CURVES[name](t), before=1.0, untrained=1e6, most=0.1)
    assert choice.after - 1.0 <= 0.1


def test_a_curve_that_never_rises_ends_at_the_largest_size():
    choice = chosen_size(lambda t: 1.0, before=1.0, untrained=3.0)
    assert choice.tried[-1][0] == MOST_NOISE
    assert len(choice.tried) < MOST


def test_the_factory_may_build_in_another_dtype_than_the_base(trained):
    x, y = batch()

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(x.double()), y)

    base = mlp(16).double()
    base.load_state_dict(trained.state_dict())
    run = mu.upscale(base, lambda: mlp(64), by="copies", loss=loss)
    assert run.model.get_parameter("0.weight").dtype == torch.float64
    assert run.provenance["auto"]["t"] > 0


def test_measuring_does_not_change_a_buffer_that_forward_writes():
    class Counted(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner = mlp(width)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Any:
            self.get_buffer("seen").add_(1)
            return self.inner(x)

    torch.manual_seed(0)
    base = Counted(16)
    run = mu.upscale(base, lambda: Counted(64), mu.SignalNoise(0.05), loss=Count())
    assert int(base.get_buffer("seen")) == int(run.model.get_buffer("seen")) == 0
