"""State dicts give the bits of live runs; buffers are carried; growing twice is growing once."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mupscale as mu
from harness.closeness import EXACT, assert_bitwise, assert_same_model, difference
from harness.draws import data, seeded
from harness.refusals import refusal
from harness.runs import drift, train


def mlp(n: int) -> Any:
    return nn.Sequential(
        nn.Linear(3, n), nn.BatchNorm1d(n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 2),
        nn.BatchNorm1d(2),
    )  # fmt: skip


def loss(model: Any) -> Any:
    return (model(data(8, 3)) - data(8, 2)).square().mean()


def output(model: Any) -> Any:
    return model(data(5, 3, seed=2))


def new_run(named: bool = False, steps: int = 3) -> Any:
    model = seeded(mlp, 4)
    given = model.named_parameters() if named else model.parameters()
    run = mu.Run(model, torch.optim.AdamW(given, lr=1e-2, eps=1e-2, weight_decay=0.1))
    train(run, loss, steps)
    return run


@pytest.mark.parametrize("named", [False, True])
def test_carried_optimizers_have_names_whether_the_base_s_had_them_or_not(named: bool):
    wide = mu.grow(new_run(named=named), lambda: mlp(8), plan=mu.plans.plan_between(mlp, 4, 8))
    by_name = dict(wide.model.named_parameters())
    names = [n for group in wide.optimizers[0].param_groups for n in group["param_names"]]
    assert sorted(names) == sorted(by_name)
    for group in wide.optimizers[0].param_groups:
        assert all(by_name[n] is p for n, p in zip(group["param_names"], group["params"], strict=True))


def keyed_by_name(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[i]: value for i, value in state["state"].items()}, "param_groups": groups}


@pytest.mark.parametrize("keys", ["position", "param_names", "name"])
def test_state_dicts_give_the_bits_of_a_live_run(keys):
    run, plan = new_run(named=keys == "param_names"), mu.plans.plan_between(mlp, 4, 8)
    live = mu.grow(run, lambda: mlp(8), plan=plan)
    names = [name for name, _ in run.model.named_parameters()]
    state = run.optimizers[0].state_dict()
    if keys == "name":
        state = keyed_by_name(state, names)
    kept = copy.deepcopy(state["param_groups"])
    carried = mu.trainers.grow_optimizer_state_dict(
        state, plan, torch.optim.AdamW, names=names if keys == "position" else None
    )
    assert state["param_groups"] == kept, "what was given is left alone"
    model = mlp(8).double()
    model.load_state_dict(mu.trainers.grow_state_dict(run.model.state_dict(), plan))
    assert_same_model(model, live.model)
    optimizer = torch.optim.AdamW(mu.trainers.groups_for(model, carried))
    optimizer.load_state_dict(carried)
    assert len(optimizer.param_groups) == len(live.optimizers[0].param_groups)
    for mine, other in zip(optimizer.param_groups, live.optimizers[0].param_groups, strict=True):
        assert {k: mine[k] for k in ("lr", "eps", "weight_decay", "betas")} == {
            k: other[k] for k in ("lr", "eps", "weight_decay", "betas")
        }
        for p, q in zip(mine["params"], other["params"], strict=True):
            assert optimizer.state[p].keys() == live.optimizers[0].state[q].keys()
            for key, value in live.optimizers[0].state[q].items():
                assert_bitwise(optimizer.state[p][key], value, key)
    assert drift(run, mu.Run(model, optimizer), loss, 10, output) <= EXACT


def test_growing_twice_continues_the_first_wide_run():
    run = new_run()
    first = mu.grow(run, lambda: mlp(8), plan=mu.plans.plan_between(mlp, 4, 8))
    train(first, loss, 20), train(run, loss, 20)
    second = mu.grow(first, lambda: mlp(16), plan=mu.plans.plan_between(mlp, 8, 16))
    assert dict(second.model.named_parameters())["0.weight"].shape == (16, 3)
    at_once = mu.grow(run, lambda: mlp(16), plan=mu.plans.plan_between(mlp, 4, 16))
    assert drift(first, second, loss, 10, output) <= EXACT
    assert drift(run, at_once, loss, 10, output) <= EXACT
    again = mu.grow(
        mu.Run(first.model),
        lambda: mlp(16),
        plan=mu.plans.plan_between(mlp, 8, 16).fold("3.weight", 2),
        prove=False,
    )
    assert drift(mu.Run(first.model), mu.Run(again.model), loss, 1, output) > 1e-6, "control"


class Buffers(nn.Module):
    """State that is not saved, and a constant that each width computes for itself."""

    def __init__(self, n: int):
        super().__init__()
        self.inner, self.head = nn.Linear(3, n), nn.Linear(n, 2, bias=False)
        self.register_buffer("offset", torch.zeros(n), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("scale", torch.tensor(8.0 / n))

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x) + self.offset)) * self.scale


def test_buffers_that_are_not_saved_are_carried_and_constants_are_the_wide_models_own():
    plan = mu.plans.plan_between(Buffers, 4, 8, loss=loss)
    model = seeded(Buffers, 4)
    model.offset.copy_(data(4, seed=3))
    model.steps.fill_(3)
    run = mu.Run(model, torch.optim.SGD(model.parameters(), lr=0.1))
    wide: Any = mu.grow(run, lambda: Buffers(8), plan=plan)
    assert_bitwise(wide.model.offset, model.offset.repeat_interleave(2))
    assert int(wide.model.steps) == 3
    assert float(wide.model.scale) == 1.0 == float(model.scale) / 2
    assert drift(run, wide, loss, 10, output) <= EXACT


def test_running_statistics_of_a_layer_that_does_not_grow_survive_without_a_plan():
    """A trained base differs from a fresh wide model in every running average; that is no reason to drop them."""
    run = new_run()
    wide: Any = mu.grow(run, lambda: mlp(8))
    assert_bitwise(wide.model[6].running_mean, run.model[6].running_mean)
    assert_bitwise(wide.model[6].running_var, run.model[6].running_var)
    assert_bitwise(wide.model[1].num_batches_tracked, run.model[1].num_batches_tracked)


class Fourier(nn.Module):
    """Random tables: one may grow, the other has a fixed size and is drawn after it."""

    def __init__(self, n: int, growing: bool = False):
        super().__init__()
        self.inner, self.head = nn.Linear(6, n), nn.Linear(n, 2)
        self.register_buffer("shift", torch.randn(n) if growing else torch.zeros(n))
        self.register_buffer("frequencies", torch.randn(3, 6))

    def forward(self, x):
        return self.head(torch.tanh(self.inner(torch.sin(x @ self.frequencies)) + self.shift))


def exact_or_refused(make: Callable[[int], Any], fresh: bool) -> bool:
    """What an ambiguous buffer must lead to; anything else is a silent error."""
    base = seeded(make, 4)
    try:
        plan = mu.plans.plan_between(make, 4, 8) if fresh else mu.infer_plan(base, seeded(make, 8, seed=1))
        wide = mu.grow(base, lambda: make(8), plan=plan, prove=False)
    except mu.MupscaleError as error:
        return error.code == "model.unclear_buffer"
    return difference(output(wide.model), output(base)) <= EXACT


@pytest.mark.parametrize("fresh", [True, False], ids=["two factories", "two live models"])
@pytest.mark.parametrize("growing", [False, True])
def test_a_random_table_of_fixed_size_is_never_replaced_in_silence(fresh, growing):
    assert exact_or_refused(lambda n: Fourier(n, growing), fresh)


class Mean(nn.Module):
    """Divides what it sums over the width by a saved constant."""

    share: torch.Tensor

    def __init__(self, n: int):
        super().__init__()
        self.inner, self.gain = nn.Linear(3, n), nn.Linear(1, 2)
        self.register_buffer("share", torch.tensor(1.0 / n))

    def forward(self, x):
        return self.gain((torch.tanh(self.inner(x)).sum(-1, keepdim=True)) * self.share)


@pytest.mark.parametrize("fresh", [True, False], ids=["two factories", "two live models"])
def test_a_saved_constant_of_the_width_is_never_copied_in_silence(fresh):
    assert exact_or_refused(Mean, fresh)


class Positions(nn.Module):
    """A table that is computed from the width and is in no checkpoint."""

    def __init__(self, n: int, persistent: bool = False) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, n), nn.Linear(n, 1)
        self.register_buffer("table", torch.sin(torch.arange(1.0, n + 1)), persistent=persistent)

    def forward(self, x: torch.Tensor) -> Any:
        return self.outer(torch.tanh(self.inner(x) + self.table))


def test_a_growing_buffer_that_is_in_no_state_dict_is_warned_of_with_lines_that_work():
    torch.manual_seed(0)
    model, x = Positions(4), torch.randn(5, 3)
    plan = mu.plans.plan_between(Positions, 4, 8, example_inputs=(x,))
    lines = r'get_buffer\("table"\)'
    with pytest.warns(UserWarning, match=lines):
        mu.trainers.grow_state_dict(model.state_dict(), plan)
    state = {**model.state_dict(), **dict(model.named_buffers())}
    result = mu.trainers.grow_state_dict(state, plan)
    other = Positions(8)
    other.load_state_dict(result, strict=False)
    assert not torch.allclose(other(x), model(x)), "control: the wide model's own table"
    other.get_buffer("table").copy_(result["table"])
    assert torch.allclose(other(x), model(x), atol=1e-6)
    stored, kept = Positions(4, True), Positions(8, True)
    stored.load_state_dict(state)
    kept.load_state_dict(mu.trainers.grow_state_dict(stored.state_dict(), plan))
    assert torch.allclose(kept(x), model(x), atol=1e-6)


def test_a_new_scheduler_starts_at_the_rate_of_the_state_dict_and_a_continued_one_at_its_peak():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    falling = lambda step: 0.5**step  # noqa: E731
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, falling)
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    plan, state = mu.plans.plan_between(lambda n: nn.Linear(n, n), 4, 8), optimizer.state_dict()
    wide = nn.Linear(8, 8)

    def loaded(**options: Any) -> torch.optim.Optimizer:
        carried = mu.trainers.grow_optimizer_state_dict(state, plan, torch.optim.AdamW, **options)
        found = torch.optim.AdamW(mu.trainers.groups_for(wide, carried))
        found.load_state_dict(carried)
        return found

    with pytest.warns(UserWarning, match="scheduler"):
        live = mu.grow(mu.Run(model, optimizer), lambda: nn.Linear(8, 8)).optimizer
    fresh = loaded()
    for found in (fresh, live):
        torch.optim.lr_scheduler.LambdaLR(found, lambda step: 1.0)
        assert mu.diagnostics.reference_lr(found) == pytest.approx(0.025), "the rate now"
    continued = loaded(keep_initial_lr=True)
    torch.optim.lr_scheduler.LambdaLR(continued, falling, last_epoch=2)
    assert mu.diagnostics.reference_lr(continued) == pytest.approx(0.1 * 0.5**3)
    stale = loaded(keep_initial_lr=True)
    torch.optim.lr_scheduler.LambdaLR(stale, lambda step: 1.0)
    assert mu.diagnostics.reference_lr(stale) == pytest.approx(0.1), "control: torch starts at initial_lr"


def test_what_is_beside_groups_and_state_is_not_dropped_in_silence():
    plan, state = mu.plans.plan_between(lambda n: nn.Linear(n, n), 4, 8), adam_state()
    more = lambda: mu.trainers.grow_optimizer_state_dict({**state, "scale": 1.0}, plan, torch.optim.AdamW)  # noqa: E731
    refusal(more, "state.unknown_entry", where="scale")
    assert mu.trainers.grow_optimizer_state_dict(state, plan, torch.optim.AdamW)["state"] == {}, "control"


def adam_state() -> dict[str, Any]:
    state: dict[str, Any] = torch.optim.AdamW(nn.Linear(4, 4).named_parameters()).state_dict()
    return state
