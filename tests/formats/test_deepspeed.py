"""Universal checkpoints of DeepSpeed, built here by its layout: the wide one has the bits of `grow`, and others are refused.

`benchmarks/engines_run.py` does the same with the stock converter and stock engines.
"""

import pickle
import shutil
import sys
from collections import OrderedDict
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import mupscale as mu
from harness.closeness import largest_gaps
from harness.growth.experts import Mixture
from harness.refusals import refusal, refused
from mupscale.formats.deepspeed.grow import grow_universal_checkpoint
from mupscale.formats.deepspeed.universal import read_universal
from mupscale.plans.more_experts import more_experts_plan

TAG = "global_step3_universal"
WORDS, WIDTH = 11, 4


def make(n):
    return nn.Sequential(nn.Embedding(WORDS, n), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, WORDS, bias=False))


PLAN = mu.plans.plan_between(make, WIDTH, 2 * WIDTH)


def own_groups(model):
    matrices = [(n, p) for n, p in model.named_parameters() if p.dim() > 1]
    vectors = [(n, p) for n, p in model.named_parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 0.02}]


def step(run, i):
    words = torch.randint(WORDS, (16,), generator=torch.Generator().manual_seed(i))
    loss = nn.functional.cross_entropy(run.model(words), words)
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return float(loss.detach())


def trained():
    torch.manual_seed(0)
    model = make(WIDTH)
    run = mu.Run(model, torch.optim.AdamW(own_groups(model), lr=0.05))
    for i in range(3):
        step(run, i)
    return run


class LossScaler:
    """What DeepSpeed puts into its settings: an object of its own."""

    __module__ = "deepspeed.runtime.fp16.loss_scaler"


def write(folder, run, stage):
    """The files that `ds_to_universal` writes for a run of one rank."""
    zero, parameters = folder / TAG / "zero", dict(run.model.named_parameters())
    groups = run.optimizer.state_dict()["param_groups"]
    for group in groups:
        group["params"] = [0]
    for name, parameter in parameters.items():
        (zero / name).mkdir(parents=True)
        state = run.optimizer.state[parameter]
        for key, tensor in (("fp32", parameter.detach()), *state.items()):
            if key == "step":
                if stage < 3:
                    torch.save(tensor, zero / name / "step.pt")
            else:
                flat = tensor.clone().flatten()
                tree = flat if stage == 3 else {"cat_dim": 0, "param": flat.view_as(tensor)}
                torch.save(tree, zero / name / f"{key}.pt")
    settings = {"loss_scaler": LossScaler(), "clip_grad": 1.0, "zero_stage": stage, "ds_version": "0.19.8"}
    names = [group.pop("param_names") for group in groups]
    settings["param_groups"] = groups
    if stage == 3:
        count = next(iter(run.optimizer.state.values()))["step"]
        settings["optimizer_state_dict"] = {
            "state": {0: {"step": count, "exp_avg": torch.ones(9)}},
            "param_groups": groups,
        }
    module = ModuleType("deepspeed.runtime.fp16.loss_scaler")
    vars(module)["LossScaler"] = LossScaler
    parts = {"deepspeed": ModuleType("deepspeed"), "deepspeed.runtime": ModuleType("deepspeed.runtime")}
    parts["deepspeed.runtime.fp16"] = ModuleType("deepspeed.runtime.fp16")
    with pytest.MonkeyPatch.context() as patch:
        for name, part in {**parts, module.__name__: module}.items():
            patch.setitem(sys.modules, name, part)
        torch.save(settings, zero / "optimizer_state.pt")
    model = {
        "module": run.model.state_dict(),
        "param_shapes": [OrderedDict((n, parameters[n].shape) for n in of) for of in names],
        "lr_scheduler": {
            "base_lrs": [0.05, 0.02],
            "_last_lr": [0.04, 0.01],
            "last_epoch": 3,
            "lr_lambdas": [None, None],
        },
        "mp_world_size": 1,
        "dp_world_size": 1,
        "global_steps": 3,
        "buffer_names": [],
        "mine": {"epoch": 7},
    }
    save_model(folder, model)
    (folder / "latest_universal").write_text(TAG)


def save_model(folder, model):
    torch.save(model, folder / TAG / "mp_rank_00_model_states.pt")


@pytest.fixture(params=[1, 3])
def narrow(request, tmp_path):
    run = trained()
    write(tmp_path / "narrow", run, request.param)
    return tmp_path / "narrow", run


def read(folder, name, key):
    tree = torch.load(folder / TAG / "zero" / name / f"{key}.pt")
    return tree["param"] if isinstance(tree, dict) else tree


def restored(folder):
    """A wide run as an engine would restore it: groups, weights, moments and steps of the files."""
    model = make(2 * WIDTH)
    optimizer = torch.optim.AdamW(mu.trainers.groups_for(model, folder))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(read(folder, name, "fp32").view_as(parameter))
            moments = {key: read(folder, name, key).view_as(parameter) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}
    return mu.Run(model, optimizer)


def test_the_wide_files_have_the_bits_of_widen_and_losses_go_on(narrow, tmp_path):
    """Controls: moments that are copied without units, and the base's own rate in every group, lose the base's losses."""
    folder, run = narrow
    left = grow_universal_checkpoint(folder, tmp_path / "wide", plan=PLAN)
    assert [name.rpartition(" ")[2] for name in left] == ["clip_grad"]
    wide, found = mu.grow(run, make(2 * WIDTH), plan=PLAN), restored(tmp_path / "wide")
    for (name, a), b in zip(wide.model.named_parameters(), found.model.parameters(), strict=True):
        assert torch.equal(a, b), name
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(wide.optimizer.state[a][key], found.optimizer.state[b][key]), (name, key)
    odd = restored(tmp_path / "wide")
    for parameter, state in odd.optimizer.state.items():
        name = next(n for n, p in odd.model.named_parameters() if p is parameter)
        state["exp_avg_sq"] /= float(PLAN[name].change.r) ** 2
    plain = restored(tmp_path / "wide")
    for group in plain.optimizer.param_groups:
        group["lr"] /= group["lr_factor"]
    gaps = largest_gaps(step, run, {"found": found, "odd": odd, "plain": plain}, range(3, 8))
    assert gaps["found"] < 1e-5
    assert min(gaps["odd"], gaps["plain"]) > 1e-3


def test_the_result_holds_plain_values_and_the_schedule_of_its_groups(narrow, tmp_path):
    folder, _ = narrow
    grow_universal_checkpoint(folder, tmp_path / "wide", plan=PLAN)
    groups = torch.load(tmp_path / "wide" / TAG / "zero" / "optimizer_state.pt")["param_groups"]
    model = torch.load(tmp_path / "wide" / TAG / "mp_rank_00_model_states.pt")
    factors = [group["lr_factor"] for group in groups]
    starts = [0.02 if set(group["param_names"]) <= {"1.bias"} else 0.05 for group in groups]
    assert [group["lr"] for group in groups] == [a * b for a, b in zip(starts, factors, strict=True)]
    assert model["lr_scheduler"]["base_lrs"] == [group["lr"] for group in groups]
    assert (model["mine"], model["global_steps"], model["module"]) == ({"epoch": 7}, 3, {})
    assert model["param_shapes"][0]["0.weight"] == (WORDS, 2 * WIDTH)
    assert len(set(factors)) > 1


def test_growing_twice_is_growing_by_the_product(narrow, tmp_path):
    folder, run = narrow
    again = mu.plans.plan_between(make, 2 * WIDTH, 4 * WIDTH)
    grow_universal_checkpoint(folder, tmp_path / "wide", plan=PLAN)
    grow_universal_checkpoint(tmp_path / "wide", tmp_path / "wider", plan=again)
    whole = mu.grow(run, make(4 * WIDTH), plan=PLAN.then(again), prove=False)
    for name, parameter in whole.model.named_parameters():
        for key, expected in (("fp32", parameter.detach()), *whole.optimizer.state[parameter].items()):
            if key != "step":
                found = read(tmp_path / "wider", name, key)
                assert torch.equal(found.view_as(expected), expected), (name, key)


@pytest.mark.parametrize("noise", [mu.SignalNoise(0.1), mu.SplitNoise()], ids=["added", "split"])
def test_noise_is_that_of_the_seed_and_leaves_moments_alone(narrow, tmp_path, noise):
    folder, run = narrow
    mu.grow_checkpoint(folder, tmp_path / "wide", plan=PLAN, noise=noise, seed=5)
    same, other = (mu.upscale(run, make(2 * WIDTH), plan=PLAN, noise=noise, seed=seed) for seed in (5, 6))
    stored = read(tmp_path / "wide", "1.weight", "fp32").flatten()
    assert torch.equal(stored, same.model.get_parameter("1.weight").detach().flatten())
    assert not torch.equal(stored, other.model.get_parameter("1.weight").detach().flatten())


def refuse(folder, tmp_path, code, where=(), **given):
    with refused(code, where=where):
        grow_universal_checkpoint(folder, tmp_path / "refused", **{"plan": PLAN, **given})
    assert not (tmp_path / "refused").exists()


def test_what_is_missing_or_unknown_is_refused_with_its_place(narrow, tmp_path):
    folder, _ = narrow
    zero = folder / TAG / "zero"
    refuse(folder, tmp_path, "checkpoint.shape_differs", "1.weight", plan=mu.plans.plan_between(make, 8, 16))
    shutil.move(zero / "1.bias", tmp_path / "bias")
    refuse(folder, tmp_path, "checkpoint.tensor_missing", "zero/1.bias")
    shutil.copytree(tmp_path / "bias", zero / "stranger")
    shutil.move(tmp_path / "bias", zero / "1.bias")
    refuse(folder, tmp_path, "checkpoint.tensor_not_in_plan", "stranger")
    shutil.rmtree(zero / "stranger")
    torch.save({"param": torch.ones(4), "is_expert_param": True}, zero / "1.bias" / "exp_avg.pt")
    refuse(folder, tmp_path, "deepspeed.unknown_state_entry", "is_expert_param")
    (folder / "latest_universal").unlink()
    refuse(folder, tmp_path, "deepspeed.not_universal", "deepspeed.checkpoint.ds_to_universal")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"mp_world_size": 2}, "deepspeed.saved_in_parallel"),
        ({"param_shapes": [{"0.weight": 1}, {"1.weight": 1}, {"1.bias": 1}]}, "deepspeed.groups_were_cut"),
        ({"lr_scheduler": {"eta_min": 0.1}}, "schedule.absolute_rate"),
        ({"lr_scheduler": {"last_batch_iteration": 3}}, "deepspeed.own_scheduler"),
        ({"param_shapes": None}, "deepspeed.names_missing"),
        ({"param_shapes": [{1: 2}, {3: 4}]}, "deepspeed.names_missing"),
    ],
)
def test_settings_that_cannot_be_carried_are_refused(narrow, tmp_path, change, code):
    folder, _ = narrow
    save_model(folder, {**torch.load(folder / TAG / "mp_rank_00_model_states.pt"), **change})
    refuse(folder, tmp_path, code)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"zero_stage": 0}, "deepspeed.without_zero"),
        ({"zero_stage": None}, "deepspeed.without_zero"),
        ({"param_groups": {"lr": 1}}, "deepspeed.settings_malformed"),
        ({"param_groups": [1, 2]}, "deepspeed.settings_malformed"),
        ({"clip_grad": "much"}, "deepspeed.settings_malformed"),
        ({"optimizer_state_dict": [1]}, "deepspeed.optimizer_malformed"),
    ],
)
def test_settings_of_another_form_are_refused(narrow, tmp_path, change, code):
    folder, _ = narrow
    change_settings(folder, lambda told: told.update(change))
    refuse(folder, tmp_path, code)


def change_settings(folder, change):
    told = read_universal(folder).settings
    told = {key: value for key, value in told.items() if key != "loss_scaler"}
    if "optimizer_state_dict" in told:
        told["optimizer_state_dict"]["state"][0].pop("exp_avg", None)
    change(told)
    torch.save(told, folder / TAG / "zero" / "optimizer_state.pt")


def test_an_optimizer_of_an_unknown_class_is_to_be_named(narrow, tmp_path):
    """Control: the same groups with the settings of AdamW alone are known from what they hold."""
    folder, _ = narrow
    change_settings(folder, lambda told: [group.update(its_own=1) for group in told["param_groups"]])
    refuse(folder, tmp_path, "state.optimizer_unclear", ("its_own", "optimizer_class="))
    change_settings(folder, lambda told: [group.pop("its_own") for group in told["param_groups"]])
    grow_universal_checkpoint(folder, tmp_path / "wide", plan=PLAN)


def test_no_pickle_is_executed(narrow, tmp_path, monkeypatch):
    """Control: torch's own loader, which may run code, runs it."""

    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    folder, _ = narrow
    file = folder / TAG / "mp_rank_00_model_states.pt"
    tree = torch.load(file)
    torch.save({**tree, "mine": Trap()}, file, pickle_module=pickle)
    left = grow_universal_checkpoint(folder, tmp_path / "wide", plan=PLAN)
    assert any("mine" in name for name in left)
    assert not (tmp_path / "sprung").exists()
    assert "mine" not in torch.load(tmp_path / "wide" / TAG / "mp_rank_00_model_states.pt")
    torch.load(file, weights_only=False)["mine"].close()
    assert (tmp_path / "sprung").exists()


@pytest.mark.parametrize("tag", [f"../outside/{TAG}", "..", "", "x" * 5000, f"{TAG}/../{TAG}"])
def test_a_tag_that_leads_elsewhere_is_refused_by_every_reader(tag, narrow, tmp_path):
    """Control: the same folder under its own name, with the end of line that editors add."""
    folder, _ = narrow
    out, model = tmp_path / "wide", make(2 * WIDTH)
    grow_universal_checkpoint(folder, out, plan=PLAN)
    shutil.copytree(out, tmp_path / "outside")
    (out / "latest_universal").write_text(f"{TAG}\n")
    assert mu.trainers.groups_for(model, out)
    for place in (folder, out):
        (place / "latest_universal").write_text(tag)
    for call in (
        lambda: mu.trainers.groups_for(model, out),
        lambda: grow_universal_checkpoint(folder, tmp_path / "refused", plan=PLAN),
    ):
        refusal(call)
    assert not (tmp_path / "refused").exists()


class Engine:
    """What `load_universal_` uses of an engine; loading does what ZeRO 3 does to groups and steps."""

    def __init__(self, optimizer, universal=True):
        self.optimizer, self.universal = SimpleNamespace(optimizer=optimizer), universal

    def load_universal_checkpoint(self):
        return self.universal

    def load_checkpoint(self, folder):
        inner, shared = self.optimizer.optimizer, torch.tensor(3.0)
        for group in inner.param_groups:
            group["lr"] = 1.0
            for parameter in group["params"]:
                inner.state[parameter] = {"step": shared}
        return folder, {"mine": 1}


def test_an_engine_gets_the_settings_of_its_groups_and_steps_of_their_own(narrow, tmp_path):
    folder, _ = narrow
    out, model = tmp_path / "wide", make(2 * WIDTH)
    grow_universal_checkpoint(folder, out, plan=PLAN)
    groups = mu.trainers.groups_for(model, out)
    rates = [group["lr"] for group in groups]
    engine = Engine(torch.optim.AdamW(groups))
    assert mu.trainers.load_universal_(engine, out) == {"mine": 1}
    inner = engine.optimizer.optimizer
    assert [group["lr"] for group in inner.param_groups] == rates
    steps = [state["step"] for state in inner.state.values()]
    assert len({id(count) for count in steps}) == len(steps) > 1
    for other, code in (
        (Engine(torch.optim.AdamW(own_groups(model))), "deepspeed.groups_differ"),
        (
            Engine(torch.optim.AdamW(mu.trainers.groups_for(model, out)), universal=False),
            "deepspeed.universal_not_enabled",
        ),
    ):
        with refused(code):
            mu.trainers.load_universal_(other, out)


def test_copies_of_experts_are_parted_as_by_upscale_or_refused(tmp_path):
    """Moments are those of `upscale` too. Control: another seed."""
    torch.manual_seed(0)
    model, make = Mixture("renormalised", 4, 2), lambda: Mixture("renormalised", 8, 2)
    run = mu.Run(model, torch.optim.AdamW(own_groups(model), lr=0.05))
    model(torch.randn(32, 6)).square().mean().backward()
    run.optimizer.step()
    write(tmp_path / "narrow", run, 1)
    plan = replace(more_experts_plan(model, make(), (4, 8)), proof="loss")
    with refused("experts.equal_scores"):
        mu.grow_checkpoint(tmp_path / "narrow", tmp_path / "wide", plan=plan)
    mu.grow_checkpoint(tmp_path / "narrow", tmp_path / "wide", plan=plan, noise=mu.NewUnits(), seed=5)
    same, other = (mu.upscale(run, make, plan=plan, seed=seed) for seed in (5, 6))
    rows = [one.model.get_parameter("router.weight") for one in (same, other)]
    for name, parameter in same.model.named_parameters():
        assert torch.equal(read(tmp_path / "wide", name, "fp32").view_as(parameter), parameter), name
        moment = same.optimizer.state[parameter]["exp_avg"]
        assert torch.equal(read(tmp_path / "wide", name, "exp_avg").view_as(parameter), moment), name
    assert not torch.equal(*rows)
