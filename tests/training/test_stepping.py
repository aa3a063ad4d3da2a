"""Reference constants in the groups, units in the step: bit for bit the steps of groups in units."""

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

import mupscale as mu
from harness.refusals import refused
from harness.setups import SETUPS
from mupscale.optimizers.carry import carry_optimizer, made
from mupscale.optimizers.identify import identify
from mupscale.optimizers.positions import named_orders
from mupscale.optimizers.read import parts, read_positions
from mupscale.optimizers.write import write_positions
from mupscale.plans.direction import Direction
from mupscale.rules.optimizers import RULES, rule_for


class Net(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.first = nn.Linear(5, n, bias=False, dtype=torch.float64)
        self.hidden = nn.Linear(n, n, bias=False, dtype=torch.float64)
        self.last = nn.Linear(n, 3, bias=False, dtype=torch.float64)

    def forward(self, x: Any) -> Any:
        return self.last(torch.tanh(self.hidden(torch.tanh(self.first(x)))))


BASE, WIDE = 4, 12
PLAN = mu.plans.plan_between(Net, BASE, WIDE)
X = torch.randn(16, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
NAMES = [name for name, _ in Net(2).named_parameters()]
DENSE = [s for s in SETUPS.values() if not s.sparse and s.optimizer.__module__.startswith("torch.")]


def train(model: nn.Module, optimizer: Any, steps: int = 3, scheduler: Any = None) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (model(X) - X[:, :3]).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def fresh(n: int = BASE) -> Net:
    torch.manual_seed(0)
    return Net(n)


def kept(optimizer: Any) -> Any:
    """The optimizer's state dict at the wide end, groups as they were."""
    groups, state = parts(optimizer.state_dict(), "state")
    order, wide_order = named_orders(groups, PLAN, [NAMES])
    direction = Direction(PLAN)
    named, unread = read_positions(groups, state, order, rule_for(type(optimizer)), "state")
    carried, uncarried = carry_optimizer(named, direction, split=False)
    assert not unread + uncarried
    return write_positions(made(carried, direction), groups, wide_order)


def bits(model: nn.Module) -> list[Any]:
    return [p.detach() for p in model.parameters()]


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    for x, y in zip(bits(a), bits(b), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("setup", DENSE, ids=lambda s: s.name)
def test_every_optimizer_steps_as_with_groups_in_units(setup):
    settings = {k: v for k, v in setup.settings.items() if k != "initial_accumulator_value"}
    base = fresh()
    optimizer = setup.optimizer(base.parameters(), **settings)
    train(base, optimizer, setup.warm)
    oracle = mu.grow(mu.Run(base, optimizer), lambda: Net(WIDE), plan=PLAN, prove=False)
    oracle.optimizers[0].load_state_dict(oracle.optimizers[0].state_dict())  # torch casts what it loads

    twin = mu.grow(base, lambda: Net(WIDE), plan=PLAN, prove=False).model
    stock = setup.optimizer(twin.parameters(), **settings)
    stock.load_state_dict(kept(optimizer))
    mu.step_in_units_(stock, PLAN, model=twin)
    train(oracle.model, oracle.optimizers[0])
    train(twin, stock)
    assert_equal(oracle.model, twin)
    for key, value in settings.items():
        assert stock.param_groups[0][key] == value


@pytest.mark.parametrize("setup", DENSE, ids=lambda s: s.name)
def test_the_optimizer_is_told_from_what_it_keeps(setup):
    model = fresh()
    optimizer = setup.optimizer(model.parameters(), **setup.settings)
    train(model, optimizer, 1)
    state = optimizer.state_dict()
    found, own = identify(state["param_groups"], state["state"].values()), rule_for(setup.optimizer)
    assert found.refuse is own.refuse
    for key in state["state"].get(0, {}):
        assert found.state[key] == own.state[key]


def test_without_units_the_steps_differ():
    """Control: the same state and constants, stepped plainly."""
    base = fresh()
    optimizer = optim.AdamW(base.parameters(), lr=1e-2)
    train(base, optimizer)
    oracle = mu.grow(mu.Run(base, optimizer), lambda: Net(WIDE), plan=PLAN, prove=False)
    plain = mu.grow(base, lambda: Net(WIDE), plan=PLAN, prove=False).model
    stock = optim.AdamW(plain.parameters(), lr=1e-2)
    stock.load_state_dict(kept(optimizer))
    train(oracle.model, oracle.optimizers[0], 1)
    train(plain, stock, 1)
    assert (
        max(float((a - b).abs().max()) for a, b in zip(bits(oracle.model), bits(plain), strict=True)) > 1e-3
    )


SCHEDULERS: dict[str, Any] = {
    "one cycle, momentum cycled": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=9),
    "cosine with a floor": lambda o: lr_scheduler.CosineAnnealingLR(o, 6, eta_min=1e-3),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda i: 1 / (i + 1)),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2, cycle_momentum=False),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_that_know_absolute_rates_go_on(name):
    """They see one rate, the reference's; base and wide stay the same run."""
    base, wide = fresh(), mu.grow(fresh(), lambda: Net(WIDE), plan=PLAN, prove=False).model
    optimizers = [optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (base, wide)]
    mu.step_in_units_(optimizers[1], PLAN, model=wide)
    schedulers = [SCHEDULERS[name](o) for o in optimizers]
    for model, optimizer, scheduler in zip((base, wide), optimizers, schedulers, strict=True):
        train(model, optimizer, 6, scheduler)
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
    torch.testing.assert_close(base(X), wide(X), rtol=1e-12, atol=1e-13)


def attached(**settings: Any) -> tuple[Net, Any, Any]:
    model = fresh(WIDE)
    optimizer = optim.AdamW(model.parameters(), **{"lr": 1e-2, **settings})
    return model, optimizer, mu.step_in_units_(optimizer, PLAN, model=model)


def test_state_saved_inside_a_step_has_the_stock_groups():
    model, optimizer, _ = attached()
    before = optimizer.state_dict()["param_groups"]
    seen: list[Any] = []

    def closure() -> Any:
        seen.append((len(optimizer.param_groups), optimizer.state_dict()["param_groups"]))
        seen.append(len(optimizer.param_groups))
        loss = model(X).square().mean()
        loss.backward()
        return loss

    twin, other, _ = attached()
    optimizer.step(closure)
    train_once = twin(X).square().mean()
    train_once.backward()
    other.step()
    assert seen[0] == (3, before)
    assert seen[1] == 3, "the groups in units are back after saving"
    assert_equal(model, twin)


def test_a_step_that_raises_leaves_the_stock_groups_to_be_saved():
    model, optimizer, units = attached()
    stock = optimizer.param_groups

    def closure() -> Any:
        raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        optimizer.step(closure)
    assert len(optimizer.state_dict()["param_groups"]) == 1
    train(model, optimizer, 1)
    assert optimizer.param_groups is stock
    units.remove()
    assert not optimizer._optimizer_step_pre_hooks


def test_taken_off_it_steps_plainly():
    model, optimizer, units = attached()
    units.remove()
    plain = fresh(WIDE)
    train(model, optimizer)
    train(plain, optim.AdamW(plain.parameters(), lr=1e-2))
    assert_equal(model, plain)


def test_a_group_added_later_is_split_too():
    model, other = fresh(WIDE), fresh(WIDE)
    for net in (model, other):
        net.last.weight.requires_grad_(False)
    optimizer = optim.AdamW([model.first.weight], lr=1e-2)
    mu.step_in_units_(optimizer, PLAN, model=model)
    train(model, optimizer, 1)
    optimizer.add_param_group({"params": [model.hidden.weight], "lr": 1e-3})
    train(model, optimizer, 1)
    assert len(optimizer.param_groups) == 2
    assert optimizer.param_groups[1]["lr"] == 1e-3
    before = fresh(WIDE).hidden.weight
    assert float((model.hidden.weight - before).abs().max().detach()) == pytest.approx(1e-3 / 3, rel=1e-2)


def test_a_rate_that_is_a_tensor_is_left_alone():
    model, optimizer, _ = attached(lr=torch.tensor(1e-2), capturable=False)
    train(model, optimizer)
    assert optimizer.param_groups[0]["lr"] == torch.tensor(1e-2)


class Forgetful(optim.SGD):
    """Keeps a counter in its groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def test_what_cannot_be_followed_is_refused():
    model = fresh(WIDE)
    with refused("optimizer.foreign_parameters"):
        mu.step_in_units_(optim.AdamW(fresh(WIDE).parameters()), PLAN, model=model)
    with refused("optimizer.groups_in_units_already"):
        mu.step_in_units_(
            mu.trainers.optimizer_in_units(model, PLAN, optim.AdamW, lr=1e-2), PLAN, model=model
        )
    with refused("optimizer.setting_of_constructor", where="initial_accumulator_value = 0.1"):
        mu.step_in_units_(optim.Adagrad(model.parameters(), initial_accumulator_value=0.1), PLAN, model=model)
    with refused("plan.other_shape"):
        mu.step_in_units_(optim.AdamW(fresh().parameters()), PLAN, model=fresh())
    _, optimizer, _ = attached()
    with refused("optimizer.in_units_already"):
        mu.step_in_units_(optimizer, PLAN, model=model)
    counting = Forgetful(model.parameters(), lr=1e-2)
    mu.step_in_units_(counting, PLAN, model=model, rules={f"{__name__}.Forgetful": RULES["torch.optim.SGD"]})
    with refused("optimizer.writes_into_groups", where="count"):
        train(model, counting)


def test_an_optimizer_for_a_grown_model_has_its_units():
    model = fresh(WIDE)
    optimizer = mu.trainers.optimizer_in_units(model, PLAN, optim.AdamW, lr=3e-2, eps=1e-3, weight_decay=0.1)
    found = {n: g for g in optimizer.param_groups for n in g["param_names"]}
    assert isinstance(optimizer, optim.AdamW)
    assert found["hidden.weight"]["lr"] == pytest.approx(1e-2)
    assert found["hidden.weight"]["weight_decay"] == pytest.approx(0.3)
    assert found["first.weight"]["lr"] == 3e-2
    assert found["first.weight"]["eps"] == pytest.approx(1e-3 / 3)


@pytest.mark.parametrize("setup", [s for s in DENSE if s.optimizer in (optim.AdamW, optim.SGD)], ids=str)
def test_a_run_that_is_stepped_in_units_is_widened_exactly(setup: Any):
    """Reference 4, base 12, wide 24: the wide run's losses are the base's, and its groups are unchanged."""
    model = fresh(WIDE)
    optimizer = setup.build(model)[0]
    mu.step_in_units_(optimizer, PLAN, model=model)
    train(model, optimizer)
    run = mu.Run(model, optimizer, since=PLAN)
    wide = mu.grow(run, lambda: Net(24), prove=False)
    assert [g["lr"] for g in wide.optimizer.param_groups] == [g["lr"] for g in optimizer.param_groups]
    plain = mu.grow(run, lambda: Net(24), prove=False)
    hook: Any = next(iter(plain.optimizer._optimizer_step_pre_hooks.values()))
    hook.__self__.remove()
    back = mu.narrow(wide, lambda: Net(WIDE))
    gaps = []
    for _ in range(4):
        for one in (run, wide, plain, back):
            train(one.model, one.optimizer, 1)
        want = run.model(X)
        gaps.append([float((one.model(X) - want).detach().abs().max()) for one in (wide, plain, back)])
    assert max(gap[0] for gap in gaps) <= 1e-12, "the wide run"
    assert max(gap[2] for gap in gaps) <= 1e-12, "narrowed again"
    assert max(gap[1] for gap in gaps) >= 1e-4, "control: without units"


def test_a_run_that_is_stepped_in_units_passes_verify_and_takes_a_rate():
    model, optimizer, _ = attached()
    train(model, optimizer)
    run = mu.Run(model, optimizer, since=PLAN)

    def step(one: mu.Run, i: int) -> Any:
        one.optimizer.zero_grad()
        loss = (one.model(X) - X[:, :3]).square().mean()
        loss.backward()
        one.optimizer.step()
        return loss

    assert mu.verify(run, lambda: Net(24), step=step).holds
    wide = mu.upscale(run, lambda: Net(24), mu.MupNoise(0.1), lr=5e-3, prove=False)
    assert [group["lr"] for group in wide.optimizer.param_groups] == [pytest.approx(5e-3)]


def test_units_from_an_unknown_reference_are_not_narrowed():
    model, optimizer, handle = attached()
    late = mu.plans.plan_between(Net, 6, WIDE)
    run = mu.Run(model, optimizer, plan=late)
    with refused("optimizer.unknown_reference_units"):
        mu.narrow(run, lambda: Net(6))
    handle.remove()
    assert mu.narrow(run, lambda: Net(6)).optimizer.param_groups
