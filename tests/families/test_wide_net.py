"""What `benchmarks/families_wide.py` says of a type that draws random numbers in eval mode, and of a wrong plan."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from mupscale.families.models import as_data, config_from
from mupscale.families.plan import family_plan
from mupscale.families.prove import small_copy
from mupscale.rules.scale import Scale
from mupscale.tensors.random_states import forked

FILE = Path(__file__).parents[2] / "benchmarks" / "families_wide.py"


@pytest.fixture(scope="module")
def net():
    spec = importlib.util.spec_from_file_location("families_wide", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def vilt():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    raw = {"model_type": "vilt", "vocab_size": 131, "image_size": 64, "patch_size": 16, **sizes}
    return family_plan(as_data(config_from(raw)), 2)


def test_vilt_draws_patches_in_eval_mode(vilt):
    copied = small_copy(vilt, 1)
    with torch.no_grad(), forked(seed=0):
        assert len({float(copied.losses[0](copied.base)) for _ in range(4)}) > 1


def test_both_ends_draw_the_same_patches(net, vilt):
    assert net.loaded_again(vilt) < 1e-12


def test_a_wrong_fold_is_seen(net, vilt):
    name = next(name for name in vilt.plan.tensors if name.endswith("output.dense.weight"))
    entry = vilt.plan.tensors[name]
    wrong = vilt.plan.with_tensors({name: replace(entry, fold=entry.fold * Scale.of("1001/1000"))})
    assert net.loaded_again(replace(vilt, plan=wrong)) > 1e4 * net.BOUND
