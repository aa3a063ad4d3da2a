"""Copies of the weights in optimizer state get the noise of the weights; moments get none."""

from typing import Any

import pytest
import torch
from torch import nn

import mupscale as mu
from harness.draws import data, seeded
from harness.refusals import refusal
from mupscale.rules import G, OptimizerRule, State, W
from mupscale.rules.optimizers import RULES

NOISE = mu.MupNoise(0.5)


class Master(torch.optim.Optimizer):
    """SGD with momentum on copies of the weights, which it writes over the weights after every step."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(master=p.detach().clone(), momentum=torch.zeros_like(p))
                state["momentum"].mul_(0.9).add_(p.grad)
                p.copy_(state["master"].sub_(state["momentum"], alpha=group["lr"]))


NAME = f"{Master.__module__}.Master"
COPY = {NAME: OptimizerRule(lr=W / G, state={"master": State(W, copy=True), "momentum": G})}
MISSED = {NAME: OptimizerRule(lr=W / G, state={"master": W, "momentum": G})}


def net(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 1))


def train(run: mu.Run, steps: int) -> None:
    for _ in range(steps):
        run.optimizer.zero_grad()
        run.model(data(5, 3)).square().mean().backward()
        run.optimizer.step()


def trained(make: Any) -> mu.Run:
    model = seeded(net, 4)
    run = mu.Run(model, make(model.parameters()))
    train(run, 3)
    return run


def noise_in(run: mu.Run, key: str | None, rules: Any = None) -> dict[str, torch.Tensor]:
    """What noise changed in the weights, or in a state."""
    pair = (mu.upscale(run, lambda: net(8), NOISE, rules=rules), mu.grow(run, lambda: net(8), rules=rules))
    found = []
    for one in pair:
        named = dict(one.model.named_parameters())
        state = one.optimizer.state
        found.append({n: (p if key is None else state[p][key]).detach() for n, p in named.items()})
    return {name: found[0][name] - found[1][name] for name in found[0]}


@pytest.mark.parametrize(
    ("make", "key", "moment", "rules"),
    [(lambda p: torch.optim.ASGD(p, lr=0.01, t0=1), "ax", None, None), (Master, "master", "momentum", COPY)],
    ids=["ASGD", "master weights"],
)
def test_a_copy_gets_the_noise_of_its_weight(make: Any, key: str, moment: str | None, rules: Any):
    run = trained(make)
    weights, copies = noise_in(run, None, rules), noise_in(run, key, rules)
    for name, delta in weights.items():
        assert torch.allclose(copies[name], delta, atol=1e-15), name
        assert delta.any() == (name.endswith("weight")), name
    if moment is not None:
        assert not any(delta.any() for delta in noise_in(run, moment, rules).values())
    missed = MISSED if rules is not None else {**RULES, "torch.optim.ASGD": _without_copy()}
    assert not any(d.any() for d in noise_in(run, key, missed).values()), (
        "control: a row that does not say so"
    )


def _without_copy() -> OptimizerRule:
    row = RULES["torch.optim.ASGD"]
    return OptimizerRule(
        lr=row.lr, hyper=row.hyper, decay=row.decay, state={**row.state, "ax": W}, neutral=row.neutral
    )


@pytest.mark.parametrize(("rules", "survives"), [(COPY, True), (MISSED, False)])
def test_noise_outlives_a_step_on_master_weights(rules: Any, survives: bool):
    run = trained(Master)
    noisy = mu.upscale(run, lambda: net(8), NOISE, rules=rules)
    exact = mu.grow(run, lambda: net(8), rules=rules)
    for one in (noisy, exact):
        train(one, 1)
    weights = [one.model.get_parameter("2.weight") for one in (noisy, exact)]
    apart = (weights[0] - weights[1]).detach().abs().max()
    assert (float(apart) > 0.1) is survives


def test_sharded_loading_gives_copies_the_same_noise():
    run = trained(lambda p: torch.optim.ASGD(p, lr=0.01, t0=1))
    live = mu.upscale(run, lambda: net(8), NOISE)
    model, plan = net(8).double(), mu.plans.plan_between(net, 4, 8)
    settings: dict[str, Any] = {"lr": 0.01, "t0": 1}
    wide = mu.Run(model, torch.optim.ASGD(mu.param_groups(model, plan, torch.optim.ASGD, **settings)))
    loaded = mu.load_grown_(run, wide, plan=plan, noise=NOISE)
    for name, p in loaded.model.named_parameters():
        other = live.model.get_parameter(name)
        want, found = live.optimizer.state[other]["ax"], loaded.optimizer.state[p]["ax"]
        assert torch.equal(found, want), name


def test_check_optimizer_finds_a_copy_that_its_row_does_not_declare():
    refused = lambda: mu.rules.check_optimizer(lambda p: Master(p, 0.1), rules=MISSED)  # noqa: E731
    refusal(refused, "optimizer.undeclared_weight_copy", where="'master'")
    assert mu.rules.check_optimizer(lambda p: Master(p, 0.1), rules=COPY) < 1e-12


def test_a_copy_has_the_units_of_the_weights():
    refusal(lambda: State(G, copy=True), "optimizer.copy_in_other_units")
