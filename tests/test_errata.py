"""The errata of the paper, one test each: the corrected statement holds, and the printed one does not.

`docs/errata.md` says where each stands in the paper; names there are names here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from benchmarks.limits import largest
from mupscale.limits import FiniteWidth, LinearKets, SampledKets, Schedule, four_layer, three_layer
from mupscale.limits.program import Backend
from mupscale.limits.recursions import FourLayer, four_layer_coefficients, three_layer_recursion
from mupscale.tuning.paper_cost import EXPERIMENTS

ROOT = Path(__file__).parent.parent
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
    """The proof says W₁ has entries N(0, 1); with those a product grows as √N."""
    sizes = []
    for n in (100, 400):
        finite = FiniteWidth(n, 2)
        x, w = finite.vector("x", "noise"), finite.matrix("W", "noise")
        sizes.append((finite.dot(w @ x, w @ x), finite.N * finite.dot(w @ x, w @ x)))
    assert all(abs(right - 1) < 0.3 for right, _ in sizes)
    assert sizes[1][1] / sizes[0][1] > 2.5, "as printed"


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


def jump(n: int, readout: Callable[[int], float]) -> float:
    """The spread of outputs that noise on the readout alone causes, over seeds."""

    def make(width: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(2, width, bias=False), nn.Tanh(), nn.Linear(width, 1, bias=False)
        ).double()

    base = mu.init_(make(n), plan := mu.infer_plan(make, 1, n), std={"0.weight": 1.0, "2.weight": 1.0})
    x = torch.tensor([[1.0, 0.3]], dtype=torch.float64)
    noise = mu.MupNoise({"0.weight": 0.0, "2.weight": readout(2 * n)})
    run = mu.Run(base, reference=plan)
    moved = [mu.upscale(run, lambda: make(2 * n), noise, seed=seed).model(x) - base(x) for seed in range(24)]
    return float(torch.cat(moved).detach().std())


def test_algorithm_one_gives_the_readout_noise_that_explodes():
    """It divides the readout by k, so outputs are sums, and adds noise of size σ̄, not σ̄/N: outputs move as √N."""
    right = [jump(n, lambda wide: 1.0) for n in (32, 512)]
    printed = [jump(n, lambda wide: float(wide)) for n in (32, 512)]
    assert right[1] / right[0] < 0.4
    assert printed[1] / printed[0] > 2.5, "as printed"
    torch.manual_seed(0)
    effective = []  # σ̄ of signal-normalised noise, as printed and with noise of size 1/N
    for n in (32, 512):
        widened = (torch.randn(n) / n).repeat_interleave(2) / 2  # a readout that sums, duplicated
        share = float(widened.norm() / torch.randn(2 * n).norm())
        effective.append((share, share * 2 * n))
    assert effective[1][0] / effective[0][0] < 0.1, "as printed"
    assert 0.7 < effective[1][1] / effective[0][1] < 1.4


def adam(gradients: list[Tensor], eps: float, shift: int, betas: tuple[float, float] = (0.9, 0.99)) -> Tensor:
    """The paper's Q_t with its exponents t moved by `shift`."""
    t = len(gradients) - 1
    means = []
    for beta, power in zip(betas, (1, 2), strict=True):
        total = sum((beta ** (t - s) * g**power for s, g in enumerate(gradients)), torch.zeros(3).double())
        means.append((1 - beta) * total / (1 - beta ** (t + shift)))
    return means[0] / (means[1].sqrt() + eps)


def test_bias_corrections_of_adam_count_from_one():
    """1 - β^t at t = 0 is 0: the exponent is t + 1."""
    torch.manual_seed(0)
    gradients = [torch.randn(3, dtype=torch.float64) for _ in range(4)]
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], lr=1.0, betas=(0.9, 0.99), eps=1e-3)
    for t, gradient in enumerate(gradients):
        before, weight.grad = weight.detach().clone(), gradient.clone()
        optimizer.step()
        moved = before - weight.detach()
        assert largest(moved, adam(gradients[: t + 1], 1e-3, shift=1)) < 1e-12
        if t:
            assert largest(moved, adam(gradients[: t + 1], 1e-3, shift=0)) > 0.05, "as printed"
    assert not adam(gradients[:1], 1e-3, shift=0).isfinite().any(), "as printed, the first step"


def test_homogeneity_holds_for_positive_factors_only():
    """Q(a x; a ε) = a^m Q(x; ε) is asked of all real a; Adam has it for a > 0, and that is all that is used."""
    gradients = [torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)] * 2
    base = adam(gradients, 1e-2, shift=1)
    for factor in (0.5, 3.0):
        assert largest(adam([factor * g for g in gradients], factor * 1e-2, shift=1), base) < 1e-12
    assert largest(adam([-g for g in gradients], -1e-2, shift=1), base) > 0.5, "a = -1"


def test_dampening_spares_the_first_gradient_in_torch():
    """(1-τ) Σ β^(t-s) x_s is not torch's SGD: its buffer starts as the first gradient, undampened."""
    gradients = [torch.tensor([g], dtype=torch.float64) for g in (1.0, -0.5, 2.0)]
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9, dampening=0.3)
    for gradient in gradients:
        before, weight.grad = weight.detach().clone(), gradient.clone()
        optimizer.step()
    moved = float(before - weight.detach())
    printed = sum(0.7 * 0.9 ** (2 - s) * float(g) for s, g in enumerate(gradients))
    assert abs(moved - (printed + 0.3 * 0.9**2 * float(gradients[0]))) < 1e-12
    assert abs(moved - printed) > 0.2, "as printed"


def test_update_of_a_vector_takes_its_own_gradient():
    """γ n^m Q(du + λu/n; ε/n) = γ Q(n du + λu; ε); with n du inside at the last step, as printed, it is another."""
    du, u = torch.tensor([0.3, -0.2, 0.1]).double(), torch.tensor([1.0, 2.0, -1.0]).double()
    n, decay, eps = 7.0, 0.1, 1e-2
    right = adam([n * du + decay * u] * 2, eps, shift=1)
    assert largest(adam([du + decay / n * u] * 2, eps / n, shift=1), right) < 1e-12
    assert largest(adam([du + decay / n * u, n * du + decay / n * u], eps / n, shift=1), right) > 0.1, (
        "as printed"
    )


def test_embeddings_grow_with_the_width_and_not_with_its_square():
    """Tuning ten times smaller is 48.2 times cheaper, by the paper's own table, and not a hundred: tables are linear."""
    assert f"{EXPERIMENTS['GPT-2'].tuning_ratio:.1f}" == "48.2"
    assert [nn.Embedding(11, width).weight.numel() for width in (8, 80)] == [88, 880]


def test_the_global_norm_of_a_widened_model_is_another():
    """GPT-2 is trained with clipping at 1.0: widening changes the norm, so an active clip is another rule."""

    def make(width: int) -> nn.Module:
        torch.manual_seed(0)
        hidden = (nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        return nn.Sequential(*hidden, nn.Linear(width, 1)).double()

    base = make(8)
    wide = mu.widen(base, lambda: make(32))
    assert wide.plan is not None
    weighted, plain = [], []
    for model, plan in ((base, mu.infer_plan(make, 8, 8)), (wide.model, wide.plan)):
        model.zero_grad()
        model(torch.ones(4, 2, dtype=torch.float64)).square().mean().backward()
        weighted.append(float(mu.grad_norm(model, plan)))
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        plain.append(float(nn.utils.get_total_norm(gradients)))
    assert abs(weighted[1] / weighted[0] - 1) < 1e-12
    assert abs(plain[1] / plain[0] - 1) > 0.05, "torch's norm"


def test_every_test_that_the_page_names_exists():
    page = (ROOT / "docs" / "errata.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    files = [*ROOT.glob("tests/test_*.py")]
    known = {name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)}
    known |= {path.stem for path in files}
    assert named - known == set()
    own = set(re.findall(r"^def (test_\w+)", Path(__file__).read_text(), re.M)) - {
        "test_every_test_that_the_page_names_exists"
    }
    assert own - named == set(), "each of these is evidence for an entry"
