"""The stock Trainer, Lightning and DCP resume a run with new blocks or zeros with its state, and it follows the base until noise wakes them."""

import shutil
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("planned_here")

import mupscale as mu  # noqa: E402
from harness import trainer as bench  # noqa: E402
from harness.trainer import gap, hugging_face, model  # noqa: E402
from mupscale.cli.main import main  # noqa: E402
from mupscale.formats.lightning.grow import grow_lightning_checkpoint  # noqa: E402
from mupscale.models.names import named_tensors  # noqa: E402
from mupscale.plans.ends import identity_plan  # noqa: E402
from mupscale.training.check.symmetry import awake  # noqa: E402

QUIET: dict[str, Any] = {"save_strategy": "no"}


@pytest.fixture(scope="module")
def base(trained, tmp_path_factory):
    return tmp_path_factory.mktemp("deeper"), trained.directory, trained.curve


GROWTHS: dict[str, tuple[list[str], dict[str, int], str, float]] = {
    "blocks": (["--to", "layers=3,after=0"], {"num_hidden_layers": 3}, "t=0.1", 1e-5),
    "zeros": (
        ["-k", "ffn=2", "--to", "hidden=48,heads=6,kv_heads=3"],
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 128},
        "t=1e-6",
        1e-4,
    ),
}
"""Goal and sizes of a growth; noise that wakes what is new, and how far it moves the first loss at most."""


def grown(folder, stopped, growth, verb="grow", *more):
    goal, sizes, _, _ = GROWTHS[growth]
    out = folder / f"{verb}.{growth}"
    assert main([verb, str(stopped), str(out), *goal, "--quiet", *more]) == 0
    callbacks = [mu.trainers.HuggingFaceCallback(out)]
    return hugging_face(model(**sizes), folder / f"{out.name}.on", out, callbacks, **QUIET)[0].losses


@pytest.mark.parametrize("growth", ["blocks", pytest.param("zeros", marks=pytest.mark.nightly)])
def test_the_grown_run_follows_the_base(base, growth):
    folder, stopped, curve = base
    assert gap(curve.losses, grown(folder, stopped, growth)) < bench.EQUAL


@pytest.mark.parametrize("growth", ["blocks", pytest.param("zeros", marks=pytest.mark.nightly)])
def test_what_noise_woke_leaves_the_base(base, growth):
    """Control: with noise the first loss is nearly the base's, and later ones are not."""
    folder, stopped, curve = base
    _, _, noise, moved = GROWTHS[growth]
    found = grown(folder, stopped, growth, "upscale", "--noise", noise, "--no-loss")
    assert found[min(found)] == pytest.approx(curve.losses[min(found)], rel=moved)
    assert gap(curve.losses, found) > bench.DIFFERENT


def test_copied_blocks_with_zero_writers_leave_the_base(base):
    """Control: block expansion as it is usually done has the base's first loss too, and trains otherwise."""
    folder, stopped, curve = base
    out = folder / "grow.blocks"
    if not out.exists():
        grown(folder, stopped, "blocks")
    copies = folder / "copies"
    shutil.copytree(out, copies)
    tensors = load_file(copies / "model.safetensors")
    writers = ("o_proj.weight", "down_proj.weight")
    for name in tensors:
        if name.startswith("model.layers.1.") and not name.endswith(writers):
            tensors[name] = tensors[name.replace("layers.1.", "layers.0.")].clone()
    save_file(tensors, copies / "model.safetensors", {"format": "pt"})
    callbacks = [mu.trainers.HuggingFaceCallback(out)]
    found = hugging_face(model(num_hidden_layers=3), folder / "copied", copies, callbacks, **QUIET)[0].losses
    first = min(found)
    assert found[first] == pytest.approx(curve.losses[first], rel=1e-5)
    assert gap(curve.losses, found) > bench.DIFFERENT


def order_plan():
    """The plan of the same growth, found from two models and an order."""
    rows = torch.stack([row["input_ids"] for row in bench.data()[:4]])
    return mu.infer_plan(
        model,
        lambda: model(num_hidden_layers=3),
        loss=lambda module: module(input_ids=rows, labels=rows).loss,
        order={"model.layers": [0, None, 1]},
    )


@pytest.mark.filterwarnings("ignore:.*dataloader.*")
@pytest.mark.filterwarnings("ignore:.*mid-epoch.*")
@pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning")
def test_lightning_follows_the_base(trained, tmp_path):
    pytest.importorskip("lightning")
    deep, plan = tmp_path / "deep.ckpt", order_plan()
    grow_lightning_checkpoint(trained.lightning, deep, plan=plan)
    module = bench.lightning_module(1, num_hidden_layers=3)
    found, _ = bench.fit(module, deep, [mu.trainers.LightningCallback(deep)], stop=30)
    assert gap(trained.lightning_curve.losses, found.losses) < bench.EQUAL
    assert set(awake(module.model, plan=plan).values()) == {0.0}
    with torch.no_grad():
        woken: Any = mu.grow(model(), lambda: model(num_hidden_layers=3), plan=plan).model
        woken.model.layers[1].mlp.down_proj.weight.normal_()
    assert awake(woken, plan=plan)["model.layers.1.mlp.down_proj.weight"] == 1.0, "control"


def test_a_deeper_run_is_saved_and_loaded_with_dcp(tmp_path):
    """Right after growing, the new tensors have no state: saved and loaded, they have none."""
    plan, base = order_plan(), model()
    run = mu.Run(base, torch.optim.AdamW(base.parameters(), lr=1e-3))
    rows = torch.stack([row["input_ids"] for row in bench.data()[:4]])
    base(input_ids=rows, labels=rows).loss.backward()
    run.optimizer.step()
    make = lambda: model(num_hidden_layers=3)  # noqa: E731
    deep = mu.upscale(run, make, mu.SignalNoise(0.1), plan=plan)
    weights, state = get_state_dict(deep.model, deep.optimizers[0])
    with warnings.catch_warnings(action="ignore"):
        save_dcp({"model": weights, "optim": state}, checkpoint_id=tmp_path, no_dist=True)
    fresh = make()
    same = replace(identity_plan(fresh), proof="modules")
    groups = mu.param_groups(fresh, same, torch.optim.AdamW, lr=1e-3)
    with warnings.catch_warnings(action="ignore"):
        loaded = mu.load_grown_(tmp_path, mu.Run(fresh, torch.optim.AdamW(groups)), plan=same)
    found = {name: tensor for name, _, tensor in named_tensors(loaded.model)}
    for name, _, tensor in named_tensors(deep.model):
        assert torch.equal(found[name], tensor), name
        wanted, got = (
            deep.optimizers[0].state.get(tensor, {}),
            loaded.optimizers[0].state.get(found[name], {}),
        )
        assert wanted.keys() == got.keys(), name
        assert all(torch.equal(torch.as_tensor(wanted[k]), torch.as_tensor(got[k])) for k in wanted), name
