"""Two checkpoints: honest pairs are the same in every format, and every planted fault is named by its code."""

import json
import shutil
from itertools import combinations

import pytest
import torch

pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

import mupscale as mu  # noqa: E402
from harness import continued  # noqa: E402
from harness.refusals import refused  # noqa: E402
from mupscale.cli.main import main  # noqa: E402


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


SAME = ("same", set())


@pytest.mark.parametrize(("one", "other"), [*combinations(continued.FORMATS, 2)])
def test_one_run_is_the_same_in_two_formats(saved, one, other):
    found = mu.same(saved[one], saved[other])
    assert found, str(found)
    assert found.compared["weights"] in (20, 21), "the tied matrix may be stored under both of its names"
    assert found.compared["moments"] == 40
    assert found.compared["step counts"] == found.compared["groups' settings"] == 20
