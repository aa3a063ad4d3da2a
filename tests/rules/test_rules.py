"""Laws of the table. No cell is retyped, except the paper's two tables, which are the independent oracle."""

import math
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mupscale as mu
from harness.draws import data
from harness.profiles import examples
from harness.refusals import refusal
from mupscale.rules.optimizer_rule import Decay, decay_factor
from mupscale.rules.optimizers import RULES, qualified_name, rule_for
from mupscale.rules.sizes import noise_size

G, W = mu.rules.G, mu.rules.W
counts = st.integers(1, 12)
fractions = st.fractions(min_value=Fraction(1, 60), max_value=60, max_denominator=60)
powers = st.fractions(min_value=-3, max_value=3, max_denominator=4)
scales = st.builds(
    lambda f, p, g, q: mu.rules.Scale.of(f) ** p * mu.rules.Scale.of(g) ** q,
    fractions,
    powers,
    fractions,
    powers,
)
changes = st.builds(mu.rules.Change, scales, fractions)


def matrix(k_out: int, k_in: int, fold: str = "1") -> mu.rules.Change:
    axes = (mu.rules.Axis.parse(f"out: 4x{k_out}"), mu.rules.Axis.parse(f"in: 4x{k_in}"))
    return mu.plans.TensorPlan(("w",), axes, mu.rules.Scale.of(fold)).change


def vector(k: int) -> mu.rules.Change:
    return mu.plans.TensorPlan(("w",), (mu.rules.Axis.parse(f"out: 4x{k}"), mu.rules.Axis.fixed(3))).change


def readout(k: int) -> mu.rules.Change:
    return mu.plans.TensorPlan(("w",), (mu.rules.Axis.fixed(3), mu.rules.Axis.parse(f"in: 4x{k}"))).change


# Units


@examples(100)
@given(changes)
def test_s_times_r_times_c_is_one(change):
    assert (change.s * change.r * mu.rules.Scale.of(change.c)).is_one


@examples(100)
@given(changes, powers, powers)
def test_units_multiply_as_the_quantities_do(change, a, b):
    assert change.factor(W**a * G**b) == change.factor(W) ** a * change.factor(G) ** b
    assert (change.factor(W), change.factor(G)) == (change.s, change.r)


@examples(60)
@given(changes)
def test_decay_per_step_does_not_depend_on_the_width(change):
    for rule in RULES.values():
        for row in rule.every_row:
            lr = change.factor(row.lr)
            assert (decay_factor(Decay.DECOUPLED, change, lr) * lr).is_one
            assert decay_factor(Decay.COUPLED, change, lr) * change.s == change.r, "decay · W is a gradient"
            assert decay_factor(Decay.INDEPENDENT, change, lr).is_one
            assert decay_factor(None, change, lr).is_one


@examples(60)
@given(counts, counts, scales)
def test_the_symmetry_theta_changes_what_the_paper_says_and_nothing_else(k_out, k_in, theta):
    """A -> Aθ, W -> W/θ: C/θ^(1+m), Dθ², D~θ^(1+m), Eθ (the paper's proposition)."""
    plain = matrix(k_out, k_in)
    moved = mu.rules.Change(plain.s / theta, plain.c)
    assert moved.r == plain.r * theta
    for m in (0, 1):
        rates = [change.factor(W * G**-m) for change in (moved, plain)]
        assert rates[0] == rates[1] / theta ** (1 + m)
        decay = [decay_factor(Decay.DECOUPLED, c, r) for c, r in zip((moved, plain), rates, strict=True)]
        assert decay[0] == decay[1] * theta ** (1 + m)
    assert moved.factor(G) == plain.factor(G) * theta
    assert moved.factor(G / W) == plain.factor(G / W) * theta**2
    assert moved.c == plain.c


@examples(40)
@given(counts, counts)
def test_gradient_norms_are_weighed_so_that_copies_do_not_count(k_out, k_in):
    for change, copies in (
        (matrix(k_out, k_in), k_out * k_in),
        (vector(k_out), k_out),
        (readout(k_in), k_in),
    ):
        for p in (1, 2, 3):
            grown = mu.rules.Scale.of(copies) * change.r**p
            assert (change.norm_weight(p) * grown).is_one
    assert matrix(k_out, k_in).norm_weight(1) == mu.rules.Scale.of(Fraction(1, k_in))
    assert matrix(k_out, k_in).norm_weight(2) == mu.rules.Scale.of(Fraction(k_out, k_in))


# The paper's tables, transcribed


@pytest.mark.parametrize("m", [0, 1])
@pytest.mark.parametrize(("k_out", "k_in"), [(1, 1), (2, 3), (5, 2), (7, 1), (1, 4)])
def test_the_papers_widening_table(m, k_out, k_in):
    """Tab. widening; a readout that sums over the width is the matrix row with k_out = 1."""
    k = k_out
    rows: list[tuple[mu.rules.Change, Any, Any, Any, Any, Any]] = [
        # change, W, lr, eps, coupled decay, decoupled decay
        (vector(k), 1, k**m, Fraction(1, k), Fraction(1, k), Fraction(1, k**m)),
        (
            matrix(k_out, k_in),
            Fraction(1, k_in),
            Fraction(k_out**m, k_in),
            Fraction(1, k_out),
            Fraction(k_in, k_out),
            Fraction(k_in, k_out**m),
        ),
        (readout(k), Fraction(1, k), Fraction(1, k), 1, k, k),
        (mu.rules.Change(), 1, 1, 1, 1, 1),
    ]
    for change, weight, lr, eps, coupled, decoupled in rows:
        rate = change.factor(W * G**-m)
        assert change.s == mu.rules.Scale.of(weight)
        assert rate == mu.rules.Scale.of(lr)
        assert change.factor(G) == mu.rules.Scale.of(eps)
        assert decay_factor(Decay.COUPLED, change, rate) == mu.rules.Scale.of(coupled)
        assert decay_factor(Decay.DECOUPLED, change, rate) == mu.rules.Scale.of(decoupled)


@pytest.mark.parametrize("m", [0, 1])
@pytest.mark.parametrize(("n_out", "n_in"), [(8, 8), (16, 24), (64, 8)])
def test_the_papers_mup_table(m, n_out, n_in):
    """Tab. mup_scaling_main, as ratios to the reference width 8; B is a variance, so its root is a size."""
    a, b = n_out // 8, n_in // 8
    matrix_axes = [mu.rules.Axis.parse(f"out: 8x{a}"), mu.rules.Axis.parse(f"in: 8x{b}")]
    vector_axes = [mu.rules.Axis.parse(f"out: 8x{a}"), mu.rules.Axis.fixed(3)]
    table: list[tuple[Any, mu.rules.Change, Any, Any, Any, Any, Any]] = [
        # axes, change, B, C, D, D~, E
        (vector_axes, vector(a), 1, a**m, Fraction(1, a), Fraction(1, a**m), Fraction(1, a)),
        (
            matrix_axes,
            matrix(a, b),
            Fraction(1, b),
            Fraction(a**m, b),
            Fraction(b, a),
            Fraction(b, a**m),
            Fraction(1, a),
        ),
    ]
    for axes, change, B, C, D, decoupled, E in table:
        rate = change.factor(W * G**-m)
        assert noise_size(axes) ** 2 == mu.rules.Scale.of(B)
        assert rate == mu.rules.Scale.of(C)
        assert change.factor(G / W) == mu.rules.Scale.of(D)
        assert decay_factor(Decay.DECOUPLED, change, rate) == mu.rules.Scale.of(decoupled)
        assert change.factor(G) == mu.rules.Scale.of(E)


def test_a_readout_is_a_matrix_for_the_optimizer_and_not_for_its_noise():
    inward = [mu.rules.Axis.fixed(3), mu.rules.Axis.parse("in: 8x4")]
    assert noise_size(inward) == mu.rules.Scale.of("1/4")
    assert noise_size([mu.rules.Axis.parse("out: 8x4"), inward[1]]) == mu.rules.Scale.of("1/2")
    assert noise_size(inward, mu.rules.Scale.of(3)) == mu.rules.Scale.of("3/4")
    assert noise_size([mu.rules.Axis.between(8, 2, "in"), mu.rules.Axis.fixed(3)]) == mu.rules.Scale.of(4), (
        "below the reference"
    )


# Scales


@examples(200)
@given(scales, scales, powers)
def test_scales_multiply_exactly(a, b, power):
    assert a * b == b * a
    assert a * b / b == a
    assert (a * b) ** power == a**power * b**power
    assert (a**power) ** 2 == a ** (2 * power)
    assert hash(a * b / b) == hash(a)


@examples(200)
@given(scales)
def test_what_a_scale_prints_can_be_read_back(scale):
    assert mu.rules.Scale.of(str(scale)) == scale


@examples(200)
@given(fractions, fractions)
def test_fractions_are_scales(a, b):
    assert (mu.rules.Scale.of(a) * mu.rules.Scale.of(b)).fraction == a * b
    assert float(mu.rules.Scale.of(a)) == float(a), "correctly rounded"


@examples(300)
@given(st.integers(1, 10**4), st.sampled_from([2, 3, 4]), st.integers(-5, 5))
def test_roots_are_rounded_to_one_unit_in_the_last_place(number, root, power):
    found = float(mu.rules.Scale.of(number) ** Fraction(power, root))
    exact = Fraction(number) ** power
    low, high = math.nextafter(found, 0), math.nextafter(found, math.inf)
    assert Fraction(low) ** root <= exact <= Fraction(high) ** root


@pytest.mark.parametrize(
    ("code", "values"),
    [
        ("scale.not_a_positive_number", [0, -1, -0.5]),
        ("scale.not_a_product", ["0", "2^(1/0)", "x", "", "1/0", "2/00"]),
        ("scale.inexact_float", [0.1, 1 / 3, math.inf, math.nan]),
    ],
)
def test_what_is_not_an_exact_scale_is_refused(code, values):
    for value in values:
        refusal(partial(mu.rules.Scale.of, value), code, where=repr(value))


# Optimizers

TORCH = [
    cls
    for name in dir(torch.optim)
    if isinstance(cls := getattr(torch.optim, name), type)
    and issubclass(cls, torch.optim.Optimizer)
    and cls is not torch.optim.Optimizer
]


@pytest.mark.parametrize("cls", TORCH, ids=lambda c: c.__name__)
def test_every_torch_optimizer_has_a_row_or_is_refused_by_name(cls):
    assert len(TORCH) >= 15
    if qualified_name(cls) in RULES:
        defaults = cls([nn.Parameter(torch.ones(2, 2))]).defaults
        rule = rule_for(cls).row(defaults, 2)
        assert [key for key in defaults if not rule.known(key)] == []
        assert not rule.known("no such hyperparameter"), "control"
        assert set(rule.hyper) <= defaults.keys(), "no row for what is not there"
        assert ("weight_decay" in defaults) == (rule.decay is not None)
    else:
        refusal(
            lambda: rule_for(cls),
            "optimizer.not_widened_exactly",
            where=f"torch.optim.{cls.__name__}",
        )


@pytest.mark.parametrize("cls", [c for c in TORCH if qualified_name(c) in RULES], ids=lambda c: c.__name__)
def test_every_row_knows_the_state_its_optimizer_makes(cls):
    parameters = [nn.Parameter(torch.ones(4, 3))]
    if cls is not torch.optim.Muon:
        parameters.append(nn.Parameter(torch.ones(3)))
    settings: dict[str, Any] = {
        key: True for key in ("amsgrad", "centered") if key in cls(parameters).defaults
    }
    if "momentum" in cls(parameters).defaults:
        settings["momentum"] = 0.9
    optimizer = cls(parameters, **settings)
    for p in parameters:
        p.grad = torch.ones_like(p).to_sparse(1) if cls is torch.optim.SparseAdam else torch.ones_like(p)
    optimizer.step()
    made = {key for state in optimizer.state.values() for key in state}
    assert made <= set(rule_for(cls).state)
    assert made, "there is state to know"


@pytest.mark.parametrize("beta2", [0.8, 0.9, 0.99, 0.999])
def test_radam_is_refused_exactly_while_torch_takes_unrectified_steps(beta2):
    """Torch's switch, observed: the update is proportional to the gradient, or it is not."""
    rule = rule_for(torch.optim.RAdam)
    seen = []
    for step in range(9):
        moves = []
        for scale in (1.0, 2.0):
            p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
            optimizer = torch.optim.RAdam([p], lr=1.0, betas=(0.9, beta2), eps=0.0)
            for t in range(step + 1):
                before = p.detach().clone()
                p.grad = scale * data(3, seed=t)
                refused = rule.refuse is not None and rule.refuse(
                    optimizer.param_groups[0], dict(optimizer.state[p])
                )
                optimizer.step()
            moves.append(p.detach() - before)
        proportional = torch.allclose(moves[1], 2 * moves[0], rtol=1e-9)
        assert bool(refused) == proportional, f"before step {step + 1}"
        seen.append(proportional)
    assert set(seen) == {True, False}, "both kinds of step were seen"
