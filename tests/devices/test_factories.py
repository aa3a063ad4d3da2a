"""Factories that put their model on a device: the grown model is where the base is, with the same bits."""

import pytest
import torch
from torch import nn

import mupscale as mu
from harness.refusals import refused
from mupscale.plans import on_meta

pytestmark = pytest.mark.device


def net(width, **options):
    return nn.Sequential(nn.Linear(8, width, **options), nn.GELU(), nn.Linear(width, 1, **options))


class Averaged(nn.Module):
    """A moving average of a weight in a buffer."""

    def __init__(self, width):
        super().__init__()
        self.net = net(width)
        self.register_buffer("average", self.net[0].weight.detach().clone())

    def forward(self, x):
        return self.net(x)


def under(device, width):
    with torch.device(device):
        return net(width)


FACTORIES = {
    "to": lambda device: net(32).to(device),
    "to another": lambda device: net(32).to(f"{device.type}:1"),
    "to with a type": lambda device: net(32).to(device, torch.float32),
    "method of its name": lambda device: getattr(net(32), device.type)(),
    "there and back": lambda device: net(32).to(device).cpu(),
    "under torch.device": lambda device: under(device, 32),
    "device=": lambda device: net(32, device=device),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_the_grown_model_is_where_the_base_is(name, device):
    torch.manual_seed(0)
    base = net(16).to(device)
    grown = mu.grow(base, lambda: FACTORIES[name](device)).model
    want = mu.grow(base, lambda: net(32)).model
    for got, expected in zip(grown.parameters(), want.parameters(), strict=True):
        assert got.device == expected.device == next(base.parameters()).device
        assert torch.equal(got, expected)
    assert all(p.is_meta for p in on_meta(lambda: FACTORIES[name](device)).parameters())


@pytest.mark.parametrize(
    "place", [lambda model, device: model.to(device), lambda model, device: model], ids=["moved", "left"]
)
def test_buffers_made_from_parameters_go_where_the_base_has_them(place, device):
    base = Averaged(16)
    want = mu.grow(base, lambda: Averaged(32), prove=False).model
    grown = mu.grow(base.to(device), lambda: place(Averaged(32), device), prove=False).model
    assert {t.device for t in (*grown.parameters(), *grown.buffers())} == {next(base.parameters()).device}
    assert torch.equal(grown.average.cpu(), want.average)  # type: ignore[arg-type]


MAPS = {
    "two devices": {"0": "pretend:0", "1": "pretend:0", "2": "pretend:1"},
    "the same, changed": {"0": "pretend:1", "1": "pretend:1", "2": "pretend:0"},
}


def mapped(width, device_map=MAPS["two devices"]):
    """Layers on two devices, as `device_map=` of transformers places them."""
    return pytest.importorskip("accelerate").dispatch_model(net(width), device_map=device_map)


def squares(model):
    x = torch.linspace(-1, 1, 256).view(32, 8).sin()
    return (model(x).to(x) - 1).square().mean()


def step(run, _):
    run.optimizer.zero_grad()
    value = squares(run.model)
    value.backward()
    run.optimizer.step()
    return value.detach()


def test_a_model_with_a_device_map_keeps_its_places(place):
    torch.manual_seed(0)
    base = mapped(16)
    run = mu.Run(base, torch.optim.AdamW(base.parameters(), lr=1e-2))
    step(run, 0)
    host = mu.grow(net(16), lambda: net(32), loss=squares)
    grown = mu.upscale(run, lambda: mapped(32), mu.SignalNoise(0.05), loss=squares)
    assert [p.device for p in grown.model.parameters()] == [p.device for p in base.parameters()]
    assert {str(p.device) for p in base.parameters()} == {"pretend:0", "pretend:1"}
    assert grown.plan.hash == host.plan.hash  # type: ignore[union-attr]
    assert step(grown, 1) == pytest.approx(float(step(run, 1)), rel=0.1)
    assert mu.verify(run, lambda: mapped(32), step=step, steps=2).holds


def test_another_device_map_is_refused_with_a_remedy_that_works(device):
    base = mapped(16)
    plain = net(16).to(device)
    for start, make in (
        (base, lambda: net(32)),
        (base, lambda: mapped(32, MAPS["the same, changed"])),
        (plain, lambda: mapped(32)),
    ):
        for options in ({"loss": squares}, {"prove": False}):
            with refused("factory.other_device_map", where="device_map"):
                mu.grow(start, make, **options)
        with refused("factory.other_device_map", where="device_map"):
            mu.infer_plan(start, make, loss=squares)
    mu.grow(base, lambda: mapped(32, base.hf_device_map), loss=squares)
    mu.grow(plain, lambda: net(32), example_inputs=(torch.ones(2, 8, device=device),))
