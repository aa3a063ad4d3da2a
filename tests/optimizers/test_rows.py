"""Rows of other packages are proved on real steps, in float64 and float32, next to rows with one factor left out."""

from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import inf, isfinite, nan
from typing import Any

import pytest
import torch
from torch import nn, optim
from transformers.optimization import Adafactor

import mupscale as mu
from harness import muons
from harness.closeness import largest
from harness.controls import has, wrong_rules
from harness.known_optimizers import CASES, WRITTEN_RULES, Known, make_moonlight
from harness.refusals import refusal
from mupscale.plans.plan import Plan
from mupscale.plans.tensor_plan import TensorPlan
from mupscale.proofs.identity import expected_gradient, expected_weight
from mupscale.rules.axes import Axis
from mupscale.rules.optimizer_rule import UNIVERSAL
from mupscale.rules.optimizers import qualified_name, rule_for
from mupscale.rules.units import BLOCKS, G, W

HALF = Fraction(1, 2)
DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_row_is_exact(case: Known):
    for dtype, bound in DTYPES.items():
        assert mu.rules.check_optimizer(case.make_written, dtype=dtype, rules=WRITTEN_RULES) < bound


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_row_is_exact_for_the_class_of_its_package(case: Known, monkeypatch):
    if not case.installed:
        pytest.skip(f"{case.row} is not installed")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # torchao compiles its step
    for dtype, bound in DTYPES.items():
        if not (case.single and dtype is torch.float64):
            assert mu.rules.check_optimizer(case.make_original, dtype=dtype) < bound


@pytest.mark.parametrize("matrices", [True, False])
def test_moonlight_says_in_its_state_which_tensors_are_matrices(matrices):
    for dtype, bound in DTYPES.items():
        worst = mu.rules.check_optimizer(
            lambda params: make_moonlight(params, matrices), dtype=dtype, rules=WRITTEN_RULES
        )
        assert worst < bound


UNSEEN = {
    "eps[0]": "too small to act",
    "RMS": "written and never read",
    "lr_max": "only the largest of it and lr is used",
    "scheduled_lr": "written before it is read",
    "eps_sq": "smaller than the second moment here",
    "max_lr": "read with decouple_lr only",
    "kahan_comp": "kept for weights in 16 bits only",
    "compensation": "below the rounding of float64; the test of 16-bit weights shows it",
    "clip_threshold": "changed by padding only",
}
"""Factors that this trial cannot show, and why."""
NOT_HERE = {
    ("Adafactor", "eps[1]"): "read with scale_parameter only",
    ("Adafactor by size", "eps[1]"): "below the size of the weights; Adafactor absolute shows it",
    ("Adafactor relative", "eps[1]"): "below the size of the weights; Adafactor absolute shows it",
    ("Adafactor by size", "lr"): "changed by padding only",
    ("Adafactor absolute", "lr"): "changed by padding only",
    ("Muon, Keller Jordan", "weight_decay"): "1, because that of lr is",
    ("Muon, Keller Jordan", "lr"): "1 for the shapes of this trial; its part of the shape is seen",
}


@pytest.mark.parametrize("label", CASES)
def test_a_row_with_one_factor_left_out_is_caught(label: str):
    case = CASES[label]
    parameter = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
    optimizer = case.make_written([parameter])
    parameter.grad = torch.ones_like(parameter)
    for _ in range(8):
        optimizer.step()
    name = qualified_name(type(optimizer))
    row = WRITTEN_RULES[name].row(optimizer.param_groups[0], 2, optimizer.state[parameter])
    wrong = {key: rule for key, rule in wrong_rules(row).items() if has(optimizer, row, key)}
    seen = []
    for key, rule in wrong.items():
        try:
            mu.rules.check_optimizer(
                case.make_written, dtype=torch.float64, rules={**WRITTEN_RULES, name: rule}
            )
        except mu.MupscaleError:
            seen.append(key)
    assert seen
    unseen = set(wrong) - set(seen)
    assert unseen - UNSEEN.keys() == {key for of, key in NOT_HERE if of == label}


def grown(
    make: Any, axes: tuple[str, ...], steps: int = 6, dtype: torch.dtype = torch.float64, **extra: Any
) -> float:
    """The largest relative error of a tensor that grows by these axes while it trains."""
    entry = TensorPlan(("weight",), tuple(map(Axis.parse, axes)))

    class Weight(nn.Module):
        def __init__(self, shape: tuple[int, ...]) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype))

    torch.manual_seed(0)
    base = Weight(entry.base_shape)
    run = mu.Run(base, make([base.weight]))
    draw = torch.Generator().manual_seed(0)

    def gradient() -> torch.Tensor:
        return torch.randn(entry.base_shape, dtype=torch.float64, generator=draw).to(dtype)

    for _ in range(4):
        base.weight.grad = gradient()
        run.optimizer.step()
    wide = mu.grow(run, lambda: Weight(entry.wide_shape), plan=Plan({"weight": entry}), prove=False, **extra)
    worst = 0.0
    for _ in range(steps):
        base.weight.grad = gradient()
        weight = wide.model.get_parameter("weight")
        weight.grad = expected_gradient(entry, {"weight": base.weight.grad}, weight)
        run.optimizer.step()
        wide.optimizer.step()
        want = expected_weight(entry, {"weight": base.weight.detach()}, weight)
        error = float((weight.detach() - want).abs().max() / want.abs().max())
        assert isfinite(error)
        worst = max(worst, error)
    return worst


def test_an_error_that_is_not_a_number_is_the_largest():
    for values in ([1.0, nan], [nan, 1.0], [1.0, inf]):
        assert largest(values) == inf
    assert largest([1.0, 2.0]) == 2.0


PER_HEAD = mu.rules.OptimizerRule(
    lr=(W / G) ** HALF / BLOCKS**HALF,
    state={"momentum_buffer": G},
    neutral={"momentum"},
    entrywise=False,
    blocks="num_heads",
)


@pytest.mark.parametrize(
    "axes", [("out: 2x2 * 3", "in: 4x3"), ("out: 6x2", "in: 4x3"), ("out: 2x2 * 3x2", "in: 4")]
)
def test_copies_of_whole_heads_do_not_count_inside_a_head(axes):
    def make(params: Any) -> muons.PerHeadMuon:
        return muons.PerHeadMuon(params, lr=0.1, num_heads=2)

    name = qualified_name(muons.PerHeadMuon)
    assert grown(make, axes, rules={name: PER_HEAD}) < 1e-12
    whole = replace(PER_HEAD, lr=(W / G) ** HALF)
    off = grown(make, axes, rules={name: whole})
    assert (off > 1e-3) == ("2x2" in axes[0]), "control: all copies counted"


def test_heads_that_do_not_grow_as_wholes_are_refused():
    make = lambda params: muons.PerHeadMuon(params, num_heads=2)  # noqa: E731
    rules = {qualified_name(muons.PerHeadMuon): PER_HEAD}
    refusal(
        lambda: grown(make, ("out: 3x2 * 2", "in: 4x3"), rules=rules),
        "optimizer.blocks_not_whole",
        where="num_heads",
    )


def keller_jordan(params: Any) -> Any:
    return muons.MuonWithAuxAdam([{"params": params, "use_muon": True, "lr": 0.1, "weight_decay": 0.5}])


@pytest.mark.parametrize(
    "axes", [("out: 6x2", "in: 4x3"), ("2", "out: 6x2", "in: 4x3"), ("out: 6x2", "in: 4x3", "3", "3")]
)
def test_a_row_depends_on_the_number_of_dimensions(axes):
    assert grown(keller_jordan, axes, rules=WRITTEN_RULES) < 1e-12


def nanochat(params: Any) -> Any:
    return muons.NanochatMuonAdamW([{"params": params, **CASES["Muon, nanochat"].settings}])


@pytest.mark.parametrize(
    "axes",
    [
        ("out: 6x2", "in: 4x2"),
        ("out: 4x2", "in: 6x3"),
        ("out: 6x2+3", "in: 4x2+1"),
        ("2", "out: 6x2", "in: 4x3"),
    ],
)
def test_second_moments_of_nanochat_follow_the_shorter_side(axes):
    assert grown(nanochat, axes, rules=WRITTEN_RULES) < 1e-12


def test_a_shorter_side_that_changes_is_refused():
    refusal(
        lambda: grown(nanochat, ("out: 6x2", "in: 4x4"), rules=WRITTEN_RULES),
        "state.other_shorter_side",
        where="second_momentum_buffer",
    )


def test_a_value_without_a_row_is_refused_with_the_values_that_have_one():
    rules = {
        qualified_name(optim.AdamW): mu.rules.OptimizerRule.by_key("kind", {"adamw": rule_for(optim.AdamW)})
    }
    make = lambda params: optim.AdamW([{"params": params, "kind": "sgd"}])  # noqa: E731
    refusal(
        lambda: grown(make, ("out: 6x2", "in: 4x3"), rules=rules),
        "optimizer.no_row_for_value",
        where=["kind", "'sgd'", "'adamw'"],
    )
    row = rules[qualified_name(optim.AdamW)]
    for odd in (["adamw"], (["adamw"],), None):
        refusal(partial(row.row, {"kind": odd}, 2), "optimizer.no_row_for_value", where="kind")
    assert row.row({"kind": "adamw"}, 2).hyper, "control"


def test_rows_need_a_key_and_one_row_or_more():
    by_key: Any = mu.rules.OptimizerRule.by_key
    row = rule_for(optim.AdamW)
    refusal(lambda: by_key(None, {"adamw": row}), "argument.wrong_type", where="key")
    refusal(lambda: by_key("kind", [row]), "argument.wrong_type", where="rows")
    refusal(lambda: by_key("kind", {}), "argument.no_rows", where="rows")
    refusal(lambda: by_key("kind", {"adamw": row, "sgd": None}), "argument.wrong_type", where="'sgd'")
    assert by_key("kind", {"adamw": row}).by == "kind", "control"


def test_a_setting_that_scales_nothing_is_declared_in_one_line():
    make = lambda params: optim.AdamW([{"params": params, "lr_scale": 0.5}], lr=0.1)  # noqa: E731
    refusal(lambda: grown(make, ("out: 6x2", "in: 4x3")), "optimizer.unknown_setting", where="lr_scale")
    mu.rules.declare_neutral("lr_scale")
    try:
        assert grown(make, ("out: 6x2", "in: 4x3")) < 1e-12
    finally:
        UNIVERSAL.remove("lr_scale")


def test_a_padded_tensor_is_refused_where_a_mean_is_held_against_a_constant():
    make = CASES["StableAdamW"].make_written
    refusal(lambda: grown(make, ("out: 6x2+2", "in: 4x3"), rules=WRITTEN_RULES), "optimizer.takes_no_padding")
    unguarded = replace(
        WRITTEN_RULES["optimi.StableAdamW"].row({"decouple_lr": False}, 2), takes_padding=True
    )
    rules = {**WRITTEN_RULES, qualified_name(type(make([nn.Parameter(torch.ones(1))]))): unguarded}
    assert grown(make, ("out: 6x2+2", "in: 4x3"), rules=rules) > 1e-6, "control"


def test_compensated_sums_of_16_bit_weights_are_widened_bit_for_bit():
    def make(params: Any) -> Any:
        return CASES["AnyPrecision"].make_written(params)

    axes, dtype = ("out: 8x2", "in: 8x4"), torch.bfloat16
    assert grown(make, axes, dtype=dtype, rules=WRITTEN_RULES) == 0
    name = CASES["AnyPrecision"].row
    row = WRITTEN_RULES[name]
    wrong = replace(row, state={**row.state, "compensation": mu.rules.State(mu.rules.NEUTRAL)})
    rules = {**WRITTEN_RULES, qualified_name(type(make([nn.Parameter(torch.ones(1))]))): wrong}
    assert grown(make, axes, dtype=dtype, rules=rules) > 0, "control: the compensation is not scaled"


@pytest.mark.parametrize(
    "name", ["Adafactor", "Adafactor by size", "Adafactor absolute", "CAME", "Lion", "ADOPT"]
)
def test_rows_hold_on_padded_tensors(name):
    assert grown(CASES[name].make_written, ("out: 6x2+2", "in: 4x3+1"), rules=WRITTEN_RULES) < 1e-12


def test_a_relative_step_is_refused_on_padded_tensors():
    make, name = CASES["Adafactor relative"].make_written, "transformers.Adafactor"
    refusal(lambda: grown(make, ("out: 6x2+2", "in: 4x3"), rules=WRITTEN_RULES), "optimizer.takes_no_padding")
    row = WRITTEN_RULES[name].row({"relative_step": True, "scale_parameter": True}, 2)
    rules = {**WRITTEN_RULES, name: replace(row, takes_padding=True)}
    assert grown(make, ("out: 6x2+2", "in: 4x3"), rules=rules) > 1e-6, "control"


def test_a_relative_step_that_no_setting_scales_is_refused():
    def make(params: Any) -> Any:
        return Adafactor(params, scale_parameter=False, relative_step=True)

    axes, name = ("out: 6x2", "in: 4x3"), "transformers.Adafactor"
    refusal(lambda: grown(make, axes), "optimizer.refused_by_row", where=["relative_step", "scale_parameter"])
    row = WRITTEN_RULES[name].row({"relative_step": True, "scale_parameter": False}, 2)
    rules = {name: replace(row, refuse=None)}
    assert grown(make, axes, rules=rules) > 1e-6, "control"


def test_the_clipping_of_came_counts_padding():
    make = CASES["CAME"].make_written
    row = WRITTEN_RULES["came_pytorch.CAME"]
    wrong = replace(row, hyper={**row.hyper, "clip_threshold": mu.rules.NEUTRAL})
    rules = {**WRITTEN_RULES, qualified_name(type(make([nn.Parameter(torch.ones(1))]))): wrong}
    assert grown(make, ("out: 6x2+2", "in: 4x3+1"), rules=rules) > 1e-6, "control"


def test_schedule_free_state_in_eval_mode_is_refused():
    def make(params: Any) -> Any:
        optimizer = CASES["schedule-free AdamW"].make_written(params)
        optimizer.param_groups[0]["train_mode"] = False
        return optimizer

    refusal(
        lambda: grown(make, ("out: 6x2", "in: 4x3"), rules=WRITTEN_RULES),
        "optimizer.refused_by_row",
        where="optimizer.train()",
    )


def test_attributes_that_a_constructor_sets_are_kept():
    class Clipped(optim.SGD):
        def __init__(self, params: Any, lr: float = 0.1, bound: float = 1.0) -> None:
            super().__init__(params, lr=lr)
            self.bound = bound

    name = qualified_name(Clipped)
    model = nn.Linear(2, 2, bias=False)
    entry = TensorPlan(("weight",), (Axis.parse("out: 2x2"), Axis.parse("in: 2x2")))
    run = mu.Run(model, Clipped(model.parameters(), bound=7.0))
    wide = mu.grow(
        run,
        lambda: nn.Linear(4, 4, bias=False),
        plan=Plan({"weight": entry}),
        prove=False,
        rules={name: rule_for(optim.SGD)},
    )
    assert wide.optimizer.bound == 7.0  # type: ignore[attr-defined]
