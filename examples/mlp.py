"""An MLP is trained, grown four times wider in the middle of its run, and continues.

    python examples/mlp.py

Model and optimizer state become those of the wide run. Without noise its losses are the base's; with noise they
fall below the base's. The control has the same wide weights and moments under the base's own settings.
"""

import torch
from torch import nn

import mupscale as mu

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)  # so that "the same" means fifteen digits
torch.manual_seed(0)

X = torch.randn(512, 8)
Y = torch.sin(2 * X[:, :1]) * X[:, 1:2] + (X[:, 2:3] * X[:, 3:4]).tanh()
GROW, END = 300, 600


def make(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
    )


def train_step(run: mu.Run, step: int) -> torch.Tensor:
    rows = torch.randint(len(X), (64,), generator=torch.Generator().manual_seed(step))
    loss = (run.model(X[rows]) - Y[rows]).square().mean()
    run.model.zero_grad()
    loss.backward()
    run.optimizer.step()
    return loss.detach()


def train(run: mu.Run, steps: range) -> list[float]:
    return [float(train_step(run, step)) for step in steps]


model = make(16)
settings = {"lr": 2e-2, "eps": 1e-3, "weight_decay": 0.1}
base = mu.Run(model, torch.optim.AdamW(model.parameters(), **settings))
train(base, range(GROW))

# What growth would do, shown on copies before anything is grown: gradients tensor by tensor, then real steps.
certificate = mu.verify(base, lambda: make(64), step=train_step)
print(certificate)
certificate.raise_if_broken()

wide = mu.grow(base, lambda: make(64))
noisy = mu.upscale(base, lambda: make(64), mu.SignalNoise(0.05), seed=0)
control = mu.grow(base, lambda: make(64))
for group in control.optimizer.param_groups:
    group.update(settings)

runs = {"base": base, "wide": wide, "noisy": noisy, "control": control}
curves = {name: train(run, range(GROW, END)) for name, run in runs.items()}
print("\nstep        width 16         width 64   with noise      control")
for i in range(0, END - GROW, 50):
    exact = f"{curves['base'][i]:15.12f}  {curves['wide'][i]:15.12f}"
    print(f"{GROW + i:4} {exact} {curves['noisy'][i]:12.6f} {curves['control'][i]:12.6f}")


def distance(name: str) -> float:
    return max(abs(a - b) / a for a, b in zip(curves["base"], curves[name], strict=True))


gain = sum(curves["base"][-50:]) / sum(curves["noisy"][-50:])
print(f"\nlargest relative difference {distance('wide'):.1e}; control {distance('control'):.1e}")
print(f"over the last 50 steps the base's loss is {gain:.2f} times that of the run with noise")
assert distance("wide") < 1e-9 < 1e-2 < distance("control")
assert gain > 1
