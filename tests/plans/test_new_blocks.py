"""Deeper models: new blocks sleep, join a group without state, and wake without a jump."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import mupscale as mu
from harness.refusals import refused
from mupscale.plans.new_blocks import NewBlocks, block_plan, first_values, order_of
from mupscale.plans.plan import Plan
from mupscale.training.check.symmetry import awake, noise_shares, symmetry

WRITERS = ("*.write.weight",)
_DRAW = torch.Generator().manual_seed(0)
X, Y = (torch.randn(32, n, dtype=torch.float64, generator=_DRAW) for n in (6, 3))


class Block(nn.Module):
    def __init__(self, width, bias):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.read, self.write = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=bias)

    def forward(self, x):
        return x + self.write(torch.relu(self.read(self.norm(x))))


class Residual(nn.Module):
    def __init__(self, width=8, blocks=2, bias=False):
        super().__init__()
        self.first = nn.Linear(6, width)
        self.blocks = nn.ModuleList(Block(width, bias) for _ in range(blocks))
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def make(width=8, blocks=2, **more):
    return Residual(width, blocks, **more).double()


def loss(model):
    return ((model(X) - Y) ** 2).mean()


def value(model):
    with torch.no_grad():
        return float(loss(model))


def step(run, i):
    run.optimizers[0].zero_grad()
    rows = torch.arange(i, i + 16) % 32
    value = ((run.model(X[rows]) - Y[rows]) ** 2).mean()
    value.backward()
    run.optimizers[0].step()
    return float(value.detach())


def deeper(order, quiet=WRITERS, biases=(), **more):
    new = NewBlocks(first_values(make()), quiet, biases=biases)
    return block_plan(make(**more), make(blocks=len(order), **more), order, new)


def trained(optimizer, steps=4, **more):
    torch.manual_seed(0)
    model = make(**more)
    run = mu.Run(model, optimizer(model.parameters()))
    for i in range(steps):
        step(run, i)
    return run


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
}


@pytest.mark.parametrize("order", [(0, None, 1), (None, 0, 1), (0, 1, None, None), (0, 1, 0, 1)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_deeper_run_is_the_run_of_its_base(name, order):
    run, plan = trained(OPTIMIZERS[name]), deeper(order)
    certificate = mu.verify(
        run, lambda: make(blocks=len(order)), step=lambda r, i: step(r, 4 + i), plan=plan, loss=loss, steps=8
    )
    assert certificate.worst == 0.0


def test_copied_blocks_with_zero_writers_leave_the_base():
    """Control: blocks that copy their neighbour's readers have the base's outputs, and train otherwise."""
    run, plan = trained(OPTIMIZERS["adamw"]), deeper((0, None, 1))
    copied = plan.with_tensors(
        {
            name: plan["blocks.0." + name.removeprefix("blocks.1.")]
            for name, entry in plan.tensors.items()
            if entry.new and not entry.quiet
        }
    )
    with refused("proof.run_deviates"):
        mu.grow(run, lambda: make(blocks=3), plan=copied, loss=loss)


BIASES = ("*.write.bias",)


@pytest.mark.parametrize("order", [(0, None, 1), (0, 1, None, None), (0, 1, 0)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bias_that_writes_into_the_stream_is_split(name, order):
    run, plan = trained(OPTIMIZERS[name], bias=True), deeper(order, biases=BIASES, bias=True)
    parts = [entry for entry in plan.tensors.values() if entry.spread != 1]
    assert {str(entry.change.s) for entry in parts} == {f"1/{len(parts)}"}
    assert {str(entry.change.r) for entry in parts} == {"1"}
    certificate = mu.verify(
        run, lambda: make(blocks=len(order), bias=True), step=lambda r, i: step(r, 4 + i), plan=plan,
        loss=loss, steps=8,
    )  # fmt: skip
    assert certificate.worst < 1e-12


def test_a_bias_that_is_not_split_is_awake():
    """Control: it has a gradient from the first step on. Shared with the wrong tensor, gradients differ."""
    wide = lambda: make(blocks=3, bias=True)  # noqa: E731
    with refused("proof.run_deviates", where="blocks.1.write.bias"):
        mu.grow(make(bias=True), wide, plan=deeper((0, None, 1), bias=True), loss=loss)
    plan = deeper((0, None, 1), biases=BIASES, bias=True)
    wrong = {
        "blocks.1.write.bias": plan["blocks.2.write.bias"],
        "blocks.2.write.bias": plan["blocks.1.write.bias"],
    }
    with refused("proof.run_deviates"):
        mu.grow(make(bias=True), wide, plan=plan.with_tensors(wrong), loss=loss)


def test_a_bias_before_the_first_block_is_refused():
    with refused("depth.bias_without_partner", where="blocks.0.write.bias"):
        deeper((None, 0, 1), biases=BIASES, bias=True)


def test_a_split_bias_counts_once_and_composes():
    plan = deeper((0, None, 1), biases=BIASES, bias=True)
    assert plan.parameters("base") == sum(p.numel() for p in make(bias=True).parameters())
    assert plan == Plan.from_json(plan.to_json())
    width = mu.infer_plan(lambda: make(blocks=3, bias=True), lambda: make(16, 3, bias=True), loss=loss)
    run = trained(OPTIMIZERS["adamw"], bias=True)
    certificate = mu.verify(
        run, lambda: make(16, 3, bias=True), step=lambda r, i: step(r, 4 + i), plan=plan.then(width),
        loss=loss, steps=6,
    )  # fmt: skip
    assert certificate.worst < 1e-11


def test_new_tensors_join_the_group_of_the_tensor_they_are_like_and_have_no_state():
    model = make()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    run = mu.Run(model, torch.optim.AdamW(groups, lr=1e-2))
    step(run, 0)
    wide = mu.grow(run, lambda: make(blocks=3), plan=deeper((0, None, 1)), loss=loss)
    found = dict(wide.model.named_parameters())
    for name, parameter in found.items():
        group = next(g for g in wide.optimizer.param_groups if any(p is parameter for p in g["params"]))
        assert group["weight_decay"] == (0.1 if parameter.dim() > 1 else 0.0), name
        assert (parameter in wide.optimizer.state) == (not name.startswith("blocks.1.")), name


def test_eps_of_zero_is_refused():
    run = trained(lambda p: torch.optim.AdamW(p, lr=1e-2, eps=0.0), steps=0)
    with refused("optimizer.divides_zero_by_zero", where="blocks.1.read.weight"):
        mu.grow(run, lambda: make(blocks=3), plan=deeper((0, None, 1)), loss=loss)


def test_waking_does_not_change_the_loss_and_every_new_weight_learns_from_the_second_step():
    run, plan = trained(OPTIMIZERS["adamw"]), deeper((0, None, 1))
    woken = mu.upscale(run, lambda: make(blocks=3), mu.SignalNoise(0.1), plan=plan, loss=loss)
    assert value(woken.model) == value(run.model)
    assert woken.provenance["noise"]["sigmas"] == {}, "copied blocks get no noise"
    assert set(woken.provenance["noise"]["repeats"]) == {
        n for n, entry in plan.tensors.items() if entry.repeats
    }
    for i in range(2):
        step(woken, i)
    grads = [p.grad for p in woken.model.parameters()]
    assert all(grad is not None and grad.abs().max() > 0 for grad in grads)
    random = mu.upscale(run, lambda: make(blocks=3), mu.NewUnits("random"), plan=plan, loss=loss)
    assert list(random.provenance["noise"]["sigmas"]) == ["blocks.1.read.weight"]
    loud = deeper((0, None, 1), quiet=())
    jumped = mu.upscale(run, lambda: make(blocks=3), mu.SignalNoise(0.1), plan=loud, loss=loss)
    assert abs(value(jumped.model) - value(run.model)) > 1e-5, "control: writers are copied too"


@pytest.mark.parametrize("k", [1, 2])
def test_new_blocks_in_stack_order_wake_as_copies_of_the_blocks_they_repeat(k):
    """At once with width: each is the wide block that it is like, but for its writer. Control: the block before it."""
    run, plan = trained(OPTIMIZERS["adamw"]), deeper((0, 1, 0, 1))
    wide = lambda: make(8 * k, 4)  # noqa: E731
    if k > 1:
        plan = plan.then(mu.infer_plan(lambda: make(blocks=4), wide, loss=loss))
    sizes = dict.fromkeys((n for n, e in plan.tensors.items() if len(e.axes) > 1 and not e.new), 0.0)
    noise = mu.MupNoise({**sizes, "last.weight": 1e-14})  # to the rest, new blocks among it, none
    woken = mu.upscale(run, wide, noise if k > 1 else mu.NewUnits(), plan=plan, loss=loss)
    assert value(woken.model) == pytest.approx(value(run.model), rel=1e-12)
    found = dict(woken.model.named_parameters())
    for leaf in ("norm.weight", "norm.bias", "read.weight", "read.bias", "write.weight"):
        for new in (2, 3):
            one, same, other = (found[f"blocks.{i}.{leaf}"].detach() for i in (new, new - 2, 3 - new))
            quiet = leaf == "write.weight"
            assert torch.equal(one, torch.zeros_like(one) if quiet else same), (new, leaf)
            assert quiet or not torch.equal(one, other), leaf
    for i in range(2):
        step(woken, i)
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in woken.model.parameters())


def test_copies_of_units_in_a_new_block_get_noise_that_parts_them():
    """Control: with zero noise on the same weight they are equal."""
    run, wide = trained(OPTIMIZERS["adamw"]), lambda: make(16, 3)
    plan = deeper((0, 1, 0)).then(mu.infer_plan(lambda: make(blocks=3), wide, loss=loss))
    for noise, parts in ((mu.SignalNoise(0.1), True), (mu.SignalNoise({"blocks.2.*": 0, "*": 0.1}), False)):
        made = mu.upscale(run, wide, noise, plan=plan, loss=loss).model.get_parameter("blocks.2.read.weight")
        assert (not torch.equal(made[::2], made[1::2])) is parts


def mixed(inner, blocks):
    model = make(blocks=blocks)
    for block in model.blocks:
        block.read, block.write = nn.Linear(8, inner), nn.Linear(inner, 8, bias=False)
    return model.double()


def test_zeros_of_a_width_wake_in_new_blocks_too():
    model = mixed(8, 2)
    run = mu.Run(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    narrow = mu.infer_plan(model, lambda: mixed(8, 4), loss=loss)
    plan = narrow.then(mu.infer_plan(lambda: mixed(8, 4), lambda: mixed(12, 4), loss=loss, by="units"))
    woken = mu.upscale(run, lambda: mixed(12, 4), plan=plan, loss=loss)
    assert value(woken.model) == pytest.approx(value(model), rel=1e-12)
    read = woken.model.get_parameter("blocks.2.read.weight").detach()
    assert bool((read[8:] != 0).all()), "new units of a new block"


def test_noise_wakes_the_readers_of_a_new_block_alone():
    plan = deeper((0, None, 1))
    new = [name for name, entry in plan.tensors.items() if entry.new]
    woken = [name for name in new if plan[name].sleep.wakes]
    assert woken == ["blocks.1.norm.bias", "blocks.1.read.weight", "blocks.1.read.bias"]
    assert [name for name in new if "noise wakes it" in plan.explain(name)] == woken
    assert set(new) - set(woken) == {"blocks.1.norm.weight", "blocks.1.write.weight"}, "a gain is 1 already"


def test_noise_of_zero_leaves_new_blocks_asleep():
    run = trained(OPTIMIZERS["adamw"])
    plan = deeper((0, None, 1))
    wide = mu.upscale(run, lambda: make(blocks=3), mu.SignalNoise(0.0), plan=plan, loss=loss)
    assert float(wide.model.get_parameter("blocks.1.read.weight").detach().abs().max()) == 0.0


def test_deeper_and_then_wider_is_one_plan():
    run, plan = trained(OPTIMIZERS["adamw"]), deeper((0, None, 1))
    width = mu.infer_plan(lambda: make(blocks=3), lambda: make(16, 3), loss=loss)
    both = plan.then(width)
    assert both == Plan.from_json(both.to_json())
    assert both["blocks.1.read.weight"].like == "blocks.0.read.weight"
    assert both.parameters("base") == sum(p.numel() for p in make().parameters())
    assert both.parameters("wide") == sum(p.numel() for p in make(16, 3).parameters())
    certificate = mu.verify(
        run, lambda: make(16, 3), step=lambda r, i: step(r, 4 + i), plan=both, loss=loss, steps=6
    )
    assert certificate.worst < 1e-12


def test_a_wide_run_grows_deeper_in_the_units_of_its_blocks():
    """Noise and units of a new block are those of its neighbour, counted from the reference."""
    run = trained(OPTIMIZERS["adamw"])
    wide = mu.grow(run, lambda: make(16), loss=loss)
    plan = block_plan(make(16), make(16, 3), (0, None, 1), NewBlocks(first_values(make()), WRITERS))
    deep = mu.grow(wide, lambda: make(16, 3), plan=plan, loss=loss)
    assert deep.since is not None
    for leaf in ("read.weight", "write.weight", "norm.weight"):
        assert deep.since[f"blocks.1.{leaf}"].change == deep.since[f"blocks.0.{leaf}"].change
        assert deep.since[f"blocks.1.{leaf}"].like == f"blocks.0.{leaf}"
    rates = {n: g["lr"] for g in deep.optimizer.param_groups for n in g["param_names"]}
    assert rates["blocks.1.read.weight"] == rates["blocks.0.read.weight"] != rates["first.weight"]


def test_two_models_that_differ_otherwise_are_refused():
    other = make(blocks=3)
    other.extra = nn.Linear(2, 2)
    with refused("depth.tensor_in_one_model", where="extra.weight"):
        block_plan(make(), other, (0, None, 1), NewBlocks({}, WRITERS))


@pytest.mark.parametrize(
    ("to", "after", "code"),
    [(2, None, "depth.not_deeper"), (3, [2], "depth.wrong_places"), (4, [0], "depth.wrong_places")],
)
def test_an_order_that_cannot_be_is_refused(to, after, code):
    with refused(code):
        order_of(2, to, after)


def test_names_of_the_tensors_that_new_ones_are_like_are_renamed_too():
    plan = deeper((0, None, 1)).rename(lambda name: f"inner.{name}")
    assert plan["inner.blocks.1.read.weight"].like == "inner.blocks.0.read.weight"


def test_a_state_dict_gets_the_new_tensors():
    model, plan = make(), deeper((0, None, 1))
    grown = mu.trainers.grow_state_dict(model.state_dict(), plan, prove=False)
    make(blocks=3).load_state_dict(grown)
    state = torch.optim.AdamW(model.named_parameters()).state_dict()
    groups = mu.trainers.grow_optimizer_state_dict(state, plan, torch.optim.AdamW, prove=False)[
        "param_groups"
    ]
    assert sorted(n for group in groups for n in group["param_names"]) == sorted(plan.tensors)


def test_a_saved_optimizer_has_the_order_of_the_deeper_model():
    """State is saved by position: loaded into an optimizer of the deeper model, every tensor has its own."""
    run, plan = trained(OPTIMIZERS["adamw"]), Plan.from_json(deeper((0, None, 1)).to_json())
    saved = torch.optim.AdamW(run.model.named_parameters()).state_dict()
    saved["state"] = run.optimizer.state_dict()["state"]
    grown = mu.trainers.grow_optimizer_state_dict(saved, plan, torch.optim.AdamW, prove=False)
    wide = make(blocks=3)
    names = [name for name, _ in wide.named_parameters()]
    assert [n for group in grown["param_groups"] for n in group["param_names"]] == names
    optimizer = torch.optim.AdamW(wide.named_parameters())
    optimizer.load_state_dict(grown)
    base = dict(run.model.named_parameters())
    for name, parameter in wide.named_parameters():
        assert (parameter in optimizer.state) is not plan[name].new, name
        if not plan[name].new:
            moment = run.optimizer.state[base[plan[name].sources[0]]]["exp_avg"]
            assert torch.equal(optimizer.state[parameter]["exp_avg"], moment), name


def test_gains_of_new_norms_stay_one_where_readers_are_random():
    plan = deeper((0, None, 1))
    woken = mu.upscale(
        trained(OPTIMIZERS["adamw"]), lambda: make(blocks=3), mu.NewUnits("random"), plan=plan, loss=loss
    )
    assert bool((woken.model.get_parameter("blocks.1.norm.weight").detach() == 1).all())


def test_the_way_back_is_refused():
    plan = deeper((0, None, 1))
    wide = mu.grow(make(), lambda: make(blocks=3), plan=plan, loss=loss)
    with refused("plan.no_way_back", where="blocks.1.read.weight"):
        mu.narrow(wide, make)


def test_sizes_that_are_named_for_new_tensors_are_heeded_or_refused():
    base, wide = make(), lambda: make(16, 3)
    plan = deeper((0, None, 1)).then(mu.infer_plan(lambda: make(blocks=3), wide, loss=loss))

    def sigmas(noise):
        made = mu.upscale(base, wide, noise, plan=plan, loss=loss).provenance["noise"]
        repeats.append(new in made.get("repeats", {}))
        return made["sigmas"]

    new = "blocks.1.read.weight"
    repeats: list[bool] = []
    usual = sigmas(mu.SignalNoise(0.1))[new]
    assert sigmas(mu.SignalNoise({"*": 0.2}))[new] == pytest.approx(2 * usual), "that of a copy with copies"
    assert repeats == [True, True]
    assert new not in sigmas(mu.SignalNoise({"blocks.0.*": 0.1}))
    assert new not in sigmas(mu.SignalNoise({"blocks.1.*": 0, "*": 0.1}))
    with refused("noise.new_weights_alone", where="blocks.1.*"):
        sigmas(mu.SignalNoise({"blocks.1.*": 0.3, "*": 0.1}))
    every = dict.fromkeys(sigmas(mu.MupNoise(0.1)), 0.1)
    assert sigmas(mu.MupNoise({**every, new: 0.7}))[new] == 0.7
    assert repeats.pop() is False, "a size that is given for it is that of random readers"
    assert sigmas(mu.MupNoise({n: s for n, s in every.items() if n != new}))[new] == 0.1, "as for block 0"
    assert repeats[-1]
    with refused("noise.in_new_writer", where="blocks.1.write.weight"):
        sigmas(mu.MupNoise({**every, "blocks.1.write.weight": 0.1}))


def test_a_new_tensor_that_is_like_no_other_belongs_to_no_group():
    run, plan = trained(OPTIMIZERS["adamw"]), deeper((0, None, 1))
    name = "blocks.1.read.weight"
    plan = plan.with_tensors({name: replace(plan[name], like=None)})
    with refused("optimizer.tensor_without_group", where=name):
        mu.grow(run, lambda: make(blocks=3), plan=plan, loss=loss)


def test_new_blocks_say_whether_they_are_awake():
    run, plan, wide = trained(OPTIMIZERS["adamw"]), deeper((0, None, 1)), lambda: make(blocks=3)
    asleep = mu.grow(run, wide, plan=plan, loss=loss)
    for i in range(3):
        step(asleep, i)
    found = awake(asleep)
    zero = [name for name, entry in plan.tensors.items() if entry.new and not name.endswith("norm.weight")]
    assert found == dict.fromkeys(zero, 0.0)
    woken = mu.upscale(run, wide, mu.SignalNoise(0.1), plan=plan, loss=loss)
    found = awake(woken.model, plan=plan)
    assert found["blocks.1.read.weight"] == 1.0
    assert found["blocks.1.read.bias"] == 1.0
    assert found["blocks.1.write.weight"] == 0.0, "quiet"
    for i in range(2):
        step(woken, i)
    assert awake(woken) == dict.fromkeys(zero, 1.0)
    assert symmetry(woken) == {}, "nothing has copies"
    with refused("plan.not_given"):
        awake(woken.model)


def test_pads_say_whether_they_are_awake():
    def net(n):
        return nn.Sequential(nn.Linear(6, n), nn.Tanh(), nn.Linear(n, 3)).double()

    plan = mu.plans.plan_between(net, 4, 7, loss=loss, by="padded")
    base = net(4)
    assert set(awake(mu.grow(base, lambda: net(7), plan=plan)).values()) == {0.0}
    woken = awake(mu.upscale(base, lambda: net(7), mu.MupNoise(0.1), plan=plan, loss=loss))
    assert 0 < woken["0.weight"] < 1


def test_the_shares_of_noise_know_new_tensors():
    run, plan = trained(OPTIMIZERS["adamw"]), deeper((0, None, 1))
    woken = mu.upscale(run, lambda: make(blocks=3), mu.NewUnits("random"), plan=plan, loss=loss)
    shares = noise_shares(run, woken)
    assert shares.keys() == {"blocks.1.read.weight"}
    assert shares["blocks.1.read.weight"].share == 1.0
    assert shares["blocks.1.read.weight"].lost < 1e-12


@pytest.mark.parametrize("bias", [False, True])
def test_a_loaded_run_keeps_the_units_of_shared_biases(bias):
    """Without biases nothing has other units than in the base, which is then the reference."""
    plan = replace(deeper((0, None, 1), biases=BIASES, bias=bias), proof="loss")
    base, wide = make(bias=bias), make(blocks=3, bias=bias)
    loaded = mu.load_grown_(mu.Run(base), wide, plan=plan)
    assert loaded.since == (plan if bias else None)
    assert value(wide) == pytest.approx(value(base), rel=1e-12)


class Gated(nn.Module):
    """LayerScale, a vector behind the branch, or ReZero, a number."""

    def __init__(self, width, gate):
        super().__init__()
        self.norm, self.read, self.write = nn.LayerNorm(width), nn.Linear(width, 9), nn.Linear(9, width)
        self.gate = nn.Parameter(gate.clone())

    def forward(self, x):
        return x + self.gate * self.write(torch.relu(self.read(self.norm(x))))


@pytest.mark.parametrize("gate", [torch.full((8,), 0.1), torch.tensor(0.1)], ids=["LayerScale", "ReZero"])
def test_blocks_behind_a_gate_sleep_and_wake_by_it(gate):
    """Control: with the gate as the factory makes it, the deeper model has another loss."""

    def gated(blocks):
        torch.manual_seed(0)
        model = make(blocks=blocks)
        model.blocks = nn.ModuleList(Gated(8, gate) for _ in range(blocks)).double()
        return model

    base = gated(2)
    run = mu.Run(base, torch.optim.AdamW(base.parameters(), lr=1e-2))
    asleep, awake = (grow(run, lambda: gated(4), loss=loss) for grow in (mu.grow, mu.upscale))
    woken: Any = awake.model
    new = woken.blocks[2:]
    assert value(awake.model) == pytest.approx(value(base), rel=1e-12)
    with torch.no_grad():
        asleep_gate = new[0].gate.clone()
        new[0].gate.fill_(0.1)
        assert value(awake.model) != pytest.approx(value(base), rel=1e-6)
        new[0].gate.copy_(asleep_gate)
    for i in range(4):
        one, other = (step(each, i) for each in (run, asleep))
        assert float(other) == pytest.approx(float(one), rel=1e-11)
    before = {name: p.detach().clone() for name, p in new.named_parameters()}
    for i in range(2):
        step(awake, i)
    still = [n for n, p in new.named_parameters() if torch.equal(before[n], p)]
    assert not still
