"""A mixture in shards that gets more experts: every way in gives the bits of one process, moments included.

Its experts are stacked in the model and in checkpoints of torch.distributed, and stored one by one in a directory.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore::UserWarning")]

import mupscale as mu  # noqa: E402
from harness.launched import folder, launch  # noqa: E402
from harness.refusals import refused  # noqa: E402
from harness.sharded_bases import save_directory, train  # noqa: E402
from harness.sharded_cases import SEED, SIZES, adamw, digest, family, gathered, save, stock_model  # noqa: E402
from mupscale.families.plan import family_plan  # noqa: E402
from mupscale.plans.ends import identity_plan  # noqa: E402

GOALS: dict[str, tuple[str, str | None]] = {
    "apart": ("1", "experts=8"),
    "multiplied": ("experts=2", None),
    "deeper": ("1", "experts=8,layers=3,after=0"),
}


def base():
    config = transformers.MixtralConfig(
        **{**SIZES, "intermediate_size": 52}, num_local_experts=4, num_experts_per_tok=2
    )
    return transformers.MixtralForCausalLM(config)


def sharded(make, plan) -> mu.Run:
    """The model on the meta device, cut over the ranks, or whole in a single process."""
    model: Any = mu.plans.on_meta(make)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return mu.Run(model, adamw(model, identity_plan(model) if plan is None else plan))


def live() -> mu.Run:
    run = sharded(base, None)
    return mu.load_grown_(folder() / "base.dcp", run, plan=identity_plan(run.model))


def loaded() -> dict[str, str]:
    """A case: the digest of everything loaded in every way, and a control with another seed."""
    found = {}
    sources: dict[str, Any] = {"dcp": folder() / "base.dcp", "hf": folder() / "hf", "live": live()}
    for goal in GOALS:
        grown = family(goal)
        for way, source in sources.items():
            for seed in (SEED, SEED + 1) if way == "dcp" else (SEED,):
                run = sharded(lambda: stock_model(grown), grown.plan)  # noqa: B023
                run = mu.load_grown_(source, run, plan=grown, noise=mu.NewUnits(), seed=seed)
                found[f"{goal} {way}{'' if seed == SEED else ' control'}"] = digest(run, gathered)
        if goal != "multiplied":
            with refused("experts.equal_scores"):
                mu.load_grown_(sources["dcp"], sharded(lambda: stock_model(grown), grown.plan), plan=grown)  # noqa: B023
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The base and the plans on the disk, and the digests of one process."""
    shared = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    run = train("mixtral", base())
    save(run, shared / "base.dcp", flat=True)
    save_directory(run, shared / "hf")
    want = {}
    for goal, (k, to) in GOALS.items():
        grown = family_plan(shared / "hf", k, to=to, by="units")
        (shared / f"family{goal}.json").write_text(grown.to_json())
        wide = mu.upscale(run, lambda: stock_model(grown), mu.NewUnits(), plan=grown.plan, seed=SEED)  # noqa: B023
        want[goal] = digest(wide, lambda t: t)
    return shared, want


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_way_into_shards_gives_the_bits_of_one_process(prepared, world, monkeypatch):
    shared, want = prepared
    monkeypatch.setenv("MUPSCALE_TEST_FOLDER", str(shared))
    every = (
        [loaded()]
        if world == 1
        else launch(__name__, ["loaded"], world, folder=shared, timeout=900)["loaded"]
    )
    for found in every:
        assert len(found) == 4 * len(GOALS)
        for label, value in found.items():
            assert (value == want[label.split()[0]]) is ("control" not in label), label
