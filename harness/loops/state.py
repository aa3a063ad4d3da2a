"""What a model or an optimizer holds besides its tensors: counters, settings, gradients that wait, methods of an instance."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import mupscale as mu
from harness import runs
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


class Slotted:
    """The same in a class with slots, under a private name."""

    __slots__ = ("_passes",)

    def __init__(self) -> None:
        self._passes = 1

    def passed(self) -> Slotted:
        self._passes += 1
        return self


def in_array(passes: Any) -> Any:
    passes += 1
    return passes


def in_first(passes: Any) -> Any:
    passes[0].add_(1)
    return passes


def in_tuple(passes: tuple[Tensor]) -> tuple[Tensor]:
    return (passes[0] + 1,)


def in_shorter_list(passes: list[int]) -> list[int]:
    passes.pop()
    return passes


COUNTERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], int]]] = {
    "counter_from_zero": (lambda: 0, lambda n: n + 1, lambda n: n),
    "counter_from_one": (lambda: 1, lambda n: n + 1, lambda n: n),
    "counter_in_a_dict": (lambda: {"passes": 0}, in_dict, lambda d: d["passes"]),
    "counter_in_a_config": (lambda: SimpleNamespace(passes=0), in_config, lambda c: c.passes),
    "counter_in_a_list": (list, in_list, len),
    "counter_in_an_object": (Annealing, lambda a: a.passed(), lambda a: a.passes),
    "counter_in_slots": (Slotted, lambda a: a.passed(), lambda a: a._passes),
    "counter_in_an_array": (lambda: np.zeros(2), in_array, lambda a: int(a[0])),
    "counter_in_a_tensor": (lambda: torch.zeros(2), in_array, lambda t: int(t[0])),
    "counter_in_a_list_of_tensors": (lambda: [torch.zeros(1)], in_first, lambda a: int(a[0])),
    "counter_in_a_dict_of_tensors": (lambda: {0: torch.zeros(1)}, in_first, lambda d: int(d[0])),
    "counter_in_a_tuple_of_tensors": (lambda: (torch.zeros(1),), in_tuple, lambda a: int(a[0])),
    "list_that_becomes_shorter": (lambda: [1] * 60, in_shorter_list, lambda a: 60 - len(a)),
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


class Scheduled(Net):
    """Weights of its steps in a list that only the loop changes, and a state as long as the width in another."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.weights, self.memory = [1, 1, 1, 1, 2, 4, 8, 16, 32, 64, 128], [torch.zeros(width)]

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) + 0.1 * self.memory[0]


def taking_weights(run: mu.Run, number: int) -> Tensor:
    found = run.model.weights.pop(0) * loss(run.model, number)  # type: ignore[operator, union-attr]
    runs.step(run, found)
    return found.detach()  # type: ignore[no-any-return]


@situation(Exact())
def list_that_the_loop_makes_shorter() -> Pair:
    return grown(trained(Scheduled, step=taking_weights), Scheduled, taking_weights)


def with_memory() -> mu.Run:
    run = trained(Scheduled)
    run.model.memory[0] = torch.linspace(0.0, 1.0, 4)  # type: ignore[operator]
    return run


@situation(Refused("proof.attribute_not_carried"))
def list_of_tensors_as_long_as_the_width() -> Pair:
    return grown(with_memory(), Scheduled)


@list_of_tensors_as_long_as_the_width.remedy
def _() -> Pair:
    def make(width: int) -> nn.Module:
        model = Scheduled(width)
        model.memory[0] = torch.linspace(0.0, 1.0, 4).repeat_interleave(width // 4)
        return model

    return grown(with_memory(), make)


def decayed_by_the_loop(run: mu.Run, number: int) -> Tensor:
    """Decoupled weight decay of one's own, for parameters that are marked."""
    found = step(run, number)
    with torch.no_grad():
        for parameter in run.model.parameters():
            if getattr(parameter, "decays", False):
                parameter.mul_(0.9)
    return found


@situation(Exact(("mid.weight.decays",)))
def parameter_marked_after_building() -> Pair:
    run = trained(optimizer=sgd)
    run.model.get_parameter("mid.weight").decays = True  # type: ignore[attr-defined]
    return grown(run, step=decayed_by_the_loop)


class Configured(Net):
    """Keeps its configuration under another name than that of the argument."""

    def __init__(self, cfg: SimpleNamespace) -> None:
        super().__init__(cfg.width)
        self.config = cfg

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.config.scale  # type: ignore[no-any-return]


@situation(Refused("proof.attribute_not_carried"))
def configuration_that_differs() -> Pair:
    """The factory's setting holds, so the wide model is another one."""
    run = trained(lambda width: Configured(SimpleNamespace(width=width, scale=1.0)))
    return grown(run, lambda width: Configured(SimpleNamespace(width=width, scale=0.3)))


@configuration_that_differs.remedy
def _() -> Pair:
    def make(width: int) -> nn.Module:
        return Configured(SimpleNamespace(width=width, scale=1.0))

    return grown(trained(make), make)
