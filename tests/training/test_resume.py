"""A grown run is saved, loaded in a new process, and gives the next losses to the last bit."""

import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mupscale as mu
from harness.refusals import refusal

COMMON = """
import sys, torch
from functools import partial
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
import mupscale as mu

torch.set_num_threads(1)

def net(n):
    return nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 1))

def falling(i):
    return 1 / (1 + 0.1 * i)

def losses(model, optimizers, schedulers, first, last):
    found = []
    for i in range(first, last):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(i))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        for part in (*optimizers, *schedulers):
            part.step()
        found.append(float(loss.detach()).hex())
    return found
"""
GROWN = """
def grown(kind):
    torch.manual_seed(0)
    model = net(4)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    if kind == "one group":
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2)]
    elif kind == "several groups":
        groups = [{"params": vectors, "lr": 3e-3, "weight_decay": 0.0}, {"params": matrices}]
        optimizers = [torch.optim.AdamW(groups, lr=1e-2)]
    else:
        optimizers = [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(vectors, lr=1e-2)]
    schedulers = [LambdaLR(optimizer, falling) for optimizer in optimizers]
    losses(model, optimizers, schedulers, 0, 3)
    run = mu.upscale(mu.Run(model, optimizers, schedulers), lambda: net(8), mu.SignalNoise(0.2))
    losses(run.model, run.optimizers, run.schedulers, 3, 6)
    return run
"""
RESUMED = """
saved = torch.load(sys.argv[1])
model = net(8)
model.load_state_dict(saved["model"])
optimizers, schedulers = [], []
for name, state, schedule in zip(saved["classes"], saved["optimizers"], saved["schedulers"]):
    optimizer = getattr(torch.optim, name)(mu.trainers.groups_for(model, state))
    schedulers.append(LambdaLR(optimizer, falling))
    optimizer.load_state_dict(state)
    schedulers[-1].load_state_dict(schedule)
    optimizers.append(optimizer)
print(*losses(model, optimizers, schedulers, 6, 16))
"""


@pytest.mark.parametrize("kind", ["one group", "several groups", "two optimizers"])
def test_the_next_losses_in_a_new_process_are_equal_to_the_last_bit(kind: str, tmp_path: Path):
    here: dict[str, Any] = {}
    exec(COMMON + GROWN, here)
    run = here["grown"](kind)
    saved = {
        "model": run.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in run.schedulers],
        "classes": [type(optimizer).__name__ for optimizer in run.optimizers],
    }
    torch.save(saved, tmp_path / "run.pt")
    want = here["losses"](run.model, run.optimizers, run.schedulers, 6, 16)
    command = [sys.executable, "-c", COMMON + RESUMED, str(tmp_path / "run.pt")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == want
    model, state = here["net"](8), saved["optimizers"][0]
    if kind != "two optimizers":
        with pytest.raises(ValueError, match="different number"):
            torch.optim.AdamW(model.parameters()).load_state_dict(state)
    fresh = here["grown"](kind)
    others = [type(o)(mu.trainers.groups_for(fresh.model, o.state_dict())) for o in fresh.optimizers]
    assert here["losses"](fresh.model, others, [], 6, 16) != want, "control: without its state"


def test_groups_of_every_carried_optimizer_have_names():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    make = lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))  # noqa: E731
    run = mu.Run(model, torch.optim.AdamW(model.parameters()))
    wide = mu.grow(run, make)
    back = mu.narrow(wide, lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    for one in (wide, back):
        own = dict(one.model.named_parameters())
        for group in one.optimizer.param_groups:
            assert all(own[n] is p for n, p in zip(group["param_names"], group["params"], strict=True))
    refusal(lambda: mu.trainers.groups_for(model, run.optimizer.state_dict()), "state.no_names")


def test_groups_are_not_read_from_other_places(tmp_path):
    """Control: what the remedy for a saved state says."""
    make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1))  # noqa: E731
    base = make(4)
    wide = mu.grow(mu.Run(base, torch.optim.AdamW(base.parameters())), lambda: make(8))
    torch.save({"optimizer": wide.optimizer.state_dict()}, saved := tmp_path / "run.pt")
    for place, remedy in ((saved, "torch.load("), (str(tmp_path), "optimizer_in_units")):
        error = refusal(partial(mu.trainers.groups_for, wide.model, place), "state.not_universal")
        assert remedy in error.faults[0].remedy
    assert len(mu.trainers.groups_for(wide.model, torch.load(saved)["optimizer"])) > 1


class Trainer:
    """An object that holds a run's optimizer and scheduler, as training scripts have it."""

    def __init__(self, model: nn.Module) -> None:
        self.share, self.lock = 1.0, threading.Lock()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.factor)

    def factor(self, step: int) -> float:
        return self.share

    def __call__(self, step: int) -> float:
        return self.share


def test_a_method_as_the_function_of_a_schedule_belongs_to_both_runs():
    model = nn.Linear(4, 4)
    trainer = Trainer(model)
    wide = mu.grow(mu.Run(model, trainer.optimizer, trainer.scheduler), lambda: nn.Linear(8, 8))
    trainer.share = 0.5
    for optimizer, scheduler in ((trainer.optimizer, trainer.scheduler), (wide.optimizer, wide.scheduler)):
        optimizer.step()
        scheduler.step()
    assert mu.diagnostics.reference_lr(wide.optimizer) == trainer.optimizer.param_groups[0]["lr"] == 0.05


def test_a_function_that_cannot_be_copied_is_refused_with_a_line_that_works():
    model = nn.Linear(4, 4)
    optimizer, called = torch.optim.SGD(model.parameters(), lr=0.1), Trainer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, called)
    make = lambda: nn.Linear(8, 8)  # noqa: E731
    refusal(
        lambda: mu.grow(mu.Run(model, optimizer, scheduler), make),
        "schedule.function_not_copyable",
        where="LambdaLR",
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: called(step))
    wide = mu.grow(mu.Run(model, optimizer, scheduler), make)
    assert wide.scheduler.lr_lambdas[0](0) == 1.0
