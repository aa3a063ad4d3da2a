"""A base in shards that grows deeper, wider by copies and zeros, gets words or experts: every way in gives the bits of one process.

New blocks and experts start without state, and zeros and words without moments; gate and up are joined with their state.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

import mupscale as mu  # noqa: E402
from harness.launched import folder, launch  # noqa: E402
from harness.refusals import refused  # noqa: E402
from harness.sharded_bases import grow, grown_here, write_llama  # noqa: E402
from harness.sharded_cases import (  # noqa: E402
    NOISES,
    SEED,
    adamw,
    base_run,
    digest,
    family,
    gathered,
    model_named,
    request,
    wide_run,
)
from mupscale.plans.ends import identity_plan  # noqa: E402

DEEP, BOTH = "1+layers=4,after=0:1", "ffn=2+layers=3,after=0,hidden=36,heads=6,kv_heads=3,vocab=+5"
EXPERTS = "hidden=2,heads=2,kv_heads=2+layers=3,after=0,experts=4,top_k=2,expert_ffn=12"
CASES = (
    (DEEP, "none"), (DEEP, "signal"), (BOTH, "mup"), (BOTH, "signal"), (EXPERTS, "none"),
    (EXPERTS, "signal"),
)  # fmt: skip


def fresh(goal: str) -> mu.Run:
    """The deeper model on the meta device, cut over the ranks, or whole in a single process."""
    if dist.is_initialized():
        return wide_run(model_named("llama"), goal, _mesh())
    model = mu.plans.on_meta(lambda: model_named("llama").wide(goal))
    return mu.Run(model, adamw(model, family(goal).plan))


def _mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def loaded() -> dict[str, str]:
    """A case: the digest of everything loaded in every way, and a control with another seed."""
    found: dict[str, str] = {}
    sources: dict[str, Any] = {"dcp": folder() / "llama.dcp1", "hf": folder() / "hf"}
    if dist.is_initialized():
        sources["live"] = base_run(model_named("llama"), _mesh(), folder() / "llama.dcp1")
    for goal, noise in CASES:
        for way, source in sources.items():
            if (goal, way) == (EXPERTS, "live"):
                with refused("run.joined_from_live_base"):
                    mu.load_grown_(source, fresh(goal), plan=family(goal))
                continue
            run = mu.load_grown_(source, fresh(goal), plan=family(goal), noise=NOISES[noise][0], seed=SEED)
            found[f"{goal} {noise} {way}"] = digest(run, gathered)
            _expect_state(run, goal)
    run = fresh(BOTH)
    same = replace(family(BOTH), plan=identity_plan(run.model))
    run = mu.load_grown_(folder() / "streamed", run, plan=same)
    found[f"{BOTH} signal streamed"] = digest(run, gathered)
    other = mu.load_grown_(
        sources["dcp"], fresh(BOTH), plan=family(BOTH), noise=NOISES["signal"][0], seed=SEED + 1
    )
    found[f"{BOTH} signal control"] = digest(other, gathered)
    return found


def _expect_state(run: mu.Run, goal: str) -> None:
    """New tensors have no state, and all others have theirs."""
    names = {id(p): name for name, p in run.model.named_parameters()}
    held = {names[id(p)] for p in run.optimizers[0].state}
    entries = family(goal).plan.tensors.items()
    assert held == {name for name, entry in entries if entry.sources and entry.kind == "parameter"}
    assert any(entry.new for _, entry in entries)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Bases, plans and streamed results on the disk, and the digest of one process for every goal and noise."""
    shared = tmp_path_factory.mktemp("deeper")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUPSCALE_TEST_FOLDER", str(shared))
        run = write_llama(shared, (DEEP, BOTH, EXPERTS), steps=0)
        want = {
            f"{goal} {noise}": digest(grown_here(run, "llama", goal, noise), lambda t: t)
            for goal, noise in CASES
        }
        wish = request(BOTH, NOISES["signal"][1])
        grow(shared / "hf", shared / "streamed", family(BOTH), wish, kill=False)
        alone = loaded()
    return shared, want, alone


def _compare(found: dict[str, str], want: dict[str, str]) -> None:
    for label, value in found.items():
        goal, noise, way = label.split()
        assert (value == want[f"{goal} {noise}"]) is (way != "control"), label


@pytest.mark.nightly
def test_files_give_the_bits_of_a_running_base(prepared):
    _, want, alone = prepared
    assert len(set(want.values())) == len(want) == len(CASES)
    _compare(alone, want)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_every_way_into_shards_gives_the_bits_of_one_process(prepared, world):
    shared, want, _ = prepared
    for rank in launch(__name__, ["loaded"], world, folder=shared, timeout=900)["loaded"]:
        _compare(rank, want)


def test_a_stream_that_is_killed_is_resumed_with_the_same_bytes(prepared, tmp_path):
    """A real kill, in the middle, with the state of the optimizer: another process continues."""
    shared, _, _ = prepared
    torch.set_num_threads(1)  # forked processes cannot use the threads of this one
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUPSCALE_TEST_FOLDER", str(shared))
        grown, wish = family(EXPERTS), request(EXPERTS, NOISES["signal"][1])
    grow(shared / "hf", tmp_path / "want", grown, wish, kill=False)
    want, cut = {file.name: file.read_bytes() for file in (tmp_path / "want").iterdir()}, 0
    assert "optimizer.pt" in want
    for number in range(4):
        out = tmp_path / f"found{number}"
        cut += grow(shared / "hf", out, grown, wish, kill=True)
        found = {file.name: file.read_bytes() for file in out.iterdir()}
        assert found == want
    assert cut, "no kill came before the end"
    grow(shared / "hf", tmp_path / "other", grown, request(EXPERTS, ("t", 0.3)), kill=False)
    other = (tmp_path / "other" / "model.safetensors").read_bytes()
    assert other != want["model.safetensors"], "control: other noise gives other bytes"
