"""Factories as people write them: moved, cast, with buffers made from parameters, with hidden modules."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import mupscale as mu
from harness.refusals import refused
from mupscale.models import build as building
from mupscale.plans import on_meta


def net(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
    )


def made_under_device(width: int) -> nn.Module:
    with torch.device("cpu"):
        return net(width)


MOVED: dict[str, Callable[[int], nn.Module]] = {
    "to a device": lambda n: net(n).to("cpu"),
    "to a device by name": lambda n: net(n).to(device=torch.device("cpu")),
    "to a device and a type": lambda n: net(n).to("cpu", torch.float32),
    "to a tensor": lambda n: net(n).to(torch.zeros(1)),
    "to a memory format": lambda n: net(n).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    "cpu": lambda n: net(n).cpu(),
    "cast and moved": lambda n: net(n).double().to("cpu").to(torch.float32),
    "one layer moved": lambda n: nn.Sequential(*(layer.to("cpu") for layer in net(n))),
    "under torch.device": made_under_device,
}


def loss(model: nn.Module) -> Tensor:
    x = torch.linspace(-1, 1, 12).view(3, 4).to(next(model.parameters()))
    return model(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MOVED)
def test_a_move_in_the_factory_changes_nothing_and_allocates_nothing(name):
    torch.manual_seed(0)
    base = net(4)
    wide = mu.grow(base, lambda: MOVED[name](8), loss=loss).model
    want = mu.grow(base, lambda: net(8), loss=loss).model
    for (_, got), (_, expected) in zip(wide.named_parameters(), want.named_parameters(), strict=True):
        assert torch.equal(got, expected)
    assert all(p.is_meta for p in on_meta(lambda: MOVED[name](8)).parameters())


def test_a_cast_in_the_factory_is_kept():
    model = on_meta(lambda: net(8).to("cpu", torch.bfloat16))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in on_meta(lambda: net(8).to("cpu")).parameters()} == {torch.float32}


def test_ties_outlive_a_move():
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        return model.to("cpu")

    model = on_meta(tied)
    assert model.get_parameter("0.weight") is model.get_parameter("1.weight")


class Averaged(nn.Module):
    """A moving average of its weights in buffers, as latent diffusion's LitEma has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = net(width)
        for name, parameter in self.net.named_parameters():
            self.register_buffer(name.replace(".", ""), parameter.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class Masked(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = net(width)
        self.register_buffer("mask", torch.ones_like(self.net[2].weight))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net[1](self.net[0](x))
        return self.net[4](self.net[3](hidden @ (self.net[2].weight * self.mask).T))  # type: ignore[no-any-return, operator]


class Scaled(nn.Module):
    """A constant that is read from a weight while the model is built."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = net(width)
        self.scale = 1.0 + 0.0 * float(self.net[0].weight.detach().mean())  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.net(x)  # type: ignore[no-any-return]


class Taught(nn.Module):
    """A frozen teacher that is kept out of the parameters by a list."""

    def __init__(self, width: int, frozen: bool = True) -> None:
        super().__init__()
        self.net = net(width)
        teacher = nn.Linear(4, 2)
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.fill_(0.25)
        self.teacher = [teacher.requires_grad_(not frozen)]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) - self.teacher[0](x)  # type: ignore[no-any-return]


def pruned(width: int) -> nn.Module:
    model = net(width)
    prune.l1_unstructured(model[2], "weight", amount=0.5)
    return model


@pytest.mark.parametrize("make", [Averaged, Masked, Scaled, Taught, pruned], ids=lambda m: m.__name__)
def test_what_is_made_from_parameters_is_made_with_values_and_grows_exactly(make):
    torch.manual_seed(0)
    base = make(4)
    run = mu.Run(base, torch.optim.AdamW(base.parameters(), lr=0.01))
    wide = mu.grow(run, lambda: make(8), loss=loss)
    for _ in range(3):
        values = []
        for side in (run, wide):
            side.optimizers[0].zero_grad()
            value = loss(side.model)
            value.backward()
            side.optimizers[0].step()
            values.append(float(value.detach()))
        assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert not any(t.is_meta for t in (*wide.model.parameters(), *wide.model.buffers()))


def test_the_random_state_is_kept_when_the_factory_runs_twice():
    before = torch.get_rng_state()
    first, again = on_meta(lambda: Averaged(4), seed=3), on_meta(lambda: Averaged(4), seed=3)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first.get_buffer("0weight"), again.get_buffer("0weight"))
    other = on_meta(lambda: Averaged(4), seed=4)
    assert not torch.equal(first.get_buffer("0weight"), other.get_buffer("0weight")), "control"


def test_a_trained_module_in_a_list_is_refused_by_its_type():
    with refused("factory.hidden_modules", where="Linear"):
        on_meta(lambda: Taught(4, frozen=False))


def test_modules_that_a_list_names_again_are_no_secret():
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.order = [self.first]

    assert on_meta(Listed).get_parameter("first.weight").is_meta


def test_a_model_that_must_be_built_and_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(building, "free_memory", lambda: 100)
    with refused("factory.too_large_to_build"):
        on_meta(lambda: Averaged(4))
    on_meta(lambda: net(4))  # control: nothing is built


def test_values_on_a_meta_device_of_the_factory_itself_are_refused_with_that_reason():
    def on_its_own() -> nn.Module:
        with torch.device("meta"):
            model = net(4)
        return nn.Sequential(model, nn.Softplus(beta=float(model[0].weight.sum())))  # type: ignore[operator]

    with refused("factory.reads_values"):
        on_meta(on_its_own)


def test_an_error_of_the_factory_itself_is_raised_as_it_is():
    def wrong() -> nn.Module:
        raise RuntimeError("no such metadata")

    with pytest.raises(RuntimeError, match="no such metadata"):
        on_meta(wrong)
