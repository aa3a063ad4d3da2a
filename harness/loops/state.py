"""What a model or an optimizer holds beside its tensors: counters, settings, gradients that wait, methods of an instance."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import mupscale as mu
from harness.data import INPUTS, OUTPUTS
from harness.loops.situation import *

LATE = BEFORE + 3
"""The forward pass from which a counting model behaves differently: the base reaches it soon after growth."""


class Counting(Net):
    """Counts its passes in training, and is half as strong from `LATE` on: a schedule inside forward."""

    def __init__(
        self, width: int, first: Any, passed: Callable[[Any], Any], count: Callable[[Any], int]
    ) -> None:
        super().__init__(width)
        self.passes, self._passed, self._count = first, passed, count

    def hidden(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes = self._passed(self.passes)
        return super().hidden(x) * (0.5 if self._count(self.passes) > LATE else 1.0)


def in_dict(passes: dict[str, int]) -> dict[str, int]:
    passes["passes"] += 1
    return passes


def in_config(config: SimpleNamespace) -> SimpleNamespace:
    config.passes += 1
    return config


def in_list(passes: list[int]) -> list[int]:
    passes.append(1)
    return passes


class Annealing:
    """A small object of one's own that keeps a count."""

    def __init__(self) -> None:
        self.passes = 0

    def passed(self) -> Annealing:
        self.passes += 1
        return self


COUNTERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], int]]] = {
    "counter_from_zero": (lambda: 0, lambda n: n + 1, lambda n: n),
    "counter_from_one": (lambda: 1, lambda n: n + 1, lambda n: n),
    "counter_in_a_dict": (lambda: {"passes": 0}, in_dict, lambda d: d["passes"]),
    "counter_in_a_config": (lambda: SimpleNamespace(passes=0), in_config, lambda c: c.passes),
    "counter_in_a_list": (list, in_list, len),
    "counter_in_an_object": (Annealing, lambda a: a.passed(), lambda a: a.passes),
}


def counted(first: Callable[[], Any], passed: Callable[[Any], Any], count: Callable[[Any], int]) -> Pair:
    def make(width: int) -> nn.Module:
        return Counting(width, first(), passed, count)

    return grown(trained(make), make)


for name, parts in COUNTERS.items():
    situation(Exact(), "S7", name)(partial(counted, *parts))


def with_dropout(width: int, p: float) -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, width), nn.ReLU(), nn.Dropout(p), nn.Linear(width, OUTPUTS))


@situation(Warned(), "S8")
def factory_asks_for_more_dropout() -> Pair:
    """The factory's setting holds, and growing says that it differs."""
    run = trained(lambda width: with_dropout(width, 0.1))
    pair = grown(run, lambda width: with_dropout(width, 0.35))
    assert pair.wide.model.get_submodule("2").p == 0.35
    return pair


def with_large_eps(width: int) -> nn.Module:
    model = Net(width)
    model.norm.eps = 0.1
    return model


@situation(Refused("proof.attribute_not_carried"))
def setting_changed_after_building() -> Pair:
    return grown(trained(with_large_eps))


@setting_changed_after_building.remedy
def _() -> Pair:
    return grown(trained(with_large_eps), with_large_eps)


class Tempered(Net):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.temperature


@situation(Exact())
def temperature_annealed_by_the_loop() -> Pair:
    def annealed(run: mu.Run, number: int) -> Tensor:
        run.model.temperature *= 0.9  # type: ignore[operator, assignment]
        return step(run, number)

    return grown(trained(Tempered, step=annealed), Tempered, annealed)


def patched(model: nn.Module) -> nn.Module:
    """A method of the instance, as adapters and wrappers of libraries put it there."""
    mid = model.get_submodule("mid")
    mid.forward = MethodType(lambda self, x: 0.5 * nn.Linear.forward(self, x), mid)
    return model


@situation(Refused("proof.attribute_not_carried"))
def forward_patched_on_the_model() -> Pair:
    run = trained()
    patched(run.model)
    return grown(run)


@forward_patched_on_the_model.remedy
def _() -> Pair:
    run = trained()
    patched(run.model)
    return grown(run, lambda width: patched(Net(width)))


@situation(Exact(), "S10")
def gradients_of_a_micro_batch_wait() -> Pair:
    """Growth between the two halves of an accumulated batch."""
    run = trained()
    run.optimizer.zero_grad()
    loss(run.model, 50).backward()  # type: ignore[no-untyped-call]
    pair = grown(run)
    for half in (pair.base, pair.wide):
        loss(half.model, 51).backward()  # type: ignore[no-untyped-call]
        half.optimizer.step()
    return pair


@situation(Exact())
def gradients_left_after_a_step() -> Pair:
    """Where zero_grad comes first in the loop, every base has gradients; they are thrown away."""

    def zeroed_first(run: mu.Run, number: int) -> Tensor:
        run.optimizer.zero_grad()
        found = loss(run.model, number)
        found.backward()  # type: ignore[no-untyped-call]
        run.optimizer.step()
        return found.detach()

    return grown(trained(step=zeroed_first), step=zeroed_first)


class Remembering(Net):
    """A state in a buffer that is not saved, as truncated backpropagation keeps it."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.memory: Tensor
        self.register_buffer("memory", torch.zeros(width), persistent=False)

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        if self.training and torch.is_grad_enabled():
            self.memory = 0.9 * self.memory + h.detach().mean(0)
        return h + 0.1 * self.memory


@situation(Exact())
def state_in_a_buffer() -> Pair:
    return grown(trained(Remembering), Remembering)
