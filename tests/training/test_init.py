"""Initialisation at any width: the reference's own distribution, times the size μP gives it."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from harness.closeness import assert_bitwise, assert_same_model
from harness.draws import seeded
from harness.refusals import refusal
from mupscale.tensors.noise import rectangle
from mupscale.tensors.philox import Stream

INPUTS = 40


def net(n: int) -> nn.Module:
    """An input layer, a matrix, a norm and a readout; biases drawn, zero, and absent."""
    model = nn.Sequential(
        nn.Linear(INPUTS, n), nn.Tanh(), nn.Linear(n, n), nn.LayerNorm(n), nn.Linear(n, 30, bias=False)
    )
    nn.init.zeros_(model[2].bias)  # type: ignore[arg-type]
    nn.init.normal_(model[4].weight, std=0.7)  # type: ignore[arg-type]
    return model


def sizes(model: nn.Module) -> dict[str, float]:
    return {n: float(p.detach().double().square().mean().sqrt()) for n, p in model.named_parameters()}


def assert_size(found: Tensor, want: float, what: str, kurtosis: float = 3.0) -> None:
    """The root mean square within five standard errors."""
    values = found.detach().double()
    size = float(values.square().mean().sqrt())
    error = 5 * math.sqrt((kurtosis - 1) / (4 * values.numel()))
    assert abs(size / want - 1) <= error, f"{what}: {size}, expected {want}"


POWERS = {"0.weight": 0.0, "2.weight": -0.5, "4.weight": -1.0}


@pytest.mark.parametrize("n", [64, 96, 160, 640])
def test_sizes_follow_mup_from_a_reference_above_and_below(n: int):
    reference = seeded(net, 256)
    model = mu.init_weights_(net(n), mu.plans.plan_between(net, 256, n), std=reference)
    measured = sizes(reference)
    for name, power in POWERS.items():
        assert_size(model.get_parameter(name), measured[name] * (n / 256) ** power, name)
    assert_size(model.get_parameter("0.bias"), measured["0.bias"], "0.bias")
    assert not model.get_parameter("2.bias").any()
    assert (model.get_parameter("3.weight") == 1).all()
    assert not model.get_parameter("3.bias").any()
    for name in ("2.weight", "4.weight"):
        with pytest.raises(AssertionError):
            assert_size(model.get_parameter(name), measured[name], "control: without q")


def test_sizes_may_be_given_by_pattern():
    given: Any = {"2.weight": 1.0, "*.weight": 0.1, "*.bias": 0.0}
    model = mu.init_weights_(net(256), mu.plans.plan_between(net, 64, 256), std=given)
    assert_size(model.get_parameter("2.weight"), 0.5, "the first pattern that matches")
    assert_size(model.get_parameter("0.weight"), 0.1, "out only")
    assert_size(model.get_parameter("4.weight"), 0.025, "in only")
    assert_size(model.get_parameter("3.weight"), 0.1, "a gain")
    assert not model.get_parameter("2.bias").any()


def kurtosis(values: Tensor) -> float:
    values = values.detach().double()
    return float(values.pow(4).mean() / values.square().mean().square())


def test_at_the_reference_the_distribution_is_the_models_own():
    built, model = seeded(net, 256), seeded(net, 256)
    mu.init_weights_(model, mu.plans.plan_between(net, 256, 256), seed=1)
    for name in ("0.weight", "2.weight"):
        before, after = built.get_parameter(name), model.get_parameter(name)
        assert not torch.equal(before, after), "drawn anew"
        assert_size(after, sizes(built)[name], name, 1.8)
        assert abs(kurtosis(after) - 1.8) <= 0.05, "uniform stays uniform"
        assert float(after.detach().abs().max()) <= float(before.detach().abs().max()) * 1.01, (
            "within the same bounds"
        )
    last = model.get_parameter("4.weight")
    assert_size(last, 0.7, "4.weight")
    assert abs(kurtosis(last) - 3) <= 5 * math.sqrt(24 / last.numel()), "normal stays normal"
    for name in ("2.bias", "3.weight", "3.bias"):
        assert_bitwise(model.get_parameter(name), built.get_parameter(name), f"{name} is a constant")


class Tied(nn.Module):
    """Tied embeddings whose last gain absorbs 1/k; a gain used as (1 + w)."""

    def __init__(self, n: int):
        super().__init__()
        self.embed = nn.Embedding(50, n)
        self.gain = nn.Parameter(torch.zeros(n))
        self.norm = nn.RMSNorm(n)
        self.head = nn.Linear(n, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.embed(tokens) * (1 + self.gain)))
        return out


DECLARED: dict[str, Any] = {"roles": {"gain": "out"}, "plus_one": ["gain"]}


def test_tied_tensors_are_drawn_once_and_folds_and_shifts_follow_their_rule():
    plan = mu.plans.plan_between(
        Tied, 64, 256, declared=mu.Declared(folds={"norm.*": "1/4", "gain": "1/2"}, **DECLARED)
    )
    model = mu.init_weights_(Tied(256), plan, std=seeded(Tied, 64))
    assert isinstance(model, Tied)
    assert model.head.weight is model.embed.weight
    assert_size(model.embed.weight, sizes(seeded(Tied, 64))["embed.weight"], "out only")
    assert (model.norm.weight == 0.25).all(), "a folded gain"
    assert (1 + model.gain == 0.5).all(), "(1 + w) is folded, not w"


def test_a_drawn_tensor_with_a_fold_or_a_shift_is_scaled_as_a_whole():
    reference = seeded(Tied, 64)
    nn.init.normal_(reference.gain, std=0.1)
    plan = mu.plans.plan_between(
        Tied, 64, 4096, declared=mu.Declared(folds={"gain": "1/2", "embed.weight": "1/8"}, **DECLARED)
    )
    model: Any = mu.init_weights_(Tied(4096), plan, std=reference)
    assert_size(model.embed.weight, sizes(reference)["embed.weight"] / 8, "folded")
    gain, want = 1 + model.gain.detach().double(), 0.5 * sizes(reference)["gain"]
    assert abs(float(gain.mean()) - 0.5) <= 5 * want / math.sqrt(4096)
    assert_size(gain - 0.5, want, "(1 + w) times a half")


class Reordered(nn.Module):
    """Layers built in another order, among others."""

    def __init__(self, n: int, extra: bool):
        super().__init__()
        if extra:
            self.other = nn.Linear(7, n)
            self.second = nn.Linear(n, n)
        self.first = nn.Linear(INPUTS, n)
        if not extra:
            self.second = nn.Linear(n, n)


def test_bits_depend_on_seed_name_and_index_only():
    std = {"*weight": 0.3, "*bias": 0.1}
    layouts = {"second.weight": {1: 1}}
    models = []
    for extra in (False, True):
        plan = mu.plans.plan_between(
            partial(Reordered, extra=extra), 64, 128, declared=mu.Declared(layouts=layouts)
        )
        torch.manual_seed(extra)
        models.append(mu.init_weights_(Reordered(128, extra), plan, std=std))
    for name, p in models[0].named_parameters():
        assert_bitwise(models[1].get_parameter(name), p, name)
        low = mu.init_weights_(Reordered(128, True).bfloat16(), plan, std=std).get_parameter(name)
        assert_bitwise(low, p.detach().bfloat16(), f"{name} in another dtype")
    weight = models[0].get_parameter("second.weight").detach()
    z = rectangle(Stream(0, "init second.weight"), (128, 128), (32, 16), (64, 8), torch.device("cpu"))
    assert_bitwise(z * float(torch.tensor(0.3 / math.sqrt(2))), weight[32:96, 16:24].contiguous(), "a shard")
    again = mu.init_weights_(Reordered(128, True), plan, std=std, seed=1)
    assert not torch.equal(again.get_parameter("first.weight"), models[0].get_parameter("first.weight"))
    assert_same_model(mu.init_weights_(again, plan, std=std), models[1])


class OffCentre(nn.Module):
    def __init__(self, n: int):
        super().__init__()
        self.decay = nn.Parameter(torch.linspace(1, 3, n))
        self.layer = nn.Linear(5, n)


def test_what_is_neither_constant_nor_centred_is_refused_and_none_leaves_it():
    plan = mu.plans.plan_between(OffCentre, 64, 128, declared=mu.Declared(roles={"decay": "out"}))
    refusal(
        lambda: mu.init_weights_(OffCentre(128), plan, std=OffCentre(64)), "init.off_centre", where="decay"
    )
    model = mu.init_weights_(OffCentre(128), plan, std={"decay": None, "*": 0.1})
    assert_bitwise(model.get_parameter("decay").detach(), torch.linspace(1, 3, 128))
    assert_size(model.get_parameter("layer.weight"), 0.1, "the others are drawn")


def test_a_size_that_is_not_known_is_refused_and_so_is_a_pattern_that_matches_nothing():
    plan = mu.plans.plan_between(net, 64, 128)
    refusal(lambda: mu.init_weights_(net(128), plan), "init.size_unknown", where="2.weight")
    refusal(lambda: mu.init_weights_(net(64), plan, std=net(64)), "plan.other_shape", where="2.weight")
    given = {"*.weight": 0.1, "*.bias": 0.0, "typo.*": 1.0}
    refusal(
        lambda: mu.init_weights_(net(128), plan, std=given),
        "argument.pattern_matches_nothing",
        where="typo.*",
    )


class Structured(nn.Module):
    """What models build with care: a forget gate's bias, an identity, orthogonal matrices, a padding row, constants."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.table = nn.Embedding(40, n, padding_idx=3)
        self.memory = nn.LSTM(8, n)
        self.identity, self.turn = nn.Linear(n, n, bias=False), nn.Linear(n, n, bias=False)
        self.plain = nn.Linear(n, n)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, 17)).repeat(n, 1))
        self.waves = nn.Parameter(torch.sin(torch.arange(n * 5.0).view(n, 5)))
        with torch.no_grad():
            self.memory.get_parameter("bias_ih_l0")[n : 2 * n] = 1.0
            self.memory.get_parameter("bias_hh_l0").zero_()
            self.memory.get_parameter("bias_hh_l0")[n : 2 * n] = 1.0
            nn.init.eye_(self.identity.weight)
            nn.init.orthogonal_(self.turn.weight)


ROLES: Any = {"A_log": {0: "out"}, "waves": {0: "out"}}
FIXED = ("memory.bias_hh_l0", "identity.weight", "turn.weight", "A_log", "waves")


@pytest.mark.parametrize("n", [32, 48, 96])
def test_structure_stays_the_model_s_own_at_every_width(n: int):
    plan = mu.plans.plan_between(Structured, 32, n, declared=mu.Declared(roles=ROLES))
    built, model = seeded(Structured, n), seeded(Structured, n)
    state = torch.get_rng_state()
    mu.init_weights_(model, plan, std=lambda: Structured(32).double())
    assert torch.equal(torch.get_rng_state(), state)
    for name in FIXED:
        assert_bitwise(model.get_parameter(name), built.get_parameter(name), name)
    bias, old = model.memory.bias_ih_l0.detach(), built.memory.bias_ih_l0.detach()
    assert (bias[n : 2 * n] == 1).all(), "the forget gate"
    assert (bias[:n] != old[:n]).all(), "the other gates are drawn"
    assert not model.table.weight[3].any(), "the padding row"
    assert (model.table.weight[4] != built.table.weight[4]).all(), "control: another row"
    reference = seeded(Structured, 32)
    power = (n / 32) ** -0.5
    assert_size(model.plain.weight, sizes(reference)["plain.weight"] * power, "plain.weight")
    assert_size(model.memory.weight_hh_l0, sizes(reference)["memory.weight_hh_l0"] * power, "weight_hh")
    rows = torch.arange(40) != 3
    assert_size(model.table.weight[rows], 1.0, "the table without its padding row", 3.5)


def test_one_model_shows_what_repeats_and_what_is_orthogonal():
    plan = mu.plans.plan_between(Structured, 32, 64, declared=mu.Declared(roles=ROLES))
    reference = seeded(Structured, 32)
    reference.memory.bias_ih_l0.data.zero_()
    reference.memory.bias_ih_l0.data[32:64] = 1.0
    built, model = seeded(Structured, 64), seeded(Structured, 64)
    mu.init_weights_(model, plan, std=reference)
    for name in {*FIXED, "memory.bias_ih_l0"} - {"waves"}:
        assert_bitwise(model.get_parameter(name), built.get_parameter(name), name)
    assert not model.table.weight[3].any()
    assert not torch.equal(model.waves, built.waves), (
        "control: one build does not show that it is no random table"
    )


def test_at_the_reference_random_entries_are_drawn_from_the_model_s_own_distribution():
    plan = mu.plans.plan_between(Structured, 128, 128, declared=mu.Declared(roles=ROLES))
    built, model = seeded(Structured, 128), seeded(Structured, 128)
    mu.init_weights_(model, plan, std=lambda: Structured(128).double())
    for name in ("plain.weight", "memory.weight_ih_l0", "memory.weight_hh_l0"):
        one, other = built.get_parameter(name), model.get_parameter(name)
        assert not torch.equal(one, other), name
        assert_size(other, sizes(built)[name], name, 1.8)
        assert abs(kurtosis(other) - kurtosis(one)) <= 0.1, name


def test_a_reference_and_tensors_left_as_built_go_together():
    class Off(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.plain, self.dt_bias = nn.Linear(n, n), nn.Parameter(3 + torch.rand(n))

    plan = mu.plans.plan_between(Off, 64, 128, declared=mu.Declared(roles={"dt_bias": "out"}))
    reference = lambda: seeded(Off, 64)  # noqa: E731
    refusal(
        lambda: mu.init_weights_(seeded(Off, 128), plan, std=reference()), "init.off_centre", where="dt_bias"
    )
    model, built = seeded(Off, 128), seeded(Off, 128)
    mu.init_weights_(model, plan, std={"dt_bias": None, "*": reference()})
    assert_bitwise(model.dt_bias, built.dt_bias, "left as built")
    assert_size(model.plain.weight, sizes(reference())["plain.weight"] * 2**-0.5, "plain", 1.8)


def test_structure_that_does_not_grow_with_its_axis_is_refused():
    class Half(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.plain = nn.Linear(8, n)
            with torch.no_grad():
                self.plain.weight[0] = 1.0

    plan = mu.plans.plan_between(Half, 16, 32)
    make = lambda: Half(16)  # noqa: E731
    refusal(
        lambda: mu.init_weights_(Half(32), plan, std=make), "init.fixed_parts_elsewhere", where="plain.weight"
    )
    mu.init_weights_(Half(32), plan, std={"plain.weight": None, "*": make})


def test_sizes_by_name_leave_padding_rows_at_zero():
    model: Any = nn.Sequential(nn.Embedding(9, 16, padding_idx=4))
    mu.init_weights_(
        model, mu.plans.plan_between(lambda n: nn.Sequential(nn.Embedding(9, n)), 8, 16), std={"*": 0.5}
    )
    assert model[0].weight.detach().abs().amax(1).bool().tolist() == [i != 4 for i in range(9)]
