"""Training at any width: constants written at the reference, in the units of every tensor of the model."""

import math
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

import mupscale as mu
from harness.closeness import LAST_PLACES, assert_bitwise
from harness.draws import data, seeded
from harness.refusals import refusal
from mupscale.rules.optimizer_rule import change_for, decay_factor
from mupscale.rules.optimizers import RULES
from mupscale.rules.sizes import noise_size


def net(sizes: tuple[int, int]) -> nn.Module:
    """Two widths of their own, a norm, and a readout."""
    n, m = sizes
    return nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, m), nn.LayerNorm(m), nn.Linear(m, 2))


PLAN = mu.plans.plan_between(net, (4, 6), (8, 24))
K_IN, K_OUT = 2, 4
AGREE = [name for name, rule in RULES.items() if rule.agrees_with_mup and name.startswith("torch.optim.")]


def class_of(name: str) -> Any:
    return getattr(optim, name.rpartition(".")[2])


def constants_of(name: str) -> dict[str, Any]:
    constants: dict[str, Any] = {"lr": 0.01}
    if RULES[name].decay is not None:
        constants["weight_decay"] = 0.1
    return constants


def by_name(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The settings of every tensor."""
    return {name: group for group in groups for name, _ in group["params"]}


def only_matrices(name: str, parameter: Any) -> bool:
    return bool(parameter.dim() == 2)


def chosen(name: str) -> Any:
    return only_matrices if name == "torch.optim.Muon" else None


@pytest.mark.parametrize("name", AGREE)
def test_groups_follow_the_rules_of_every_optimizer_that_agrees_with_mup(name: str):
    rule, constants, model = RULES[name], constants_of(name), net((8, 24))
    groups = mu.param_groups(model, PLAN, class_of(name), parameters=chosen(name), **constants)
    for tensor, group in by_name(groups).items():
        row = rule.row(group, len(PLAN[tensor].axes))
        change = change_for(row, group, PLAN[tensor].change, PLAN[tensor].axes)
        factor = change.factor(row.lr)
        assert group["lr"] == 0.01 * float(factor), tensor
        assert group["lr_factor"] == float(factor), tensor
        if "weight_decay" in constants:
            want = 0.1 * float(decay_factor(row.decay_kind(group), change, factor))
            assert group["weight_decay"] == want, tensor
    base = seeded(net, (4, 6))
    parameters = [p for p in base.parameters() if p.dim() == 2 or chosen(name) is None]
    run = mu.Run(base, class_of(name)(parameters, **constants))
    if name == "torch.optim.RAdam":  # widening waits until it rectifies
        for state in (run.optimizers[0].state[p] for p in parameters):
            state["step"] = torch.tensor(50.0)
    wide = mu.grow(run, lambda: net((8, 24)), plan=PLAN)
    names = {id(p): n for n, p in wide.model.named_parameters()}
    found = by_name(groups)
    for carried in wide.optimizers[0].param_groups:
        for tensor in (names[id(p)] for p in carried["params"]):
            for key, value in carried.items():
                if key != "params":
                    assert found[tensor].get(key, value) == pytest.approx(value), f"{tensor}: {key}"
    optimizer = class_of(name)(groups)
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p).to_sparse() if name == "torch.optim.SparseAdam" else torch.ones_like(p)
    with torch.sparse.check_sparse_tensor_invariants():
        optimizer.step()


def test_the_table_of_the_paper_is_what_groups_hold():
    """lr and eps of a matrix, a vector and a readout, as powers of k written out by hand."""
    sgd = by_name(mu.param_groups(net((8, 24)), PLAN, optim.SGD, lr=1.0, weight_decay=1.0))
    adam = by_name(mu.param_groups(net((8, 24)), PLAN, optim.AdamW, lr=1.0, weight_decay=1.0, eps=1.0))
    rates = {"2.weight": K_OUT / K_IN, "0.weight": K_IN, "2.bias": K_OUT, "4.weight": 1 / K_OUT}
    for name, rate in rates.items():
        assert (sgd[name]["lr"], sgd[name]["weight_decay"]) == (rate, 1 / rate), name
    want = {"2.weight": (0.5, 0.25), "0.weight": (1, 0.5), "2.bias": (1, 0.25), "4.weight": (0.25, 1)}
    for name, (lr, eps) in want.items():
        assert (adam[name]["lr"], adam[name]["eps"], adam[name]["weight_decay"]) == (lr, eps, 1 / lr), name
    assert (adam["4.bias"]["lr"], adam["4.bias"]["eps"]) == (1, 1), "a tensor that does not grow"


def test_adafactor_is_refused_groups():
    refusal(lambda: mu.param_groups(net((8, 24)), PLAN, optim.Adafactor, lr=0.1), "optimizer.outside_mup")


def test_groups_are_the_fewest_in_the_order_of_the_model():
    model = net((8, 24))
    groups = mu.param_groups(model, PLAN, optim.AdamW, lr=0.01, weight_decay=0.1)
    settings = [tuple((k, v) for k, v in sorted(g.items()) if k != "params") for g in groups]
    assert len(set(settings)) == len(settings), "no two groups alike"
    order = [name for name, _ in model.named_parameters()]
    firsts = [order.index(group["params"][0][0]) for group in groups]
    assert firsts == sorted(firsts)
    for group in groups:
        inside = [order.index(name) for name, _ in group["params"]]
        assert inside == sorted(inside)
    assert sorted(by_name(groups)) == sorted(order)
    at_reference = mu.plans.plan_between(net, (8, 24), (8, 24))
    assert len(mu.param_groups(model, at_reference, optim.AdamW, lr=0.01)) == 1


class LlamaShape(nn.Module):
    """The tensors of a Llama: stream d, key-value width kv, feed-forward f."""

    def __init__(self, sizes: tuple[int, int, int]):
        super().__init__()
        d, kv, f = sizes
        self.embed = nn.Embedding(128256, d)
        self.layers = nn.ModuleList()
        for _ in range(32):
            shapes = {"q": (d, d), "k": (d, kv), "v": (d, kv), "o": (d, d)}
            mlp = {"gate": (d, f), "up": (d, f), "down": (f, d)}
            block = {name: nn.Linear(*shape, bias=False) for name, shape in {**shapes, **mlp}.items()}
            self.layers.append(nn.ModuleDict({**block, "norm1": nn.RMSNorm(d), "norm2": nn.RMSNorm(d)}))
        self.norm = nn.RMSNorm(d)
        self.readout = nn.Linear(d, 128256, bias=False)


def test_a_llama_of_eight_billion_needs_at_most_eight_groups():
    with torch.device("meta"):
        reference, model = LlamaShape((256, 128, 688)), LlamaShape((4096, 1024, 14336))
    layouts = {f"layers.*.{name}.weight": {1: 1} for name in ("q", "k", "v", "o", "gate", "up", "down")}
    plan = mu.infer_plan(
        reference, model, declared=mu.Declared(layouts={**layouts, "readout.weight": {1: 1}})
    )
    assert sum(math.prod(p.shape) for p in model.parameters()) > 8e9
    skip = ["*norm*", "embed.weight"]
    groups = mu.param_groups(model, plan, optim.AdamW, lr=3e-3, weight_decay=0.1, no_decay=skip)
    assert len(groups) <= 8
    assert len(by_name(groups)) == len(list(model.parameters()))
    assert by_name(groups)["layers.7.norm1.weight"]["weight_decay"] == 0.0
    assert by_name(groups)["layers.7.down.weight"]["lr"] == pytest.approx(3e-3 * 688 / 14336)


def test_no_decay_takes_patterns_and_refuses_those_that_match_nothing():
    model = net((8, 24))
    settings: Any = {"lr": 0.01, "weight_decay": 0.1}
    found = by_name(mu.param_groups(model, PLAN, optim.AdamW, no_decay=["*.bias", "3.*"], **settings))
    without = {name for name, group in found.items() if group["weight_decay"] == 0.0}
    assert without == {"0.bias", "2.bias", "3.bias", "4.bias", "3.weight"}
    refusal(
        lambda: mu.param_groups(model, PLAN, optim.AdamW, no_decay=["norm*"], **settings),
        "argument.pattern_matches_nothing",
        where="norm*",
    )
    bare, listed = (mu.param_groups(model, PLAN, optim.SGD, lr=0.1, no_decay=n) for n in ([], ["*.bias"]))
    assert len(listed) == len(bare), "where nothing decays, the list splits no group"


def test_several_optimizers_share_a_model_by_names_or_by_a_predicate():
    model = net((8, 24))
    named = [(n, p) for n, p in model.named_parameters() if p.dim() == 2]
    by_list = mu.param_groups(model, PLAN, optim.Muon, parameters=named, lr=0.02)
    by_generator = mu.param_groups(model, PLAN, optim.Muon, parameters=(pair for pair in named), lr=0.02)
    by_rule = mu.param_groups(model, PLAN, optim.Muon, parameters=only_matrices, lr=0.02)
    rest = mu.param_groups(model, PLAN, optim.AdamW, parameters=lambda n, p: p.dim() == 1, lr=0.01)
    for groups in (by_list, by_generator):
        assert by_name(groups).keys() == by_name(by_rule).keys()
        assert [g["lr"] for g in groups] == [g["lr"] for g in by_rule]
    assert sorted([*by_name(by_list), *by_name(rest)]) == sorted(n for n, _ in model.named_parameters())
    assert optim.Muon(by_list)
    stranger = [("nobody", nn.Parameter(torch.ones(2, 2)))]
    refusal(
        lambda: mu.param_groups(model, PLAN, optim.Muon, parameters=stranger, lr=0.02),
        "argument.not_a_trainable_parameter",
        where="nobody",
    )


def test_vectors_are_refused_to_muon_by_name():
    refusal(
        lambda: mu.param_groups(net((8, 24)), PLAN, optim.Muon, lr=0.02),
        "optimizer.takes_matrices_only",
        where=["0.bias", "Muon"],
    )


def stepped(model: nn.Module, **settings: Any) -> optim.Optimizer:
    optimizer = optim.AdamW(mu.param_groups(model, PLAN, optim.AdamW, lr=0.01, **settings))
    for _ in range(2):
        model.zero_grad()
        model(data(5, 3)).square().mean().backward()
        optimizer.step()
    return optimizer


def test_state_dicts_go_round_through_a_rebuilt_optimizer_by_name():
    model = seeded(net, (8, 24))
    saved = stepped(model).state_dict()
    assert {name for group in saved["param_groups"] for name in group["param_names"]} == set(PLAN.tensors)
    again = seeded(net, (8, 24), seed=1)
    rebuilt = optim.AdamW(mu.param_groups(again, PLAN, optim.AdamW, lr=0.5))
    rebuilt.load_state_dict(saved)
    loaded = rebuilt.state_dict()
    assert loaded["param_groups"] == saved["param_groups"]
    for i, state in saved["state"].items():
        for key, value in state.items():
            assert_bitwise(loaded["state"][i][key], value, f"{i}.{key}")
    assert mu.diagnostics.reference_lr(rebuilt) == pytest.approx(0.01)


def test_a_tensor_learning_rate_is_not_shared_between_groups():
    rate = torch.tensor(0.01, dtype=torch.float64)
    groups = mu.param_groups(net((8, 24)), PLAN, optim.AdamW, lr=rate)
    rates = [group["lr"] for group in groups]
    assert len({r.data_ptr() for r in [rate, *rates]}) == len(rates) + 1
    plain = mu.param_groups(net((8, 24)), PLAN, optim.AdamW, lr=0.01)
    assert [float(r) for r in rates] == [group["lr"] for group in plain]
    optimizer = optim.AdamW(groups)
    mu.set_lr_(optimizer, 0.02)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx(
        [2 * g["lr"] for g in plain]
    )
    assert float(rate) == 0.01, "the caller's tensor is left alone"


def test_defaults_are_scaled_although_nobody_wrote_them():
    found = by_name(mu.param_groups(net((8, 24)), PLAN, optim.AdamW))
    assert found["2.weight"]["eps"] == 1e-8 / K_OUT
    assert found["2.weight"]["weight_decay"] == 1e-2 * K_IN
    assert found["2.weight"]["lr"] == 1e-3 / K_IN
    refusal(
        lambda: mu.param_groups(net((8, 24)), PLAN, optim.AdamW, momentum=0.9),
        "optimizer.unknown_setting",
        where="momentum = 0.9",
    )


def test_adagrads_first_accumulator_has_the_units_of_its_tensor_or_is_refused():
    """Adagrad reads initial_accumulator_value from its constructor and not from its groups."""
    try:
        groups = mu.param_groups(net((8, 24)), PLAN, optim.Adagrad, lr=0.1, initial_accumulator_value=0.5)
    except mu.MupscaleError:
        return
    members = [pair for group in groups for pair in group["params"]]
    optimizer = optim.Adagrad(groups, initial_accumulator_value=0.5)
    for name, p in members:
        want = 0.5 * float(PLAN[name].change.r) ** 2
        assert float(optimizer.state[p]["sum"].max()) == pytest.approx(want), name


def test_a_rate_set_later_is_the_rate_given_at_once_even_after_zero():
    for first in (0.5, 0.0):
        optimizer = optim.SGD(mu.param_groups(net((8, 24)), PLAN, optim.SGD, lr=first))
        mu.set_lr_(optimizer, 0.01)
        names = [n for group in optimizer.param_groups for n in group["param_names"]]
        rates = {n: g["lr"] for g in optimizer.param_groups for n in g["param_names"]}
        want = by_name(mu.param_groups(net((8, 24)), PLAN, optim.SGD, lr=0.01))
        assert rates == pytest.approx({n: want[n]["lr"] for n in names}), f"after {first}"
        assert mu.diagnostics.reference_lr(optimizer) == pytest.approx(0.01)


def test_a_scheduler_that_overwrites_the_rates_is_noticed_and_one_that_multiplies_is_not():
    optimizer = stepped(seeded(net, (8, 24)))
    lr_scheduler.LambdaLR(optimizer, lambda i: 0.5)
    assert mu.diagnostics.reference_lr(optimizer) == pytest.approx(0.005)
    lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    refusal(lambda: mu.diagnostics.reference_lr(optimizer), "rates.no_single_reference", where="group 1")
    mu.set_lr_(optimizer, 0.02)
    assert mu.diagnostics.reference_lr(optimizer) == pytest.approx(0.02)
    plain = optim.AdamW(net((8, 24)).parameters())
    refusal(lambda: mu.diagnostics.reference_lr(plain), "rates.no_factor")
    refusal(lambda: mu.set_lr_(plain, 0.1), "rates.no_factor")


REFERENCE = (256, 320)
OTHERS = [(64, 80), (96, 40), (160, 640), (640, 160)]


@pytest.mark.parametrize("first", [(32, 48), (512, 1000)])
@pytest.mark.parametrize("sizes", OTHERS)
@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW, optim.Muon])
def test_constants_written_under_one_reference_are_the_same_under_another(first: Any, sizes: Any, kind: Any):
    with torch.device("meta"):
        model = net(sizes)
    early, late = mu.plans.plan_between(net, first, REFERENCE), mu.plans.plan_between(net, REFERENCE, sizes)
    direct, through = mu.plans.plan_between(net, first, sizes), early.then(late)
    settings: Any = {
        "lr": 3e-3,
        "weight_decay": 0.1,
        "parameters": only_matrices if kind is optim.Muon else None,
    }
    one, two = (by_name(mu.param_groups(model, plan, kind, **settings)) for plan in (direct, through))
    naive = by_name(mu.param_groups(model, late, kind, **settings))
    assert one.keys() == two.keys()
    for name, group in one.items():
        for key in {"lr", "eps", "weight_decay", "lr_factor"} & group.keys():
            assert two[name][key] == pytest.approx(group[key], rel=LAST_PLACES, abs=0), f"{name}: {key}"
    assert any(abs(naive[n]["lr"] / g["lr"] - 1) > 0.1 for n, g in one.items()), "control: not converted"
    for name, entry in direct.tensors.items():
        std = 0.3 * float(noise_size(entry.axes, entry.fold))
        composed = through[name]
        assert 0.3 * float(noise_size(composed.axes, composed.fold)) == pytest.approx(
            std, rel=LAST_PLACES, abs=0
        ), name
        converted = 0.3 * float(noise_size(early[name].axes)) * float(noise_size(late[name].axes))
        assert converted == pytest.approx(std, rel=LAST_PLACES, abs=0), (
            f"{name}: σ̄ rewritten at the second reference"
        )
