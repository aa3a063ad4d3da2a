"""Upscale is grow plus noise plus a learning rate: exact at zero noise, counted from the first reference."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale as mu
from harness.closeness import EXACT, assert_same_model
from harness.draws import data, seeded
from harness.exactness import precise_muon, prepare_worker, warm_base
from harness.models import CASES, Case
from harness.refusals import refusal, refused
from harness.runs import drift
from harness.runs import train as take
from harness.setups import SETUPS, Setup
from mupscale.plans.plan import OUTPUTS_ALONE
from mupscale.sharded.verify import verify_sharded

SILENT = mu.MupNoise(0.0)
LIMIT = 0.05


@pytest.fixture
def float64():
    """The benchmarks' models and batches have torch's default dtype."""
    before = torch.get_default_dtype()
    prepare_worker()
    yield
    torch.set_default_dtype(before)


def assert_same_optimizer(found: Any, want: Any) -> None:
    mine, other = found.state_dict(), want.state_dict()
    assert mine["param_groups"] == other["param_groups"]
    assert mine["state"].keys() == other["state"].keys()
    for i, state in other["state"].items():
        assert mine["state"][i].keys() == state.keys()
        for key, value in state.items():
            held = mine["state"][i][key]
            assert torch.equal(held, value) if isinstance(value, Tensor) else held == value, f"{i}.{key}"


def step_of(case: Case, setup: Setup, clip: Any = None) -> Any:
    def step(run: mu.Run, i: int) -> Tensor:
        run.model.zero_grad()
        loss = setup.sign * case.loss(run.model, setup.warm + i)
        loss.backward()
        if clip is not None:
            clip(run)
        for optimizer in run.optimizers:
            optimizer.step()
        return loss

    return step


def clip_by_reference(run: mu.Run) -> None:
    norm = mu.trainers.clip_grad_norm_(run.model, run, max_norm=LIMIT)
    assert norm > LIMIT, "clipping must be active"


def clip_plainly(run: mu.Run) -> None:
    if any(p.grad is not None and p.grad.is_sparse for p in run.model.parameters()):  # torch's refuses these
        mu.trainers.clip_grad_norm_(run.model, mu.Run(run.model), max_norm=LIMIT)
    else:
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), LIMIT)


PAIRS = [
    ("SGD momentum", "MLP", True), ("AdamW", "MLP+p", True), ("Adam amsgrad", "Llama", False),
    ("AdamW", "Llama+p", True), ("Adagrad", "ResNet", False), ("SGD", "ResNet", True),
    ("NAdam", "GPT-2", True), ("Lion", "LSTM", False), ("RMSprop centered", "LSTM", True),
    ("SGD sparse", "Word2Vec", True), ("SparseAdam", "Word2Vec", False), ("Muon original", "MLP", False),
    ("Muon original", "GPT-2", True), ("Adafactor", "MLP", False),
]  # fmt: skip


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("setup", "case", "clips"), PAIRS)
def test_zero_noise_is_widening_and_passes_the_certificate(setup: Any, case: Any, clips: bool):
    setup, case = SETUPS[setup], CASES[case]
    make = lambda: case.make(case.wide)  # noqa: E731
    with precise_muon():
        base = warm_base(setup, case)
        wide, exact = mu.upscale(base, make, SILENT, plan=case.plan), mu.grow(base, make, plan=case.plan)
        assert_same_model(wide.model, exact.model)
        for mine, other in zip(wide.optimizers, exact.optimizers, strict=True):
            assert_same_optimizer(mine, other)
        step = step_of(case, setup, clip_by_reference if clips else None)
        mu.verify(base, wide, step=step, steps=5).raise_if_broken()
        if clips:
            control = mu.verify(base, wide, step=step_of(case, setup, clip_plainly), steps=5)
            assert not control.holds, "control: the norm that torch computes"


@pytest.mark.usefixtures("float64")
def test_a_certificate_is_refused_to_a_run_with_noise():
    case, setup = CASES["MLP"], SETUPS["AdamW"]
    base = warm_base(setup, case)
    wide = mu.upscale(base, lambda: case.make(case.wide), mu.MupNoise(1e-3), plan=case.plan)
    assert not mu.verify(base, wide, step=step_of(case, setup), steps=3).holds


def net(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 2))


X, Y = data(16, 3), data(16, 2, seed=2)


def loss(model: Any) -> Tensor:
    dtype = next(model.parameters()).dtype
    found: Tensor = (model(X.to(dtype)) - Y.to(dtype)).square().mean()
    return found


def output(model: Any) -> Any:
    return model(X)


def trained(steps: int = 5, **settings: Any) -> mu.Run:
    model = seeded(net, 4)
    run = mu.Run(model, torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, "eps": 1e-2, **settings}))
    take(run, loss, steps)
    return run


def noise_of(run: mu.Run, wide: Any) -> dict[str, Tensor]:
    """What was added to the widened weights."""
    exact = mu.grow(run, lambda: net(wide.model[0].out_features), plan=wide.plan).model
    return {
        name: (p - exact.get_parameter(name)).detach()
        for name, p in wide.model.named_parameters()
        if p.dim() == 2
    }


def assert_sizes(deltas: dict[str, Tensor], want: dict[str, float], errors: float = 5.0) -> None:
    for name, delta in deltas.items():
        ratio = float(delta.square().mean().sqrt()) / want[name]
        assert abs(ratio - 1) <= errors / math.sqrt(2 * delta.numel()), f"{name}: {ratio} of {want[name]}"


def sizes(sigma: float, ratio: float) -> dict[str, float]:
    return {"0.weight": sigma, "2.weight": sigma * ratio**-0.5, "4.weight": sigma / ratio}


def test_repeated_growth_keeps_the_first_reference():
    run = trained()
    once = mu.upscale(run, lambda: net(16), SILENT)
    twice = mu.upscale(once, lambda: net(64), mu.MupNoise(0.3))
    assert_sizes(noise_of(once, twice), sizes(0.3, 16))
    with pytest.raises(AssertionError):
        assert_sizes(noise_of(once, twice), sizes(0.3, 4))
    assert twice.since == mu.plans.plan_between(net, 4, 64)
    exact = mu.upscale(once, lambda: net(64), SILENT)
    assert drift(run, exact, loss, 10, output) <= EXACT


@pytest.mark.parametrize(("reference", "base", "wide"), [(4, 8, 40), (24, 8, 40), (40, 8, 40)])
def test_noise_counts_from_the_reference_above_or_below_the_base(reference: int, base: int, wide: int):
    plan = mu.plans.plan_between(net, reference, base)
    model = mu.init_weights_(net(base).double(), plan, std=net(reference))
    groups = mu.param_groups(model, plan, torch.optim.AdamW, lr=1e-2)
    run = mu.Run(model, torch.optim.AdamW(groups), since=plan)
    take(run, loss, 3)
    grown = mu.upscale(run, lambda: net(wide), mu.MupNoise(0.3))
    assert_sizes(noise_of(run, grown), sizes(0.3, wide / reference))
    assert mu.diagnostics.reference_lr(grown.optimizers[0]) == pytest.approx(1e-2, rel=1e-12)
    assert drift(run, mu.upscale(run, lambda: net(wide), SILENT), loss, 10, output) <= EXACT


def test_a_model_trained_without_mup_is_its_own_reference():
    run = trained()
    grown = mu.upscale(run, lambda: net(12), SILENT)
    assert drift(run, grown, loss, 10, output) <= EXACT
    noisy = mu.upscale(trained(), lambda: net(64), mu.MupNoise(0.3))
    assert_sizes(noise_of(trained(), noisy), sizes(0.3, 16))


def plain(n):
    return nn.Sequential(nn.Linear(3, n), nn.GELU(), nn.Linear(n, 1))


def centred(n):
    return nn.Sequential(
        nn.Linear(3, n), nn.LayerNorm(n), nn.Linear(n, 4 * n), nn.GELU(), nn.Linear(4 * n, 1)
    )


class BehindTheSum(nn.Module):
    """As in BERT: what a norm returns is the stream."""

    def __init__(self, n):
        super().__init__()
        self.inside, self.first, self.last, self.out = (
            nn.Linear(3, n),
            nn.LayerNorm(n),
            nn.LayerNorm(n),
            nn.Linear(n, 1),
        )
        self.up, self.down = nn.Linear(n, 4 * n), nn.Linear(4 * n, n)

    def forward(self, x):
        h = self.first(self.inside(x))
        return self.out(self.last(h + self.down(F.gelu(self.up(h)))))


def bent(n):
    return nn.Sequential(nn.Linear(3, n), nn.GELU(), nn.LayerNorm(n), nn.Linear(n, 1))


def grouped(n):
    layers = nn.Conv1d(1, n, 3), nn.GroupNorm(n // 2, n), nn.ReLU(), nn.Flatten(), nn.Linear(n, 1)
    return nn.Sequential(nn.Unflatten(1, (1, 3)), *layers)


def leaking(n):
    return nn.Sequential(nn.Linear(3, n), nn.Sigmoid(), nn.Linear(n, 1))


BY_UNITS = {
    "twice": (plain, 8, {"4+4"}),
    "half as much again": (plain, 6, {"4+2"}),
    "a stream that LayerNorm centres": (centred, 8, {"4+4", "16+16"}),
    "half as much again of it": (centred, 6, {"4+2", "16+8"}),
    "a norm that writes into the stream": (BehindTheSum, 8, {"4x2", "16+16"}),
    "an activation that does": (bent, 8, {"4x2"}),
    "new groups": (grouped, 8, {"4+4"}),
    "an activation with f(0) = 1/2": (leaking, 8, {"4x2"}),
}


@pytest.mark.parametrize("case", BY_UNITS)
def test_upscale_without_options_does_not_change_the_loss(case):
    make, width, ways = BY_UNITS[case]
    torch.manual_seed(0)
    x, base = torch.randn(16, 3, dtype=torch.float64), make(4).double()

    def loss(model):
        return (model(x) - 1).square().mean()

    run = mu.Run(base, torch.optim.AdamW(base.parameters(), lr=1e-2))
    wide = mu.upscale(run, lambda: make(width), loss=loss)
    torch.testing.assert_close(loss(wide.model), loss(base), rtol=1e-12, atol=0)
    assert wide.plan is not None
    axes = [axis for entry in wide.plan.tensors.values() for axis in entry.axes if axis.grows]
    assert {str(axis).partition(": ")[2] for axis in axes} == ways
    for _ in range(2):
        wide.optimizer.zero_grad()
        loss(wide.model).backward()
        wide.optimizer.step()
    assert all(p.grad is not None and bool(p.grad.any()) for p in wide.model.parameters())
    asleep = mu.grow(run, lambda: make(width), plan=wide.plan, loss=loss)
    back = mu.narrow(asleep, lambda: make(4))
    for a, b in zip(back.model.parameters(), base.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0)


def test_new_channels_of_a_centred_stream_carry_the_mean_and_nothing_less():
    """The nearest wrong rules move the loss: zeros for the mean, a gain without its fold, a bias that wakes."""
    torch.manual_seed(0)
    x, base = torch.randn(16, 3, dtype=torch.float64), centred(4).double()
    with torch.no_grad():
        base[1].bias.normal_()

    def loss(model):
        return (model(x.to(model[0].weight.dtype)) - 1).square().mean()

    wide = mu.upscale(base, lambda: centred(6), loss=loss)
    plan = wide.plan
    assert plan is not None
    assert [entry.mean for entry in plan.tensors.values()] == [(0,), (0,), (), (), (), (), (), ()]
    assert mu.Plan.from_json(plan.to_json()) == plan
    assert OUTPUTS_ALONE in str(plan)
    torch.testing.assert_close(
        wide.model.get_parameter("0.weight")[4:],
        1.5**0.5 * base[0].weight.mean(0).expand(2, 3),
        rtol=1e-14,
        atol=0,
    )
    assert not wide.model.get_parameter("1.bias")[4:].any()
    wrong = {
        "0.weight": replace(plan["0.weight"], mean=(), cut=(0,)),
        "1.weight": replace(plan["1.weight"], fold=mu.rules.Scale.of(1)),
        "1.bias": replace(plan["1.bias"], cut=()),
    }
    before = loss(base).item()
    for name, entry in wrong.items():
        changed = plan.with_tensors({name: entry})
        other = mu.upscale(base, lambda: centred(6), plan=changed, prove=False)
        assert abs(loss(other.model).item() - before) > 1e-4 * before, name
        with refused():
            mu.upscale(base, lambda: centred(6), plan=changed, loss=loss)


def test_growing_exactly_copies_a_centred_stream_and_one_rank_loads_a_woken_one():
    torch.manual_seed(0)
    x, base = torch.randn(16, 3, dtype=torch.float64), centred(4).double()

    def loss(model):
        return (model(x.to(model[0].weight.dtype)) - 1).square().mean()

    def make():
        return centred(8).double()

    exact = mu.grow(base, make, by="units", loss=loss).plan
    assert exact is not None
    assert not exact.carries_mean
    assert not mu.infer_plan(base, make, by="units", loss=loss).carries_mean
    run = mu.Run(base, torch.optim.AdamW(base.parameters(), lr=1e-2))
    wide = mu.upscale(run, make, loss=loss)
    carried = wide.plan
    assert carried is not None

    def step(run, i):
        run.optimizer.zero_grad()
        value = loss(run.model)
        value.backward()
        run.optimizer.step()
        return value

    certificate = mu.verify(run, make, step=step, plan=wide.plan, steps=2)
    assert not certificate.holds, "training is not the base's"
    assert mu.verify(run, make, loss=loss, plan=wide.plan).holds, "the pulled-back gradient is"
    for _ in range(3):
        step(wide, 0)
    with pytest.warns(UserWarning, match="new units are in use"):
        mu.narrow(wide, lambda: centred(4).double())
    loaded = mu.load_grown_(mu.Run(base), mu.Run(make()), plan=carried)
    assert OUTPUTS_ALONE in str(loaded.plan)
    for part, want in zip(
        loaded.model.parameters(),
        mu.grow(base, make, plan=carried, loss=loss).model.parameters(),
        strict=True,
    ):
        assert torch.equal(part, want)
    with refused("proof.steps_with_means"):
        verify_sharded(mu.Run(base), loaded, step=step)


def test_noise_means_copies_and_an_unknown_way_is_refused():
    base = plain(4)

    def copies(*noise, **options):
        plan = mu.upscale(base, lambda: plain(8), *noise, **options).plan
        assert plan is not None
        return plan["0.weight"].change.c

    assert (copies(mu.SignalNoise(0.1)), copies(mu.NewUnits("random"))) == (2, 1)
    assert copies(mu.NewUnits(), by="copies") == 2
    refusal(lambda: copies(by="halves"), "argument.unknown_way")
    refusal(lambda: copies(by="copies"), "noise.needs_loss")


class Experts(nn.Module):
    """Experts as one parameter of (experts, in, out), which no module explains: both orders of in and out are exact asleep."""

    def __init__(self, n):
        super().__init__()
        self.inside, self.norm, self.router, self.out = (
            nn.Linear(3, n),
            nn.LayerNorm(n),
            nn.Linear(n, 2),
            nn.Linear(n, 1),
        )
        self.up = nn.Parameter(torch.randn(2, n, 2 * n) / n**0.5)
        self.down = nn.Parameter(torch.randn(2, 2 * n, n) / n**0.5)

    def forward(self, x):
        x = self.inside(x)
        h = self.norm(x)
        y = torch.einsum("bef,efn->ben", F.gelu(torch.einsum("bn,enf->bef", h, self.up)), self.down)
        return self.out(x + (y * self.router(h).softmax(-1).unsqueeze(-1)).sum(1))


class Positions(nn.Module):
    """A raw parameter is added to what writes the stream, so both have to be cut there."""

    def __init__(self, n):
        super().__init__()
        self.inside, self.positions = nn.Linear(3, n), nn.Parameter(torch.randn(16, n))
        self.norm, self.out = nn.RMSNorm(n), nn.Linear(n, 1)

    def forward(self, x):
        return self.out(self.norm(self.inside(x) + self.positions))


def frozen(n):
    model = plain(n)
    model[0].requires_grad_(False)
    return model


LEARNING = {
    "experts in one tensor": (Experts, 8, {"4x2", "8+8"}),
    "positions": (Positions, 6, {"4+2"}),
    "a frozen layer that new units read with": (frozen, 6, {"4+2"}),
    # Zeros behind RMSNorm stay zero in front of ReLU, where it has no gradient.
    "ReLU behind RMSNorm": (
        lambda n: nn.Sequential(nn.Linear(3, n), nn.RMSNorm(n), nn.ReLU(), nn.Linear(n, 1)),
        8,
        {"4x2"},
    ),
}


@pytest.mark.parametrize("case", LEARNING)
def test_what_is_new_learns_and_the_loss_stays(case):
    make, width, ways = LEARNING[case]
    torch.manual_seed(1)
    x, base = torch.randn(16, 3), make(4)

    def loss(model):
        return (model(x.to(next(model.parameters()).dtype)) - 1).square().mean()

    trained = [p for p in base.parameters() if p.requires_grad]
    wide = mu.upscale(mu.Run(base, torch.optim.AdamW(trained, lr=1e-2)), lambda: make(width), loss=loss)
    torch.testing.assert_close(loss(wide.model), loss(base), rtol=1e-5, atol=0)
    assert wide.plan is not None
    axes = [axis for entry in wide.plan.tensors.values() for axis in entry.axes if axis.grows]
    assert {str(axis).partition(": ")[2] for axis in axes} == ways
    before = {name: p.detach().clone() for name, p in wide.model.named_parameters() if p.requires_grad}
    for _ in range(3):
        wide.optimizer.zero_grad()
        loss(wide.model).backward()
        wide.optimizer.step()
    if any(entry.cut for entry in wide.plan.tensors.values()):
        with pytest.warns(UserWarning, match="new units are in use"):
            mu.narrow(wide, lambda: make(4))
    for name, old in before.items():
        moved = (wide.model.get_parameter(name) != old).flatten()
        for dim, axis in enumerate(wide.plan[name].axes):
            new = [i for i in range(axis.wide) if axis.grows and i >= axis.base]
            if new and len(old.shape) > 1:
                part = moved.view(old.shape).index_select(dim, torch.tensor(new))
                assert bool(part.any()), (name, dim)
