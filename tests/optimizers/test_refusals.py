"""What cannot be exact is refused."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim
from transformers.optimization import Adafactor

import mupscale as mu
from harness import muons, published
from harness.known_optimizers import WRITTEN_RULES
from harness.refusals import refusal
from mupscale.optimizers.named import NamedGroup
from mupscale.optimizers.rows import stacked
from mupscale.optimizers.settings import cannot_be_exact, unknown_settings
from mupscale.plans.tensor_plan import TensorPlan
from mupscale.rules.axes import Axis
from mupscale.rules.muon_rows import CLASSES, muon_row
from mupscale.rules.optimizers import RULES, qualified_name, rule_for
from mupscale.rules.refused import why_refused

ADAMW = rule_for(optim.AdamW)


def entry(*axes: str) -> TensorPlan:
    return TensorPlan(("weight",), tuple(map(Axis.parse, axes)))


def test_a_tensor_without_state_has_zeros_in_the_stack_of_its_group():
    rule = mu.rules.OptimizerRule(lr=mu.rules.W, state={"exp_avg": mu.rules.G}, stacked=True)
    group = NamedGroup(("new", "a", "joined", "b"), {}, rule)
    found = stacked([group], {"a": {"exp_avg": torch.ones(2)}, "b": {"exp_avg": 2 * torch.ones(2)}})
    assert found.keys() == {"new"}
    assert torch.equal(
        found["new"]["exp_avg"], torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [2.0, 2.0]])
    )


def test_a_stack_of_different_shapes_is_refused():
    rule = mu.rules.OptimizerRule(lr=mu.rules.W, state={"exp_avg": mu.rules.G}, stacked=True)
    state = {"a": {"exp_avg": torch.ones(2)}, "b": {"exp_avg": torch.ones(3)}}
    error = refusal(lambda: stacked([NamedGroup(("a", "b"), {}, rule)], state), "state.cannot_be_stacked")
    assert error.faults[0].where == "b"


G, W = mu.rules.G, mu.rules.W


@pytest.mark.parametrize(
    ("hyper", "settings", "refused"),
    [
        ({"eps": G}, {"eps": 0.0}, True),
        ({"eps": G}, {"eps": 0}, True),
        ({"eps": G}, {"eps": 1e-8}, False),
        ({"adamw_eps": G}, {"adamw_eps": 0.0}, True),
        ({"floor": G**2}, {"floor": torch.tensor(0.0)}, True),
        ({"eps": (G**2, W)}, {"eps": (0.0, 1e-3)}, True),
        ({"eps": (G**2, W)}, {"eps": (1e-30, 0.0)}, False),
        ({"eps": (G, W)}, {"eps": (None, 0.0)}, False),
        ({"lambd": G / W, "max_lr": W}, {"lambd": 0.0, "max_lr": 0.0}, False),
    ],
)
def test_a_floor_of_zero_is_refused_where_gradients_are_zero(hyper, settings, refused):
    rule = mu.rules.OptimizerRule(lr=W, hyper=hyper)
    found = cannot_be_exact(rule, settings, "weight", entry("out: 2x2+1", "4"))
    assert bool(found) == refused
    assert not cannot_be_exact(rule, settings, "weight", entry("out: 2x2", "4")), "control: nothing is padded"


@pytest.mark.parametrize(
    "name",
    [
        "LAMB8bit",
        "FusedLAMB",
        "FusedMixedPrecisionLamb",
        "Lamb",
        "LARS8bit",
        "PytorchLARS",
        "Lars",
        "SophiaG",
    ],
)
def test_relatives_of_refused_optimizers_are_refused_by_name(name):
    assert why_refused(f"some.package.{name}")


@pytest.mark.parametrize("name", ["AdamW", "LambdaSGD", "Larson"])
def test_other_names_are_not(name):
    assert why_refused(f"some.package.{name}") is None


def test_the_remedy_for_layerwise_optimizers_names_one_that_is_supported():
    reason = why_refused("transformers.LayerWiseDummyOptimizer") or ""
    assert 'optim="adafactor"' in reason
    assert 'optim="adamw_torch"' in reason


@pytest.mark.parametrize("module", ["muon", "moonlight", "nanochat.optim", "mine"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_copy_of_muon_is_refused_with_the_line_to_write(module, name):
    kind = type(name, (optim.Optimizer,), {"__module__": module})
    for version in CLASSES[name]:
        line = f"register_optimizer({name}, {version!r})"
        refusal(lambda: rule_for(kind), "optimizer.unknown_class", where=line)


def test_the_line_to_write_works_and_is_proved():
    class Muon(muons.MoonlightMuon):
        pass

    refusal(lambda: rule_for(Muon, rules={}), "optimizer.unknown_class", where="Muon, 'moonlight'")
    try:
        mu.rules.register_optimizer(Muon, "moonlight")
        assert mu.rules.check_optimizer(lambda params: Muon(lr=0.1, wd=0.5, muon_params=params)) < 1e-12
        mu.rules.register_optimizer(Muon, replace_lr(muon_row("moonlight")))
        refusal(
            lambda: mu.rules.check_optimizer(lambda params: Muon(lr=0.1, wd=0.5, muon_params=params)),
            "optimizer.wrong_units",
        )
    finally:
        del RULES[qualified_name(Muon)]


def replace_lr(rule: mu.rules.OptimizerRule) -> mu.rules.OptimizerRule:
    """The control: the rate of another version."""
    other = muon_row("keller_jordan").row({}, 2).lr
    return replace(rule, rows={True: replace(rule.rows[True], lr=other), False: rule.rows[False]})


def test_a_version_of_muon_without_a_row_is_refused():
    refusal(
        lambda: mu.rules.register_optimizer("mine.Muon", "moon"),
        "optimizer.unknown_muon_version",
        where=["'moon'", "'moonlight'"],
    )


def test_a_setting_that_only_another_row_lists_is_refused():
    """A forgotten eps in one of two rows would stay unscaled."""
    adam = rule_for(optim.AdamW)
    forgot = replace(adam, hyper={})
    rules = {qualified_name(optim.AdamW): mu.rules.OptimizerRule.by_key("kind", {"a": adam, "b": forgot})}
    for kind, refused in (("a", False), ("b", True)):
        model = net(2)
        run = mu.Run(model, optim.AdamW([{"params": list(model.parameters()), "kind": kind}], lr=0.1))

        def act(run: mu.Run = run, kind: str = kind) -> list[Any]:
            return [
                lambda: mu.grow(run, lambda: net(4), plan=PLAN, rules=rules),
                lambda: mu.param_groups(net(4), PLAN, optim.AdamW, rules=rules, kind=kind),
                lambda: mu.step_in_units_(wide(kind), PLAN, model=MODEL, rules=rules),
            ]

        for action in act():
            if refused:
                refusal(action, "optimizer.unknown_setting", where="eps")
            else:
                action()


@pytest.mark.parametrize(
    ("value", "own", "refused"),
    [
        (0.5, ["lr"], True),
        ((0.5, 0.1), ["lr"], True),
        ([None, 0.5], ["lr"], True),
        (3, [], True),
        ((3, 4), [], True),
        (3, ["lr"], False),
        (True, [], False),
        ("name", [], False),
        (("name", True), [], False),
    ],
)
def test_numbers_without_units_are_refused(value, own, refused):
    group = NamedGroup((), {"lr": 0.1, "mine": value}, ADAMW)
    assert bool(unknown_settings([group], own, "here")) == refused


def net(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 1))


PLAN = mu.plans.plan_between(net, 2, 4)
PADDED = mu.plans.plan_between(net, 2, 5, by="padded")
MODEL = net(4)


def wide(kind: str) -> optim.Optimizer:
    return optim.AdamW([{"params": list(MODEL.parameters()), "kind": kind}])


@pytest.mark.parametrize("settings", [{"eps": 0.0}, {}], ids=["eps = 0", "control"])
def test_fresh_groups_refuse_what_cannot_be_exact(settings):
    assert any(entry.padded for entry in PADDED.tensors.values())
    group = lambda: mu.param_groups(net(5), PADDED, optim.AdamW, lr=0.1, **settings)  # noqa: E731
    refusal(group, "optimizer.divides_zero_by_zero", where="eps") if settings else group()


def test_fresh_groups_refuse_padding_where_a_mean_would_see_it():
    def group(plan: Any, n: int) -> Any:
        return mu.param_groups(net(n), plan, published.StableAdamW, lr=0.1, rules=WRITTEN_RULES)

    refusal(lambda: group(PADDED, 5), "optimizer.takes_no_padding")
    assert group(PLAN, 4), "control"


def test_settings_that_a_row_refuses_are_refused_in_fresh_groups_and_steps():
    model, betas = net(4), (0.9, 0.5)
    group = lambda: mu.param_groups(model, PLAN, optim.RAdam, lr=0.1, betas=betas)  # noqa: E731
    refusal(group, "optimizer.refused_by_row", where="betas")
    for optimizer, where in (
        (optim.RAdam(model.parameters(), lr=0.1, betas=betas), "betas"),
        (Adafactor(model.parameters(), scale_parameter=False), "relative_step"),
    ):
        refusal(
            partial(mu.step_in_units_, optimizer, PLAN, model=model), "optimizer.refused_by_row", where=where
        )
    assert mu.param_groups(model, PLAN, optim.RAdam, lr=0.1), "control"


@pytest.mark.parametrize("steps", [0, 5])
def test_steps_in_units_are_refused_while_the_row_does_not_hold(steps):
    model, x = net(4), torch.ones(2, 3)
    optimizer = optim.RAdam(model.parameters(), lr=0.1)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(steps):
        step()
    mu.step_in_units_(optimizer, PLAN, model=model)
    if steps < 5:
        refusal(step, "optimizer.refused_by_row", where="RAdam")
    else:
        step()


def test_a_row_without_decay_asks_for_a_kind_of_decay():
    row = mu.rules.OptimizerRule(lr=W)
    group = NamedGroup((), {"lr": 0.1, "weight_decay": 0.1, "beta": 0.9}, row)
    beta, decay = unknown_settings([group], ["lr", "weight_decay", "beta"], "here")
    assert beta.code == decay.code == "optimizer.unknown_setting"
    assert "decay=Decay.DECOUPLED" in decay.remedy
    assert "declare_neutral" in beta.remedy, "control: another setting"
    known = replace(row, decay=mu.rules.Decay.DECOUPLED, neutral={"beta"})
    assert not unknown_settings([replace(group, rule=known)], ["lr", "weight_decay", "beta"], "here")
