"""Errata of the paper's infinite-width calculus: the corrected statement holds, and the printed one does not.

`docs/errata.md` says where each stands in the paper; names there are names here and in `test_errata_training.py`,
which has the errata of algorithms, optimizers and costs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reproduce.limits import FiniteWidth, LinearKets, SampledKets, Schedule, four_layer, three_layer
from reproduce.limits.measure import largest
from reproduce.limits.program import Backend
from reproduce.limits.recursions import FourLayer, four_layer_coefficients, three_layer_recursion

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
X, SIGMA = 1.2, 0.9
S2 = SIGMA**2
SETTINGS: dict[str, Any] = {"x": X, "sigma": SIGMA, "slope": lambda y: y - 2.5}
THREE = {"A": 0.5, "B": 0.8, "C": 0.6}
FOUR = {"A": 0.5, "B": 0.8, "C": 0.7, "D": 0.6}


def test_overlap_of_the_input_layer_has_one_factor_x():
    """(1/k) Tr⟨C|h⟩ is x σ̄² and x (σ̄² + σ_C²), where x² is printed."""
    for k in (1, 2, 3):
        kets = LinearKets(k)
        start = kets.vector("C", "duplicated", SIGMA)
        grown = start + kets.vector("noise of C", "noise", 0.6)
        h = X * grown
        assert abs(kets.dot(start, h) - X * S2) < 1e-12
        assert abs(kets.dot(grown, h) - X * (S2 + 0.36)) < 1e-12
        assert abs(kets.dot(start, h) - X**2 * S2) > 0.1, "as printed"


def test_readout_of_a_bra_ket_needs_a_trace():
    """⟨A|h⟩ is k × k: the output is its trace over k; the sum of its entries is another number."""
    k, n = 2, 20_000
    finite = FiniteWidth(n, k)
    start, noise = finite.vector("A", "duplicated", SIGMA), finite.vector("noise of A", "noise", 0.5)
    a = (start + noise).data.view(n, k)
    table = a.T @ a / n  # of h = A, whose overlap with A is known
    assert abs(float(table.trace()) / k - (S2 + 0.25)) < 0.02
    assert abs(float(table[0, 0] - table[0, 1]) - 0.25) < 0.02, "its entries differ, so it is no scalar"
    assert abs(float(table.sum()) / k - (S2 + 0.25)) > 0.5


def coefficients(schedule: Schedule, slopes: list[float], noise: dict[str, float], k: int = 2) -> FourLayer:
    return four_layer_coefficients(schedule, k=k, x=X, sigma=SIGMA, noise=noise, slope=slopes)


def totals(found: FourLayer, grow_at: int) -> tuple[list[float], list[float]]:
    """M + M' and N + N' from growth on."""
    both = zip(found.M, found.M_after, strict=True), zip(found.N, found.N_after, strict=True)
    return tuple([a + b for a, b in pairs][grow_at:] for pairs in both)  # type: ignore[return-value]


@pytest.mark.parametrize(("noise", "holds"), [((0.6, 0.6), True), ((0.3, 0.9), False)])
def test_condition_on_coefficients_is_two_conditions(noise, holds):
    """γ'²(σ̄²+σ_D²)(σ̄²+σ_A²) = γ²σ̄⁴ is not enough: γ'(σ̄²+σ_D²) = γ'(σ̄²+σ_A²) = γσ̄² is, so σ_A = σ_D."""
    sizes = {"A": noise[0], "B": 0.0, "C": 0.0, "D": noise[1]}
    rate = 0.05
    after = rate * S2 / ((S2 + noise[1] ** 2) * (S2 + noise[0] ** 2)) ** 0.5  # the printed condition
    slopes = list(np.linspace(-2.5, -0.5, 14))
    grown = Schedule(14, 5, rate, after)
    plain = Schedule(14, 14, rate)
    found = totals(coefficients(grown, slopes, sizes), 5)
    wanted = totals(coefficients(plain, slopes, dict.fromkeys("ABCD", 0.0)), 5)
    gap = max(largest(a, b) for a, b in zip(found, wanted, strict=True))
    assert gap < 1e-12 if holds else gap > 0.04


def test_quiet_hidden_layers_do_not_make_the_overlaps_equal():
    """σ_B = σ_C = 0 leaves terms σ̄²σ_D²/k and σ̄²σ_A²/k: (1') and (2') equal (1) only if σ_A = σ_D = 0 too."""

    def gap(k: int, size: float) -> float:
        noise = {"A": size, "B": 0.0, "C": 0.0, "D": size}
        after = 0.05 * S2 / (S2 + size**2)
        grown = Schedule(14, 5, 0.05, after)
        outputs = [four_layer(LinearKets(k), grown, noise=noise, **SETTINGS)]
        outputs += [four_layer(LinearKets(k), Schedule(14, 14, 0.05), noise=noise, **SETTINGS)]
        return largest(outputs[0], outputs[1])

    assert gap(2, 0.0) < 1e-12
    assert gap(2, 0.6) > 0.01
    assert 0 < gap(1000, 0.6) < gap(2, 0.6) / 100, "they fade with k, and never vanish"


@pytest.mark.parametrize("k", [2, 3])
def test_sums_to_t_minus_two_leave_out_a_gradient_step(k):
    """The printed sums belong to W_T = W_{T-1} + Δ; a run that steps at T-1 and then grows has sums to T-1."""
    printed = Schedule(13, 5, 0.06, 0.03, growth_takes_a_step=True)
    every = Schedule(13, 5, 0.06, 0.03)
    for schedule, other in ((printed, every), (every, printed)):
        program = three_layer(LinearKets(k), schedule, noise=THREE, **SETTINGS)
        assert largest(program, three_layer_recursion(schedule, noise=THREE, **SETTINGS)) < 1e-12
        assert largest(program, three_layer_recursion(other, noise=THREE, **SETTINGS)) > 0.05, (
            "the other convention"
        )
        deep = four_layer(LinearKets(k), schedule, noise=FOUR, **SETTINGS)
        wrong = four_layer_coefficients(other, k=k, noise=FOUR, **SETTINGS).outputs
        assert largest(deep, wrong) > 0.05


def there_and_back(backend: Backend) -> float:
    """⟨v, W U Uᵀ Wᵀ v⟩ of duplicated matrices, which is the mean square of Uᵀ Wᵀ v: 1 at infinite width."""
    w, u, v = (
        backend.matrix("W", "duplicated"),
        backend.matrix("U", "duplicated"),
        backend.vector("v", "duplicated"),
    )
    return backend.dot(v, w @ (u @ (u.T @ (w.T @ v))))


@pytest.mark.parametrize("k", [1, 2, 4])
def test_derivative_by_a_duplicated_hat_is_the_total_one(k):
    """U Uᵀ g holds the mean of g over its k equal entries: coordinate by coordinate its derivative is 1/k, in all 1."""
    finite = float(np.mean([there_and_back(FiniteWidth(400, k, seed)) for seed in range(6)]))
    assert abs(there_and_back(LinearKets(k)) - 1) < 1e-12
    assert abs(there_and_back(SampledKets(k, 2**12)) - 1) < 0.05
    assert abs(finite - 1) < 0.1
    g = torch.ones(k, dtype=torch.float64, requires_grad=True)
    first = g.mean().expand(k)[0]  # the dot part of U Uᵀ g, one entry
    (slopes,) = torch.autograd.grad(first, g)
    assert abs(float(slopes.sum()) - 1) < 1e-12, "the total derivative"
    assert k == 1 or abs(float(slopes[0]) - finite) > 0.3, "coordinate by coordinate, as printed"


def test_backward_signal_at_step_t_carries_the_slope_at_step_t():
    """dh₂ at t is (…)ᵀ dh₃ at t, where dh₃ at T is printed: they differ by the ratio of loss derivatives."""
    torch.manual_seed(0)
    n = 30
    a, b, c, d = (torch.randn(*shape, dtype=torch.float64) for shape in ((n,), (n, n), (n, n), (n,)))
    b, c = b / n**0.5, c / n**0.5
    signals, slopes = [], []
    for _ in range(3):
        h2 = (c @ d * X).requires_grad_()
        y = a @ (b @ h2) / n
        loss = (y - 2.5) ** 2 / 2
        (signal,) = torch.autograd.grad(loss, h2)
        slopes.append(float(y.detach()) - 2.5)
        signals.append((signal, b.T @ a / n))
        b = b - 0.05 * slopes[-1] * torch.outer(a, h2.detach()) / n
    signal, through = signals[2]
    assert float((signal - slopes[2] * through).abs().max()) < 1e-14
    assert float((signal - slopes[0] * through).abs().max()) > 1e-2 * float(signal.abs().max()), "as printed"


def test_rows_of_a_block_are_k_apart():
    """Row t of copy i is (t-1)k + i; (t-1)n + i is printed, and leaves the matrix."""
    n, k = 5, 2
    x = torch.arange(1, n * k + 1)
    for i in range(1, k + 1):
        assert x[i - 1 :: k].tolist() == [(t - 1) * k + i for t in range(1, n + 1)]
    assert (n - 1) * n + k > n * k, "as printed"


def test_noise_matrices_have_variance_one_over_the_width():
    """The proof says W₁ has entries N(0, 1); with those, drawn here, the square of a product grows as N."""

    def square(finite: FiniteWidth) -> float:
        x, w = finite.vector("x", "noise"), finite.matrix("W", "noise")
        return finite.dot(w @ x, w @ x)

    torch.manual_seed(0)
    for n in (100, 400):
        assert abs(square(FiniteWidth(n, 2)) - 1) < 0.3
        entries = torch.randn(2 * n, 2 * n, dtype=torch.float64)
        assert abs(square(FiniteWidth(n, 2, values={"W": entries})) / (2 * n) - 1) < 0.3, "as printed"


def test_derivative_of_relu_is_not_pseudo_lipschitz():
    """|φ'(x) - φ'(y)| ≤ C |x - y| (1 + |x|^p + |y|^p) fails at 0, so the theorem does not cover ReLU's backward pass."""

    def ratio(derivative: Callable[[Tensor], Tensor], width: float) -> float:
        at = torch.tensor([-width / 2, width / 2], dtype=torch.float64)
        low, high = derivative(at)
        return float(high - low) / width

    for width in (1e-2, 1e-4, 1e-6):
        assert ratio(lambda x: (x > 0).double(), width) > 0.9 / width
        assert ratio(lambda x: 1 - torch.tanh(x) ** 2, width) < 1, "tanh has no such place"


def test_a_derivative_taken_symbolically_forgets_the_corner_of_relu():
    """E[∂ step(ξ)/∂ξ] is 0 almost everywhere; ⟨x, Wᵀ step(W x)⟩ is E[ξ step(ξ)] = 1/√(2π)."""
    kets = SampledKets(1, 2**13)
    x, w = kets.vector("x", "noise"), kets.matrix("W", "noise")
    h = w @ x
    right = kets.dot(x, w.T @ kets.apply(lambda h: (h > 0).double(), h))
    at = h.data.clone().requires_grad_()
    (once,) = torch.autograd.grad(torch.relu(at).sum(), at, create_graph=True)
    symbolic = torch.autograd.grad(once.sum(), at, allow_unused=True)[0]
    finite = [FiniteWidth(1000, 1, seed) for seed in range(6)]
    measured = []
    for backend in finite:
        x, w = backend.vector("x", "noise"), backend.matrix("W", "noise")
        measured.append(backend.dot(x, w.T @ backend.apply(lambda h: (h > 0).double(), w @ x)))
    assert abs(right - 0.3989) < 2e-3
    assert abs(np.mean(measured) - 0.3989) < 2e-2
    assert symbolic is None or float(symbolic.mean()) == 0.0, "what differentiating gives"


def test_trained_preactivations_are_not_gaussian():
    """Gaussian at initialisation; one gradient step adds v·φ'(h), and the fourth moment leaves 3 squares."""
    kets = SampledKets(2, 2**13)
    x, v, w = kets.vector("x", "duplicated"), kets.vector("v", "duplicated"), kets.matrix("W", "duplicated")
    h = w @ x
    trained = h + 2.0 * kets.apply(lambda v, h: v * (h > 0).double(), v, h)

    def kurtosis(vector: Any) -> float:
        return kets.average(kets.apply(lambda h: h**4, vector)) / kets.dot(vector, vector) ** 2

    assert abs(kurtosis(h) - 3) < 0.05
    assert kurtosis(trained) > 4


def test_every_test_that_the_page_names_exists():
    page = (ROOT / "docs" / "errata.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    files = [*ROOT.glob("tests/*/test_*.py")]
    known = {name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)}
    known |= {path.stem for path in files}
    assert named - known == set()
    own = {
        name
        for path in files
        if path.stem.startswith("test_errata")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert own - named == {"test_every_test_that_the_page_names_exists"}, (
        "each other is evidence for an entry"
    )
