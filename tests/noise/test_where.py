"""Where noise goes: to weights with copies, and not to frozen ones, padding rows, gains and biases."""

import copy
import json
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from harness.closeness import EXACT
from harness.draws import data, seeded
from harness.runs import drift, train
from mupscale.noise import where as noise_places
from mupscale.noise.resolved import restore_noise
from mupscale.noise.where import Exempt, exempt_of, noisy_weights
from mupscale.plans.direction import Direction
from mupscale.plans.tensor_plan import TensorPlan
from mupscale.plans.wide_model import fill_model_
from mupscale.rules import Axis
from mupscale.tensors.expand import expand
from mupscale.tensors.making import Making
from mupscale.tensors.noise import TensorNoise
from mupscale.tensors.philox import Stream
from mupscale.training.grow.loss_rise import measured

NOISES: dict[str, Any] = {"mup": mu.MupNoise(0.1), "signal": mu.SignalNoise(0.2)}


class Mixed(nn.Module):
    """Every kind of tensor that noise treats differently."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.table = nn.Embedding(7, n, padding_idx=2)
        self.backbone = nn.Linear(8, 20)
        self.inner = nn.Linear(8, n)
        self.frozen = nn.Linear(n, n).requires_grad_(False)
        self.image_norm = nn.LayerNorm([n, 2, 2])
        self.layer_scale = nn.Parameter(torch.full((n, 1, 1), 1e-6))
        self.empty = nn.Parameter(torch.zeros(0, n))
        self.readout = nn.Parameter(torch.randn(n))
        self.outer = nn.Linear(n, 3)


def plan(base: int = 4, wide: int = 8) -> mu.Plan:
    roles: dict[str, Any] = {"layer_scale": "out", "empty": {1: "out"}, "readout": "in"}
    return mu.plans.plan_between(Mixed, base, wide, declared=mu.Declared(roles=roles))


def moved(noise: Any, base: nn.Module | None = None) -> dict[str, Tensor]:
    model = seeded(Mixed, 4) if base is None else base
    noisy, exact = (
        mu.upscale(model, lambda: Mixed(8), noise, plan=plan(), prove=False).model,
        mu.grow(model, lambda: Mixed(8), plan=plan(), prove=False).model,
    )
    kept = dict(exact.named_parameters())
    return {name: (p - kept[name]).detach() for name, p in noisy.named_parameters()}


@pytest.mark.parametrize("kind", NOISES)
def test_noise_goes_to_weights_that_have_copies_and_train(kind: str):
    moves = moved(NOISES[kind])
    noisy = {name for name, delta in moves.items() if delta.any()}
    assert noisy == {"table.weight", "inner.weight", "readout", "outer.weight"}
    rows = moves["table.weight"].abs().amax(1)
    assert rows[2] == 0, "the padding row"
    assert bool((rows[[0, 1, 3, 4, 5, 6]] > 0).all())


def test_vectors_are_asked_for_by_role_and_not_by_shape():
    moves = moved(replace(NOISES["mup"], vectors=True))
    noisy = {name for name, delta in moves.items() if delta.any()}
    assert {"image_norm.weight", "image_norm.bias", "layer_scale", "inner.bias"} <= noisy
    assert not noisy & {"backbone.bias", "outer.bias", "frozen.bias"}, "they have no copies, or do not train"


def test_a_frozen_weight_is_listed_and_gets_noise_once_it_trains():
    model = seeded(Mixed, 4)
    run = mu.upscale(model, lambda: Mixed(8), mu.SignalNoise(0.2), plan=plan(), prove=False)
    assert run.provenance["noise"]["without"] == ("frozen.weight",)
    model.frozen.requires_grad_(True)
    assert moved(NOISES["signal"], model)["frozen.weight"].any(), "control: it trains"


def test_without_the_rule_everything_would_move(monkeypatch):
    monkeypatch.setattr(noise_places, "must_part", lambda entry: True)
    assert moved(NOISES["mup"])["backbone.weight"].any()


def test_growing_one_axis_leaves_the_others_without_noise():
    class Block(nn.Module):
        def __init__(self, hidden: int, ffn: int) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(hidden, 2)
            self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    grown = mu.infer_plan(lambda: Block(8, 6), lambda: Block(8, 12))
    assert list(noisy_weights(grown, Exempt(), vectors=True)) == ["up.weight", "up.bias", "down.weight"]
    both = mu.infer_plan(lambda: Block(8, 6), lambda: Block(16, 12))
    assert "attention.in_proj_weight" in noisy_weights(both, Exempt(), vectors=False), "control: it grows"


def test_copies_in_other_tensors_must_part_too():
    fixed = Axis.fixed(3)
    entry = TensorPlan(("w",), (fixed, fixed), spread=Fraction(2))
    assert list(noisy_weights(mu.Plan({"w": entry}), Exempt(), vectors=False)) == ["w"]
    alone = mu.Plan({"w": replace(entry, spread=Fraction(1))})
    assert not noisy_weights(alone, Exempt(), vectors=False), "control: no copies"


def test_live_and_sharded_paths_exempt_the_same_weights():
    base, wide = seeded(Mixed, 4).float(), seeded(Mixed, 8).float()
    for kind, noise in NOISES.items():
        live = mu.upscale(base, lambda: Mixed(8), noise, plan=plan(), seed=3, prove=False)
        loaded = mu.load_grown_(mu.Run(base), wide, plan=plan(), prove=False, noise=noise, seed=3)
        assert live.provenance["noise"] == loaded.provenance["noise"], kind
        for name, parameter in loaded.model.named_parameters():
            assert torch.equal(parameter, dict(live.model.named_parameters())[name]), f"{kind}, {name}"
    thawed = mu.load_grown_(
        mu.Run(base), wide.requires_grad_(True), plan=plan(), prove=False, noise=noise, seed=3
    )
    frozen = [run.model.get_parameter("frozen.weight") for run in (thawed, live)]
    assert not torch.equal(*frozen), "control: it trains"


class Gained(nn.Module):
    """A space that is multiplied by a gain of its own, of any spelling, and no norm averages over it."""

    def __init__(self, n: int, *shape: int, zero: bool = False) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, n), nn.Linear(n, 3)
        self.gain = nn.Parameter(
            torch.zeros(*shape, n) if zero else torch.linspace(0.1, 0.3, n).expand(*shape, n).clone()
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.gain * self.inner(x).tanh())
        return out


class Residual(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, n), nn.Linear(n, n), nn.Linear(n, 3)
        self.first, self.second = nn.BatchNorm1d(n), nn.BatchNorm1d(n)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.a(x)).tanh()
        out: Tensor = self.out(x + self.second(self.b(x)))
        return out


class LayerScale(nn.Module):
    """A gain that writes into a space which a norm averages over: it must not wake, or the loss would jump."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.a, self.norm, self.out = nn.Linear(6, n), nn.RMSNorm(n, eps=1e-6), nn.Linear(n, 3)
        self.up, self.down = nn.Linear(n, 2 * n), nn.Linear(2 * n, n)
        self.last, self.gain = nn.RMSNorm(n, eps=1e-6), nn.Parameter(torch.full((n,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = x + self.gain * self.down(nn.functional.gelu(self.up(self.norm(x))))
        out: Tensor = self.out(self.last(x))
        return out


GAINED: dict[str, tuple[Any, set[str]]] = {
    "batch norm": (
        lambda n: nn.Sequential(nn.Linear(6, n), nn.BatchNorm1d(n), nn.ReLU(), nn.Linear(n, 3)),
        {"1.weight", "1.running_var"},
    ),
    "residual": (
        Residual,
        {f"{n}.{leaf}" for n in ("first", "second") for leaf in ("weight", "running_var")},
    ),
    "gain": (Gained, {"gain"}),
    "gain in a row": (lambda n: Gained(n, 1), {"gain"}),
    "gain of zeros": (lambda n: Gained(n, zero=True), {"gain"}),
    "layer scale": (LayerScale, set()),
}
DATA = data(64, 6), data(64, 3, seed=2)


def squared(model: nn.Module) -> Tensor:
    return nn.functional.mse_loss(model(DATA[0]), DATA[1])


def in_eval_mode(model: nn.Module) -> float:
    return measured(squared, model)


@pytest.mark.parametrize("name", GAINED)
def test_gains_of_padded_units_wake_without_a_jump_and_everything_new_learns(name: str):
    """Control: gains that stay zero leave their units without a gradient for ever."""
    make, typical = GAINED[name]

    def start() -> mu.Run:
        model = seeded(make, 4)
        run = mu.Run(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0))
        if name != "gain of zeros":
            train(run, squared, 10)
        return run

    wide = lambda: make(7).double()  # noqa: E731
    run = start()
    plan = mu.infer_plan(run.model, wide, by="padded", loss=squared)
    assert {name for name, entry in plan.tensors.items() if entry.typical} == typical
    assert mu.Plan.from_json(plan.to_json()) == plan
    asleep = mu.grow(start(), wide, plan=plan)
    woken = mu.upscale(run, wide, mu.SignalNoise(0.1), plan=plan)
    assert drift(start(), asleep, squared, 20) <= EXACT, "asleep"
    in_training = [float(squared(copy.deepcopy(model)).detach()) for model in (woken.model, run.model)]
    assert abs(in_training[0] - in_training[1]) <= 1e-14
    assert abs(in_eval_mode(woken.model) - in_eval_mode(run.model)) <= 1e-14
    loaded = mu.load_grown_(mu.Run(run.model), wide(), plan=plan, noise=mu.SignalNoise(0.1))
    record = json.loads(json.dumps(dict(woken.provenance["noise"]), default=list))
    restored = fill_model_(
        make(7).double(), run.model, Direction(plan, noise=restore_noise(record, plan))
    ).state_dict()
    for key, value in woken.model.state_dict().items():
        assert torch.equal(value, loaded.model.state_dict()[key]), f"shards: {key}"
        assert torch.equal(value, restored[key]), f"from its record: {key}"
    dull = replace(plan, tensors={key: replace(e, typical=False) for key, e in plan.tensors.items()})
    control = mu.upscale(run, wide, mu.SignalNoise(0.1), plan=dull, prove=False)
    assert still(woken) == set()
    assert bool(still(control)) == bool(typical)


def still(run: mu.Run) -> set[str]:
    """Parameters with an entry that 12 steps have not moved."""
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    train(run, squared, 12)
    return {name for name, p in run.model.named_parameters() if bool((p == before[name]).any())}


def test_names_are_found_through_wrappers_and_ties():
    class Tied(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.head = nn.Linear(n, 5, bias=False)
            self.table = nn.Embedding(5, n, padding_idx=1)
            self.table.weight = self.head.weight

    grown = mu.plans.plan_between(
        Tied, 4, 8, declared=mu.Declared(roles={"head.weight": {1: "out"}}, folds={"head.weight": 1})
    )
    model = Tied(4)
    assert exempt_of(model, grown, "base").padding == {"head.weight": 1}
    averaged = torch.optim.swa_utils.AveragedModel(model)
    assert exempt_of(averaged, grown, "base").padding == {"head.weight": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_row_without_noise_keeps_every_bit_in_every_cut(dtype: torch.dtype):
    axes = (Axis.fixed(6), Axis.parse("out: 5x3"))
    base = torch.randn(6, 5).to(dtype)
    base[4, 0] = -0.0
    noise = TensorNoise(Stream(0, "w"), 0.1, without_row=4)
    exact, noisy = (expand(base, Making(axes, noise=n)) for n in (None, noise))
    free = expand(base, Making(axes, noise=replace(noise, without_row=None)))
    same = noisy.view(torch.uint8) == exact.view(torch.uint8)
    assert bool(same[4].all())
    others = [0, 1, 2, 3, 5]
    assert torch.equal(noisy[others], free[others])
    assert not torch.equal(noisy[4], free[4]), "control: the row has noise otherwise"
    if dtype != torch.bfloat16:
        for start, rows in ((0, 4), (3, 2), (4, 1), (5, 1)):
            part = noise.add_(exact[start : start + rows].clone(), axes, [start, 0])
            assert torch.equal(part, noisy[start : start + rows]), start
            delta = noise.slice(axes, [start, 0], [rows, 15], exact)
            assert torch.equal(exact[start : start + rows] + delta, part), start


def test_exempt_survives_json():
    exempt = Exempt(frozenset({"a"}), frozenset({"b"}), {"c": 1})
    assert Exempt.of_json(exempt.as_json()) == exempt
