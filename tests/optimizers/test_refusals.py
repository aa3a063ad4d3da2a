"""What cannot be exact is refused, and what does not change is carried as it is."""

from typing import Any

import pytest
import torch
from torch import optim

import mupscale as mu
from harness.refusals import refusal
from mupscale.optimizers.carry import carry_state
from mupscale.optimizers.named import Moment, NamedGroup
from mupscale.optimizers.rows import stacked
from mupscale.optimizers.settings import cannot_be_exact
from mupscale.plans.direction import Direction
from mupscale.plans.plan import Plan, TensorPlan
from mupscale.rules.axes import Axis
from mupscale.rules.refused import why_refused

ADAMW = mu.rules.rule_for(optim.AdamW)


def entry(*axes: str) -> TensorPlan:
    return TensorPlan(("weight",), tuple(map(Axis.parse, axes)))


def carried(of: TensorPlan, state: dict[str, Any], trains: bool = True) -> tuple[dict[str, Any], list[Any]]:
    group = NamedGroup(("weight",), {"lr": 0.1, "eps": 0.1}, ADAMW)
    return carry_state(group, state, "weight", Direction(Plan({"weight": of})), trains)


def codes() -> dict[str, Any]:
    """State as bitsandbytes keeps it in 8 bits."""
    return {
        "step": 3,
        "state1": torch.arange(8, dtype=torch.uint8).reshape(2, 4),
        "absmax1": torch.ones(1),
        "qmap1": torch.arange(256.0),
    }


class Elsewhere:
    """A tensor that lies in a file."""

    shape = (256,)


def test_quantised_state_of_a_tensor_that_does_not_change_is_copied():
    state = codes()
    new, faults = carried(entry("2", "4"), state)
    assert not faults
    assert new.keys() == state.keys()
    assert all(torch.equal(torch.as_tensor(new[key]), torch.as_tensor(state[key])) for key in state)
    assert new["state1"].data_ptr() != state["state1"].data_ptr()
    new, faults = carried(entry("2", "4"), {**state, "qmap1": Elsewhere()})
    assert isinstance(new["qmap1"], Moment)
    assert new["qmap1"].making.wide_shape == (256,)


@pytest.mark.parametrize("trains", [True, False])
def test_quantised_state_of_a_tensor_that_grows_is_refused(trains):
    _, [fault] = carried(entry("out: 2x2", "4"), codes(), trains)
    assert "quantised in blocks" in fault.what


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
    refusal(lambda: stacked([NamedGroup(("a", "b"), {}, rule)], state), "b", "with which it is stacked")


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
    assert 'optim="adafactor" or optim="adamw_torch"' in reason
