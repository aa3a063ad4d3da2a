"""Factories that put their model on a device: the grown model is where the base is, with the same bits."""

import pytest
import torch
from torch import nn

import mupscale as mu
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
    grown = mu.widen(base, lambda: FACTORIES[name](device)).model
    want = mu.widen(base, lambda: net(32)).model
    for got, expected in zip(grown.parameters(), want.parameters(), strict=True):
        assert got.device == expected.device == next(base.parameters()).device
        assert torch.equal(got, expected)
    assert all(p.is_meta for p in on_meta(lambda: FACTORIES[name](device)).parameters())


@pytest.mark.parametrize(
    "place", [lambda model, device: model.to(device), lambda model, device: model], ids=["moved", "left"]
)
def test_buffers_made_from_parameters_go_where_the_base_has_them(place, device):
    base = Averaged(16)
    want = mu.widen(base, lambda: Averaged(32), unproved=True).model
    grown = mu.widen(base.to(device), lambda: place(Averaged(32), device), unproved=True).model
    assert {t.device for t in (*grown.parameters(), *grown.buffers())} == {next(base.parameters()).device}
    assert torch.equal(grown.average.cpu(), want.average)  # type: ignore[arg-type]
