"""Models inside wrappers, copies and torch's utilities, and factories that compute with weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import mupscale as mu
from harness.data import INPUTS, OUTPUTS
from harness.loops.hooks import Words, words_loss, words_step
from harness.loops.situation import *


class Shadowed(Net):
    """Buffers made from parameters, as averages inside a model, anchors and masks are."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("anchor", self.mid.weight.detach().clone())


@situation(Exact(), "T1")
def buffer_cloned_from_a_parameter() -> Pair:
    return grown(trained(Shadowed), Shadowed)


@situation(Exact(), "T1")
def mask_like_a_parameter() -> Pair:
    class Masked(Net):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.mask: Tensor
            self.register_buffer("mask", torch.ones_like(self.mid.weight))

        def forward(self, x: Tensor) -> Tensor:
            weight = self.mid.weight * self.mask
            return self.head(nn.functional.linear(self.hidden(x), weight, self.mid.bias).relu())  # type: ignore[no-any-return]

    return grown(trained(Masked), Masked)


def pruned(width: int) -> nn.Module:
    model = Net(width)
    prune.l1_unstructured(model.mid, "weight", amount=0.5)  # type: ignore[no-untyped-call]
    return model


@situation(Exact(), "T1")
def pruned_in_base_and_factory() -> Pair:
    return grown(trained(pruned), pruned)


class Recomputed(Net):
    """Activations are computed again in backward, in the older of torch's two ways."""

    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        h: Any = checkpoint(self.mid, self.hidden(x), use_reentrant=self.reentrant)
        return self.head(h.relu())  # type: ignore[no-any-return]


class RecomputedAgain(Recomputed):
    reentrant = False


@situation(Exact(), "T2")
def checkpoint_reentrant() -> Pair:
    return grown(trained(Recomputed), Recomputed)


@situation(Exact())
def checkpoint_not_reentrant() -> Pair:
    return grown(trained(RecomputedAgain), RecomputedAgain)


class Hidden(nn.Module):
    """A module in a Python list, which torch does not see."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inp, self.rest, self.head = (
            nn.Linear(INPUTS, width),
            self.listed(width),
            nn.Linear(width, OUTPUTS),
        )

    @staticmethod
    def listed(width: int) -> Any:
        return [nn.Linear(width, width)]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rest[0](self.inp(x)).relu())  # type: ignore[no-any-return]


class Seen(Hidden):
    @staticmethod
    def listed(width: int) -> Any:
        return nn.ModuleList([nn.Linear(width, width)])


@situation(Refused("factory.hidden_modules", "nn.ModuleList"), "T3")
def module_in_a_list() -> Pair:
    return grown(trained(Hidden), Hidden)


@module_in_a_list.remedy
def _() -> Pair:
    return grown(trained(Seen), Seen)


def stepping_loss(model: nn.Module) -> Tensor:
    found = loss(model)
    found.backward()  # type: ignore[no-untyped-call]
    return found


@situation(Refused("argument.loss_calls_backward", "loss=lambda model"), "T4")
def loss_that_calls_backward() -> Pair:
    return grown(trained(), loss=stepping_loss)


@loss_that_calls_backward.remedy
def _() -> Pair:
    return grown(trained())


class Distributed(nn.Module):
    """A wrapper with the model in `.module`, as DataParallel and DDP are."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)  # type: ignore[no-any-return]


@situation(Exact())
def wrapped_base() -> Pair:
    """The base is inside torch's DataParallel, the wide model is not."""
    torch.manual_seed(0)
    inner = Net(BASE)
    return grown(after(mu.Run(nn.DataParallel(inner), adamw(inner))))


@situation(Exact())
def wrapped_in_base_and_factory() -> Pair:
    def make(width: int) -> nn.Module:
        return Distributed(Net(width))

    return grown(trained(make), make)


@situation(Exact())
def compiled_base() -> Pair:
    torch.manual_seed(0)
    inner = Net(BASE)
    compiled: Any = torch.compile(inner, backend="eager")
    return grown(after(mu.Run(compiled, adamw(inner))))


@situation(Exact())
def copied_base() -> Pair:
    """The run is a deep copy of another, as for a sweep of growths."""
    return grown(copy.deepcopy(trained()))


@situation(Exact())
def weight_norm() -> Pair:
    def make(width: int) -> nn.Module:
        model = Net(width)
        parametrizations.weight_norm(model.head)
        return model

    return grown(trained(make), make)


@situation(Refused("model.parametrized_weight", "remove_parametrizations(module, 'weight')"))
def spectral_norm() -> Pair:
    return grown(trained(spectral), spectral)


def spectral(width: int) -> nn.Module:
    model = Net(width)
    parametrizations.spectral_norm(model.mid)
    return model


@spectral_norm.remedy
def _() -> Pair:
    run = trained(spectral)
    parametrize.remove_parametrizations(run.model.mid, "weight")  # type: ignore[arg-type]
    return grown(mu.Run(run.model, adamw(run.model)))


@situation(Exact())
def tied_readout() -> Pair:
    class Tied(Words):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.head.weight = self.embed.weight

    return grown(trained(Tied, step=words_step), Tied, words_step, loss=words_loss)


@situation(Exact())
def module_used_twice() -> Pair:
    class Twice(Net):
        def hidden(self, x: Tensor) -> Tensor:
            return self.mid(super().hidden(x)).tanh()  # type: ignore[no-any-return]

    return grown(trained(Twice), Twice)


class Straight(torch.autograd.Function):
    """Rounds, and passes gradients straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (8 * x).round() / 8

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


@situation(Exact())
def gradient_of_ones_own() -> Pair:
    class Rounded(Net):
        def hidden(self, x: Tensor) -> Tensor:
            h: Tensor = Straight.apply(super().hidden(x))  # type: ignore[no-untyped-call]
            return h

    return grown(trained(Rounded), Rounded)


@situation(Exact())
def lazily_built() -> Pair:
    """Sizes are known after the first batch; the factory runs one."""

    def make(width: int) -> nn.Module:
        model = nn.Sequential(nn.LazyLinear(width), nn.LayerNorm(width), nn.ReLU(), nn.LazyLinear(OUTPUTS))
        with torch.no_grad():
            model(torch.zeros(1, INPUTS))
        return model

    return grown(trained(make), make)


@situation(Exact())
def model_without_an_optimizer() -> Pair:
    """A module grows alone, and its optimizer is made from the plan."""
    torch.manual_seed(0)
    model = Net(BASE)
    wide = mu.grow(model, lambda: Net(WIDE), loss=loss)
    groups = mu.param_groups(wide.model, wide, torch.optim.SGD, lr=0.1)
    return Pair(
        mu.Run(model, torch.optim.SGD(model.parameters(), lr=0.1)),
        mu.Run(wide.model, torch.optim.SGD(groups)),
        step,
    )
