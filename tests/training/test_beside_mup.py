"""What holds here where the `mup` package is wrong: each docstring says what `mup` does.

Training is compared in float64; next to it stands the wrong rule, which must be seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from harness.closeness import LAST_PLACES, assert_broken, assert_exact, assert_same_tensors, difference
from harness.runs import train_on, trained
from harness.tensors import tensors_of
from harness.toys import MLP, WIDE_MLP, TiedModel, loss_on, mlp, tokens, trained_mlp, vectors, wide_mlp
from harness.wrong import without
from mupscale.rules.axes import Axis
from mupscale.rules.optimizer_rule import change_for
from mupscale.rules.optimizers import RULES
from mupscale.rules.scale import Scale
from mupscale.rules.sizes import noise_size
from mupscale.rules.units import G, W

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def gap(make_optimizer: MakeOptimizer, **options: Any) -> float:
    """How far the base and its widened copy part in ten steps."""
    base = trained_mlp(make_optimizer)
    wide = mu.grow(base, wide_mlp, **options)
    return difference(train_on(wide, vectors()), train_on(base, vectors()))


def test_a_tied_readout_with_a_bias_grows():
    """`MuSharedReadout` builds its Linear with in and out swapped, so its default bias has the wrong size."""
    plan = mu.plans.plan_between(TiedModel, 8, 32, loss=loss_on(tokens()))
    assert plan["readout.bias"].wide_shape == (7,)
    assert plan["readout.weight"] is plan["embed.weight"]
    gaps = []
    for chosen in (plan, plan.fold("norm.weight", 4)):
        torch.manual_seed(0)
        base = trained(TiedModel(8), lambda m: torch.optim.AdamW(m.parameters(), eps=1e-3), tokens(3))
        wide = mu.grow(base, lambda: TiedModel(32), plan=chosen, prove=False)
        assert wide.model.get_parameter("readout.weight") is wide.model.get_parameter("embed.weight")
        gaps.append(difference(train_on(wide, tokens()), train_on(base, tokens())))
    assert_exact(gaps[0])
    assert_broken(gaps[1])


def test_noise_of_a_tied_embedding_is_the_same_at_every_width():
    """`MuSharedReadout` multiplies the embedding by the square root of the width: 2.83 at 64, 5.65 at 256."""
    for width in (64, 256):
        plan = mu.plans.plan_between(
            TiedModel, 8, width, declared=mu.Declared(folds={"norm.weight": Fraction(8, width)})
        )
        tied, matrix = plan["embed.weight"], plan["hidden.weight"]
        assert noise_size(tied.axes, tied.fold) == Scale.of(1)
        assert noise_size(matrix.axes) == Scale.of(width // 8) ** Fraction(-1, 2), "control: a matrix moves"


class Stack(nn.Module):
    """Three experts in one tensor (E, out, in), all applied."""

    def __init__(self, n: int, m: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(3, n)
        self.experts = nn.Parameter(torch.randn(3, m, n) / n)
        self.readout = nn.Linear(m, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inputs(x))
        mixed = torch.tanh(torch.einsum("eoi,bi->beo", self.experts, h)).mean(1)
        out: Tensor = self.readout(mixed)
        return out


def test_stacked_matrices_get_the_rate_of_a_matrix():
    """`MuSGD` reads dimensions 1 and 0 of an (E, out, in) weight as fan-in and fan-out: lr/8 in place of lr."""
    searched = mu.plans.plan_between(lambda sizes: Stack(*sizes), (4, 4), (8, 8), loss=loss_on(vectors()))
    declared = mu.plans.plan_between(
        lambda sizes: Stack(*sizes),
        (4, 4),
        (8, 8),
        declared=mu.Declared(roles={"experts": {1: "out", 2: "in"}}),
    )
    assert searched == declared
    change = searched["experts"].change
    assert (str(change.s), str(change.r)) == ("1/2", "1/2")
    assert change.factor(RULES["torch.optim.SGD"].lr) == Scale.of(1)

    uneven = mu.plans.plan_between(lambda sizes: Stack(*sizes), MLP, WIDE_MLP, loss=loss_on(vectors()))
    assert str(uneven["experts"].change.factor(RULES["torch.optim.SGD"].lr)) == "2"
    gaps = []
    for wrong in (1, 8):
        torch.manual_seed(0)
        base = trained(Stack(*MLP), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), vectors(3))
        wide = mu.grow(base, lambda: Stack(*WIDE_MLP), plan=uneven)
        for group in wide.optimizers[0].param_groups:
            if any(p is wide.model.experts for p in group["params"]):
                group["lr"] /= wrong
        gaps.append(difference(train_on(wide, vectors()), train_on(base, vectors())))
    assert_exact(gaps[0])
    assert_broken(gaps[1])


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"weight_decay": 0.1, "eps": 1e-3}, {"decay": mu.rules.Decay.DECOUPLED}),
        (
            {"weight_decay": 1.0, "decoupled_weight_decay": True},
            {"decoupled_flag": None, "neutral": {"betas", "amsgrad", "decoupled_weight_decay"}},
        ),
    ],
    ids=["coupled", "decoupled"],
)
def test_both_decays_of_adam_have_their_own_rule(settings, wrong):
    """`MuAdam` cannot tell which decay torch's Adam applies, and multiplies an L2 penalty by the width multiplier."""

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-2, **settings)

    if "decoupled_weight_decay" not in settings:
        wide = mu.grow(trained_mlp(adam), wide_mlp)
        (hidden,) = (
            g for g in wide.optimizers[0].param_groups if any(p.shape == (24, 8) for p in g["params"])
        )
        assert hidden["weight_decay"] == pytest.approx(0.1 * 2 / 4, rel=LAST_PLACES)  # G/W: k_in / k_out
    assert_exact(gap(adam))
    assert_broken(gap(adam, rules=without(torch.optim.Adam, **wrong)))


def test_noise_of_a_scalar_like_tensor_has_no_power_of_the_width():
    """`mup.init.ones_` on a tensor without a width raises "Sampler for (inf, inf) tensors should have mean 0"."""
    assert (
        noise_size([])
        == noise_size([Axis.fixed(2)])
        == noise_size([Axis.fixed(2), Axis.fixed(5)])
        == Scale.of(1)
    )
    plan = mu.plans.plan_between(lambda sizes: mlp(*sizes), MLP, WIDE_MLP)
    assert "std = σ̄ · 1\n" in plan.explain("4.bias")
    assert "std = σ̄ · 1\n" not in plan.explain("4.weight"), "control: a readout's size moves"


def optimizers_among(names: dict[str, Any]) -> list[str]:
    return [n for n, v in names.items() if inspect.isclass(v) and issubclass(v, torch.optim.Optimizer)]


def test_a_star_import_brings_no_optimizer():
    """`from mup import *` also exports torch's Adam, AdamW and SGD, which then train without muP."""
    names: dict[str, Any] = {}
    exec("from mupscale import *", names)
    assert "infer_plan" in names
    assert optimizers_among(names) == []
    exec("from torch.optim import *", names)
    assert "AdamW" in optimizers_among(names), "control: an exported optimizer is seen"


def test_inferring_a_plan_changes_no_model():
    """`set_base_shapes` changes weights in place, so that a second call, or one after loading, spoils them."""
    torch.manual_seed(0)
    models = mlp(*MLP), mlp(*WIDE_MLP)
    before = [{n: t.clone() for n, t in tensors_of(model).items()} for model in models]
    plans = [mu.infer_plan(*models), mu.infer_plan(*models, loss=loss_on(vectors()))]
    assert plans[0] == plans[1]
    for model, kept in zip(models, before, strict=True):
        assert_same_tensors(tensors_of(model), kept)
        assert all(vars(p) == {} for p in model.parameters())


@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
def test_the_shape_factor_of_muon_is_counted_once(adjust):
    """Where Muon already multiplies lr by a factor of the shape, muP's factor on top counts it twice."""
    group = {"adjust_lr_fn": adjust}
    rule = RULES["torch.optim.Muon"].row(group, 2)
    matrix = mu.plans.plan_between(lambda sizes: mlp(*sizes), MLP, WIDE_MLP)["2.weight"]
    (rows, columns), (wide_rows, wide_columns) = matrix.base_shape, matrix.wide_shape
    if adjust == "match_rms_adamw":
        own = Fraction(max(wide_rows, wide_columns), max(rows, columns))
    else:
        own = max(Fraction(1), Fraction(wide_rows, wide_columns)) / max(Fraction(1), Fraction(rows, columns))
    factor = change_for(rule, group, matrix.change, matrix.axes).factor(rule.lr)
    half = Fraction(1, 2)
    assert factor * Scale.of(own) ** half == matrix.change.factor((W / G) ** half) == Scale.of(2) ** half
    assert own != 1
