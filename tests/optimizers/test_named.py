"""An optimizer as named data: every reader reads the same, and carrying it there and back changes nothing."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn, optim

import mupscale as mu
from harness.setups import SETUPS
from mupscale.optimizers.carry import carry_optimizer, made, renamed
from mupscale.optimizers.named import Moment, NamedGroup, NamedOptimizer
from mupscale.optimizers.read import parts, read_live, read_positions, read_state_dict
from mupscale.optimizers.settings import same_setting
from mupscale.optimizers.write import write_live, write_state_dict
from mupscale.plans.direction import Direction
from mupscale.rules.optimizers import rule_for


class Net(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.first = nn.Linear(5, n, bias=False, dtype=torch.float64)
        self.hidden = nn.Linear(n, n, bias=False, dtype=torch.float64)
        self.last = nn.Linear(n, 3, bias=False, dtype=torch.float64)

    def forward(self, x: Any) -> Any:
        return self.last(torch.tanh(self.hidden(torch.tanh(self.first(x)))))


PLAN = mu.plans.plan_between(Net, 4, 12)
THERE, BACK = Direction(PLAN), Direction(PLAN, back=True)
NAMES = [name for name, _ in Net(2).named_parameters()]
X = torch.randn(16, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
DENSE = [s for s in SETUPS.values() if not s.sparse and s.optimizer.__module__.startswith("torch.")]


def trained(setup: Any) -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net(4)
    optimizer = setup.optimizer(model.parameters(), **setup.settings)
    for _ in range(setup.warm):
        optimizer.zero_grad()
        (model(X) - X[:, :3]).square().mean().mul(setup.sign).backward()
        optimizer.step()
    return model, optimizer


def read(setup: Any) -> NamedOptimizer:
    model, optimizer = trained(setup)
    named, faults = read_live(optimizer, model, THERE, rule_for(setup.optimizer))
    assert not faults
    return named


def assert_same(found: NamedOptimizer, wanted: NamedOptimizer) -> None:
    """Equal settings of every tensor up to rounding, and equal state, however its groups are cut."""
    settings = [{n: g.settings for g in named.groups for n in g.names} for named in (found, wanted)]
    assert settings[0].keys() == settings[1].keys()
    for name, own in settings[1].items():
        assert settings[0][name].keys() - {"lr_factor"} == own.keys()
        for key, value in own.items():
            assert same_setting(settings[0][name][key], value), f"{name}: {key}"
        assert same_setting(settings[0][name].get("lr_factor", 1.0), 1.0)
    assert found.state.keys() == wanted.state.keys()
    for name, state in wanted.state.items():
        assert found.state[name].keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(found.state[name][key], value, rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("setup", DENSE, ids=lambda s: s.name)
def test_there_and_back_gives_the_same_named_optimizer(setup, split):
    start = read(setup)
    wide, faults = carry_optimizer(start, THERE, split=split)
    assert not faults
    plain = start.groups[0].settings
    assert all(g.settings == plain for g in wide.groups) is not split
    assert any(g.settings != {**plain, "lr_factor": 1.0} for g in wide.groups)
    back, faults = carry_optimizer(made(wide, THERE), BACK, split=split)
    assert not faults
    assert_same(made(back, BACK), start)


def test_a_setting_or_a_number_that_changed_is_seen():
    """Control: the comparison of named optimizers notices one setting, one entry, and a missing state."""
    start = read(SETUPS["AdamW"])
    group = start.groups[0]
    other = replace(group, settings={**group.settings, "eps": group.settings["eps"] * (1 + 1e-5)})
    with pytest.raises(AssertionError, match="eps"):
        assert_same(replace(start, groups=(other,)), start)
    moved = {**start.state[NAMES[0]], "exp_avg": start.state[NAMES[0]]["exp_avg"] * (1 + 1e-12)}
    with pytest.raises(AssertionError):
        assert_same(replace(start, state={**start.state, NAMES[0]: moved}), start)
    with pytest.raises(AssertionError):
        assert_same(replace(start, state={}), start)


def test_every_reader_reads_the_same():
    model, optimizer = trained(SETUPS["AdamW"])
    rule, tree = rule_for(optim.AdamW), optimizer.state_dict()
    live, _ = read_live(optimizer, model, THERE, rule)
    keyed = {
        "state": {NAMES[key]: value for key, value in tree["state"].items()},
        "param_groups": [{**g, "params": [NAMES[i] for i in g["params"]]} for g in tree["param_groups"]],
    }
    found = [
        read_state_dict(tree, THERE, optim.AdamW, rule, NAMES),
        read_state_dict(keyed, THERE, optim.AdamW, rule),
        read_positions(*parts(tree, "state"), [NAMES], rule, "state"),
    ]
    for named, faults in found:
        assert not faults
        assert [g.names for g in named.groups] == [g.names for g in live.groups] == [tuple(NAMES)]
        assert_same(named, live)


@pytest.mark.parametrize("by_name", [False, True])
def test_what_is_written_is_read_again(by_name):
    model, optimizer = trained(SETUPS["AdamW"])
    rule = rule_for(optim.AdamW)
    start, _ = read_live(optimizer, model, THERE, rule)
    assert_same(read_state_dict(write_state_dict(start, by_name), THERE, optim.AdamW, rule)[0], start)
    other = Net(4)
    assert_same(read_live(write_live(start, optimizer, other), other, THERE, rule)[0], start)


def test_the_rule_belongs_to_the_group():
    """Two groups with different rules are carried at once, each by its own units."""
    adam, sgd = rule_for(optim.AdamW), rule_for(optim.SGD)
    settings = {"lr": 1.0}
    groups = tuple(NamedGroup(("hidden.weight",), settings, rule, i) for i, rule in enumerate((adam, sgd)))
    alone = [carry_optimizer(NamedOptimizer("one", (group,)), THERE)[0].groups[0] for group in groups]
    both, faults = carry_optimizer(NamedOptimizer("both", groups), THERE)
    assert not faults
    assert [g.settings for g in both.groups] == [g.settings for g in alone]
    assert both.groups[0].settings["lr"] != both.groups[1].settings["lr"]
    assert [g.origin for g in both.groups] == [0, 1]


@dataclass
class Elsewhere:
    """Stands for a tensor in a file, or on other ranks."""

    shape: tuple[int, ...]


def test_state_that_lies_elsewhere_is_noted_and_not_touched():
    rule, lies = rule_for(optim.AdamW), Elsewhere((4, 4))
    group = NamedGroup(("hidden.weight",), {"lr": 1.0}, rule)
    start = NamedOptimizer("a file", (group,), {"hidden.weight": {"step": 3, "exp_avg": lies}})
    wide, faults = carry_optimizer(start, THERE, split=False)
    assert not faults
    moment = wide.state["hidden.weight"]["exp_avg"]
    assert isinstance(moment, Moment)
    assert moment.source is lies
    assert moment.making.wide_shape == (12, 12)
    assert wide.state["hidden.weight"]["step"] == 3
    assert wide.groups[0].settings == {"lr": 1.0}
    odd = {"hidden.weight": {"exp_avg": Elsewhere((4, 5)), "unheard": 1.0}}
    _, faults = carry_optimizer(replace(start, state=odd), THERE)
    assert [fault.code for fault in faults] == ["state.other_shape", "state.unknown_key"]
    assert "(4, 4)" in faults[0].what
    assert "'unheard'" in faults[1].what


def test_what_does_not_train_is_not_refused():
    rule = replace(rule_for(optim.SGD), refuse=lambda settings, state: "never exact")
    start = NamedOptimizer("SGD", (NamedGroup(tuple(NAMES), {"lr": 1.0}, rule),))
    assert len(carry_optimizer(start, THERE)[1]) == 3
    assert len(carry_optimizer(replace(start, idle={NAMES[0]}), THERE)[1]) == 2


def test_new_names_change_no_units():
    start = read(SETUPS["AdamW"])
    plan = PLAN.rename(lambda name: f"model.{name}")
    named = replace(
        start,
        groups=tuple(replace(g, names=tuple(f"model.{n}" for n in g.names)) for g in start.groups),
        state={f"model.{name}": state for name, state in start.state.items()},
    )
    assert_same(renamed(named, Direction(plan)), named)
