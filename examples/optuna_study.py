"""Noise and learning rate are tuned on a small pair in your own Optuna storage, and applied to a larger one.

    python examples/optuna_study.py

`mu.tune` takes a module or file with `build` and `train`, here this file itself. Any storage of Optuna's will do: give
PostgreSQL's address and start it on many machines (`mupscale tune` is the same as a command). The recipe is then
applied at twice the width; the control grows without noise and continues as the base does.
"""

import sys
import tempfile
from collections.abc import Callable

import optuna
import torch
from torch import nn

import mupscale as mu
from mupscale.studies import Settings

torch.set_num_threads(1)
STEPS, SMALL, LARGE, K = 150, 100, 200, 2  # below 100 units the best point still moves with the width
X = torch.randn(2048, 6, generator=torch.Generator().manual_seed(0))
Y = torch.sin(2 * X[:, :1] * X[:, 1:2]) + torch.cos(3 * X[:, 2:3])
batch = 64  # stored in the recipe


def build(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    )


def train(run: mu.Run, steps: int, report: Callable[[int, torch.Tensor], None]) -> None:
    for step in range(run.steps, steps):
        rows = torch.randint(len(X), (batch,), generator=torch.Generator().manual_seed(step))
        loss = (run.model(X[rows]) - Y[rows]).square().mean()
        run.model.zero_grad()
        loss.backward()
        run.optimizer.step()
        report(step, loss.detach())


storage = optuna.storages.InMemoryStorage()
with tempfile.TemporaryDirectory() as folder:
    chosen = Settings(
        width=SMALL, k=K, steps=STEPS, reference=LARGE, lrs=[2e-3, 8e-3], noises=[0, 0.2], factors=[1, 2],
        extend=0, halving=False,
    )  # fmt: skip
    recipe = mu.tune(sys.modules[__name__], chosen, storage=storage, folder=folder)
trials = optuna.load_study(study_name="mupscale", storage=storage).trials
print(f"{len(trials)} trials; learning rate {recipe.base_lr:g} for bases, {recipe.lr:g} after growth")
print(f"at width {SMALL} to {K * SMALL}: loss {recipe.loss:.4f}, without noise {recipe.control:.4f}")

# The target: a base at the reference, trained at the rate the study found, then grown by the recipe.
torch.manual_seed(0)
model = build(LARGE)
base = mu.Run(model, torch.optim.AdamW(model.parameters(), lr=recipe.base_lr))
train(base, STEPS, lambda step, loss: None)
losses: dict[str, list[float]] = {"recipe": [], "control": []}
grown = mu.upscale(base, lambda: build(K * LARGE), recipe=recipe)
plain = mu.grow(base, lambda: build(K * LARGE))
for name, run in (("recipe", grown), ("control", plain)):
    train(run, 2 * STEPS, lambda step, loss, kept=losses[name]: kept.append(float(loss)))
last = {name: sum(curve[-30:]) / 30 for name, curve in losses.items()}
print(f"at width {LARGE} to {K * LARGE}: loss {last['recipe']:.4f}, without noise {last['control']:.4f}")
assert recipe.loss < recipe.control
assert last["recipe"] < last["control"]
