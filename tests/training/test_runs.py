"""A widened run continues its base: every part of it is carried, nothing is shared, nothing is guessed."""

import copy
import warnings
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mupscale as mu
from harness.closeness import EXACT, assert_bitwise, assert_close
from harness.draws import data, seeded
from harness.refusals import refusal
from harness.runs import drift, train
from mupscale.models.names import named_tensors
from mupscale.tensors.nested import tensors_in

ADAM: Any = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1}


class Net(nn.Module):
    """A tied stack with an odd width next to the tied one, a buffer that grows and is not saved, and BatchNorm."""

    def __init__(self, n: int, m: int):
        super().__init__()
        self.embed = nn.Embedding(5, n)
        self.up, self.down = nn.Linear(n, m), nn.Linear(m, n)
        self.batch = nn.BatchNorm1d(m)
        self.norm = nn.LayerNorm(n)
        self.head = nn.Linear(n, 5, bias=False)
        self.head.weight = self.embed.weight
        self.out = nn.BatchNorm1d(5)
        self.register_buffer("gate", torch.full((m,), 0.5), persistent=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        h = h + self.down(self.batch(self.up(h)).tanh() * self.gate)
        return self.out(self.head(self.norm(h)))


SMALL, LARGE = (4, 3), (8, 9)
FOLDS = {"norm.*": "1/2"}
TOKENS = torch.arange(10) % 5


def make_wide() -> Any:
    return Net(*LARGE)


def plan() -> mu.Plan:
    return mu.plans.plan_between(lambda size: Net(*size), SMALL, LARGE, declared=mu.Declared(folds=FOLDS))


def output(model: Any) -> Any:
    return model(TOKENS)


def loss(model: Any) -> Any:
    return (model(TOKENS) - data(10, 5).to(model.embed.weight.dtype)).square().mean()


def new_run(
    kind: Any = torch.optim.AdamW, steps: int = 3, dtype: torch.dtype = torch.float64, **settings: Any
) -> Any:
    model = seeded(Net, *SMALL).to(dtype)
    run = mu.Run(model, kind(model.parameters(), **(settings or ADAM)), steps=steps)
    train(run, loss, steps)
    return run


def grow(run: mu.Run) -> Any:
    return mu.grow(run, make_wide, plan=plan(), prove=False)


def test_everything_at_once_continues_and_a_run_with_one_forgotten_factor_does_not():
    run = new_run()
    wide = grow(run)
    assert drift(run, wide, loss, 10, output) <= EXACT
    run = new_run()
    wide = grow(run)
    for group in wide.optimizers[0].param_groups:
        group["eps"] = ADAM["eps"]
    assert drift(run, wide, loss, 10, output) > 1e-6, "control: eps left as it was"


def test_several_optimizers_share_a_model():
    model = seeded(Net, *SMALL)
    matrices = [model.up.weight, model.down.weight]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    run = mu.Run(model, [torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.AdamW(others, **ADAM)])
    train(run, loss, 3)
    wide = grow(run)
    assert [type(o) for o in wide.optimizers] == [torch.optim.SGD, torch.optim.AdamW]
    assert drift(run, wide, loss, 10, output) <= EXACT


def two_groups(model: Any) -> list[dict[str, Any]]:
    first = [model.up.weight, model.up.bias]
    rest = [p for p in model.parameters() if all(p is not f for f in first)]
    return [{"params": first, "lr": 0.03}, {"params": rest, "weight_decay": 0.0}]


S = lr_scheduler
SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: S.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: S.MultiStepLR(o, [2, 5], 0.3),
    "ConstantLR": lambda o: S.ConstantLR(o, 0.3, 5),
    "LinearLR": lambda o: S.LinearLR(o, 0.1, 1.0, 8),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: S.PolynomialLR(o, 12, 2.0),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 9),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 5),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, [lambda t: 0.9, lambda t: 0.7]),
    "LambdaLR": lambda o: S.LambdaLR(o, [lambda t: 1 / (t + 1), lambda t: 0.8**t]),
    "SequentialLR": lambda o: S.SequentialLR(o, [S.LinearLR(o, 0.1, 1.0, 5), S.ExponentialLR(o, 0.8)], [5]),
    "ChainedScheduler": lambda o: S.ChainedScheduler(
        [S.LinearLR(o, 0.1, 1.0, 5), S.ExponentialLR(o, 0.9)], o
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_multiplicative_scheduler_goes_on_at_the_same_step(name):
    model = seeded(Net, *SMALL)
    optimizer = torch.optim.AdamW(two_groups(model), **ADAM)
    run = mu.Run(model, optimizer, SCHEDULERS[name](optimizer))
    train(run, loss, 3)
    wide, frozen = grow(run), grow(run)
    groups = wide.optimizers[0].param_groups
    first = {id(wide.model.up.weight), id(wide.model.up.bias)}
    origins = [optimizer.param_groups[0 if id(g["params"][0]) in first else 1] for g in groups]
    ratios = [group["lr"] / origin["lr"] for group, origin in zip(groups, origins, strict=True)]
    assert set(ratios) != {1.0}
    for _ in range(10):
        assert drift(run, wide, loss, 1, output) <= EXACT
        for group, origin, ratio in zip(groups, origins, ratios, strict=True):
            assert group["lr"] == pytest.approx(ratio * origin["lr"], rel=1e-14)
        assert wide.schedulers[0].get_last_lr() == pytest.approx([g["lr"] for g in groups], rel=1e-14)
    train(mu.Run(frozen.model, frozen.optimizers), loss, 10)
    assert_far(output(frozen.model), output(run.model))


RATED: dict[str, Any] = {
    "OneCycleLR": lambda o: S.OneCycleLR(o, [0.05, 0.02], total_steps=60),
    "OneCycleLR, three phases": lambda o: S.OneCycleLR(o, 0.05, total_steps=60, three_phase=True),
    "CyclicLR": lambda o: S.CyclicLR(o, [1e-3, 2e-3], 0.03, step_size_up=7, mode="triangular2"),
    "CyclicLR, its own scale": lambda o: S.CyclicLR(o, 1e-3, 0.03, step_size_up=7, scale_fn=lambda i: 0.9**i),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 9, eta_min=4e-3),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 9, eta_min=4e-3),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=20),
    "inside": lambda o: S.SequentialLR(
        o, [S.LinearLR(o, 0.1, 1.0, 8), S.CosineAnnealingLR(o, 9, eta_min=4e-3)], [8]
    ),
}
"""Schedulers that hold learning rates of their own, and momenta."""
HELD = {"initial_lr", "max_lr", "min_lr", "swa_lr"}


def rated(name: str, units: bool) -> mu.Run:
    model = seeded(Net, *SMALL)
    optimizer = torch.optim.AdamW(two_groups(model), **ADAM)
    if units:
        mu.step_in_units_(optimizer, mu.Run(model))
    run = mu.Run(model, optimizer, RATED[name](optimizer))
    train(run, loss, 5)
    return run


def with_rates_of(base: mu.Run, wide: mu.Run) -> mu.Run:
    """The control: the rates that the scheduler holds are the base's, and only the rate now is in units."""
    first = base.optimizer.param_groups[0]
    for group in wide.optimizer.param_groups:
        group.update({key: first[key] for key in HELD & first.keys()})
    pairs = [(base.scheduler, wide.scheduler)]
    for old, new in pairs:
        pairs += zip(getattr(old, "_schedulers", ()), getattr(new, "_schedulers", ()), strict=True)
        for key in ("base_lrs", "max_lrs"):
            if hasattr(old, key):
                setattr(new, key, getattr(old, key)[:1] * len(wide.optimizer.param_groups))
        if hasattr(old, "eta_min"):
            new.eta_min = [old.eta_min] * len(wide.optimizer.param_groups)
    return wide


@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("name", RATED)
def test_a_scheduler_that_holds_rates_goes_on_in_their_units(name: str, units: bool):
    run = rated(name, units)
    wide, wrong = grow(run), grow(run)
    twice = mu.narrow(wide, lambda: Net(*SMALL))
    lone = mu.Run(grow(run).model, grow(run).optimizers)
    twin = rated(name, units)
    assert drift(twin, wide, loss, 40, output) <= EXACT
    assert drift(run, twice, loss, 40, output) <= EXACT, "and back"
    assert type(wide.scheduler).__name__ == type(run.scheduler).__name__
    far = lone if units else with_rates_of(rated(name, units), wrong)
    train(far, loss, 40)
    assert_far(output(far.model), output(twin.model))


@pytest.mark.parametrize("name", RATED)
@pytest.mark.parametrize("peak", [False, True])
def test_a_new_rate_scales_the_whole_schedule_of_such_a_scheduler(name: str, peak: bool):
    model = seeded(Net, *SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    alike = {**RATED, "OneCycleLR": lambda o: S.OneCycleLR(o, 0.05, total_steps=60)}
    alike["CyclicLR"] = lambda o: S.CyclicLR(o, 1e-3, 0.03, step_size_up=7, mode="triangular2")
    run = mu.Run(model, optimizer, alike[name](optimizer))
    train(run, loss, 5)
    peaks = {
        "OneCycleLR": 0.05,
        "OneCycleLR, three phases": 0.05,
        "CyclicLR": 0.03,
        "CyclicLR, its own scale": 0.03,
    }
    given: Any = {"peak_lr": 3 * peaks.get(name, ADAM["lr"])}
    given = given if peak else {"lr": 3 * optimizer.param_groups[0]["lr"]}
    silent: Any = {"plan": plan(), "prove": False}
    fast, same = (
        mu.upscale(run, make_wide, mu.MupNoise(0.0), **silent, **more) for more in (given, dict[str, Any]())
    )
    for i in range(40):
        for one, other in zip(fast.optimizer.param_groups, same.optimizer.param_groups, strict=True):
            assert one["lr"] == pytest.approx(3 * other["lr"], rel=1e-12), i
        for part in (fast.optimizer, fast.scheduler, same.optimizer, same.scheduler):
            part.step()


def test_a_base_of_one_cycle_grows_whatever_becomes_of_its_scheduler():
    """Left out, replaced by a LambdaLR, or one of an own class on an optimizer that is stepped in units."""
    run = rated("OneCycleLR", False)
    for schedulers in ([], [S.LambdaLR(run.optimizer, lambda t: 1.0)]):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "training changes")  # by the scheduler that is left out
            wide = grow(mu.Run(run.model, run.optimizer, schedulers))
        rates = {round(g["max_lr"] / g["lr_factor"], 12) for g in wide.optimizer.param_groups}
        assert rates == {0.05, 0.02}
    own = type("Own", (S.OneCycleLR,), {})
    refused = mu.Run(run.model, run.optimizer, own(run.optimizer, 0.05, total_steps=60))
    refusal(lambda: grow(refused), "schedule.unknown_scheduler", where="Own")
    mu.step_in_units_(run.optimizer, mu.Run(run.model))
    assert type(grow(refused).scheduler) is own, "the remedy"
    refused.scheduler.seen = list(run.model.parameters())
    refusal(lambda: grow(refused), "schedule.unknown_scheduler", where="Own")
    del refused.scheduler.seen
    assert drift(refused, grow(refused), loss, 10, output) <= EXACT


def test_a_cosine_with_floors_is_resumed_and_torchs_own_class_does_not_take_its_state():
    wide = grow(rated("CosineAnnealingLR", False))
    saved = copy.deepcopy((wide.optimizer.state_dict(), wide.scheduler.state_dict()))
    optimizer = torch.optim.AdamW(mu.trainers.groups_for(wide.model, saved[0]))
    scheduler = mu.trainers.load_scheduler_(S.CosineAnnealingLR(optimizer, 9), saved[1])
    optimizer.load_state_dict(saved[0])
    for _ in range(12):
        for part in (optimizer, scheduler, wide.optimizer, wide.scheduler):
            part.step()
        assert scheduler.get_last_lr() == wide.scheduler.get_last_lr()
    plain = S.CosineAnnealingLR(optimizer, 9)
    plain.load_state_dict(saved[1])
    with pytest.raises(TypeError):
        plain.step()


def assert_far(found: torch.Tensor, want: torch.Tensor) -> None:
    assert float((found - want).detach().abs().max()) > 1e-6, "control: it went unseen"


@pytest.mark.parametrize("kind", ["ema", "swa", "module", "dict"])
def test_an_average_of_the_weights_is_carried_like_the_weights(kind):
    run = new_run(steps=1)
    start = copy.deepcopy(run.model)
    ema: Any
    if kind in ("ema", "swa"):
        ema = AveragedModel(
            start, multi_avg_fn=get_ema_multi_avg_fn(0.8) if kind == "ema" else None, use_buffers=True
        )
        ema.update_parameters(start)
    else:
        ema = start if kind == "module" else dict(start.state_dict())
    train(run, loss, 2)
    if kind in ("ema", "swa"):
        ema.update_parameters(run.model)
    wide: Any = mu.grow(mu.Run(run.model, run.optimizers, ema=ema), make_wide, plan=plan(), prove=False)
    if kind == "dict":
        with pytest.warns(UserWarning, match="buffers that grow"):
            expected = mu.trainers.grow_state_dict(ema, plan(), prove=False)
        assert wide.ema.keys() == expected.keys()
        assert all(torch.equal(wide.ema[key], expected[key]) for key in expected)
        return
    assert type(wide.ema) is type(ema)
    for model in (ema, wide.ema):
        model.eval()
    assert_close(wide.ema(TOKENS), ema(TOKENS), EXACT, "averaged output")
    assert_far(wide.ema(TOKENS), grow(run).model.eval()(TOKENS))
    if kind != "module":
        assert int(wide.ema.n_averaged) == 2
        train(run, loss, 1), train(wide, loss, 1)
        ema.update_parameters(run.model), wide.ema.update_parameters(wide.model)
        assert_close(wide.ema(TOKENS), ema(TOKENS), EXACT, "after one more average")


def test_frozen_parameters_stay_frozen_and_tied_ones_tied():
    run = new_run()
    run.model.up.weight.requires_grad_(False)
    wide = grow(run)
    assert not wide.model.up.weight.requires_grad
    assert wide.model.up.bias.requires_grad
    assert wide.model.head.weight is wide.model.embed.weight
    before = wide.model.up.weight.clone()
    assert drift(run, wide, loss, 5, output) <= EXACT
    assert_bitwise(wide.model.up.weight, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.ASGD], ids=["AdamW", "ASGD"])
def test_dtypes_of_weights_and_state_are_kept(dtype, kind):
    run = new_run(kind, 2, dtype, lr=1e-2)
    wide = grow(run)
    kinds = [{n: t.dtype for n, _, t in named_tensors(model)} for model in (run.model, wide.model)]
    assert kinds[0] == kinds[1]
    assert dtype in kinds[0].values()
    names = {id(p): n for n, p in wide.model.named_parameters()}
    for parameter, state in wide.optimizers[0].state.items():
        origin = run.optimizers[0].state[run.model.get_parameter(names[id(parameter)])]
        assert {k: v.dtype for k, v in state.items()} == {k: v.dtype for k, v in origin.items()}
        assert_bitwise(state["step"], origin["step"], "step")


def everything(run: mu.Run) -> list[torch.Tensor]:
    found = [t for _, _, t in named_tensors(run.model)]
    for optimizer in run.optimizers:
        found += tensors_in([dict(optimizer.state), optimizer.param_groups, optimizer.defaults])
    return found + ([t for _, _, t in named_tensors(run.ema)] if isinstance(run.ema, nn.Module) else [])


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["same size", "wide"])
def test_nothing_is_shared_with_the_base_and_the_base_is_left_alone(size):
    run = new_run(lr=torch.tensor(1e-2), betas=(torch.tensor(0.9), torch.tensor(0.99)))
    run = mu.Run(run.model, run.optimizers, ema=AveragedModel(run.model))
    before = [t.detach().clone() for t in everything(run)]
    groups = [(list(map(id, g["params"])), {**g, "params": 0}) for g in run.optimizers[0].param_groups]
    chosen = mu.plans.plan_between(
        lambda s: Net(*s), SMALL, size, declared=mu.Declared(folds={"norm.*": Fraction(SMALL[0], size[0])})
    )
    random = torch.random.get_rng_state()
    wide, again = (mu.grow(run, lambda: Net(*size), plan=chosen, prove=False) for _ in range(2))
    assert_bitwise(torch.random.get_rng_state(), random, "global random state")
    for kept, now in zip(before, everything(run), strict=True):
        assert_bitwise(now, kept, "the base")
    after = [(list(map(id, g["params"])), {**g, "params": 0}) for g in run.optimizers[0].param_groups]
    assert after == groups, "the caller's parameter groups"
    for mine, other in zip(everything(wide), everything(again), strict=True):
        assert_bitwise(mine, other, "the second call")
    stores = [{t.untyped_storage().data_ptr() for t in everything(r)} for r in (run, wide, again)]
    assert not stores[0] & stores[1]
    assert not stores[1] & stores[2]


def test_the_wide_model_is_never_initialised():
    devices = []

    class Watched(nn.Linear):
        def reset_parameters(self):
            devices.append(self.weight.device.type)
            super().reset_parameters()

    wide = mu.grow(nn.Linear(4, 4), lambda: Watched(8, 8), prove=False)
    assert devices == ["meta"]
    assert wide.model.weight.device.type == "cpu"
    Watched(8, 8)
    assert devices[-1] == "cpu", "control: the watch sees a real initialisation"


def test_a_run_may_have_no_optimizer_and_modes_and_step_are_kept():
    run = mu.Run(new_run().model.eval(), steps=7)
    wide = grow(run)
    assert not wide.model.batch.training
    assert (wide.optimizers, wide.steps, wide.plan) == ((), 7, plan())
    assert_close(output(wide.model), output(run.model), EXACT)


@pytest.mark.parametrize("setting", ["fused", "foreach", "amsgrad"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_implementations_of_adam_are_kept(kind, setting):
    run = new_run(kind, **(ADAM | {setting: True}))
    wide = grow(run)
    assert all(group[setting] for group in wide.optimizers[0].param_groups)
    assert drift(run, wide, loss, 10, output) <= EXACT


def test_a_learning_rate_given_as_a_tensor_stays_one():
    run = new_run(**{**ADAM, "lr": torch.tensor(1e-2, dtype=torch.float64)})
    wide = grow(run)
    rates = [group["lr"] for group in wide.optimizers[0].param_groups]
    assert all(isinstance(rate, torch.Tensor) and rate.dtype == torch.float64 for rate in rates)
    kept = run.optimizers[0].param_groups[0]["lr"]
    assert len({rate.data_ptr() for rate in (kept, *rates)}) == 1 + len(rates), "one tensor for each group"
    assert len({float(rate) for rate in rates}) > 1
    assert drift(run, wide, loss, 10, output) <= EXACT
    assert float(kept) == 1e-2
    for group in wide.optimizers[0].param_groups:
        group["lr"] = rates[-1]
    assert drift(run, wide, loss, 10, output) > 1e-6, "control: one tensor for all groups"


def test_gradient_accumulation_is_exact():
    run = new_run()
    wide = grow(run)

    def twice(model: Any) -> Any:
        (loss(model) / 2).backward()
        return (model(TOKENS.flip(0)) - 1).square().mean() / 2

    assert drift(run, wide, twice, 10, output) <= EXACT
