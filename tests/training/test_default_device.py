"""Numbers that the library makes for itself do not depend on `torch.set_default_device`.

The default device is meta here: a tensor that lands there by mistake has no numbers, and the first use of one raises.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from mupscale.rules import Axis
from mupscale.tensors.compiled import Kernel, load_kernel
from mupscale.tensors.entry_sources import copies_of
from mupscale.tensors.philox import quantiles
from mupscale.training.units.clip import grad_norm


def net(width: int) -> nn.Module:
    def linear(a: int, b: int) -> nn.Module:
        return nn.Linear(a, b, device="cpu")

    return nn.Sequential(linear(4, width), nn.Tanh(), linear(width, width), nn.Tanh(), linear(width, 2))


@pytest.fixture
def elsewhere() -> Iterator[None]:
    quantiles.cache_clear()
    load_kernel.cache_clear()
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def start() -> mu.Run:
    torch.manual_seed(0)
    model = net(4)
    return mu.Run(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def step(run: mu.Run, i: int) -> Tensor:
    run.optimizers[0].zero_grad()
    loss = (run.model(torch.linspace(-1, 1, 12, device="cpu").view(3, 4)) - 1).square().mean()
    loss.backward()
    run.optimizers[0].step()
    return loss.detach()  # type: ignore[no-any-return]


NOISE = {
    "signal": mu.SignalNoise(0.1),
    "mup": mu.MupNoise(0.1),
    "paired": mu.PairedNoise(t=0.1),
}


@pytest.mark.parametrize("kind", NOISE)
def test_noise_has_its_bits_with_any_default_device(kind, elsewhere):
    run = start()
    got = mu.upscale(run, lambda: net(8), NOISE[kind]).model.state_dict()  # type: ignore[arg-type]
    torch.set_default_device(None)
    want = mu.upscale(run, lambda: net(8), NOISE[kind]).model.state_dict()  # type: ignore[arg-type]
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_verify_holds_with_any_default_device(elsewhere):
    assert mu.verify(start(), lambda: net(8), step=step).holds


def test_sizes_of_a_reference_and_norms_without_gradients(elsewhere):
    plan = mu.plans.plan_between(net, 4, 8)
    mu.init_weights_(net(8), plan, std=net(4))
    assert grad_norm(net(8), plan).device.type == "cpu"
    assert copies_of(Axis.parse("out: 2x2")).tolist() == [[0, 1], [2, 3]]
    assert not isinstance(load_kernel(), Kernel) or quantiles().device.type == "cpu"


def test_the_fixture_shows_a_tensor_without_a_device(elsewhere):
    """Control: what is made without a device has no numbers."""
    with pytest.raises(RuntimeError):
        torch.zeros(1).item()
