"""Two checkpoints: honest pairs are the same in every format, and every planted fault is named by its code."""

import json
import shutil
from itertools import combinations

import pytest
import torch

pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file

import mupscale as mu
from harness import continued, planted
from harness.refusals import refused
from mupscale.cli.main import main


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    job = continued.trained()
    folder = tmp_path_factory.mktemp("saved")
    return {name: write(job, folder / name) for name, write in continued.FORMATS.items()}


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved["trainer"], tmp_path / "copy")


def codes(a, b, profile="strict"):
    """The verdict, and the codes of what differs or cannot be told."""
    found = mu.same(a, b, profile=profile)
    assert bool(found) == (found.verdict == "same")
    return found.verdict, {fault.code for fault in (*found.differences, *found.unknown)}


SAME: tuple[str, set[str]] = ("same", set())


@pytest.mark.parametrize(("one", "other"), [*combinations(continued.FORMATS, 2)])
def test_one_run_is_the_same_in_two_formats(saved, one, other):
    found = mu.same(saved[one], saved[other])
    assert found, str(found)
    assert found.compared["weights"] in (20, 21), "the tied matrix may be stored under both of its names"
    assert found.compared["moments"] == 40
    assert found.compared["step counts"] == found.compared["groups' settings"] == 20


def without_moments(folder):
    (folder / "optimizer.pt").unlink()


def swapped_groups(folder):
    """The decay of one group in the other, as where a resumed job lists its groups in another order."""

    def change(tree):
        one, other = tree["param_groups"]
        one["weight_decay"], other["weight_decay"] = other["weight_decay"], one["weight_decay"]

    continued.edited(folder / "optimizer.pt", change)


def step_reset(folder):
    def change(tree):
        for state in tree["state"].values():
            state["step"].zero_()

    continued.edited(folder / "optimizer.pt", change)


def stale_initial_lr(folder):
    def change(tree):
        for group in tree["param_groups"]:
            group["initial_lr"] *= 1 + 2**-20

    continued.edited(folder / "optimizer.pt", change)


def changed_weight(folder, name, change):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def transposed_weight(folder):
    changed_weight(folder, "model.layers.0.self_attn.q_proj.weight", lambda t: t.T)


def transposed_projection(folder):
    changed_weight(folder, "model.layers.1.mlp.up_proj.weight", lambda t: t.T)


def one_bit(folder):
    def change(tensor):
        tensor.view(torch.int32)[3, 5] ^= 1
        return tensor

    changed_weight(folder, "model.layers.1.mlp.up_proj.weight", change)


def one_moment(folder):
    def change(tree):
        tree["state"][4]["exp_avg_sq"][1, 1] *= 1.5

    continued.edited(folder / "optimizer.pt", change)


def lost_moment(folder):
    continued.edited(folder / "optimizer.pt", lambda tree: tree["state"][4].pop("exp_avg") is None)


def schedule_restarted(folder):
    continued.edited(folder / "scheduler.pt", lambda tree: {**tree, "last_epoch": 0})


def no_schedule(folder):
    (folder / "scheduler.pt").unlink()


def other_job_step(folder):
    (folder / "trainer_state.json").write_text('{"global_step": 0}')


def other_random(folder):
    torch.save({"cpu": torch.zeros(8, dtype=torch.uint8)}, folder / "rng_state.pth")


def lost_weight(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


FAULTS = {
    without_moments: {"same.moments_missing", "same.settings_missing"},
    swapped_groups: {"same.setting_differs"},
    step_reset: {"same.step_differs"},
    stale_initial_lr: {"same.setting_differs"},
    transposed_weight: {"same.weight_differs"},
    transposed_projection: {"same.shape_differs"},
    one_bit: {"same.weight_differs"},
    one_moment: {"same.moment_differs"},
    lost_moment: {"same.moments_missing"},
    schedule_restarted: {"same.schedule_differs"},
    no_schedule: {"same.schedule_missing"},
    other_job_step: {"same.job_step_differs"},
    other_random: {"same.random_differs"},
    lost_weight: {"same.weight_missing"},
}
FORGIVEN = {one_bit, other_random}
"""Faults within the tolerance of the profile standard: one unit in the last place, and other random states."""


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("other", ["trainer", "dcp"])
def test_a_planted_fault_is_named(saved, copy, plant, other):
    """In the same format and against another one; control: without the fault the pair is the same."""
    assert codes(saved[other], copy) == SAME
    plant(copy)
    wanted = FAULTS[plant]
    if other == "dcp" and plant is other_random:  # only one of them has random states
        assert codes(saved[other], copy) == SAME
        return
    assert codes(saved[other], copy) == ("different", wanted)
    assert codes(copy, saved[other]) == ("different", wanted), "whichever comes first"
    forgiven = plant in FORGIVEN
    assert codes(saved[other], copy, "standard") == (SAME if forgiven else ("different", wanted))


@pytest.mark.parametrize("transposed", [transposed_weight, transposed_projection])
def test_a_matrix_that_is_transposed_is_said_to_be(saved, copy, transposed):
    transposed(copy)
    [fault] = mu.same(saved["trainer"], copy).differences
    assert "transposed" in str(fault)


def test_a_test_of_resuming_fails_with_the_report(saved, copy):
    """Control: the same run passes."""
    assert mu.same(saved["dcp"], copy)
    without_moments(copy)
    report = mu.same(saved["dcp"], copy)
    with pytest.raises(AssertionError) as caught:
        assert report, str(report)
    assert "same.moments_missing" in str(caught.value)


def test_the_command_answers_by_its_exit_status(saved, copy):
    """0 the same, 1 different, 2 cannot tell, which a refusal is as well."""
    assert main(["same", str(saved["dcp"]), str(copy), "--quiet"]) == 0
    one_moment(copy)
    assert main(["same", str(saved["dcp"]), str(copy), "--quiet", "--threads", "2"]) == 1
    report = copy.parent / "same.json"
    assert main(["same", str(saved["dcp"]), str(copy), "--quiet", "--json", str(report)]) == 1
    told = json.loads(report.read_text())
    assert told["verdict"] == "different"
    assert [found["code"] for found in told["differences"]] == ["same.moment_differs"]
    torch.save({"state_dict": {"other": torch.ones(2)}}, copy / "x.ckpt")
    assert main(["same", str(copy / "x.ckpt"), str(copy), "--quiet"]) == 2
    assert main(["same", str(copy), str(copy / "nowhere"), "--quiet"]) == 2


def test_bf16_weights_with_float32_copies(tmp_path):
    """The same as the float32 weights they are rounded from; without the copies, training goes on from rounded weights."""
    job = continued.trained(dtype=torch.float32)
    full = continued.dcp(job, tmp_path / "full")
    half = continued.universal(job, continued.weights(job, tmp_path / "half"))
    rounded = {name: tensor.bfloat16() for name, tensor in load_file(half / "model.safetensors").items()}
    for name, tensor in rounded.items():
        changed_weight(half, name, lambda t, tensor=tensor: tensor)
    assert codes(full, half) == SAME
    assert codes(half, full) == SAME
    shutil.rmtree(half / "global_step3_universal")
    (half / "latest_universal").unlink()
    shutil.copy(continued.trainer(job, tmp_path / "whole") / "optimizer.pt", half)
    assert "same.masters_missing" in codes(full, half, "relaxed")[1]
    changed_weight(half, "model.norm.weight", lambda t: t * 1.05)
    assert "same.weight_differs" in codes(full, half, "relaxed")[1], "control"


def test_wrappers_and_prefixes_do_not_matter(saved, tmp_path):
    """DDP around torch.compile, and a bare decoder below a head. Control: another number is seen through them."""
    job = continued.trained()
    inner = torch.nn.Module()
    wrapped = torch.nn.Module()
    wrapped.module, inner._orig_mod = inner, job.model
    other = continued.dcp(job, tmp_path / "wrapped", model=wrapped)
    assert codes(saved["trainer"], other) == SAME
    with torch.no_grad():
        job.model.model.norm.weight[3] += 1
    again = continued.dcp(job, tmp_path / "again", model=wrapped)
    assert codes(saved["trainer"], again) == ("different", {"same.weight_differs"})


@pytest.mark.parametrize("parts", [("gate_proj", "up_proj"), ("up_proj", "gate_proj")])
def test_fused_projections_are_compared_with_their_parts(saved, tmp_path, parts):
    """Below each other in the right order they are the same; in the other order, the halves are said to be swapped."""
    tensors = {n: t for n, t in continued.trained().model.state_dict().items() if n != "lm_head.weight"}
    for layer in range(2):
        path = f"model.layers.{layer}.mlp"
        rows = [tensors.pop(f"{path}.{part}.weight") for part in parts]
        tensors[f"{path}.gate_up_proj.weight"] = torch.cat(rows)
    plain = continued.weights(continued.trained(), tmp_path / "plain")
    torch.save({"state_dict": tensors}, tmp_path / "fused.ckpt")
    found = mu.same(plain, tmp_path / "fused.ckpt")
    assert bool(found) == (parts[0] == "gate_proj")
    assert {fault.code for fault in found.differences} == ({"same.weight_differs"} if not found else set())
    assert all("halves" in fault.what for fault in found.differences)


def test_what_cannot_be_told_is_not_called_the_same(saved, copy, tmp_path):
    """Groups that no stock Trainer makes: tensors by position can be compared with such, and not with names."""

    def one_group(tree):
        first, second = tree["param_groups"]
        first["params"], second["params"] = first["params"][:-2], first["params"][-2:] + second["params"]

    continued.edited(copy / "optimizer.pt", one_group)
    verdict, found = codes(saved["dcp"], copy)
    assert verdict == "cannot tell"
    assert found == {"same.state_unnamed", "same.state_names_differ", "same.groups_unnamed"}
    again = shutil.copytree(copy, tmp_path / "again")
    assert codes(copy, again) == SAME
    one_moment(again)
    assert codes(copy, again) == ("different", {"same.moment_differs"}), "control"


def test_names_and_layouts_of_torchtitan_and_megatron_are_read(tmp_path):
    """Against stock names, and against each other; controls: what converters have got wrong is a difference.

    `benchmarks/same.py` does the same with whole runs.
    """
    pairs = [*planted.every_two(tmp_path, planted.WEIGHTS, tied=False), *planted.misconverted(tmp_path)]
    for pair in pairs:
        found = mu.same(
            pair.a, pair.b, profile=pair.profile, config=tmp_path / "Hugging Face" / "config.json"
        )
        assert {fault.code for fault in (*found.differences, *found.unknown)} == ({pair.code} - {""}), pair
    assert sum(bool(pair.code) for pair in pairs) == 7


def test_without_sizes_of_heads_layouts_are_not_guessed(tmp_path):
    """Control: with a config.json they are the same; one without heads is refused."""
    job = continued.trained(tied=False)
    config = continued.weights(job, tmp_path / "hf") / "config.json"
    one, other = (
        planted.WEIGHTS[name](job, tmp_path / name) for name in ("dcp weights", "torchtitan weights")
    )
    assert codes(one, other) == ("cannot tell", {"same.heads_unknown", "same.no_name_fits"})
    assert mu.same(one, other, config=config)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with refused("same.config_without_heads"):
        mu.same(one, other, config=tmp_path)


def test_with_a_batch_loss_gradients_and_a_step_are_measured(saved, copy, tmp_path):
    """Equal runs give equal numbers; what a fault does to them is in its size. Control: steps counted anew move the step alone."""
    batch = tmp_path / "batch.json"
    batch.write_text(json.dumps({"input_ids": [[1, 5, 7, 9, 11, 3]]}))
    found = mu.same(
        saved["universal"], saved["dcp"], batch=batch, config=saved["trainer"] / "config.json"
    ).measured
    assert found["loss of A"] == found["loss of B"] > 1
    assert found["gradients apart by"] == found["one step apart by"] == 0
    step_reset(copy)
    odd = mu.same(saved["trainer"], copy, batch=batch).measured
    assert odd["loss of A"] == odd["loss of B"]
    assert odd["gradients apart by"] == 0
    assert odd["one step apart by"] > 0.1
    one_bit(copy)
    own = mu.same(
        copy,
        saved["trainer"],
        model=lambda: continued.trained().model,
        loss=lambda model: model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 5],
    )
    assert own.measured["loss of A"] != own.measured["loss of B"]
    report = tmp_path / "same.json"
    assert main(["same", str(saved["trainer"]), str(copy), "--batch", str(batch), "--json", str(report)]) == 1
    assert json.loads(report.read_text())["measured"]["one step apart by"] > 0.1


def test_what_cannot_be_run_is_noted(saved, tmp_path):
    found = mu.same(saved["universal"], saved["dcp"], batch={"input_ids": torch.ones(1, 3, dtype=torch.long)})
    assert found
    assert not found.measured
    with refused("argument.batch_or_loss"):
        mu.same(saved["dcp"], saved["dcp"], model=lambda: torch.nn.Linear(1, 1))


def test_wrong_profiles_are_refused(saved):
    with refused("argument.unknown_profile"):
        mu.same(saved["dcp"], saved["dcp"], profile="loose")


def test_nothing_of_a_pickle_is_executed(saved, copy, tmp_path):
    """Where the optimizer's file holds a call, it is refused before anything could run."""
    mark = tmp_path / "ran"

    class Call:
        def __reduce__(self):
            return open, (str(mark), "w")

    torch.save({"state": {}, "param_groups": [Call()]}, copy / "optimizer.pt")
    with refused("archive.more_than_tensors"):
        mu.same(saved["dcp"], copy)
    torch.save({"last_epoch": Call()}, saved["trainer"].parent / "scheduler.pt")
    shutil.copy(saved["trainer"] / "optimizer.pt", copy)
    shutil.copy(saved["trainer"].parent / "scheduler.pt", copy)
    assert codes(saved["dcp"], copy)[0] != "same"
    assert not mark.exists()
