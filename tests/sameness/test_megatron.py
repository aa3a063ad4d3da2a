"""Megatron's checkpoints of one run, saved by other numbers of ranks: the same, and planted faults are named."""

import pytest
import torch

import mupscale as mu
from harness.megatron_files import fsdp_dtensor, torch_dist
from tests.formats.test_megatron import trained

RUN = trained()


@pytest.mark.parametrize("writer", [torch_dist, fsdp_dtensor], ids=["torch_dist", "fsdp_dtensor"])
def test_cutting_a_checkpoint_for_other_ranks_changes_nothing(writer, tmp_path):
    """Control: one entry of a moment."""

    def change(tensors, _):
        key = next(key for key in tensors if "exp_avg_sq" in str(key))
        tensors[key] = (
            tensors[key].clone().view(-1).index_fill(0, torch.tensor([1]), 7.0).view(tensors[key].shape)
        )

    one, two = writer(tmp_path / "1", RUN, 1), writer(tmp_path / "2", RUN, 2)
    found = mu.same(one, two)
    assert found, str(found)
    assert found.compared["moments"] == 2 * found.compared["weights"]
    assert found.compared["step counts"] >= found.compared["weights"]
    changed = mu.same(one, writer(tmp_path / "3", RUN, 2, change=change))
    assert [fault.code for fault in changed.differences] == ["same.moment_differs"]


def test_steps_and_groups_without_names_are_compared(tmp_path):
    def reset(_, common):
        common["optimizer"]["state"]["common_step"] = torch.tensor(0.0)

    def rate(_, common):
        common["optimizer"]["param_groups"][1]["max_lr"] = 1.0

    base = torch_dist(tmp_path / "base", RUN)
    for change, code in ((reset, "same.step_differs"), (rate, "same.setting_differs")):
        found = mu.same(base, torch_dist(tmp_path / change.__name__, RUN, change=change))
        assert {fault.code for fault in found.differences} == {code}


def test_bf16_with_float32_copies_of_other_ranks(tmp_path):
    ends = [torch_dist(tmp_path / str(n), RUN, n, "fp32_param", torch.bfloat16) for n in (1, 2)]
    found = mu.same(*ends)
    assert found, str(found)
    assert found.compared["masters"] == found.compared["weights"]


def test_layers_in_one_tensor_and_one_by_one_are_the_same(tmp_path):
    """torch_dist against fsdp_dtensor. Control: the halves of one gated unit are swapped."""

    def swap(tensors, _):
        gate, up = (
            next(k for k in tensors if k.endswith(f"model.module.decoder.layers.1.mlp.linear_fc1.weight{h}"))
            for h in ("_w", "_v")
        )
        tensors[gate], tensors[up] = tensors[up], tensors[gate]

    one = torch_dist(tmp_path / "a", RUN, 2)
    found = mu.same(one, fsdp_dtensor(tmp_path / "b", RUN))
    assert found, str(found)
    assert found.compared["groups' settings"] == found.compared["weights"]
    changed = mu.same(one, fsdp_dtensor(tmp_path / "c", RUN, change=swap))
    assert [fault.code for fault in changed.differences] == ["same.weight_differs"]
