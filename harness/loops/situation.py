"""One situation around a model: how a base is trained and grown, what is expected of it, and what to type if it is refused.

A situation is a function without arguments. It trains a base, grows it without noise and returns both runs with the
loop that trains them; or, where a promise is not about losses, how far the promise is missed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import mupscale as mu
from harness import runs
from harness.data import INPUTS, OUTPUTS, regression

__all__ = ["BASE", "WIDE", "BEFORE", "PROOF", "Make", "Step", "Exact", "Warned", "Refused", "Pair"]
__all__ += ["situation", "Net", "adamw", "sgd", "trained_part", "loss", "step", "trained", "after", "grown"]

BASE, WIDE = 4, 8
BEFORE = 4
"""Steps of the base before it grows."""
PROOF = 5000
"""The number of the batch on which plans are proved; no run is trained on it."""

Make = Callable[[int], nn.Module]
Step = Callable[[mu.Run, int], Tensor]
"""One step of a training loop on the batch with this number; returns the loss before it."""


@dataclass(frozen=True)
class Exact:
    """The wide run continues the base without a warning; its provenance names each of these words."""

    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Warned:
    """Training changes, and a warning says so."""


@dataclass(frozen=True)
class Refused:
    """Growth is refused with this code; `shows` is code that the message prints, and the remedy types it."""

    code: str
    shows: str = ""


@dataclass(frozen=True)
class Pair:
    """A base and the run that must continue it, and the loop of each."""

    base: mu.Run
    wide: mu.Run
    step: Step
    wide_step: Step | None = None
    """The loop of the wide run, where it is written in another way."""


Outcome = Pair | float
Function = Callable[[], Outcome]


@dataclass
class Situation:
    """A situation by its name, with the pattern of the review that it shows (S1 to S16, W1 to W3, T1 to T5), if any."""

    name: str
    function: Function
    judgement: Exact | Warned | Refused
    pattern: str
    typed: Function | None = None
    """The same with the remedy of the refusal written down."""

    def remedy(self, function: Function) -> Function:
        """Decorates what a user writes after the refusal."""
        self.typed = function
        return function


LOOPS: dict[str, Situation] = {}


def situation(
    judgement: Exact | Warned | Refused, pattern: str = "", name: str = ""
) -> Callable[[Function], Situation]:
    """Decorates a situation, and keeps it in `LOOPS`."""

    def kept(function: Function) -> Situation:
        found = Situation(name or function.__name__, function, judgement, pattern)
        assert found.name not in LOOPS, f"two situations are called {found.name}"
        LOOPS[found.name] = found
        return found

    return kept


class Net(nn.Module):
    """A norm between two layers: the shapes decide its plan, so what goes wrong lies around it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inp, self.norm = nn.Linear(INPUTS, width), nn.LayerNorm(width)
        self.mid, self.head = nn.Linear(width, width), nn.Linear(width, OUTPUTS)

    def hidden(self, x: Tensor) -> Tensor:
        return self.norm(self.inp(x)).relu()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mid(self.hidden(x)).relu())  # type: ignore[no-any-return]


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(trained_part(model), lr=1e-2, weight_decay=0.1)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(trained_part(model), lr=0.1, momentum=0.9)


def trained_part(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def loss(model: nn.Module, number: int = PROOF) -> Tensor:
    """The squared error on one batch, as people pass it to `loss=`."""
    x, y = regression(number)
    return F.mse_loss(model(x), y)


def step(run: mu.Run, number: int) -> Tensor:
    """The plainest loop: zero, backward, step, schedule."""
    found = loss(run.model, number)
    runs.step(run, found)
    return found.detach()


def trained(
    make: Make = Net,
    optimizer: Callable[[nn.Module], Optimizer | list[Optimizer]] = adamw,
    schedule: Callable[[Optimizer], Any] | None = None,
    step: Step = step,
) -> mu.Run:
    """A base after a few steps of a loop."""
    torch.manual_seed(0)
    model = make(BASE)
    found = optimizer(model)
    run = mu.Run(model, found, [] if schedule is None else schedule(found))  # type: ignore[arg-type]
    return after(run, step)


def after(run: mu.Run, step: Step = step, first: int = 0, count: int = BEFORE) -> mu.Run:
    """The run after some steps of a loop."""
    for number in range(first, first + count):
        torch.manual_seed(number)
        step(run, number)
    return run


def grown(run: mu.Run, make: Make = Net, step: Step = step, **options: Any) -> Pair:
    """The run and its wide one, grown as the README says."""
    return Pair(run, mu.grow(run, lambda: make(WIDE), **{"loss": loss, **options}), step)
