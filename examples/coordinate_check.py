"""μP from scratch: constants written down at one width hold at every width, and the coordinate check shows it.

    python examples/coordinate_check.py

Initialisation, learning rates, eps and clipping are given at width 64 and put into each tensor's units by a plan. Then
activations move by the same amount at all widths: the slopes are near 0. The control trains the same models as torch
makes them, with one learning rate for all; its activations move more, the wider the model.
"""

import torch
import torch.nn.functional as F
from torch import nn

import mupscale as mu

torch.set_num_threads(1)
REFERENCE, WIDTHS, RATE = 64, (64, 128, 256, 512), 1e-2
X = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
Y = torch.randint(10, (64,), generator=torch.Generator().manual_seed(1))


def make(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def with_mup(width: int, seed: int) -> mu.Run:
    torch.manual_seed(seed)
    plan = mu.plans.plan_between(make, REFERENCE, width)
    model = make(width)
    mu.init_weights_(model, plan, std=make(REFERENCE), seed=seed)
    optimizer = torch.optim.AdamW(mu.param_groups(model, plan, torch.optim.AdamW, lr=RATE, eps=1e-6))
    mu.clip_before_step_(optimizer, plan, model=model, max_norm=1.0)
    return mu.Run(model, optimizer)


def without(width: int, seed: int) -> mu.Run:
    torch.manual_seed(seed)
    model = make(width)
    return mu.Run(model, torch.optim.AdamW(model.parameters(), lr=RATE, eps=1e-6))


def step(run: mu.Run, _: int) -> None:
    run.model.zero_grad()
    F.cross_entropy(run.model(X), Y).backward()
    run.optimizer.step()


found = {}
for name, start in (("μP", with_mup), ("control: one rate for all widths", without)):
    found[name] = mu.diagnostics.coordinate_check(
        start, step=step, probe=lambda model: model(X), widths=WIDTHS, steps=4, seeds=3
    )
    print(f"{name}\n{found[name]}\nthe slope farthest from 0: {found[name].worst:+.3f}\n")

flat, steep = (abs(measured.worst) for measured in found.values())
assert flat < 0.15 < 0.4 < steep
