"""A dense base in shards that gets experts, layers and width in one plan: files give the bits of one process on any ranks.

Gate and up are joined with their state, and experts are stacks of new tensors that start without state.
"""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

import mupscale as mu  # noqa: E402
from benchmarks.sharded import grow, save_directory, train  # noqa: E402
from benchmarks.sharded_cases import (  # noqa: E402
    NOISES,
    SEED,
    SIZES,
    adamw,
    base_run,
    digest,
    family,
    gathered,
    llama_model,
    model_named,
    request,
    save,
    wide_run,
)
from harness.launched import folder, launch  # noqa: E402
from harness.refusals import refusal  # noqa: E402
from mupscale.families.process import plan_in_process  # noqa: E402

GOAL = "hidden=2,heads=2,kv_heads=2+layers=3,after=0,experts=4,top_k=2,expert_ffn=12"
CASES = ("none", "signal")


def fresh() -> mu.Run:
    """The model with experts on the meta device, cut over the ranks, or whole in a single process."""
    if dist.is_initialized():
        return wide_run(model_named("llama"), GOAL, init_device_mesh("cpu", (dist.get_world_size(),)))
    model = mu.plans.on_meta(lambda: model_named("llama").wide(GOAL))
    return mu.Run(model, adamw(model, family(GOAL).plan))


def loaded() -> dict[str, str]:
    """A case: the digest of everything loaded from both kinds of files, and a control with another seed."""
    found: dict[str, str] = {}
    sources: dict[str, Any] = {"dcp": folder() / "llama.dcp1", "hf": folder() / "hf"}
    for noise in CASES:
        for way, source in sources.items():
            run = mu.load_wide(source, fresh(), plan=family(GOAL), noise=NOISES[noise][0], seed=SEED)
            found[f"{noise} {way}"] = digest(run, gathered)
            names = {id(p): name for name, p in run.model.named_parameters()}
            held = {names[id(p)] for p in run.optimizers[0].state}
            entries = family(GOAL).plan.tensors.items()
            assert held == {name for name, entry in entries if entry.sources and entry.kind == "parameter"}
    other = mu.load_wide(sources["hf"], fresh(), plan=family(GOAL), noise=NOISES["signal"][0], seed=SEED + 1)
    found["signal control"] = digest(other, gathered)
    if dist.is_initialized():
        live = base_run(
            model_named("llama"), init_device_mesh("cpu", (dist.get_world_size(),)), sources["dcp"]
        )
        refusal(lambda: mu.load_wide(live, fresh(), plan=family(GOAL)), "run.joined_from_live_base")
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The base and the plan on the disk, and the digest of one process for every noise."""
    shared = tmp_path_factory.mktemp("experts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUPSCALE_TEST_FOLDER", str(shared))
        (shared / "only_llama").touch()
        torch.manual_seed(0)
        run = train("llama", llama_model(SIZES))
        save(run, shared / "llama.dcp1", flat=True)
        save_directory(run, shared / "hf")
        asked = request(GOAL, None)
        grown = plan_in_process(shared / "hf", asked.multipliers, to=asked.to, steps=0)
        (shared / f"family{GOAL}.json").write_text(grown.to_json())
        want, make = {}, functools.partial(model_named("llama").wide, GOAL)
        for noise in CASES:
            kind = NOISES[noise][0]
            wide = (
                mu.widen(run, make, plan=grown.plan)
                if kind is None
                else mu.upscale(run, make, kind, seed=SEED, plan=grown.plan)
            )
            want[noise] = digest(wide, lambda t: t)
        alone = loaded()
    return shared, want, alone


def _compare(found: dict[str, str], want: dict[str, str]) -> None:
    assert len(set(want.values())) == len(want)
    for label, value in found.items():
        noise, way = label.split()
        assert (value == want[noise]) is (way != "control"), label


def test_files_give_the_bits_of_a_running_base(prepared):
    _, want, alone = prepared
    _compare(alone, want)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_do_not_matter(prepared, world):
    shared, want, _ = prepared
    for rank in launch(__name__, ["loaded"], world, folder=shared, timeout=900)["loaded"]:
        _compare(rank, want)


def test_a_stream_that_is_killed_is_resumed_with_the_same_bytes(prepared, tmp_path):
    """A real kill, in the middle, with the state of the optimizer: another process goes on."""
    shared, _, _ = prepared
    torch.set_num_threads(1)  # forked processes cannot use the threads of this one
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUPSCALE_TEST_FOLDER", str(shared))
        grown, wish = family(GOAL), request(GOAL, NOISES["signal"][1])
    grow(shared / "hf", tmp_path / "want", grown, wish, kill=False)
    want, cut = {file.name: file.read_bytes() for file in (tmp_path / "want").iterdir()}, 0
    assert "optimizer.pt" in want
    for number in range(4):
        out = tmp_path / f"found{number}"
        cut += grow(shared / "hf", out, grown, wish, kill=True)
        found = {file.name: file.read_bytes() for file in out.iterdir()}
        assert found == want
    assert cut, "no kill came before the end"
    grow(shared / "hf", tmp_path / "other", grown, request(GOAL, ("t", 0.3)), kill=False)
    other = (tmp_path / "other" / "model.safetensors").read_bytes()
    assert other != want["model.safetensors"], "control: other noise gives other bytes"
