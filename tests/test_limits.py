"""The infinite-width calculus: exact programs, samples, finite widths and this package's own growth agree."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mupscale.limits
from benchmarks.limits import (
    ACTIVATIONS,
    NETWORK,
    OWN,
    OWN_K,
    OWN_SCHEDULE,
    REFERENCE,
    SAMPLED,
    SAMPLES,
    SCHEDULE,
    WRONG,
    largest,
    sampled,
)
from mupscale.errors import MupscaleError
from mupscale.limits import (
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
from mupscale.limits.convergence import Convergence
from mupscale.limits.program import Backend, Kind
from mupscale.limits.real import Grow, grown, train_model

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
    stored = {kind: entry["outputs"] for kind, entry in json.loads(REFERENCE.read_text()).items()}
    outputs = sampled(name, SAMPLES[name], seed=1)
    assert largest(outputs, stored[name]) < SAMPLED[name]
    (other,) = set(stored) - {name}
    assert largest(outputs, stored[other]) > 10 * SAMPLED[name], "control: another activation"


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU(), nn.SiLU()], ids=["tanh", "relu", "silu"])
@pytest.mark.parametrize("layers", [2, 3, 4])
def test_finite_width_is_real_training_grown_by_upscale(activation, layers):
    settings = {**NETWORK, "sigma": [1.0] * layers, "noise": [0.3] * layers, "activation": activation}
    real = train_model(16, 3, SCHEDULE, seed=5, keep_values=True, **settings)
    assert largest(mlp(FiniteWidth(16, 3, values=real.values), SCHEDULE, **settings), real.outputs) < 1e-12
    values = {**real.values, f"noise of layer {layers - 1}": real.values[f"noise of layer {layers - 1}"] / 3}
    control = mlp(FiniteWidth(16, 3, values=values), SCHEDULE, **settings)
    assert largest(control, real.outputs) > 1e-3, "control: noise of the readout by k too small"


def test_minibatches_are_what_torch_trains_on():
    n, batches = 12, [[0], [1, 2], [2, 0], [1], [0]]
    schedule = Schedule(steps=5, grow_at=5, rate=0.3)
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((n, 2), (n, n), (n,))
    ]
    values = {"layer 0, 0": weights[0][:, 0], "layer 0, 1": weights[0][:, 1]}
    values |= {"layer 1": weights[1] / n**0.5, "layer 2": weights[2]}
    program = mlp(FiniteWidth(n, 1, values=values), schedule, batches=batches, **NETWORK)
    x, y = (torch.tensor(NETWORK[key], dtype=torch.float64) for key in ("inputs", "targets"))
    trained = [w.clone().requires_grad_() for w in (weights[0], weights[1] / n**0.5, weights[2])]
    outputs = []
    for batch in batches:
        y_hat = torch.tanh(torch.tanh(x @ trained[0].T) @ trained[1].T) @ trained[2] / n
        outputs.append(y_hat.tolist())
        loss = ((y_hat - y)[batch] ** 2).mean() / 2
        gradients = torch.autograd.grad(loss, trained)
        with torch.no_grad():
            for weight, gradient, units in zip(trained, gradients, (n, 1, n), strict=True):
                weight -= schedule.rate * units * gradient
    assert largest(program, outputs) < 1e-12
    assert largest(mlp(FiniteWidth(n, 1, values=values), schedule, **NETWORK), outputs) > 1e-3, (
        "control: all samples"
    )


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


def test_finite_widths_approach_the_limit_as_the_root_of_the_width():
    def finite(n: int, seed: int) -> list[float]:
        return four_layer(FiniteWidth(n, 2, seed), SLOW, **FOUR)

    report = convergence(four_layer_recursion(SLOW, k=2, **FOUR), finite, (64, 256), 20)
    assert -0.7 < report.slope < -0.3
    assert "slope" in str(report)
    without = {**FOUR, "noise": dict.fromkeys("ABCD", 0.0)}
    control = convergence(four_layer_recursion(SLOW, k=2, **without), finite, (64, 256), 20)
    assert control.slope > -0.2, "control: the limit without noise"


def test_relu_networks_approach_their_limit_although_the_theorem_does_not_say_so():
    stored = json.loads(REFERENCE.read_text())

    @cache
    def finite(n: int, seed: int) -> list[list[float]]:
        return mlp(FiniteWidth(n, 2, seed), SCHEDULE, activation=ACTIVATIONS["relu"], **NETWORK)

    report = convergence(stored["relu"]["outputs"], finite, (128, 512), (20, 12), since=SCHEDULE.grow_at)
    assert -0.7 < report.slope < -0.3
    assert max(report.bias) < 3
    control = convergence(stored["tanh"]["outputs"], finite, (128, 512), (20, 12), since=SCHEDULE.grow_at)
    assert control.slope > -0.2, "control: the limit of another activation"


def own(grow: Grow, limit: list[list[float]], seeds: tuple[int, int]) -> Convergence:
    def finite(n: int, seed: int) -> list[list[float]]:
        return train_model(n, OWN_K, OWN_SCHEDULE, seed=seed, grow=grow, **OWN).outputs

    return convergence(limit, finite, (128, 512), seeds, since=OWN_SCHEDULE.grow_at)


@pytest.fixture(scope="module")
def own_limit() -> list[list[float]]:
    return mlp(SampledKets(OWN_K, 2**13), OWN_SCHEDULE, **OWN)


@pytest.fixture(scope="module")
def as_it_is(own_limit) -> Convergence:
    return own(grown, own_limit, (12, 6))


def test_growth_as_it_is_approaches_the_limit(as_it_is):
    assert -0.7 < as_it_is.slope < -0.3


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_multiplier_is_a_mismatch_that_does_not_shrink(name, own_limit, as_it_is):
    report = own(WRONG[name], own_limit, (4, 3))
    print(name, report.errors, report.slope)
    assert report.slope > -0.2
    assert report.errors[-1] > 3 * as_it_is.errors[-1]


def test_a_figure_is_drawn(tmp_path):
    report = convergence([[0.0], [1.0]], lambda n, seed: [[0.0], [1 + (-1) ** seed / n]], (4, 8), 2)
    report.plot(tmp_path / "figure.png", {"another": report}, grow_at=1)
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_a_matrix_knows_its_transpose_whatever_came_first():
    """⟨u, W v⟩ = ⟨Wᵀ u, v⟩ in every backend, in whatever order products are asked for."""
    for kind in ("duplicated", "noise"):
        for backend in (LinearKets(3), SampledKets(3, 512, sampler="white"), FiniteWidth(20, 3)):
            w = backend.matrix("W", kind)
            u, v = backend.vector("u", "noise"), backend.vector("v", "noise")
            v = v + w.T @ u  # so that there is something to remember
            assert abs(backend.dot(u, w @ v) - backend.dot(w.T @ u, v)) < 1e-12


def refused(match: str, call: Any) -> None:
    with pytest.raises(MupscaleError, match=match):
        call()


def test_what_cannot_run_is_refused():
    kets = LinearKets(2)
    x = kets.vector("x", "noise")
    refused("linear programs only", lambda: kets.apply(torch.tanh, x))
    refused("linear programs only", lambda: kets.outer(torch.add, [x], [x]))
    refused("already has", lambda: kets.vector("x", "noise"))
    refused('write "duplicated" or "noise"', lambda: kets.vector("z", "copied"))  # type: ignore[arg-type]
    refused("another backend", lambda: LinearKets(2).dot(x, x))
    refused("whole number", lambda: LinearKets(0))
    refused("whole number", lambda: FiniteWidth(0, 1))
    refused("powers of two", lambda: SampledKets(2, 1000))
    refused("one of sobol, white, plain", lambda: SampledKets(2, 1024, sampler="halton"))  # type: ignore[arg-type]
    refused(
        "expected \\(4,\\)", lambda: FiniteWidth(4, 2, values={"x": torch.zeros(8)}).vector("x", "duplicated")
    )
    refused("from 1 to steps", lambda: Schedule(3, 4, 0.1))
    refused("each of A, B, C", lambda: three_layer(kets, SLOW, **{**THREE, "noise": {"A": 1.0}}))
    refused("4 faults|3 faults", lambda: mlp(kets, SLOW, inputs=[[1.0]], targets=[], sigma=[1], noise=[]))
    refused("no size is given", lambda: three_layer(kets, SLOW, **{**THREE, "noise": {"A": 1.0}}))
    one: dict[str, Any] = {
        "inputs": [[1.0]],
        "targets": [1.0],
        "sigma": [1, 1],
        "noise": [0, 0],
        "activation": None,
    }
    refused("2 faults", lambda: mlp(kets, Schedule(2, 1, 0.1), batches=[[1]], **one))
    refused("ascending", lambda: convergence([0.0], lambda n, s: [0.0], (8, 4)))
    refused("one row for each step", lambda: convergence([0.0], lambda n, s: [0.0, 1.0], (4, 8), 2))


def test_the_room_is_small_and_loaded_on_demand_only():
    assert len(mupscale.limits.__all__) <= 10
    code = (
        "import sys, mupscale; assert 'mupscale.limits' not in sys.modules\n"
        "import mupscale.limits; assert not {'matplotlib', 'scipy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_sobol_columns_go_on_where_a_smaller_engine_ended():
    """Columns of different engines are independent scrambles of different dimensions: their products average out."""
    kets = SampledKets(1, 2**12)
    columns: list[Tensor] = [kets.vector(f"x{i}", "noise").data[:, 0] for i in range(70)]
    table = torch.stack(columns)
    gram = table @ table.T / 2**12 - torch.eye(70, dtype=torch.float64)
    assert float(gram.abs().max()) < 0.06
    assert float(gram[:64, 64:].abs().mean()) < 0.01
    assert torch.equal(columns[3], SampledKets(1, 2**12).vector("y", "noise").data[:, 0]) is False
