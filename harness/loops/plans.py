"""Plans and growths: padded, saved, proved by a wrong loss, twice and back, with noise, with arguments of another function."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale as mu
from harness.data import INPUTS, OUTPUTS, regression
from harness.loops.modes import batch_normed
from harness.loops.situation import *

PADDED = 7
"""A width that is no multiple of the base's."""


def asleep_after_waking(make: Make, readers: str) -> float:
    """The share of new units whose readers are still zero after some steps of a padded run with noise."""
    run = trained(make)
    plan = mu.infer_plan(run.model, lambda: make(PADDED), by="padded", loss=loss)
    wide = mu.upscale(run, lambda: make(PADDED), mu.SignalNoise(0.1), plan=plan, loss=loss)
    after(wide, count=12)
    new = wide.model.get_parameter(readers).detach()[:, BASE:]
    return float((new == 0).all(0).double().mean())


@situation(Exact(), "S4")
def padded_batch_norm_wakes() -> float:
    return asleep_after_waking(batch_normed, "3.weight")


class Gained(nn.Module):
    """A gain of one's own behind the layer that grows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(INPUTS, width), nn.Linear(width, OUTPUTS)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gain * self.inp(x).tanh())  # type: ignore[no-any-return]


@situation(Exact(), "S4")
def padded_gain_wakes() -> float:
    return asleep_after_waking(Gained, "head.weight")


def raw(model: nn.Module) -> Tensor:
    """Targets that nobody has normalised."""
    x, y = regression(9)
    return F.mse_loss(model(x), 1e3 + 5 * y)


@situation(Exact(), "S5")
def chosen_noise_keeps_the_loss() -> float:
    """How often the loss doubles at growth, where its size is chosen by what it costs."""
    torch.manual_seed(0)
    model = Net(BASE)
    nn.init.constant_(model.head.bias, 1e3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        raw(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    wide = mu.upscale(mu.Run(model, optimizer), lambda: Net(WIDE), by="copies", loss=raw)
    return max(0.0, math.log2(float(raw(wide.model) / raw(model))) // 1)


class Rooted(Net):
    """Depends on its width in code, where no shape shows it."""

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) / math.sqrt(self.mid.in_features)


@situation(Refused("argument.loss_without_gradient", "loss=lambda model"), "S6")
def loss_that_ignores_its_argument() -> Pair:
    run = trained(Rooted)
    return grown(run, Rooted, loss=lambda model: loss(run.model))


@loss_that_ignores_its_argument.remedy
def _() -> Pair:
    return grown(trained(Rooted), Rooted, loss=lambda model: loss(model))


def saved_plan() -> mu.Plan:
    """A plan that was proved for `Net`, and read from its file."""
    return mu.Plan.from_json(mu.plans.plan_between(Net, BASE, WIDE, loss=loss).to_json())


@situation(Warned(), "S13")
def saved_plan_of_other_code() -> Pair:
    return grown(trained(Rooted), Rooted, loss=None, plan=saved_plan())


@situation(Refused("proof.run_deviates"), "S13")
def saved_plan_of_other_code_with_a_loss() -> Pair:
    return grown(trained(Rooted), Rooted, plan=saved_plan())


@saved_plan_of_other_code_with_a_loss.remedy
def _() -> Pair:
    return grown(trained(Rooted), Rooted)


@situation(Exact(), "S13")
def saved_plan_of_the_same_code() -> Pair:
    return grown(trained(), loss=None, plan=saved_plan())


@situation(Exact(), "S14")
def noise_twice_with_the_default_seed() -> float:
    """Two doses of the same size add up to its root of two; the same numbers twice would be its double."""
    run, noise = trained(), mu.MupNoise(0.1)
    exact = mu.grow(run, lambda: Net(WIDE), loss=loss)
    once = mu.upscale(run, lambda: Net(WIDE), noise, loss=loss)
    try:
        twice = mu.add_noise(once, noise)
    except mu.MupscaleError:
        twice = mu.add_noise(once, noise, seed=1)
    weights = [r.model.get_parameter("mid.weight").detach() for r in (exact, once, twice)]
    first, second = weights[1] - weights[0], weights[2] - weights[1]
    return float(torch.allclose(first, second, rtol=1e-3))


class Padded(nn.Module):
    """An RMSNorm over zeros, for which a plan multiplies its gain and what it reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inp, self.norm, self.head = (
            nn.Linear(INPUTS, width),
            nn.RMSNorm(width, eps=1e-3),
            nn.Linear(width, OUTPUTS),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.inp(x)))  # type: ignore[no-any-return]


def padded(**options: Any) -> Pair:
    run = trained(Padded)
    plan = mu.infer_plan(run.model, lambda: Padded(6), by="padded", loss=loss)
    return Pair(run, mu.grow(run, lambda: Padded(6), plan=plan, **options), step)


@situation(Exact(), "W2")
def padded_norm() -> Pair:
    return padded()


@situation(Exact(), "W2")
def padded_norm_measured_again() -> Pair:
    return padded(loss=loss)


def wide_of(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, OUTPUTS))


@situation(Refused("axis.not_whole_copies", "infer_plan("), "T5")
def width_that_is_no_multiple() -> Pair:
    run = trained(wide_of)
    return Pair(run, mu.grow(run, lambda: wide_of(PADDED)), step)


@width_that_is_no_multiple.remedy
def _() -> Pair:
    run = trained(wide_of)
    plan = mu.infer_plan(run.model, lambda: wide_of(PADDED), by="padded")
    return Pair(run, mu.grow(run, lambda: wide_of(PADDED), plan=plan), step)


class Labelled(Net):
    """Whole numbers in a buffer as long as the width, which no gradient decides."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.labels: Tensor
        self.register_buffer("labels", torch.arange(width) % 3)

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) * (1 + self.labels)


@situation(Refused("model.growing_integer_buffer", "declared=mu.Declared("), "T5")
def whole_numbers_in_a_buffer() -> Pair:
    return grown(trained(Labelled), Labelled)


@whole_numbers_in_a_buffer.remedy
def _() -> Pair:
    return grown(trained(Labelled), Labelled, declared=mu.Declared(layouts={"labels": 1}))


@situation(Refused("argument.wrong_signature", "lambda: "), "T5")
def factory_that_needs_its_width() -> Pair:
    run = trained()
    return Pair(run, mu.grow(run, Net, loss=loss), step)  # type: ignore[arg-type]


@factory_that_needs_its_width.remedy
def _() -> Pair:
    return grown(trained())


class Joined(nn.Module):
    """[growing | fixed] into one layer, as in NeRF: its two halves need two learning rates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(INPUTS, width), nn.Linear(width + INPUTS, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.inp(x).relu(), x], 1))  # type: ignore[no-any-return]


class Split(nn.Module):
    """The same function in two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(INPUTS, width), nn.Linear(width, OUTPUTS)
        self.skip = nn.Linear(INPUTS, OUTPUTS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inp(x).relu()) + self.skip(x)  # type: ignore[no-any-return]


@situation(Refused("axis.not_whole_copies"), "T5")
def growing_and_fixed_in_one_layer() -> Pair:
    return grown(trained(Joined), Joined)


@growing_and_fixed_in_one_layer.remedy
def _() -> Pair:
    return grown(trained(Split), Split)


@situation(Exact())
def grown_twice() -> Pair:
    run = trained()
    half = mu.grow(run, lambda: Net(WIDE), loss=loss)
    return Pair(run, mu.grow(half, lambda: Net(2 * WIDE), loss=loss), step)


@situation(Exact())
def grown_trained_and_narrowed() -> Pair:
    """Without noise the copies stay equal, so the way back is exact too."""
    pair = grown(trained())
    after(pair.base, first=50)
    after(pair.wide, first=50)
    return Pair(pair.base, mu.narrow(pair.wide, lambda: Net(BASE)), step)


@situation(Exact())
def growth_checked_first() -> Pair:
    """`verify` on the run leaves it as it is."""
    run = trained()
    with warnings.catch_warnings():
        assert mu.verify(run, lambda: Net(WIDE), step=step, steps=3).holds
    return grown(run)


@situation(Exact())
def upscale_without_noise() -> Pair:
    run = trained()
    return Pair(run, mu.upscale(run, lambda: Net(WIDE), mu.MupNoise(0.0), loss=loss), step)


@situation(Exact())
def deeper_by_a_sleeping_block() -> Pair:
    class Blocks(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.inp, self.head = nn.Linear(INPUTS, 4), nn.Linear(4, OUTPUTS)
            self.blocks = nn.ModuleList(Block() for _ in range(count))

        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)  # type: ignore[no-any-return]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.up(self.norm(x)).relu())  # type: ignore[no-any-return]

    run = trained(lambda width: Blocks(2))
    plan = mu.infer_plan(run.model, lambda: Blocks(3), loss=loss, order={"blocks": [0, None, 1]})
    return Pair(run, mu.grow(run, lambda: Blocks(3), plan=plan), step)
