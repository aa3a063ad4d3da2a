"""Parts that do not train: frozen after building, thawed, adapters next to frozen weights, teachers."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import mupscale as mu
from harness.data import regression
from harness.loops.situation import *


def fine_tuned(*frozen: str) -> mu.Run:
    """A base whose modules were frozen after it was built; the factory knows nothing of it."""
    torch.manual_seed(0)
    model = Net(4)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    return after(mu.Run(model, adamw(model)))


@situation(Exact(), "W1")
def first_layer_frozen_after_building() -> Pair:
    return grown(fine_tuned("inp"))


@situation(Exact(), "W1")
def frozen_and_proved_by_inputs() -> Pair:
    return grown(fine_tuned("inp"), loss=None, example_inputs=regression(7)[:1])


@situation(Exact(), "W1")
def only_the_readout_trains() -> Pair:
    return grown(fine_tuned("inp", "norm", "mid"))


@situation(Exact(), "W1")
def biases_alone_train() -> Pair:
    torch.manual_seed(0)
    model = Net(4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return grown(after(mu.Run(model, adamw(model))))


@situation(Exact(), "W1")
def thawed_after_building() -> Pair:
    """The factory freezes, and the base was thawed in the middle of its training."""

    def make(width: int) -> nn.Module:
        model = Net(width)
        model.inp.requires_grad_(False)
        return model

    run = trained(make)
    run.model.inp.requires_grad_(True)
    run.optimizer.add_param_group({"params": list(run.model.inp.parameters())})  # type: ignore[union-attr]
    return grown(after(run), make)


@situation(Exact())
def thawed_after_growth() -> Pair:
    """What was frozen at growth trains later, in a group that the loop adds."""
    run = fine_tuned("inp")
    pair = grown(run)
    for half in (pair.base, pair.wide):
        half.model.inp.requires_grad_(True)
    return pair


class Adapted(Net):
    """Low-rank adapters next to frozen weights; the rank stays."""

    def __init__(self, width: int, rank: int = 2) -> None:
        super().__init__(width)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.head((self.mid(h) + self.up(self.down(h))).relu())  # type: ignore[no-any-return]


@situation(Exact())
def low_rank_adapters() -> Pair:
    torch.manual_seed(0)
    model = Adapted(4)
    for name in ("inp", "norm", "mid", "head"):
        model.get_submodule(name).requires_grad_(False)
    return grown(after(mu.Run(model, adamw(model))), Adapted)


class Taught(nn.Module):
    """A student next to a teacher that follows it, as in BYOL."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.student = Net(width)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x) + 0.1 * self.teacher(x)  # type: ignore[no-any-return]


def followed(run: mu.Run, number: int) -> Tensor:
    found = step(run, number)
    pairs = zip(run.model.teacher.parameters(), run.model.student.parameters(), strict=True)  # type: ignore[union-attr]
    with torch.no_grad():
        for teacher, student in pairs:
            teacher.lerp_(student, 0.1)
    return found


@situation(Exact())
def teacher_inside_the_model() -> Pair:
    return grown(trained(Taught, step=followed), Taught, followed)


@situation(Exact())
def frozen_for_one_phase_of_the_loop() -> Pair:
    """The loop itself freezes and thaws by the number of the step."""

    def phased(run: mu.Run, number: int) -> Tensor:
        run.model.inp.requires_grad_(number % 2 == 0)
        return step(run, number)

    return grown(trained(optimizer=sgd, step=phased), step=phased)


@situation(Exact())
def part_without_gradient_yet() -> Pair:
    """A second head that the loss does not reach: its weights are copied, and nothing moves them."""

    class TwoHeads(Net):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.later = nn.Linear(width, 2).requires_grad_(False)

    return grown(trained(TwoHeads), TwoHeads, loss=loss)
