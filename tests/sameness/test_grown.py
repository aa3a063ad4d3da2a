"""A base and its grown result are compared through the plan of the record."""

import shutil

import pytest

pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file

import mupscale as mu
from harness import continued


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return continued.trainer(continued.trained(), tmp_path_factory.mktemp("grown") / "base")


def codes(a, b):
    found = mu.same(a, b)
    return found.verdict, {fault.code for fault in found.differences}


def test_a_base_and_its_exact_growth_are_the_same_run(base, tmp_path):
    """In either order, with the state of the Trainer. Controls: another base, and one entry of the result."""
    mu.grow_checkpoint(base, tmp_path / "wide", 2)
    assert codes(base, tmp_path / "wide") == codes(tmp_path / "wide", base) == ("same", set())
    other = shutil.copytree(base, tmp_path / "other")
    for folder, name in (
        (other, "model.norm.weight"),
        (tmp_path / "wide", "model.layers.1.mlp.up_proj.weight"),
    ):
        [file] = folder.glob("*.safetensors")
        tensors = load_file(file)
        tensors[name].view(-1)[1] += 1e-3
        save_file(tensors, file, {"format": "pt"})
        assert codes(folder if folder == other else base, tmp_path / "wide") == (
            "different", {"same.not_grown_from_it"}
        )  # fmt: skip


@pytest.mark.nightly
def test_a_growth_that_trains_new_units_is_another_run(base, tmp_path):
    mu.grow_checkpoint(base, tmp_path / "wide", 2, noise=mu.NewUnits())
    assert codes(base, tmp_path / "wide") == ("different", {"same.grown_with_noise"})
    assert codes(tmp_path / "wide", shutil.copytree(tmp_path / "wide", tmp_path / "copy"))[0] == "same"
