"""Print docs/optimizers.md from the registry: `python docs/generate.py > docs/optimizers.md`.

A test compares the two, so the page cannot disagree with the code.
"""

from mupscale.rules.optimizers import REFUSED, RULES, Decay, OptimizerRule
from mupscale.rules.units import NEUTRAL, G, Units, W

HEAD = """# Which optimizers

Widening multiplies a tensor's weights by s and its gradients by r, with s r c = 1. A quantity with units W^a G^b is
multiplied by s^a r^b. This page is printed from the registry.

| optimizer | learning rate | weight decay | other settings | state |
|---|---|---|---|---|"""

TAIL = """
A setting or state that is not listed has no units and is copied; one that the registry does not know is refused.
*fill* is the share of a tensor that is not zero padding.

## A third-party optimizer

State its units and prove them on real steps:

```python
import torch
import mupscale as mu

class SignSGD(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(p.grad.sign(), alpha=group["lr"])

mu.register_optimizer(SignSGD, mu.OptimizerRule(lr=mu.W, decay=mu.Decay.DECOUPLED))
print(mu.check_optimizer(lambda params: SignSGD(params, lr=0.1, weight_decay=0.5)))
```

A wrong row is caught:

```python
mu.register_optimizer(SignSGD, mu.OptimizerRule(lr=mu.W / mu.G, decay=mu.Decay.DECOUPLED))
try:
    mu.check_optimizer(lambda params: SignSGD(params, lr=0.1, weight_decay=0.5))
except mu.MupscaleError as error:
    print(error)
else:
    raise SystemExit("the wrong units were not caught")
```

## Refused
"""


def spell(units: Units | tuple[Units, ...]) -> str:
    return f"({', '.join(map(str, units))})" if isinstance(units, tuple) else str(units)


def decay(rule: OptimizerRule) -> str:
    if rule.decay is None:
        return "none"
    words = {
        Decay.COUPLED: f"coupled: {G / W}",
        Decay.DECOUPLED: "decoupled: 1/lr",
        Decay.INDEPENDENT: "independent: 1",
    }
    kinds = [words[rule.decay]]
    if rule.decoupled_flag and rule.decay is not Decay.DECOUPLED:
        kinds.append(words[Decay.DECOUPLED])
    return ", or ".join(kinds)


def row(name: str, rule: OptimizerRule) -> str:
    settings = ", ".join(f"{key}: {spell(units)}" for key, units in rule.hyper.items()) or "none"
    states = ", ".join(f"{key}: {s.units}" for key, s in rule.state.items() if s.units != NEUTRAL) or "none"
    lr = str(rule.lr) + (", over the change of its own shape factor" if rule.shape_factor else "")
    return f"| {name.removeprefix('torch.optim.')} | {lr} | {decay(rule)} | {settings} | {states} |"


def page() -> str:
    rows = [row(name, rule) for name, rule in RULES.items() if name.startswith("torch.optim.")]
    refused = [f"- **{name.rstrip('.')}**: {reason}." for name, reason in REFUSED.items()]
    return "\n".join([HEAD, *rows, TAIL, *refused]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
