"""The stock Trainer resumes a model that got experts with its state, and it follows the dense base until noise wakes them."""

import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("planned_here")

import mupscale as mu  # noqa: E402
from harness import trainer as bench  # noqa: E402
from harness.trainer import gap, hugging_face  # noqa: E402
from mupscale.cli.main import main  # noqa: E402

QUIET: dict[str, Any] = {"save_strategy": "no"}
GOAL = "experts=4,top_k=2,expert_ffn=24"


@pytest.fixture(scope="module")
def base(trained, tmp_path_factory):
    return tmp_path_factory.mktemp("experts"), trained.directory, trained.curve


def resumed(folder, directory, *, callbacks=()):
    """The stock class of the directory, resumed by the stock Trainer with the optimizer.pt that lies there."""
    start = transformers.AutoModelForCausalLM.from_pretrained(directory)
    return hugging_face(start, folder / f"{directory.name}-on", directory, callbacks, **QUIET)[0].losses


def grown(folder, stopped, out, verb, goal, *more):
    if not (folder / out).exists():
        assert main([verb, str(stopped), str(folder / out), "--to", goal, "--quiet", *more]) == 0
    return folder / out


@pytest.mark.parametrize("into", ["granitemoeshared", pytest.param("glm4_moe", marks=pytest.mark.nightly)])
def test_a_model_with_sleeping_experts_follows_the_dense_one(base, into):
    folder, stopped, curve = base
    goal = GOAL if into == "granitemoeshared" else GOAL.replace("24", "32")
    out = grown(folder, stopped, into, "grow", goal, "--into", into)
    assert gap(curve.losses, resumed(folder, out)) < bench.EQUAL


def test_experts_and_copies_follow_it_with_their_units(base):
    folder, stopped, curve = base
    out = grown(folder, stopped, "wider", "grow", f"layers=3,{GOAL}", "-k", "hidden=2,heads=2,kv_heads=2")
    followed = resumed(folder, out, callbacks=[mu.trainers.HuggingFaceCallback(out)])
    assert gap(curve.losses, followed) < bench.EQUAL


COPIES = "experts=4,top_k=4,expert_ffn=64,into=mixtral"


def test_copies_follow_the_dense_model(base):
    """Four copies in Mixtral, all for every token, with the state of gate and up joined and copied."""
    folder, stopped, curve = base
    out = grown(folder, stopped, "copies", "grow", COPIES)
    assert (
        gap(curve.losses, resumed(folder, out, callbacks=[mu.trainers.HuggingFaceCallback(out)]))
        < bench.EQUAL
    )


def test_twice_the_experts_follow_the_model_with_experts(base):
    """A mixture that the Trainer resumes gets copies of its experts and their moments, and each token twice as many."""
    folder, stopped, curve = base
    first = grown(folder, stopped, "copies", "grow", COPIES)
    out = folder / "multiplied"
    assert main(["grow", str(first), str(out), "-k", "experts=2", "--quiet"]) == 0
    followed = resumed(folder, out, callbacks=[mu.trainers.HuggingFaceCallback(out)])
    assert gap(curve.losses, followed) < bench.EQUAL


def test_sparse_upcycling_leaves_the_base(base):
    """Control: the same copies with the same state behind a random router that chooses two of four."""
    folder, stopped, curve = base
    out = grown(folder, stopped, "copies", "grow", COPIES)
    shutil.copytree(out, folder / "sparse")
    config = json.loads((out / "config.json").read_text())
    (folder / "sparse" / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 2}))
    file = folder / "sparse" / "model.safetensors"
    tensors = load_file(file)
    torch.manual_seed(1)
    for name in (n for n in tensors if n.endswith("mlp.gate.weight")):
        tensors[name].normal_(std=0.1)
    save_file(tensors, file, {"format": "pt"})
    found = resumed(folder, folder / "sparse", callbacks=[mu.trainers.HuggingFaceCallback(out)])
    assert found[min(found)] == pytest.approx(curve.losses[min(found)], rel=1e-5), "the copies are equal"
    assert gap(curve.losses, found) > bench.DIFFERENT


def test_woken_experts_leave_the_base(base):
    """Control: with noise the first loss is the base's, and later ones are not."""
    folder, stopped, curve = base
    found = resumed(folder, grown(folder, stopped, "woken", "upscale", GOAL, "--noise", "t=0.1", "--no-loss"))
    assert found[min(found)] == pytest.approx(curve.losses[min(found)], rel=1e-5)
    assert gap(curve.losses, found) > bench.DIFFERENT


def test_experts_that_are_silent_and_not_asleep_leave_the_base(base):
    """Control: random gates and ups with zero downs have the base's first loss, and train otherwise."""
    folder, stopped, curve = base
    shutil.copytree(grown(folder, stopped, "granitemoeshared", "grow", GOAL), folder / "silent")
    file = folder / "silent" / "model.safetensors"
    tensors = load_file(file)
    torch.manual_seed(1)
    for name in (n for n in tensors if n.endswith(("router.weight", "experts.gate_up_proj"))):
        tensors[name].normal_(std=0.1)
    save_file(tensors, file, {"format": "pt"})
    found = resumed(folder, folder / "silent")
    assert found[min(found)] == pytest.approx(curve.losses[min(found)], rel=1e-5)
    assert gap(curve.losses, found) > bench.DIFFERENT
