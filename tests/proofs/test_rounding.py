"""What is zero by nature or amplified by chaos is judged by the base's own rounding; a wrong factor is still seen."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mupscale as mu


def data(i, shape, classes=3):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(shape, generator=generator), torch.randint(0, classes, shape[:1], generator=generator)


def stepper(*shape):
    def step(run, i):
        x, y = data(i, shape)
        for optimizer in run.optimizers:
            optimizer.zero_grad()
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        for optimizer in run.optimizers:
            optimizer.step()
        return loss

    return step


def trained(make, step, optimizer, warm):
    torch.manual_seed(0)
    model = make(4)
    run = mu.Run(model, optimizer(model))
    for i in range(warm):
        step(run, 1000 + i)
    return run


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def bottleneck(width):
    """A linear layer between two batch norms: the second running mean is zero by nature."""
    return nn.Sequential(
        nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 4 * width, bias=False),
        nn.BatchNorm1d(4 * width), nn.ReLU(), nn.Linear(4 * width, 3),
    )  # fmt: skip


def convolution(width, channels):
    return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width))


class Residual(nn.Module):
    """Convolutions with a bias before batch norms, which amplify rounding at a batch of 4."""

    def __init__(self, width):
        super().__init__()
        self.stem = convolution(width, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(convolution(width, width), nn.ReLU(), convolution(width, width)) for _ in range(3)
        )
        self.out = nn.Linear(width, 3)

    def forward(self, x):
        h = F.relu(self.stem(x))
        for block in self.blocks:
            h = F.relu(h + block(h))
        return self.out(h.mean((2, 3)))


class Encoder(nn.Module):
    """Attention, whose key bias has no effect."""

    def __init__(self, width):
        super().__init__()
        self.embed, self.out = nn.Linear(4, width), nn.Linear(width, 3)
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True)

    def forward(self, x):
        return self.out(self.layer(self.embed(x)).mean(1))


NETS = {
    "bottleneck": (bottleneck, (16, 8)),
    "residual": (Residual, (4, 3, 6, 6)),
    "encoder": (Encoder, (8, 5, 4)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("net", NETS)
def test_tensors_that_are_zero_by_nature_do_not_break_an_exact_run(net, dtype):
    make, shape = NETS[net]
    step = stepper(*shape)
    run = trained(make, step, adamw, warm=5)
    certificate = mu.verify(run, lambda: make(12), step=step, steps=5, dtype=dtype)
    assert certificate.holds, certificate.failure


FACTOR = {"bottleneck": "5.weight", "residual": "out.weight", "encoder": "layer.linear2.weight"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("net", NETS)
def test_a_factor_that_is_wrong_by_one_percent_is_seen(net, dtype):
    make, shape = NETS[net]
    step = stepper(*shape)
    run = trained(make, step, adamw, warm=5)
    plan = mu.plans.plan_between(make, 4, 12, declared=mu.Declared(folds={FACTOR[net]: "101/100"}))
    assert not mu.verify(run, lambda: make(12), plan=plan, step=step, steps=5, dtype=dtype).holds


def test_the_certificate_says_what_it_took_for_rounding():
    step = stepper(8, 5, 4)
    certificate = mu.verify(
        trained(Encoder, step, adamw, warm=5), lambda: Encoder(12), step=step, steps=5, dtype=torch.float32
    )
    assert certificate.holds
    assert "so does the base from itself when its weights move by one unit in the last place" in str(
        certificate
    )
    assert "layer.self_attn.in_proj_bias" in str(certificate).splitlines()[-1]
    assert certificate.worst <= certificate.tolerance


def wide_enough(width):
    return nn.Sequential(
        nn.Linear(32, 16 * width),
        nn.GELU(),
        nn.Linear(16 * width, 16 * width),
        nn.GELU(),
        nn.Linear(16 * width, 3),
    )


@pytest.mark.parametrize("k", [2, 3])
def test_bfloat16_sees_one_percent_over_the_entries_of_a_tensor(k):
    step = stepper(64, 32)
    run = trained(wide_enough, step, adamw, warm=3)
    certificate = mu.verify(run, lambda: wide_enough(4 * k), step=step, steps=3, dtype=torch.bfloat16)
    assert certificate.holds, certificate.failure
    assert "bfloat16 shows a wrong factor on one tensor from 0." in str(certificate)
    plan = mu.plans.plan_between(wide_enough, 4, 4 * k, declared=mu.Declared(folds={"2.weight": "101/100"}))
    failure = mu.verify(
        run, lambda: wide_enough(4 * k), plan=plan, step=step, steps=3, dtype=torch.bfloat16
    ).failure
    assert failure is not None
    assert "rounding" in failure.what


def test_muon_is_judged_by_its_own_rounding():
    def muon(model):
        matrices = [p for p in model.parameters() if p.dim() == 2]
        return [
            torch.optim.Muon(matrices, lr=1e-2),
            torch.optim.SGD([p for p in model.parameters() if p.dim() < 2], 0.1),
        ]

    step = stepper(64, 32)
    run = trained(wide_enough, step, muon, warm=3)
    assert mu.verify(run, lambda: wide_enough(12), step=step, steps=3).holds
    plan = mu.plans.plan_between(wide_enough, 4, 12, declared=mu.Declared(folds={"2.weight": "101/100"}))
    assert not mu.verify(run, lambda: wide_enough(12), plan=plan, step=step, steps=3).holds
