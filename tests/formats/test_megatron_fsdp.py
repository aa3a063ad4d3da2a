"""fsdp_dtensor checkpoints of Megatron, built here by their layout: the wide one has the bits of `grow`, and others are refused.

`benchmarks/megatron_run.py --fsdp` does the same with the Megatron-FSDP of megatron-core itself.
"""

from importlib.util import find_spec

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

import mupscale as mu
from harness.megatron_files import META, MODEL, MOMENTS, STATE, halves
from harness.megatron_files import fsdp_dtensor as write
from harness.refusals import refused
from mupscale.formats.megatron.grow import grow_megatron_checkpoint
from tests.formats.test_megatron import (
    PLAN,
    WIDTH,
    Model,
    goes_on,
    loaded,
    planned,
    refuse,
    trained,
)


def read(folder, name, state=None):
    """One tensor of the plan, its halves joined."""
    keys = {
        f"{MODEL}{part}" if state is None else f"{STATE}{part}.{state}": None
        for part in halves(name, torch.zeros(2))
    }
    found = [loaded(folder)[key] for key in keys]
    return (torch.cat(found) if found[0].dim() else found[0]).clone()


def settings(folder):
    """The settings of every tensor's group, read by torch's own reader."""
    described = FileSystemReader(folder).read_metadata().state_dict_metadata
    keys = [k for k, e in described.items() if isinstance(e, BytesStorageMetadata) and k.startswith(META)]
    tree = dict.fromkeys(keys)
    load(tree, checkpoint_id=folder, no_dist=True)
    found: dict[str, dict[str, object]] = {}
    for key, value in tree.items():
        name, _, setting = key.removeprefix(META).rpartition(".")
        found.setdefault(name, {})[setting] = value
    return found


def restored(folder):
    """A wide run as Megatron would restore it."""
    model, told = Model(2 * WIDTH), settings(folder)
    kept = ("lr", "eps", "weight_decay", "lr_factor")
    optimizer = torch.optim.AdamW(
        [{**{k: told[n][k] for k in kept}, "params": [p]} for n, p in model.named_parameters()]
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(read(folder, name))
            optimizer.state[parameter] = {key: read(folder, name, key) for key in ("step", *MOMENTS)}
    return mu.Run(model, optimizer)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_wide_files_have_the_bits_of_widen_and_losses_go_on(tmp_path, ranks):
    """Controls: moments that are copied without units, and the base's own rate everywhere, lose the base's losses."""
    run, out = trained(), tmp_path / "wide"
    narrow = write(tmp_path / "run" / "iter_0000003", run, ranks)
    (narrow.parent / "latest_checkpointed_iteration.txt").write_text("3\n")
    left = grow_megatron_checkpoint(narrow.parent, out, plan=PLAN)
    assert set(left) == {"args"}
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "3"
    out = out / "iter_0000003"
    wide, found = mu.grow(run, Model(2 * WIDTH), plan=PLAN), restored(out)
    for (name, a), b in zip(wide.model.named_parameters(), found.model.parameters(), strict=True):
        assert torch.equal(a, b), name
        for key in ("step", *MOMENTS):
            assert torch.equal(wide.optimizer.state[a][key], found.optimizer.state[b][key]), (name, key)
    goes_on(run, found, restored(out), restored(out))


@pytest.mark.filterwarnings("ignore:.*that nothing parts")
@pytest.mark.parametrize("noise", [mu.SignalNoise(0.1), mu.SplitNoise()], ids=["added", "split"])
def test_noise_has_the_bits_of_upscale_in_both_halves(tmp_path, noise):
    """Control: another seed."""
    run = trained()
    narrow = write(tmp_path / "narrow", run, ranks=2)
    grow_megatron_checkpoint(narrow, tmp_path / "wide", plan=PLAN, noise=noise, seed=5)
    same, other = (mu.upscale(run, Model(2 * WIDTH), plan=PLAN, noise=noise, seed=seed) for seed in (5, 6))
    for name, parameter in same.model.named_parameters():
        assert torch.equal(read(tmp_path / "wide", name), parameter), name
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    assert not torch.equal(read(tmp_path / "wide", name), other.model.get_parameter(name))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tensors_of_one_group_have_the_same_settings_and_rates_are_the_schedules(tmp_path):
    """Megatron refuses a group whose tensors disagree. Growing twice gives the rates of growing once by as much."""
    run = trained()
    grow_megatron_checkpoint(write(tmp_path / "narrow", run), tmp_path / "wide", plan=PLAN)
    again = planned(2 * WIDTH, 4 * WIDTH)
    assert grow_megatron_checkpoint(tmp_path / "wide", tmp_path / "wider", plan=again) == {}
    whole = mu.grow(run, Model(4 * WIDTH), plan=PLAN.then(again), prove=False)
    told = settings(tmp_path / "wider")
    names = {p: n for n, p in whole.model.named_parameters()}
    for group in whole.optimizer.param_groups:
        own = [told[names[p]] for p in group["params"]]
        assert all(each == own[0] for each in own)
        assert own[0]["max_lr"] == pytest.approx(group["lr"])
        assert own[0]["min_lr"] == pytest.approx(group["lr"] / 5)
        assert 0.1 * own[0]["wd_mult"] == pytest.approx(group["weight_decay"])
    assert len({each["is_decoupled_lr"] for each in told.values()}) == len(whole.optimizer.param_groups)


FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


@pytest.mark.parametrize(
    ("change", "code", "where"),
    [
        (lambda t, _: t.update({MODEL + "stranger.weight": torch.ones(2)}), "checkpoint.tensor_not_in_plan", "stranger.weight"),
        (lambda t, _: t.pop(MODEL + "output_layer.weight"), "checkpoint.tensor_missing", "output_layer.weight"),
        (lambda t, _: t.pop(MODEL + FC1 + "_v"), "checkpoint.tensor_missing", FC1),
        (lambda t, _: t.pop(f"{STATE}{FC1}_v.exp_avg"), "megatron.half_missing", f"{FC1}_v.exp_avg"),
        (lambda t, _: t.update({MODEL + "output_layer.weight": torch.ones(2, 2)}), "checkpoint.shape_differs", "output_layer.weight"),
        (lambda t, _: t.update({"model.output_layer.weight": torch.ones(2, 2)}), "megatron.different_wrappers", "model."),
        (lambda _, v: v.update({"optimizer.0.param_to_group_meta.a.lr": 1.0}), "megatron.several_optimizers", "optimizer.0."),
        (lambda _, v: v.update({f"{META}output_layer.weight.is_expert_parallel": True}), "megatron.group_of_experts", ()),
        (
            lambda t, _: t.update({f"{MODEL}decoder.layers.0.mlp.experts.linear_fc1.weight0": torch.ones(6, 8)}),
            "megatron.experts_not_read", "experts.linear_fc1.weight0",
        ),
        (lambda _, v: [v.pop(key) for key in list(v) if key.startswith(META)], "megatron.no_param_groups", ()),
        (lambda _, v: [v.pop(key) for key in list(v) if key.startswith(f"{META}output_layer.")], "state.in_no_group", "output_layer.weight"),
        (lambda t, _: t.pop(f"{STATE}output_layer.weight.exp_avg"), "state.entry_missing", ("output_layer.weight", "exp_avg")),
        (lambda _, v: v.update({f"{META}output_layer.weight.lr": torch.ones(2)}), "state.setting_is_tensor", "output_layer.weight"),
        (lambda _, v: v.update({"opt_param_scheduler.num_steps": None}), "megatron.unknown_scheduler", "opt_param_scheduler"),
        (lambda _, v: v.update({f"{META}output_layer.weight.max_lr": "fast"}), "state.setting_not_a_number", "max_lr"),
        (lambda t, _: t.clear(), "megatron.no_model_tensors", ()),
    ],
)  # fmt: skip
def test_what_is_missing_or_unknown_is_refused_by_name(tmp_path, change, code, where):
    refuse(write(tmp_path / "narrow", trained(), change=change), tmp_path, code, where)


def test_names_are_refused_where_tensors_name_their_groups(tmp_path):
    refuse(write(tmp_path / "narrow", trained()), tmp_path, "megatron.names_not_needed", names=[["a"], ["b"]])


def test_random_states_stay_behind_and_a_warm_up_is_told(tmp_path):
    def change(tensors, values):
        tensors["rng_state.(0, 0).0.torch_rng_state"] = torch.zeros(8, dtype=torch.uint8)
        values["rng_state.(0, 0).0.random_rng_state"] = 3
        values["opt_param_scheduler.lr_warmup_steps"] = 9

    narrow = write(tmp_path / "narrow", trained(), change=change)
    left = grow_megatron_checkpoint(narrow, tmp_path / "wide", plan=PLAN)
    assert set(left) == {"args", "rng_state", "opt_param_scheduler"}
    described = FileSystemReader(tmp_path / "wide").read_metadata().state_dict_metadata
    assert not [key for key in described if key.startswith("rng_state")]


def test_a_base_has_no_overrides_and_megatron_is_asked_for_by_name(tmp_path):
    """The base's own rates would be those of the wide job."""
    with refused("megatron.was_not_grown"):
        mu.trainers.megatron_overrides(write(tmp_path / "narrow", trained()))
    grow_megatron_checkpoint(tmp_path / "narrow", tmp_path / "wide", plan=PLAN)
    if find_spec("megatron") is None:
        with refused("extra.missing", where="megatron-core"):
            mu.trainers.megatron_overrides(tmp_path / "wide")
