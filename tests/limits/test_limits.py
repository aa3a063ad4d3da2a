"""The infinite-width calculus: exact programs, closed recursions and samples agree, and what cannot run is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.refusals import refusal
from reproduce.limits import (
    FiniteWidth,
    LinearKets,
    SampledKets,
    Schedule,
    convergence,
    four_layer,
    four_layer_recursion,
    mlp,
    three_layer,
    three_layer_recursion,
)
from reproduce.limits.measure import (
    ACTIVATIONS,
    NETWORK,
    REFERENCE,
    SAMPLED,
    SAMPLES,
    SCHEDULE,
    Forgetful,
    largest,
    sampled,
)
from reproduce.limits.program import Backend, Kind

pytestmark = pytest.mark.nightly

THREE: dict[str, Any] = {
    "x": 1.2,
    "sigma": 0.9,
    "noise": {"A": 0.5, "B": 0.8, "C": 0.6},
    "slope": lambda y: y - 2.5,
}
FOUR: dict[str, Any] = {**THREE, "noise": {"A": 0.5, "B": 0.8, "C": 0.7, "D": 0.6}}
SLOW = Schedule(steps=13, grow_at=5, rate=0.05, rate_after=0.025)
PAPER = Schedule(steps=13, grow_at=5, rate=0.05, rate_after=0.025, growth_takes_a_step=True)


@pytest.mark.parametrize("schedule", [SLOW, PAPER], ids=["every step", "growth takes a step"])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_exact_programs_give_the_recursions(schedule, k):
    assert (
        largest(three_layer(LinearKets(k), schedule, **THREE), three_layer_recursion(schedule, **THREE))
        < 1e-10
    )
    deep = four_layer(LinearKets(k), schedule, **FOUR)
    assert largest(deep, four_layer_recursion(schedule, k=k, **FOUR)) < 1e-10
    assert largest(deep, four_layer_recursion(schedule, k=k + 1, **FOUR)) > 1e-3, "control: another k"


@pytest.mark.parametrize("layer", "ABCD")
def test_the_recursion_sees_the_noise_of_every_layer(layer):
    """Control: no size is without effect, so agreement on all of them says something."""
    quiet = {**FOUR, "noise": {**FOUR["noise"], layer: 0.0}}
    exact = four_layer(LinearKets(2), SLOW, **quiet)
    assert largest(exact, four_layer_recursion(SLOW, k=2, **quiet)) < 1e-10
    assert largest(exact, four_layer_recursion(SLOW, k=2, **FOUR)) > 1e-2, "control"


def test_whitened_samples_are_exact_on_linear_programs():
    closed = four_layer_recursion(SLOW, k=3, **FOUR)
    assert largest(four_layer(SampledKets(3, 1024, sampler="white"), SLOW, **FOUR), closed) < 1e-10
    assert largest(four_layer(SampledKets(3, 1024, sampler="plain"), SLOW, **FOUR), closed) > 1e-3, "control"


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_samples_agree_with_the_stored_reference(name):
    stored = json.loads(REFERENCE.read_text())[name]["outputs"]
    assert largest(sampled(name, SAMPLES[name], seed=1), stored) < SAMPLED[name]
    control = largest(sampled(name, SAMPLES[name], seed=1, backend=Forgetful), stored)
    print(f"without the dot part: {control:.3f}, {control / SAMPLED[name]:.0f} times the bound")
    assert control > 10 * SAMPLED[name], "control: products without their dot part"


def silent(**changes: Any) -> dict[str, Any]:
    return {**NETWORK, "noise": [0.0] * 3, "activation": nn.Tanh(), **changes}


def test_without_noise_outputs_do_not_depend_on_k():
    quiet = {**FOUR, "noise": dict.fromkeys("ABCD", 0.0)}
    linear = [four_layer(LinearKets(k), SLOW, **quiet) for k in (1, 2, 5)]
    assert max(largest(linear[0], other) for other in linear) < 1e-12
    finite = [mlp(FiniteWidth(16, k), SCHEDULE, **silent()) for k in (1, 2, 3)]
    assert max(largest(finite[0], other) for other in finite) < 1e-12
    limit = [mlp(SampledKets(k, 2**13), SCHEDULE, **silent()) for k in (1, 2, 4)]
    assert max(largest(limit[0], other) for other in limit) < 5e-3
    loud = [mlp(SampledKets(k, 2**13), SCHEDULE, **silent(noise=[0.0, 3.0, 3.0])) for k in (1, 4)]
    assert largest(*loud) > 1.5e-2, "control: with noise they do"


def test_growth_by_one_with_noise_is_a_fresh_start_of_larger_weights():
    """With k = 1 at step 1 and no gradient step before it, noise is the same as another initial size."""
    early = Schedule(steps=5, grow_at=1, rate=0.05, growth_takes_a_step=True)
    size = math.hypot(THREE["sigma"], 0.5)
    grown_at_one = three_layer(LinearKets(1), early, **{**THREE, "noise": dict.fromkeys("ABC", 0.5)})
    plain = Schedule(steps=4, grow_at=4, rate=0.05)
    fresh = three_layer(LinearKets(1), plain, **{**THREE, "sigma": size})
    assert largest(grown_at_one[1:], fresh) < 1e-12


def step_remembered(backend: Backend, kind: Kind) -> float:
    x, w = backend.vector("x", kind), backend.matrix("W", kind)
    return backend.dot(x, w.T @ backend.apply(lambda h: (h > 0).double(), w @ x))


@pytest.mark.parametrize("kind", ["duplicated", "noise"])
@pytest.mark.parametrize("k", [1, 2])
def test_a_step_function_is_remembered_although_it_has_no_slope(kind, k):
    expected = 1 / math.sqrt(2 * math.pi)
    assert abs(step_remembered(SampledKets(k, 2**13), kind) - expected) < 2e-3
    finite = np.mean([step_remembered(FiniteWidth(800, k, seed), kind) for seed in range(8)])
    assert abs(finite - expected) < 2e-2


def test_outer_nonlinearities_average_over_an_independent_copy():
    """E cos(x y) over independent x, y is 1/√2; of x with itself it is Re (1 - 2i)^-1/2."""
    for backend, tolerance in ((SampledKets(2, 2**12), 5e-3), (FiniteWidth(1500, 2), 3e-2)):
        x = backend.vector("x", "noise")
        mean = backend.average(backend.outer(lambda a, b: torch.cos(a * b), [x], [x]))
        assert abs(mean - 0.5**0.5) < tolerance
        alone = backend.average(backend.apply(lambda a: torch.cos(a * a), x))
        assert abs(alone - ((1 - 2j) ** -0.5).real) < tolerance
        assert abs(mean - alone) > 0.1, "control: the same copy on both sides"


def test_a_matrix_knows_its_transpose_whatever_came_first():
    """⟨u, W v⟩ = ⟨Wᵀ u, v⟩ in every backend, in whatever order products are asked for."""
    for kind in ("duplicated", "noise"):
        for backend in (LinearKets(3), SampledKets(3, 512, sampler="white"), FiniteWidth(20, 3)):
            w = backend.matrix("W", kind)
            u, v = backend.vector("u", "noise"), backend.vector("v", "noise")
            v = v + w.T @ u  # so that there is something to remember
            assert abs(backend.dot(u, w @ v) - backend.dot(w.T @ u, v)) < 1e-12


def test_what_cannot_run_is_refused():
    kets = LinearKets(2)
    x = kets.vector("x", "noise")
    refusal(lambda: kets.apply(torch.tanh, x), "limits.program_not_linear")
    refusal(lambda: kets.outer(torch.add, [x], [x]), "limits.program_not_linear")
    refusal(lambda: kets.vector("x", "noise"), "limits.name_taken", where="x")
    refusal(lambda: kets.vector("z", "copied"), "limits.unknown_kind", where="'copied'")  # type: ignore[arg-type]
    refusal(lambda: LinearKets(2).dot(x, x), "limits.vector_of_other_backend")
    refusal(lambda: LinearKets(0), "argument.not_whole")
    refusal(lambda: FiniteWidth(0, 1), "argument.not_whole")
    refusal(lambda: SampledKets(2, 1000), "limits.not_a_power_of_two", where="1000")
    refusal(lambda: SampledKets(2, 1024, sampler="halton"), "limits.unknown_sampler", where="'halton'")  # type: ignore[arg-type]
    given = FiniteWidth(4, 2, values={"x": torch.zeros(8)})
    refusal(lambda: given.vector("x", "duplicated"), "limits.value_of_other_shape", where=["(8,)", "(4,)"])
    refusal(lambda: Schedule(3, 4, 0.1), "limits.growth_after_end")
    error = refusal(lambda: three_layer(kets, SLOW, **{**THREE, "noise": {"A": 1.0}}))
    assert [(fault.code, fault.where) for fault in error.faults] == [
        ("limits.layer_without_size", "B"),
        ("limits.layer_without_size", "C"),
    ]
    error = refusal(lambda: mlp(kets, SLOW, inputs=[[1.0]], targets=[], sigma=[1], noise=[]))
    assert error.codes == (
        "limits.too_few_layers",
        "limits.noise_unlike_layers",
        "limits.targets_unlike_inputs",
    )
    one: dict[str, Any] = {
        "inputs": [[1.0]], "targets": [1.0], "sigma": [1, 1], "noise": [0, 0], "activation": None,
    }  # fmt: skip
    error = refusal(lambda: mlp(kets, Schedule(2, 1, 0.1), batches=[[1]], **one))
    assert error.codes == ("limits.batches_unlike_steps", "limits.batch_not_of_inputs")
    refusal(lambda: convergence([0.0], lambda n, s: [0.0], (8, 4)), "limits.widths_not_ascending")
    refusal(lambda: convergence([0.0], lambda n, s: [0.0, 1.0], (4, 8), 2), "limits.shapes_differ")


def schedule(**changes: Any) -> Schedule:
    return Schedule(**{"steps": 3, "grow_at": 2, "rate": 0.1, **changes})


def example(noise: Any) -> Any:
    return three_layer(LinearKets(2), schedule(), x=1.0, sigma=1.0, noise=noise, slope=lambda y: y - 1)


def recursion(k: Any) -> Any:
    noise = dict.fromkeys("ABCD", 0.1)
    return four_layer_recursion(schedule(), k=k, x=1.0, sigma=1.0, noise=noise, slope=lambda y: y - 1)


def network(sigma: Any) -> Any:
    options: dict[str, Any] = {"inputs": [[1.0]], "targets": [1.0], "noise": [0.1, 0.1], "activation": None}
    return mlp(LinearKets(2), schedule(), sigma=sigma, **options)


def test_wrong_calls_are_refused_and_the_right_ones_accepted():
    kets = LinearKets(2)
    matrix, x = kets.matrix("W", "noise"), kets.vector("x", "noise")
    values: dict[str, Any] = {"x": [1.0, 2.0]}
    refusal(lambda: schedule(steps=3.0), "argument.not_whole")
    refusal(lambda: example(0.5), "argument.wrong_type")
    refusal(lambda: recursion(0), "argument.not_whole")
    refusal(lambda: network(1.0), "limits.one_size_for_layers")
    refusal(lambda: matrix @ 3, "limits.not_a_vector")  # type: ignore[operator]
    refusal(lambda: SampledKets(2, 64, seed=1.5), "argument.not_whole")  # type: ignore[arg-type]
    refusal(lambda: FiniteWidth(2, 2, values=values), "argument.wrong_type")
    schedule(), example(dict.fromkeys("ABC", 0.5)), recursion(2), network([1.0, 1.0]), matrix @ x
    SampledKets(2, 64, seed=1), FiniteWidth(2, 2, values={"x": torch.tensor(values["x"])})


def test_sobol_columns_go_on_where_a_smaller_engine_ended():
    """Columns of different engines are independent scrambles of different dimensions: their products average out."""
    kets = SampledKets(1, 2**12)
    columns: list[Tensor] = [kets.vector(f"x{i}", "noise").data[:, 0] for i in range(70)]
    table = torch.stack(columns)
    gram = table @ table.T / 2**12 - torch.eye(70, dtype=torch.float64)
    assert float(gram.abs().max()) < 0.06
    assert float(gram[:64, 64:].abs().mean()) < 0.01
    assert torch.equal(columns[3], SampledKets(1, 2**12).vector("y", "noise").data[:, 0]) is False
