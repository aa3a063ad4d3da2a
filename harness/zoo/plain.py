"""Feed-forward models of the zoo: perceptrons, policies, shared layers, and a net that makes weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.data import INPUTS, OUTPUTS, regression
from harness.models import CASES
from harness.zoo.batches import copied
from harness.zoo.entry import MASKED, Entry, Exact, Impossible, vector_model

LAW = 0.01
"""The weight of the entropy of a policy."""


def between(*middle: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    """Modules between an input layer and a readout."""
    return lambda w: nn.Sequential(nn.Linear(INPUTS, w), *(make(w) for make in middle), nn.Linear(w, OUTPUTS))


def linear(w: int) -> nn.Module:
    return nn.Linear(w, w)


def gelu(_: int) -> nn.Module:
    return nn.GELU()


class FunctionalDropout(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(INPUTS, w), nn.Linear(w, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        return self.b(F.dropout(F.relu(self.a(x)), 0.2, self.training))


class InputSkip(nn.Module):
    """NeRF: the input is read again in the middle, next to the hidden units."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(INPUTS, w), nn.Linear(w + INPUTS, w)
        self.out = nn.Linear(w, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        return self.out(F.relu(self.b(torch.cat([F.relu(self.a(x)), x], -1))))


class Repeated(nn.Module):
    """One layer applied three times, as in ALBERT."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(INPUTS, w), nn.Linear(w, w), nn.Linear(w, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        for _ in range(3):
            x = x + F.gelu(self.b(x))
        return self.c(x)


def one_layer_twice(w: int) -> nn.Module:
    """The same module under two names."""
    shared = nn.Linear(w, w)
    return nn.Sequential(nn.Linear(INPUTS, w), shared, nn.GELU(), shared, nn.GELU(), nn.Linear(w, OUTPUTS))


class TransposedHidden(nn.Module):
    """A hidden matrix that is used as it is and transposed."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(INPUTS, w), nn.Linear(w, w, bias=False), nn.Linear(w, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        return self.c(F.linear(F.gelu(self.b(self.a(x))), self.b.weight.T))


class TransposedReadout(nn.Module):
    """An autoencoder whose decoder is the transposed encoder."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.encoder, self.bias = nn.Linear(INPUTS, w), nn.Parameter(torch.zeros(INPUTS))

    def forward(self, x: Tensor) -> Any:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.T, self.bias)


class MadeMatrix(nn.Module):
    """A hypernetwork whose output is a matrix of width by width."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.w, self.code = w, nn.Parameter(torch.randn(4))
        self.maker, self.a, self.out = nn.Linear(4, w * w), nn.Linear(INPUTS, w), nn.Linear(w, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        matrix = self.maker(self.code).view(self.w, self.w)
        return self.out(F.gelu(F.linear(self.a(x), matrix)))


class Siren(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(INPUTS, w), nn.Linear(w, w), nn.Linear(w, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.sin(30 * self.b(torch.sin(30 * self.a(x)))))


class Dueling(nn.Module):
    """A value and an advantage per action, from one trunk."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.trunk = nn.Linear(INPUTS, w)
        self.value = nn.Sequential(nn.Linear(w, w), nn.ReLU(), nn.Linear(w, 1))
        self.advantage = nn.Sequential(nn.Linear(w, w), nn.ReLU(), nn.Linear(w, OUTPUTS))

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.trunk(x))
        a = self.advantage(h)
        return self.value(h) + a - a.mean(-1, keepdim=True)


class ActorCritic(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(INPUTS, w), nn.Tanh(), nn.Linear(w, w), nn.Tanh())
        self.policy, self.value = nn.Linear(w, OUTPUTS), nn.Linear(w, 1)
        self.log_std = nn.Parameter(torch.zeros(OUTPUTS))

    def forward(self, x: Tensor) -> Any:
        h = self.trunk(x)
        return self.policy(h), self.value(h), self.log_std


def policy_loss(found: tuple[Tensor, Tensor, Tensor], actions: Tensor) -> Tensor:
    mean, value, log_std = found
    error = 0.5 * ((actions - mean) / log_std.exp()).square().sum(-1) + log_std.sum()
    return error.mean() + value.square().mean() - LAW * log_std.sum()


class Euler(nn.Module):
    """A neural ODE with four steps of one field."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(INPUTS, w), nn.Linear(w, OUTPUTS)
        self.field = nn.Sequential(nn.Linear(w, 2 * w), nn.Tanh(), nn.Linear(2 * w, w))

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        for _ in range(4):
            h = h + 0.25 * self.field(h)
        return self.out(h)


def adam_small(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-4)


PARTLY = "an axis grows in part, and one tensor has one learning rate"
MODELS = (
    Entry("house_mlp", CASES["MLP"].make, (6, 8, 4), (12, 24, 20), regression, criterion=F.mse_loss),
    vector_model("mlp_gelu", between(gelu, linear, gelu)),
    vector_model("mlp_batchnorm", between(nn.BatchNorm1d, gelu), sizes=(8, 24)),
    vector_model("mlp_dropout", between(gelu, lambda _: nn.Dropout(0.2)), MASKED, dropout=True),
    vector_model("functional_dropout", FunctionalDropout, MASKED, dropout=True),
    vector_model("nerf_input_skip", InputSkip, Impossible(PARTLY)),
    vector_model("albert_repeated_layer", Repeated),
    vector_model("one_layer_twice", one_layer_twice),
    vector_model("transposed_hidden", TransposedHidden),
    vector_model(
        "tied_autoencoder",
        TransposedReadout,
        Impossible(
            "the encoder is applied at scale 1 and its transpose at 1/k, with nothing between that could absorb it"
        ),
        batch=copied,
    ),
    vector_model(
        "hypernetwork_matrix",
        MadeMatrix,
        Exact(layouts={"maker.*": {0: [(4, 2), (4, 2)]}}, folds={"maker.*": "1/2"}),
        sizes=(4, 8),
    ),
    vector_model("siren", Siren, optimizer=adam_small),
    vector_model("dueling_dqn", Dueling),
    vector_model("actor_critic", ActorCritic, criterion=policy_loss),
    vector_model("neural_ode_euler", Euler),
)
