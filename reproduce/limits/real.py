"""The network of `mlp.py` as a real module: initialised, trained and grown by this package and `torch.optim.SGD`.

Knows: that a reference of width one has the program's units, and how to hand a model's numbers to the program. It
compares the calculus with the package, so it contains no multipliers of its own: all of them come from a plan.
Internal, used by tests: none of its names is public.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from mupscale.noise.kinds import MupNoise
from mupscale.planning.infer import plan_between
from mupscale.runs.run import Run
from mupscale.tensors.devices import on_cpu
from mupscale.training.grow.upscale import upscale
from mupscale.training.start.init import init_weights_
from mupscale.training.units.groups import param_groups

from .schedule import Schedule

Grow = Callable[[Run, Callable[[], nn.Module], MupNoise, float, int], Run]


@dataclass(frozen=True)
class RealRun:
    """Outputs for every input at every step, and the initial objects in the program's units if they were kept."""

    outputs: list[list[float]]
    values: dict[str, Tensor] = field(default_factory=dict)


def grown(run: Run, make_wide: Callable[[], nn.Module], noise: MupNoise, lr: float, seed: int) -> Run:
    """Call `upscale`; tests wrap this function to try wrong rules."""
    return upscale(run, make_wide, noise, lr=lr, seed=seed)


@on_cpu()
def train_model(
    n: int,
    k: int,
    schedule: Schedule,
    *,
    inputs: Sequence[Sequence[float]],
    targets: Sequence[float],
    sigma: Sequence[float],
    noise: Sequence[float],
    activation: nn.Module,
    seed: int = 0,
    grow: Grow = grown,
    keep_values: bool = False,
) -> RealRun:
    """Train a model of width n, grow it to k·n, and continue: what `mlp` computes in the limit, done by the package itself.

    >>> settings = dict(inputs=[[1.0]], targets=[1.0], sigma=[1, 1, 1], noise=[0.1, 0.1, 0.1], activation=nn.Tanh())
    >>> schedule = Schedule(steps=4, grow_at=2, rate=0.1)
    >>> real = train_model(8, 2, schedule, **settings, keep_values=True)
    >>> from reproduce.limits import FiniteWidth, mlp
    >>> program = mlp(FiniteWidth(8, 2, values=real.values), schedule, **settings)
    >>> max(abs(a[0] - b[0]) for a, b in zip(real.outputs, program)) < 1e-12
    True
    """
    make = partial(_make, len(inputs[0]), len(sigma), activation)
    x = torch.tensor(inputs, dtype=torch.float64)
    y = torch.tensor(targets, dtype=torch.float64)
    rates = schedule.rates()
    model = make(n)
    plan = plan_between(make, 1, n)
    names = [name for name, _ in model.named_parameters()]
    init_weights_(model, plan, std=dict(zip(names, map(float, sigma), strict=True)), seed=seed)
    optimizer = torch.optim.SGD(param_groups(model, plan, torch.optim.SGD, lr=schedule.rate))
    run = Run(model, optimizer, since=plan)
    values = _values("layer", model, n) if keep_values else {}
    outputs: list[list[float]] = []
    for t, rate in enumerate(rates):
        if t == schedule.grow_at:
            sizes = MupNoise(dict(zip(names, map(float, noise), strict=True)))
            narrow, run = run, grow(run, partial(make, k * n), sizes, rate, seed)
            if keep_values:
                still = grow(narrow, partial(make, k * n), MupNoise(0.0), rate, seed)
                values |= _noise_values(run.model, still.model, k * n)
        predicted = run.model(x)[:, 0]
        outputs.append(predicted.tolist())
        if rate:
            run.model.zero_grad()
            ((predicted - y).square().mean() / 2).backward()
            run.optimizers[0].step()
    return RealRun(outputs, values)


def _make(features: int, layers: int, activation: nn.Module, width: int) -> nn.Module:
    sizes = [features, *[width] * (layers - 1), 1]
    modules: list[nn.Module] = []
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        modules += [nn.Linear(fan_in, fan_out, bias=False, dtype=torch.float64)]
        modules += [activation] if i < layers - 1 else []
    return nn.Sequential(*modules)


def _values(prefix: str, model: nn.Module, width: int) -> dict[str, Tensor]:
    """A model's weights by the names of `mlp`: first layer by columns, and a readout that takes means, not sums."""
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    named = {f"{prefix} 0, {j}": column for j, column in enumerate(weights[0].T)}
    named |= {f"{prefix} {i}": weight for i, weight in enumerate(weights[1:-1], 1)}
    return named | {f"{prefix} {len(weights) - 1}": weights[-1][0] * width}


def _noise_values(noisy: nn.Module, still: nn.Module, width: int) -> dict[str, Tensor]:
    loud, quiet = _values("noise of layer", noisy, width), _values("noise of layer", still, width)
    return {name: loud[name] - quiet[name] for name in loud}
