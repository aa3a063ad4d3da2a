"""Finite widths: programs equal real training that this package grew, and both approach the limit; wrong growth does not."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from torch import nn

from reproduce.limits import (
    FiniteWidth,
    SampledKets,
    Schedule,
    convergence,
    four_layer,
    four_layer_recursion,
    mlp,
)
from reproduce.limits.convergence import Convergence
from reproduce.limits.measure import (
    ACTIVATIONS,
    NETWORK,
    OWN,
    OWN_K,
    OWN_SCHEDULE,
    REFERENCE,
    SCHEDULE,
    STANDARD_ERRORS,
    WRONG,
    Forgetful,
    largest,
    sampled,
)
from reproduce.limits.real import Grow, grown, train_model
from tests.limits.test_limits import FOUR, SLOW

pytestmark = pytest.mark.nightly


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


def test_finite_widths_approach_the_limit_as_the_root_of_the_width():
    def finite(n: int, seed: int) -> list[float]:
        return four_layer(FiniteWidth(n, 2, seed), SLOW, **FOUR)

    report = convergence(four_layer_recursion(SLOW, k=2, **FOUR), finite, (64, 256), 20)
    assert -0.7 < report.slope < -0.3
    assert "slope" in str(report)
    without = {**FOUR, "noise": dict.fromkeys("ABCD", 0.0)}
    control = convergence(four_layer_recursion(SLOW, k=2, **without), finite, (64, 256), 20)
    assert control.slope > -0.2, "control: the limit without noise"


def test_tanh_networks_approach_their_limit():
    approaches_its_limit("tanh")


def test_relu_networks_approach_their_limit_although_the_theorem_does_not_say_so():
    approaches_its_limit("relu")


def approaches_its_limit(name: str) -> None:
    """Errors fall as n^-1/2 and means agree with the stored reference; not so without the dot parts."""
    stored = json.loads(REFERENCE.read_text())

    @cache
    def finite(n: int, seed: int) -> list[list[float]]:
        return mlp(FiniteWidth(n, 2, seed), SCHEDULE, activation=ACTIVATIONS[name], **NETWORK)

    report = convergence(stored[name]["outputs"], finite, (128, 512), (20, 12), since=SCHEDULE.grow_at)
    assert -0.7 < report.slope < -0.3
    assert max(report.bias) < STANDARD_ERRORS
    forgot = sampled(name, 2**11, seed=0, backend=Forgetful)
    control = convergence(forgot, finite, (128, 512), (20, 12), since=SCHEDULE.grow_at)
    print(f"without the dot part: slope {control.slope:+.2f}, {max(control.bias):.1f} standard errors")
    assert control.slope > -0.2, "control: a limit without dot parts"
    assert max(control.bias) > 2 * STANDARD_ERRORS


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
