"""Runs as people have them: averages in wrappers, scripted modules, complex weights, schedules that are methods."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mupscale as mu
from harness.refusals import refused

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def mlp(width):
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3))


class Average(nn.Module):
    """An average of weights that holds a copy of the model as `module`, and nothing else."""

    def __init__(self, model):
        super().__init__()
        self.module, self.decay = copy.deepcopy(model), 0.9


def test_an_average_in_a_wrapper_is_carried_in_its_wrapper():
    model = mlp(4).double()
    wide = mu.grow(mu.Run(model, ema=Average(model)), lambda: mlp(8).double())
    assert isinstance(wide.ema, Average)
    assert wide.ema.decay == 0.9
    assert torch.allclose(wide.ema.module(X), model(X), atol=1e-14)


def test_a_model_that_is_itself_called_module_keeps_its_names():
    class Net(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.module = mlp(width)

        def forward(self, x):
            return 2 * self.module(x)

    model = Net(4).double()
    wide = mu.grow(mu.Run(model, ema=copy.deepcopy(model)), lambda: Net(8).double(), example_inputs=(X,))
    assert isinstance(wide.ema, Net)
    assert torch.allclose(wide.ema(X), model(X), atol=1e-14)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_scripted_model_is_refused():
    scripted = torch.jit.script(mlp(4))
    with refused("model.scripted"):
        mu.grow(scripted, lambda: mlp(8))
    with refused("model.scripted"):
        mu.infer_plan(mlp(4), lambda: torch.jit.script(mlp(8)))


class Spectral(nn.Module):
    """A layer with one complex weight per channel."""

    def __init__(self, width):
        super().__init__()
        self.first, self.out = nn.Linear(8, width), nn.Linear(width, 3)
        self.gain = nn.Parameter(torch.randn(width, dtype=torch.complex64))

    def forward(self, x):
        h = torch.fft.ifft(torch.fft.fft(self.first(x), dim=0) * self.gain, dim=0)
        return self.out(h.real)


def square(model):
    return F.mse_loss(model(X.float()), X[:, :3].float())


def test_complex_weights_are_searched_and_verified():
    def step(run, i):
        run.optimizer.zero_grad()
        loss = square(run.model)
        loss.backward()
        run.optimizer.step()
        return loss

    model = Spectral(4)
    run = mu.Run(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    plan = mu.plans.plan_between(Spectral, 4, 8, loss=square)
    assert str(plan["gain"].axes[0]) == "out: 4x2"
    certificate = mu.verify(run, lambda: Spectral(8), plan=plan, step=step, steps=3)
    assert certificate.holds
    assert certificate.worst < 1e-9
    wrong = mu.plans.plan_between(
        Spectral, 4, 8, declared=mu.Declared(roles={"gain": "out"}, folds={"gain": "101/100"})
    )
    assert not mu.verify(run, lambda: Spectral(8), plan=wrong, step=step, steps=3).holds


class Trainer:
    """A trainer whose method is the schedule; its lock cannot be copied."""

    def __init__(self, model):
        self.scale, self.lock = 1.0, threading.Lock()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.factor)

    def factor(self, epoch):
        return self.scale


class Counted:
    """A callable object with state, which torch saves in the scheduler's state."""

    def __init__(self):
        self.calls = 0

    def __call__(self, epoch):
        self.calls += 1
        return 0.5**epoch


def test_a_schedule_that_is_a_method_is_shared_with_its_owner():
    model = mlp(4)
    trainer = Trainer(model)
    wide = mu.grow(mu.Run(model, trainer.optimizer, trainer.scheduler), lambda: mlp(8))
    trainer.scale = 0.1
    for run in (mu.Run(model, trainer.optimizer, trainer.scheduler), wide):
        run.optimizer.step()
        run.scheduler.step()
    group = wide.optimizer.param_groups[-1]
    assert group["lr"] == pytest.approx(0.1 * 1e-3 * group["lr_factor"])


def test_a_callable_object_has_its_own_state():
    model, counted = mlp(4), Counted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wide = mu.grow(
        mu.Run(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, counted)), lambda: mlp(8)
    )
    before = counted.calls
    wide.optimizer.step()
    wide.scheduler.step()
    assert counted.calls == before
    assert wide.scheduler.lr_lambdas[0].calls == before + 1
