"""An optimizer that the registry does not know is carried through growth by one row that states its units.

    python examples/register_optimizer.py

Lion (Chen et al., arXiv 2302.06675) moves a weight by the sign of an average of gradients. So its learning rate is
measured in weights, its average in gradients. The row is proved on real steps; a wrong row is refused.
"""

from typing import Any

import torch
from torch import nn

import mupscale as mu

torch.set_default_dtype(torch.float64)


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float, betas: Any = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            lr, (fast, slow) = group["lr"], group["betas"]
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"]).sub_(average.lerp(p.grad, 1 - fast).sign(), alpha=lr)
                average.lerp_(p.grad, 1 - slow)


def make(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 1))


def train(run: mu.Run, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        run.model.zero_grad()
        loss = (run.model(X) - Y).square().mean()
        loss.backward()
        run.optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def lion(params: list[nn.Parameter]) -> Lion:
    return Lion(params, lr=0.01, weight_decay=0.5)  # large, so that a wrong unit shows


X = torch.randn(128, 4, generator=torch.Generator().manual_seed(0))
Y = torch.sin(3 * X[:, :1]) * X[:, 1:2]
base = mu.Run(model := make(16), lion(model.parameters()))
train(base, 30)

try:
    mu.grow(base, lambda: make(64))
except mu.MupscaleError as error:
    print(f"without a row: {error}\n")

# A wrong row: were the rate measured like SGD's, in weights over gradients, copies would drift from the base.
row = {"decay": "decoupled", "state": {"average": mu.rules.G}, "neutral": {"betas"}}
mu.rules.register_optimizer(Lion, mu.rules.OptimizerRule(lr=mu.rules.W / mu.rules.G, **row))
try:
    mu.rules.check_optimizer(lion)
except mu.MupscaleError as error:
    print(f"a wrong row: {error}\n")
else:
    raise SystemExit("the wrong row was not caught")

# The right row, proved; then a run that continues.
mu.rules.register_optimizer(Lion, mu.rules.OptimizerRule(lr=mu.rules.W, **row))
print(f"the right row: off by {mu.rules.check_optimizer(lion):.1e} after 12 steps")
wide = mu.grow(base, lambda: make(64))
gap = max(abs(a - b) / a for a, b in zip(train(base, 50), train(wide, 50), strict=True))
print(f"width 16 and 64 over the next 50 steps: losses differ by {gap:.1e} at most")
assert gap < 1e-9
