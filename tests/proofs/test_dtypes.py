"""Float32 programs are proved in float64: initial states, masks, class weights, targets and scalers included."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mupscale as mu
from harness.refusals import refused
from mupscale.models.float64 import lifted_casts

WEIGHTS = torch.tensor([1.0, 2.0, 1.0, 0.5])


def mlp(width):
    return nn.Sequential(nn.Flatten(), nn.Linear(24, width), nn.Tanh(), nn.Linear(width, 4))


class Recurrent(nn.Module):
    """An LSTM whose initial state is made in forward."""

    def __init__(self, width):
        super().__init__()
        self.width, self.cell, self.out = width, nn.LSTM(4, width, batch_first=True), nn.Linear(width, 4)

    def forward(self, x):
        start = torch.zeros(1, len(x), self.width)
        return self.out(self.cell(x, (start, start))[0][:, -1])


class Masked(nn.Module):
    """Attention with a float mask made in forward."""

    def __init__(self, width):
        super().__init__()
        self.embed, self.out = nn.Linear(4, width), nn.Linear(width, 4)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x):
        h = self.embed(x)
        mask = torch.full((h.shape[1],) * 2, float("-inf")).triu(1)
        return self.out(self.attention(h, h, h, attn_mask=mask)[0][:, -1])


class Tabled(nn.Module):
    """A plain float32 tensor, no buffer, in a matrix product."""

    def __init__(self, width):
        super().__init__()
        self.first, self.out = nn.Linear(6, width), nn.Linear(width, 4)
        self.table = torch.linspace(-1, 1, 24).view(4, 6)

    def forward(self, x):
        return self.out(torch.tanh(self.first(x[:, 0] @ self.table)))


def batch(i):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(6, 6, 4, generator=generator), torch.randint(0, 4, (6,), generator=generator)


def plain(model, x, y):
    return F.cross_entropy(model(x), y)


def outside(model, x, y):
    return (model(x) @ x[:, 0].mT - 1).square().mean()


CRITERION = nn.CrossEntropyLoss(weight=WEIGHTS)
PROGRAMS = {
    "initial state": (Recurrent, plain),
    "float mask": (Masked, plain),
    "tensor attribute": (Tabled, plain),
    "class weights": (mlp, lambda m, x, y: F.cross_entropy(m(x), y, weight=WEIGHTS)),
    "class weights of a module": (mlp, lambda m, x, y: CRITERION(m(x), y)),
    "sigmoid and bce": (mlp, lambda m, x, y: F.binary_cross_entropy(m(x).sigmoid(), F.one_hot(y, 4).float())),
    "batch outside the model": (mlp, outside),
}


def stepper(loss):
    def step(run, i):
        run.optimizer.zero_grad()
        value = loss(run.model, *batch(i))
        value.backward()
        run.optimizer.step()
        return value

    return step


def adamw(model):
    return mu.Run(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


@pytest.mark.parametrize("program", PROGRAMS)
def test_float32_programs_are_verified_and_searched_in_float64(program):
    make, loss = PROGRAMS[program]
    plan = mu.plans.plan_between(make, 8, 16, loss=lambda model: loss(model, *batch(0)))
    certificate = mu.verify(adamw(make(8)), lambda: make(16), step=stepper(loss), steps=3)
    assert certificate.holds
    assert certificate.worst < 1e-9, "measured in float64, not in float32"
    assert plan.hash == certificate.plan_hash
    assert torch.get_default_dtype() == torch.float32


def test_a_grad_scaler_in_the_step_works_and_still_works_afterwards():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(run, i):
        run.optimizer.zero_grad()
        value = plain(run.model, *batch(i))
        scaler.scale(value).backward()
        scaler.step(run.optimizer)
        scaler.update()
        return value

    run = adamw(mlp(8))
    assert mu.verify(run, lambda: mlp(16), step=step, steps=3).worst < 1e-12
    step(run, 0)
    assert scaler.get_scale() == 2.0**10


def test_targets_of_writes_stay_the_tensors_they_are():
    kept, given, values = torch.zeros(2), torch.zeros(2), torch.ones(2, dtype=torch.float64)
    with lifted_casts():
        assert kept.lerp_(values, 0.5) is kept
        assert torch.mul(values, torch.full((2,), 3.0), out=given) is given
        kept[0] = values[0]
    assert kept.dtype == given.dtype == torch.float32
    assert (kept.tolist(), given.tolist()) == ([1.0, 0.5], [3.0, 3.0])


def test_an_error_of_dtypes_is_refused():
    class Stubborn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            raise RuntimeError("expected scalar type Float but found Double")

    with refused("model.not_in_float64"):
        mu.verify(mlp(8), lambda: mlp(16), loss=lambda model: Stubborn.apply(model(batch(0)[0])))
    with pytest.raises(RuntimeError, match="another error"), lifted_casts():
        raise RuntimeError("another error")
