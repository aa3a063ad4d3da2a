"""How much noise a tensor gets: Algorithm 2, signal-normalised and paired noise, and who gets none."""

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mupscale as mu
from harness.closeness import EXACT, assert_bitwise, assert_close, difference
from harness.draws import data, seeded
from harness.refusals import refusal
from mupscale.noise.kinds import CLASSES
from mupscale.noise.resolved import reference_size
from mupscale.rules.schemes import SCHEMES
from mupscale.tensors.noise import TensorNoise

T = 0.2


def top(matrix: Tensor) -> float:
    matrix = matrix.detach().double()
    gram = matrix @ matrix.T if matrix.shape[0] < matrix.shape[1] else matrix.T @ matrix
    return math.sqrt(float(torch.linalg.eigvalsh(gram)[-1]))


def grown(base: nn.Module, make_wide: Any, noise: Any, plan: mu.Plan | None = None, seed: int = 0) -> Any:
    """What noise alone did: the wide tensors, and the same without noise."""
    plan = plan or mu.infer_plan(base, make_wide())
    wide = mu.upscale(base, make_wide, noise, plan=plan, prove=False, seed=seed)
    exact = mu.grow(base, make_wide, plan=plan, prove=False)
    weights = {name: t.detach() for name, t in exact.model.named_parameters()}
    deltas = {name: t.detach() - weights[name] for name, t in wide.model.named_parameters()}
    return wide, weights, deltas


def as_matrices(tensor: Tensor, stacked: bool) -> list[Tensor]:
    return list(tensor) if stacked else [tensor.flatten(1)]


class Experts(nn.Module):
    """Three stacked matrices of very different sizes."""

    def __init__(self, n: int):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, n, n) * torch.tensor([1.0, 0.1, 3.0]).view(3, 1, 1))


PLAIN = {"weight": {1: 1}}
SIGNAL: dict[str, Any] = {
    "matrix": (lambda n: nn.Linear(n, n), 256, 512, "weight", {}),
    "input layer": (lambda n: nn.Linear(300, n), 256, 1024, "weight", {}),
    "readout": (lambda n: nn.Linear(n, 300), 256, 768, "weight", {"layouts": PLAIN}),
    "convolution": (lambda n: nn.Conv2d(n, n, 3), 64, 128, "weight", {}),
    "convolution, out fixed": (lambda n: nn.Conv2d(n, 96, 3), 64, 128, "weight", {"layouts": PLAIN}),
    "convolution in one dimension": (lambda n: nn.Conv1d(n, n, 3), 128, 256, "weight", {}),
    "convolution in one dimension, out fixed": (lambda n: nn.Conv1d(n, 96, 3), 128, 256, "weight", {"layouts": PLAIN}),
    "experts": (Experts, 128, 256, "w", {"roles": {"w": {1: "out", 2: "in"}}}),
}  # fmt: skip


@pytest.mark.parametrize("kind", SIGNAL)
def test_signal_noise_has_t_times_the_spectral_norm_of_the_widened_weight(kind: str):
    make, n, wide_n, name, declared = SIGNAL[kind]
    base = seeded(make, n).float()
    plan = mu.plans.plan_between(make, n, wide_n, declared=mu.Declared(**declared))
    wide, weights, deltas = grown(base, lambda: make(wide_n), mu.SignalNoise(T), plan)
    pairs = zip(*(as_matrices(x[name], kind == "experts") for x in (weights, deltas)), strict=True)
    ratios = [top(delta) / top(weight) for weight, delta in pairs]
    for ratio in ratios:
        assert abs(ratio / T - 1) <= 0.02, f"{ratio} instead of {T}"
    sigma = wide.provenance["noise"]["sigmas"][name]
    assert len(sigma) == 3 if kind == "experts" else isinstance(sigma, float)


def test_one_spectral_norm_for_all_experts_would_be_seen():
    base = seeded(Experts, 64).float()
    plan = mu.plans.plan_between(Experts, 64, 128, declared=mu.Declared(roles={"w": {1: "out", 2: "in"}}))
    _, weights, deltas = grown(base, lambda: Experts(128), mu.MupNoise(0.1), plan)
    ratios = [top(d) / top(w) for w, d in zip(weights["w"], deltas["w"], strict=True)]
    assert max(ratios) / min(ratios) > 10, "control: one σ̄ for three experts"


def test_signal_noise_scales_vectors_too_when_asked():
    make = lambda n: nn.Linear(n, n)  # noqa: E731
    base = seeded(make, 256).float()
    _, weights, deltas = grown(base, lambda: make(1024), mu.SignalNoise(T, vectors=True))
    ratio = float(deltas["bias"].norm() / weights["bias"].norm())
    assert abs(ratio / T - 1) <= 5 / math.sqrt(2 * 1024)


def block(n: int, ends: int = 20) -> nn.Module:
    return nn.Sequential(nn.Linear(ends, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, ends))


def test_recorded_sigmas_are_plain_noise_with_the_same_sizes_at_another_seed():
    base = seeded(block, 128).float()
    first, _, one = grown(base, lambda: block(256), mu.SignalNoise(T))
    sigmas = first.provenance["noise"]["sigmas"]
    again, _, two = grown(base, lambda: block(256), mu.MupNoise(sigmas), seed=9)
    assert again.provenance["noise"]["sigmas"] == sigmas
    for name in sigmas:
        assert not torch.equal(one[name], two[name]), name
        assert abs(float(two[name].std() / one[name].std()) - 1) <= 10 / math.sqrt(2 * one[name].numel())
    _, _, same = grown(base, lambda: block(256), mu.MupNoise(sigmas), seed=0)
    for name in sigmas:
        assert_bitwise(same[name], one[name], name)


def test_signal_noise_reproduces_the_formula_of_the_paper():
    n, k = 256, 2
    base = seeded(block, n, 250).float()
    wide, _, deltas = grown(base, lambda: block(k * n, 250), mu.SignalNoise(T))
    ratios = {"0.weight": (k, 1), "2.weight": (k, k), "4.weight": (1, k)}
    for name, (k_out, k_in) in ratios.items():
        weight = dict(base.named_parameters())[name]
        std = wide.provenance["noise"]["sigmas"][name] * float(reference_size(wide.plan[name], None))
        unit = deltas[name] / std  # Δ, of standard normal entries
        paper = T * math.sqrt(k_out / k_in) * top(weight) / top(unit)
        assert abs(std / paper - 1) <= 0.02, name
        assert abs(std / (T * top(weight) / top(unit)) - 1) > 0.2 or k_out == k_in, f"control: {name}"


SIZES = {"0.weight": Fraction(0), "2.weight": Fraction(-1, 2), "4.weight": Fraction(-1)}


def test_sigmas_transfer_from_a_small_pair_by_the_sizes_of_the_reference():
    """σ̄ found on 32 -> 64 under reference 32, applied on 64 -> 256 under the same reference."""
    sigmas = {"0.weight": 0.3, "2.weight": 0.2, "4.weight": 0.1}
    base = seeded(block, 64)
    reference = mu.plans.plan_between(block, 32, 64)
    run = mu.Run(base, since=reference)
    wide = mu.upscale(run, lambda: block(256), mu.MupNoise(sigmas))
    exact = mu.grow(base, lambda: block(256))
    for name, power in SIZES.items():
        delta = wide.model.get_parameter(name) - exact.model.get_parameter(name)
        want = sigmas[name] * 8**power
        error = 5 / math.sqrt(2 * delta.numel())
        assert abs(float(delta.detach().std()) / want - 1) <= error, name
        own = sigmas[name] * 4**power
        assert power == 0 or abs(own / want - 1) > error, "control: counted from the base"


def test_folds_before_and_after_the_base_both_scale_the_noise():
    reference = mu.plans.plan_between(block, 8, 16).fold("2.weight", "1/3")
    plan = mu.plans.plan_between(block, 16, 32).fold("2.weight", "1/5")
    assert str(reference_size(plan["2.weight"], reference)) == "1/30", "1/3 · 1/5 · (32/8)^-1/2"
    assert str(reference_size(plan["2.weight"], None)) != "1/30", "control: counted from the base"


def test_a_width_that_happens_to_equal_its_reference_keeps_its_role():
    """Sizes (in, out): reference (8, 8), base (8, 4), wide (16, 8). The matrix is a matrix all the same."""
    make = lambda s: nn.Sequential(nn.Linear(3, s[0]), nn.Linear(*s), nn.Linear(s[1], 2))  # noqa: E731
    reference, plan = (
        mu.plans.plan_between(make, (8, 8), (8, 4)),
        mu.plans.plan_between(make, (8, 4), (16, 8)),
    )
    assert float(reference_size(plan["1.weight"], reference)) == 2**-0.5
    near = mu.plans.plan_between(make, (8, 8), (8, 5)), mu.plans.plan_between(make, (8, 5), (16, 10))
    assert float(reference_size(near[1]["1.weight"], near[0])) == 2**-0.5, "control: a neighbouring width"


def test_vectors_get_noise_only_when_asked():
    base = seeded(block, 8)
    for noise in (mu.MupNoise(0.1), mu.SignalNoise(0.1), mu.PairedNoise(0.1)):
        _, _, deltas = grown(base, lambda: block(16), noise)
        assert not any(d.any() for name, d in deltas.items() if name.endswith("bias"))
    _, _, deltas = grown(base, lambda: block(16), mu.MupNoise(0.1, vectors=True))
    still = [name for name, delta in deltas.items() if not delta.any()]
    assert still == ["4.bias"], "control: all others grow and were asked for"


def test_a_missing_sigma_is_refused_and_a_zero_means_none():
    base = seeded(block, 8)
    make = lambda: block(16)  # noqa: E731
    refusal(
        lambda: mu.upscale(base, make, mu.MupNoise({"0.weight": 0.1})), "noise.size_missing", where="2.weight"
    )
    for zero in (0.0, 0):
        sigmas = {"0.weight": 0.1, "2.weight": zero, "4.weight": zero}
        _, _, deltas = grown(base, make, mu.MupNoise(sigmas))
        assert [name for name, delta in deltas.items() if delta.any()] == ["0.weight"]


PAIRS = {"k = 2": (8, 16, False), "k = 3": (8, 24, False), "pads": (8, 19, True)}


@pytest.mark.parametrize("kind", PAIRS)
def test_paired_noise_moves_weights_and_no_output(kind: str):
    n, wide_n, pad = PAIRS[kind]
    base, x = seeded(block, n), data(50, 20)
    plan = mu.plans.plan_between(block, n, wide_n, by="padded" if pad else "copies")
    wide, weights, deltas = grown(base, lambda: block(wide_n), mu.PairedNoise(0.5), plan)
    assert_close(wide.model(x), base(x), EXACT)
    for name in ("2.weight", "4.weight"):
        assert float(deltas[name].norm()) > 0.1 * float(weights[name].norm()), name
    free, _, _ = grown(base, lambda: block(wide_n), mu.MupNoise(0.5), plan)
    assert difference(free.model(x), base(x)) > 1e-3, "control: the same noise unpaired"
    assert mu.diagnostics.resolve_noise(
        dict(base.named_parameters()), mu.PairedNoise(0.5), plan=plan
    ).without == ("0.weight",)


def test_paired_noise_moves_no_output_of_a_block_layout():
    make = lambda n: nn.Sequential(nn.Linear(5, 12 * n // 4), nn.Tanh(), nn.Linear(12 * n // 4, 3))  # noqa: E731
    layouts = {"0.*": {0: 4}, "2.weight": {1: 4}}
    plan = mu.plans.plan_between(make, 4, 12, declared=mu.Declared(layouts=layouts))
    assert str(plan["2.weight"].axes[1]) == "in: 3x3 * 4"
    base, x = seeded(make, 4), data(50, 5)
    wide, _, deltas = grown(base, lambda: make(12), mu.PairedNoise(0.5), plan)
    assert deltas["2.weight"].any()
    assert_close(wide.model(x), base(x), EXACT)
    plain = replace(plan["2.weight"], axes=(plan["2.weight"].axes[0], mu.rules.Axis.parse("in: 12x3")))
    resolved = mu.diagnostics.resolve_noise({}, mu.MupNoise(0.5), plan=plan).tensor("2.weight")
    assert resolved is not None
    wrong = TensorNoise(resolved.stream, 0.5, 1)
    delta = wrong.slice(plain.axes, [0, 0], [3, 36], deltas["2.weight"])
    hidden = mu.grow(base, lambda: make(12), plan=plan).model[:2](x)  # type: ignore[index]
    assert float((hidden @ delta.T).detach().abs().max()) > 1e-3, "control: copies taken for neighbours"


SAME: dict[str, tuple[int, Any]] = {
    "added": (24, mu.MupNoise(0.1, vectors=True)),
    "new units": (20, mu.NewUnits()),
}
"""A width that 8 units grow to, by copies and zeros, and the noise."""


@pytest.mark.parametrize("kind", SAME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_of_weights_get_the_same_noise_and_moments_none(dtype: torch.dtype, kind: str):
    n, noise = SAME[kind]
    base = seeded(block, 8).to(dtype)
    optimizer = torch.optim.AdamW(base.parameters(), lr=0.01)
    base(data(4, 20).to(dtype)).square().mean().backward()
    optimizer.step()
    average = AveragedModel(base, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    master = {name: p.detach().float().clone() for name, p in base.named_parameters()}
    plan = mu.plans.plan_between(block, 8, n, by="padded")
    for ema in (average, {name: p.detach().clone() for name, p in base.named_parameters()}, master):
        wide: Any = mu.upscale(mu.Run(base, optimizer, ema=ema), lambda: block(n), noise, plan=plan)
        kept = wide.ema if isinstance(wide.ema, dict) else dict(wide.ema.module.named_parameters())
        for name, p in wide.model.named_parameters():
            assert_bitwise(kept[name].to(dtype), p, name)
        exact = mu.grow(mu.Run(base, optimizer), lambda: block(n), plan=plan)
        for name, p in wide.model.named_parameters():
            other = exact.model.get_parameter(name)
            assert torch.equal(p, other) is (name == "4.bias"), f"control: {name} has noise if it grows"
            for key in ("exp_avg", "exp_avg_sq"):
                want = exact.optimizers[0].state[other][key]
                assert_bitwise(wide.optimizers[0].state[p][key], want, f"{name} {key}")


def test_every_scheme_has_a_class():
    assert list(CLASSES) == list(SCHEMES)
