"""Every name of the Trainer's optim= has a row or is refused by name, and the names with a row train in units."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import mupscale as mu
from harness import published
from harness.known_optimizers import WRITTEN_RULES, stand_ins
from harness.refusals import refusal
from mupscale.rules.optimizers import RULES, qualified_name, rule_for
from mupscale.rules.refused import REFUSED
from mupscale.trainers.menu import MENU, REFUSED_NAMES, named_optimizer

NOT_HERE = {"adamw_torch_xla": "torch_xla has AdamW for its own devices"}


def make(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )


def unknown(names: set[str]) -> set[str]:
    return names - MENU.keys() - REFUSED_NAMES.keys()


def test_every_name_of_the_installed_menu_is_supported_or_refused():
    names = {name.value for name in pytest.importorskip("transformers.training_args").OptimizerNames}
    assert unknown(names) == set()
    assert unknown(names | {"adamw_next"}) == {"adamw_next"}, "control: a name of tomorrow is noticed"
    assert not MENU.keys() & REFUSED_NAMES.keys()
    assert len(names & MENU.keys()) == 29


def test_every_name_leads_to_a_row_or_to_a_reason():
    assert {named.kind for named in MENU.values()} <= RULES.keys()
    assert set(REFUSED_NAMES.values()) <= REFUSED.keys()


@pytest.mark.parametrize("name", REFUSED_NAMES)
def test_a_refused_name_says_why(name):
    refusal(
        lambda: mu.trainers.optimizer_in_units(make(4), mu.plans.plan_between(make, 2, 4), name, lr=0.1),
        "optimizer.cannot_be_exact",
        where=REFUSED[REFUSED_NAMES[name]],
    )


def test_a_name_that_is_not_on_the_menu_is_refused():
    refusal(lambda: named_optimizer("adamw_tork"), "trainer.unknown_optimizer_name", where="'adamw_torch'")


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", MENU)
def test_a_name_trains_in_units_by_its_groups_and_by_its_steps(name, monkeypatch):
    """`optimizer_in_units` scales the groups; the callback keeps the Trainer's groups and scales every step."""
    if name in NOT_HERE:
        pytest.skip(NOT_HERE[name])
    for path, module in stand_ins().items():
        monkeypatch.setitem(sys.modules, path, module)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # torchao compiles its step
    torch.manual_seed(0)
    plan, model, x = mu.plans.plan_between(make, 4, 8), make(8), torch.randn(16, 3)
    kind, own = named_optimizer(name)
    by_groups, by_steps, plain = (copy.deepcopy(model) for _ in range(3))
    optimizers = [
        mu.trainers.optimizer_in_units(by_groups, plan, name, lr=1e-2, rules=WRITTEN_RULES),
        kind(by_steps.parameters(), lr=1e-2, **own),  # type: ignore[call-arg]
        kind(plain.parameters(), lr=1e-2, **own),  # type: ignore[call-arg]
    ]
    handle = mu.step_in_units_(optimizers[1], plan, model=by_steps, rules=WRITTEN_RULES)
    for trained, optimizer in zip((by_groups, by_steps, plain), optimizers, strict=True):
        if hasattr(optimizer, "train"):
            optimizer.train()
        for _ in range(8):
            trained.zero_grad()
            trained(x).square().mean().backward()
            optimizer.step()
    handle.remove()
    assert torch.equal(by_groups.get_parameter("2.weight"), by_steps.get_parameter("2.weight"))
    assert not torch.equal(plain.get_parameter("2.weight"), by_steps.get_parameter("2.weight")), (
        "control: without units"
    )
    assert not torch.equal(model.get_parameter("2.weight"), by_steps.get_parameter("2.weight")), "it moved"


def test_values_that_an_optimizer_keeps_in_its_groups_are_kept_at_the_reference():
    """A schedule-free group sums powers of its rates; the Trainer saves the sum of the reference's rates."""
    plan = mu.plans.plan_between(make, 4, 8)
    model, base = make(8), make(4)
    kind = published.AdamWScheduleFree
    wide, small = kind(model.parameters(), lr=0.1), kind(base.parameters(), lr=0.1)
    mu.step_in_units_(wide, plan, model=model, rules=WRITTEN_RULES)
    for trained, optimizer in ((model, wide), (base, small)):
        for _ in range(3):
            trained(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    kept = [
        {k: g[k] for k in ("k", "lr_max", "weight_sum")} for g in (*wide.param_groups, *small.param_groups)
    ]
    assert kept[0] == pytest.approx(kept[1])


def test_a_value_without_units_that_a_step_writes_is_refused():
    class Writes(AdamW):
        def step(self, closure=None):
            self.param_groups[0]["written"] = 1.0
            return super().step(closure)

    model = make(8)
    optimizer = Writes(model.parameters())
    rules = {qualified_name(Writes): rule_for(AdamW)}
    mu.step_in_units_(optimizer, mu.plans.plan_between(make, 4, 8), model=model, rules=rules)
    model(torch.ones(2, 3)).sum().backward()
    refusal(optimizer.step, "optimizer.writes_into_groups", where="written")
