"""Deeper models of one's own: `order=` says which blocks are new, and everything else is found and measured."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import mupscale as mu
from harness.refusals import refused
from mupscale.planning.deeper import usual_order

_DRAW = torch.Generator().manual_seed(0)
X, Y = (torch.randn(8, 5, n, dtype=torch.float64, generator=_DRAW) for n in (6, 3))


class Attending(nn.Module):
    """Pre-norm, with torch's attention and a feed-forward whose modules have numbers."""

    def __init__(self, width, bias):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, 2, bias=bias, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width, bias=bias))

    def forward(self, x):
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.feed(self.norms[1](x))


class Behind(nn.Module):
    """A norm behind the branch."""

    def __init__(self, width, bias):
        super().__init__()
        self.read, self.write = nn.Linear(width, 12), nn.Linear(12, width, bias=bias)
        self.norm = nn.RMSNorm(width)

    def forward(self, x):
        return x + self.norm(self.write(torch.tanh(self.read(x))))


class After(Behind):
    """A norm after the sum: no block can pass its input on."""

    def forward(self, x):
        return self.norm(x + self.write(torch.tanh(self.read(x))))


class Stack(nn.Module):
    def __init__(self, block, blocks=2, bias=False, width=8):
        super().__init__()
        self.first, self.last = nn.Linear(6, width), nn.Linear(width, 3)
        self.blocks = nn.ModuleList(block(width, bias) for _ in range(blocks))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def loss(model):
    return ((model(X) - Y) ** 2).mean()


def make(block, blocks=2, bias=False, width=8):
    return Stack(block, blocks, bias, width).double()


def step(run, i):
    run.optimizers[0].zero_grad()
    rows = torch.arange(i, i + 4) % 8
    value = ((run.model(X[rows]) - Y[rows]) ** 2).mean()
    value.backward()
    run.optimizers[0].step()
    return float(value.detach())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("block", [Attending, Behind])
def test_an_order_is_enough(block, bias):
    order = {"blocks": [0, None, 1]}
    wide = lambda: make(block, 3, bias)  # noqa: E731
    plan = mu.infer_plan(lambda: make(block, bias=bias), wide, loss=loss, order=order)
    assert plan.proof == "loss"
    torch.manual_seed(0)
    model = make(block, bias=bias)
    run = mu.Run(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3))
    for i in range(3):
        step(run, i)
    certificate = mu.verify(run, wide, step=lambda r, i: step(r, 3 + i), plan=plan, loss=loss, steps=6)
    assert certificate.worst < 1e-12
    woken = mu.upscale(run, wide, mu.SignalNoise(0.1), plan=plan, loss=loss)
    assert float(loss(woken.model).detach()) == pytest.approx(float(loss(model).detach()), rel=1e-12)


def test_the_writers_that_are_found():
    plan = mu.plans.plan_between(
        lambda n: make(Attending, n, True), 2, 3, loss=loss, order={"blocks": [0, None, 1]}
    )
    quiet = {name for name, entry in plan.tensors.items() if entry.quiet}
    assert quiet == {"blocks.1.attention.out_proj.weight", "blocks.1.feed.2.weight"}
    shared = {name for name, entry in plan.tensors.items() if entry.spread == 3}
    assert shared == {"blocks.0.feed.2.bias", "blocks.1.attention.out_proj.bias", "blocks.1.feed.2.bias"}
    behind = mu.plans.plan_between(lambda n: make(Behind, n), 2, 3, loss=loss, order={"blocks": [0, None, 1]})
    assert {name for name, entry in behind.tensors.items() if entry.quiet} == {"blocks.1.norm.weight"}


def test_missing_blocks_are_refused_with_the_order_to_write():
    """Without a measurement. What the refusal says to write is what works, and what a loss alone does."""
    base, wide = make(Attending), make(Attending, 4)
    with refused("depth.order_missing", where='order={"blocks": [0, 1, 0, 1]}'):
        mu.infer_plan(base, wide)
    plan = mu.infer_plan(base, wide, loss=loss, order={"blocks": [0, 1, 0, 1]})
    assert plan.tensors == mu.infer_plan(base, wide, loss=loss).tensors
    grown = mu.grow(base, lambda: make(Attending, 4), loss=loss).plan
    assert grown is not None
    assert grown.tensors == plan.tensors


@pytest.mark.parametrize("block", [Attending, Behind])
def test_upscale_alone_puts_new_blocks_in_stack_order(block):
    model = make(block)
    run = mu.Run(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for i in range(3):
        step(run, i)
    woken = mu.upscale(run, lambda: make(block, 4), loss=loss)
    assert abs(woken.provenance["loss"]["after"] - woken.provenance["loss"]["before"]) <= 1e-10
    for i in range(2):
        step(woken, i)
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in woken.model.parameters())
    assert woken.plan is not None
    repeated = {
        name: replace(entry, quiet=False, repeats=True) if entry.quiet else entry
        for name, entry in woken.plan.tensors.items()
    }
    with pytest.raises(mu.MupscaleError) as caught:  # control: writers are copied too
        mu.upscale(run, lambda: make(block, 4), loss=loss, plan=replace(woken.plan, tensors=repeated))
    assert caught.value.code == "growth.waking_moves_loss", caught.value


def test_blocks_of_two_kinds_keep_their_places():
    """Stack order where the class alternates its kinds. Control: with three blocks it would copy another kind."""

    def alternating(blocks):
        made = make(Attending, blocks)
        for number, block in enumerate(made.blocks):
            block.window, block.number = number % 2, number
        return made

    def order(layers, blocks):
        found = usual_order(alternating(layers), alternating(blocks))
        assert found is not None
        return found["blocks"]

    assert order(2, 4) == (0, 1, 0, 1)
    with pytest.warns(UserWarning, match="another kind"):
        assert order(3, 6) == (0, None, 1, None, 2, None)


@pytest.mark.parametrize(
    ("order", "code"),
    [
        ({"blocks": [0, 1, 2]}, "depth.order_does_not_fit"),
        ({"blocks": [None, 1, 0]}, "depth.order_does_not_fit"),
        ({"blocks": [0, None]}, "depth.order_does_not_fit"),
        ({"layers": [0, None, 1]}, "depth.order_does_not_fit"),
        ({}, "depth.order_not_one_list"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(order, code):
    with refused(code, where=list(order)):
        mu.infer_plan(make(Attending), make(Attending, 3), loss=loss, order=order)


def test_an_order_needs_a_measurement_at_one_width():
    order = {"blocks": [0, None, 1]}
    plan = mu.infer_plan(make(Attending), make(Attending, 3), example_inputs=(X,), order=order)
    assert plan.proof == "outputs"
    with refused("depth.order_not_measured"):
        mu.infer_plan(make(Attending), make(Attending, 3), order=order)
    with refused("depth.width_grows_too"):
        mu.infer_plan(make(Attending), make(Attending, 3, width=16), loss=loss, order=order)


def test_blocks_that_cannot_sleep_are_refused():
    """Controls: a norm after the sum, and a bias without a block before it."""
    with refused("depth.block_changes_output"):
        mu.infer_plan(make(After), make(After, 3), loss=loss, order={"blocks": [0, None, 1]})
    with refused("depth.bias_without_partner", where="blocks.0.attention.out_proj.bias"):
        mu.infer_plan(
            make(Attending, bias=True), make(Attending, 3, True), loss=loss, order={"blocks": [None, 0, 1]}
        )
    plan = mu.infer_plan(make(Attending), make(Attending, 3), loss=loss, order={"blocks": [None, 0, 1]})
    assert plan["blocks.0.feed.0.weight"].new
