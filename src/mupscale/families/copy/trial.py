"""One step of growth, tried on a small copy: two models that hold corresponding weights, and one loss of both.

Every step is tried in the same way, whatever it adds:

    step     from           to                          what must hold
    experts  dense copy     the class with experts      asleep: loss and gradients are the base's; awake: the loss is
    words    copy           a few more rows             a loss over the base's words has the base's gradients
    blocks   copy           a block behind each         asleep and awake, as for experts
    width    copy           another share of zeros      loss and gradients are the base's

Both models are built with random weights of order one from seed 0, in float64 and with their casts lifted. The second
one is then filled from the first by the step's plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ...models.float64 import cast_, lifted_casts
from ...models.names import named_tensors, pattern_of
from ...noise.kinds import SignalNoise
from ...noise.resolve import resolve_noise
from ...noise.where import exempt_of
from ...plans.direction import Direction
from ...plans.plan import Plan
from ...plans.rows import old_words
from ...plans.wide_model import fill_model_
from ...proofs.identity import GRADIENT_TOLERANCE, Compared, Loss, compared
from ...tensors.random_states import forked
from ..models import Config, factory
from .losses import batch_for, loss_for


class End(NamedTuple):
    """One end of a step: a configuration, and the stock class that holds it."""

    config: Config
    cls: Any


@dataclass(frozen=True)
class Trial:
    """Two small models that hold corresponding weights, the plan between them, and a loss that both share."""

    base: nn.Module
    wide: nn.Module
    plan: Plan
    loss: Loss

    def compared(self) -> Compared:
        """Loss and gradients of both, with the casts of their code lifted."""
        with lifted_casts():
            return compared(self.base, self.wide, self.plan, self.loss)

    def wake_(self) -> None:
        """Wake what is new, as any t does, and nothing else."""
        tensors = {name: tensor for name, _, tensor in named_tensors(self.base)}
        exempt = exempt_of(self.wide, self.plan, "wide")
        noise = resolve_noise(tensors, SignalNoise(0.1), plan=self.plan, exempt=exempt)
        with torch.no_grad():
            for name, parameter in self.wide.named_parameters():
                entry = self.plan[name]
                if entry.new:
                    planned = self.plan.planned(name)
                    made = noise.woken(planned, entry)
                    made.write_(parameter, tensors, made.making(noise.tensor(planned)))

    def measured(self) -> Measured:
        """How far loss and gradients of the second model are from what the plan says."""
        found = self.compared()
        name, worst = found.identity.worst
        return Measured(found.gap, worst, pattern_of(name))


class Measured(NamedTuple):
    """What a trial gave: the relative difference of the losses, the worst gradient error, and the tensor that has it."""

    gap: float
    worst: float
    where: str

    @property
    def most(self) -> float:
        return max(self.gap, self.worst)

    @property
    def exact(self) -> bool:
        """Whether both are the rounding of float64; what is not a number is not."""
        return self.most <= GRADIENT_TOLERANCE


def trial(base: End, wide: End, plan_of: Callable[[nn.Module, nn.Module], Plan]) -> Trial:
    """The trial of one step from a small configuration to another; `plan_of` makes the plan of the two models.

    A Llama of width 8 with more words: the loss is over the words that it has, so its gradients stay.

    >>> from ..models import config_from, model_class
    >>> from ...plans.rows import row_plan
    >>> sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> ends = [config_from({"model_type": "llama", "vocab_size": words, **sizes}) for words in (31, 36)]
    >>> base, wide = (End(config, model_class(config)) for config in ends)
    >>> trial(base, wide, lambda a, b: row_plan(a, b, "words", 5)).measured().exact
    True
    """
    with forked(seed=0):
        first = cast_(factory(base.cls)(base.config), torch.float64)
        second = cast_(factory(wide.cls)(wide.config), torch.float64)
    plan = plan_of(first, second)
    fill_model_(second, first, Direction(plan), in_place=True)
    with lifted_casts():
        loss = loss_for(first, second, batch_for(first, base.config), old_words(plan))
    return Trial(first, second, plan, loss)
