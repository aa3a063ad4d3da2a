"""A deeper model as a streamed job: its bits do not depend on blocks and workers, nor on a kill in the middle."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness.llama_files import Llama, job_for, write_directory
from mupscale.jobs.work_units import WorkUnits
from mupscale.jobs.worker import run_job, run_worker
from mupscale.plans.new_blocks import order_of

MODEL = Llama(hidden=32, ffn=88, heads=4, kv_heads=2, layers=2, vocabulary=50)
ORDER = order_of(2, 4)
DATA = Path(os.environ.get("MUPSCALE_DATA", Path(__file__).parents[3] / "shared" / "data"))
TINY = DATA / "models" / "tiny_llama"


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_directory(tmp_path_factory.mktemp("base") / "base", MODEL.shapes(), "F32", 2)


@pytest.mark.parametrize("k", [1, 2])
def test_blocks_and_workers_do_not_matter(base, tmp_path, k):
    plan = MODEL.plan(k, ORDER)
    noise = MODEL.noise(plan)
    run_job(job_for(plan, base, tmp_path / "whole", noise))
    small = job_for(plan, base, tmp_path / "small", noise, block_bytes=1024)
    assert WorkUnits(small).blocks > 2 * len(plan.tensors)
    run_job(small)
    for worker in range(3):
        run_worker(job_for(plan, base, tmp_path / "three", noise), worker, 3)
    want = load_file(tmp_path / "whole" / "model.safetensors")
    for way in ("small", "three"):
        found = load_file(tmp_path / way / "model.safetensors")
        assert all(torch.equal(found[name], tensor) for name, tensor in want.items()), way
    new = want["model.layers.1.mlp.up_proj.weight"]
    assert len(torch.unique(new)) > 0.9 * new.numel(), "no part of the noise is another's"
    other = want["model.layers.3.mlp.up_proj.weight"]
    assert not torch.equal(new, other), "control: another block has other noise"


@pytest.mark.skipif(not TINY.exists(), reason="there is no tiny_llama; set MUPSCALE_DATA")
@pytest.mark.parametrize(
    ("k", "to"), [pytest.param("1", "layers=8", marks=pytest.mark.nightly), ("ffn=2", "layers=8,vocab=+64")]
)
def test_a_stream_that_is_killed_is_resumed_with_the_same_bytes(tmp_path, k, to):
    """A real kill, in the middle: the process that writes is ended with SIGKILL, and another one continues."""
    pytest.importorskip("transformers")
    from harness.sharded_bases import grow
    from mupscale.checkpoints.request import Request
    from mupscale.families.config.goal import Goal
    from mupscale.families.process import plan_in_process

    torch.set_num_threads(1)  # forked processes cannot use the threads of this one
    family = plan_in_process(TINY, k, to=to, steps=0)
    request = Request(Goal.parse(k, to), ("t", 0.1), 3)
    grow(TINY, tmp_path / "want", family, request, kill=False)
    want, cut = contents(tmp_path / "want"), 0
    for number in range(4):
        cut += grow(TINY, tmp_path / f"found{number}", family, request, kill=True)
        found = contents(tmp_path / f"found{number}")
        assert found.keys() == want.keys()
        assert [name for name in want if found[name] != want[name]] == []
    assert cut, "no kill came before the end"
    grow(TINY, tmp_path / "other", family, Request(Goal.parse(k, to), ("t", 0.1), 4), kill=False)
    assert contents(tmp_path / "other") != want, "control: another seed gives other bytes"
