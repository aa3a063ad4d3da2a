"""One entry of the zoo: a model in two sizes, what it is trained on, and whether its growth can be exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale as mu
from harness.data import cross_entropy, regression
from harness.runs import step

Batch = tuple[Any, ...]
GRADIENT_SEED = 5000
"""The number of the batch on which plans are proved; no run is trained on it."""


@dataclass(frozen=True)
class Exact:
    """An exact plan is known: the one that these declarations give, with a loss for what they leave open."""

    roles: Mapping[str, Any] = field(default_factory=dict)
    layouts: Mapping[str, Any] = field(default_factory=dict)
    folds: Mapping[str, Any] = field(default_factory=dict)
    loss: bool = True
    """False where the declarations decide everything and the search is left out."""

    @property
    def declarations(self) -> dict[str, dict[str, Any]]:
        """What to pass to `infer_plan`."""
        given = {"roles": self.roles, "layouts": self.layouts, "folds": self.folds}
        return {word: dict(values) for word, values in given.items() if values}


@dataclass(frozen=True)
class Impossible:
    """No plan of copies, zeros and folds is exact, for this reason."""

    reason: str


@dataclass(frozen=True)
class Open:
    """No exact plan is known, and it is not known that there is none."""

    reason: str


MASKED = Impossible("every copy draws its own dropout mask")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.05)


@dataclass(frozen=True)
class Entry:
    """A model in two sizes, with the data and the loss it is trained on.

    A batch is a function of its number and has torch's default dtype. `criterion(output, *targets)` is the loss of
    most models; a model whose loss needs more has its own `objective(model, batch)`.
    """

    name: str
    make: Callable[[Any], nn.Module]
    base: Any
    wide: Any
    batch: Callable[[int], Batch]
    judgement: Exact | Impossible | Open = field(default_factory=Exact)
    criterion: Callable[..., Tensor] = cross_entropy
    objective: Callable[[nn.Module, Batch], Tensor] | None = None
    inputs: int = 1
    """How many parts of a batch the model is called with; 0 when it takes keywords only."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    dropout: bool = False
    rebuilt: bool = False
    """True for a model of a public library or repository that was written anew from its description."""
    needs: str = ""
    """A package without which the model cannot be built."""

    @property
    def available(self) -> bool:
        return not self.needs or find_spec(self.needs) is not None

    def loss(self, model: nn.Module, number: int = GRADIENT_SEED) -> Tensor:
        batch = self.batch(number)
        if self.objective is not None:
            return self.objective(model, batch)
        return self.criterion(model(*batch[: self.inputs]), *batch[self.inputs :])

    @property
    def examples(self) -> Batch | None:
        """The arguments of one call of the model, for `example_inputs=`."""
        return self.batch(GRADIENT_SEED)[: self.inputs] if self.inputs else None

    def start(self) -> mu.Run:
        """A base with fresh weights and its optimizer."""
        torch.manual_seed(0)
        model = self.make(self.base)
        return mu.Run(model, self.optimizer(model))

    def grown(self) -> nn.Module:
        return self.make(self.wide)

    def step(self, run: mu.Run, number: int) -> Tensor:
        """One training step; returns the loss before it."""
        loss = self.loss(run.model, number)
        step(run, loss)
        return loss.detach()


def vector_model(name: str, make: Callable[[Any], nn.Module], *rest: Any, **options: Any) -> Entry:
    """An entry that maps vectors to vectors, 8 to 16 wide unless it says otherwise."""
    base, wide = options.pop("sizes", (8, 16))
    return Entry(
        name,
        make,
        base,
        wide,
        options.pop("batch", regression),
        *rest,
        **{"criterion": F.mse_loss, **options},
    )
