"""How far exact runs deviate in multiples of the base's own rounding: the reason for `MULTIPLE` in proofs/rounding.py.

Small networks with batch norms, biases without effect and attention, at small batches, where rounding is amplified
most. For every run: the largest deviation above the tolerance, divided by how far the base's twins part from it.

    python benchmarks/rounding.py [--only float32]

Takes about five CPU minutes. A multiple of 0 says that nothing was above the tolerance.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import product
from math import inf

import torch
from torch import nn
from torch.nn import functional as F

import mupscale as mu
from mupscale.plans.float64 import cast_inputs, lifted_casts
from mupscale.proofs.compare import compare_steps, tolerance_of
from mupscale.proofs.rounding import MULTIPLE, Rounding
from mupscale.proofs.trial import Trial
from mupscale.proofs.twin import rounding_of_steps
from mupscale.tensors.differences import loss_gap
from mupscale.training.copies import clone
from mupscale.training.settings import settings_comparer

STEPS = 5
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def convolution(channels: int, width: int, size: int, groups: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(channels, width, size, padding=size // 2, groups=groups)
    return nn.Sequential(layer, nn.BatchNorm2d(width))


class Residual(nn.Module):
    """Six residual blocks; every convolution has a bias that the norm behind it takes away."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = convolution(3, width, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(convolution(width, width, 3), nn.ReLU(), convolution(width, width, 3))
            for _ in range(6)
        )
        self.out = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.stem(x))
        for block in self.blocks:
            h = F.relu(h + block(h))
        return self.out(h.mean((2, 3)))  # type: ignore[no-any-return]


def mobile(width: int) -> nn.Module:
    """An inverted residual block: a linear bottleneck between batch norms."""
    return nn.Sequential(
        convolution(3, width, 3),
        nn.ReLU(),
        convolution(width, width, 1),
        convolution(width, 4 * width, 1),
        nn.ReLU(),
        convolution(4 * width, 4 * width, 3, groups=4 * width),
        nn.ReLU(),
        convolution(4 * width, width, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 4),
    )


class Encoder(nn.Module):
    """One layer of attention, whose key bias has no effect."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(3, width), nn.Linear(width, 4)
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(self.embed(x.flatten(2).mT)).mean(1))  # type: ignore[no-any-return]


NETS: dict[str, Callable[[int], nn.Module]] = {"residual": Residual, "mobile": mobile, "encoder": Encoder}


def stepper(batch: int) -> Callable[[mu.Run, int], torch.Tensor]:
    def step(run: mu.Run, i: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(batch, 3, 6, 6, generator=generator)
        y = torch.randint(0, 4, (batch,), generator=generator)
        run.optimizer.zero_grad()
        loss: torch.Tensor = F.cross_entropy(run.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        run.optimizer.step()
        return loss.detach()

    return step


def deviations(trial: Trial, own: Rounding, tolerance: float) -> Iterator[tuple[float, float, str]]:
    """What is above the tolerance and tested, with the deviation that rounding would be allowed, and its name."""
    assert trial.identity is not None
    for i, pair in enumerate(trial.losses):
        yield loss_gap(*pair), own.loss(i), "loss"
    for name, error in trial.identity.errors.items():
        if name not in trial.identity.untested:
            yield error, own.gradient(trial.plan[name]), f"gradient of {name}"
    for i, errors in enumerate(trial.weights):
        for name, error in errors.items():
            if name not in trial.identity.rounding:
                yield error, own.weight(trial.plan[name], i), f"{name} after step {i}"


def multiple(net: str, dtype: torch.dtype, batch: int, k: int, warm: int) -> tuple[float, str]:
    """The largest deviation of one exact run in multiples of its own rounding; 0 if none is above the tolerance."""
    torch.manual_seed(batch + k + warm)
    make, step = NETS[net], stepper(batch)
    model = make(4)
    run = mu.Run(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for i in range(warm):
        step(run, 1000 + i)

    def fresh() -> mu.Run:
        copied = clone(run, dtype)
        cast_inputs(copied.model, dtype)
        return copied

    base, plan = fresh(), mu.plan_between(make, 4, 4 * k)
    wide = mu.widen(clone(run, dtype), make(4 * k), plan=plan)
    cast_inputs(wide.model, dtype)
    trial = Trial(base, wide, plan, inf)
    compare_steps(trial, step, STEPS, settings_comparer(None))
    own = rounding_of_steps(fresh, step, STEPS)
    tolerance = tolerance_of(dtype, None)
    found = deviations(trial, own, tolerance)
    return max(((MULTIPLE * e / max(a, 1e-300), n) for e, a, n in found if e > tolerance), default=(0.0, ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=DTYPES, help="one dtype")
    asked = parser.parse_args().only
    torch.set_num_threads(1)
    for name in [asked] if asked else DTYPES:
        runs: list[tuple[float, str]] = []
        for net, batch, k, warm in product(NETS, (4, 16), (2, 3), (0, 10)):
            if name == "float64":
                with lifted_casts():
                    value, where = multiple(net, DTYPES[name], batch, k, warm)
            else:
                value, where = multiple(net, DTYPES[name], batch, k, warm)
            runs.append((value, f"{net}, batch {batch}, k {k}, {warm} steps before: {where}"))
        worst = sorted(runs, reverse=True)
        above = sum(value > MULTIPLE for value, _ in runs)
        print(f"{name}: {len(runs)} exact runs, {above} above {MULTIPLE:g}; the largest multiples:")
        for value, where in worst[:3]:
            print(f"  {value:9.3g}  {where}")


if __name__ == "__main__":
    main()
