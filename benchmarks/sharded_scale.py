"""One rank of thousands loads its share of 70 -> 280 billion parameters with AdamW state, at the cost of its share.

A checkpoint of torch.distributed with the tensors of a Llama of 70 billion parameters (bfloat16 weights, float32
moments, written by 16 ranks) whose data are holes in its files is loaded at twice the width, with noise, into the
shards of one rank of 512 and one of 4,096. Everything is real but the other ranks: the model is on the meta device
and cut by `fully_shard`, over a process group that only pretends (torch's "fake" backend). Figures for other
numbers of ranks follow from the bytes and the measured constants.

    python benchmarks/sharded_scale.py [--dir FOLDER]

Prints a table and, last, `seconds=… rss_mib=… reading=… planning_ratio=…`; the exit code is 1 when a bound fails:
beside its shards a rank takes at most 128 MiB more than one that loads a small model, it reads at most 1.2 times
the bytes its shards are made from (a shard that ends between two copies shares their source), and planning on 4,096 ranks takes at most 1.5 times as long as on 512.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mupscale as mu
from harness.llama_files import Llama, Shapes, peak_mib
from harness.program import Outcome, option, run
from mupscale.files.places import OutFile, torch_dtype
from mupscale.files.torch_file import Room, lay_out
from mupscale.sharded import fill
from mupscale.tensors.parts import local_of, local_rectangle

LLAMA_70B = Llama(hidden=8192, ffn=28672, heads=64, kv_heads=8, layers=80, vocabulary=128256)
SMALL = Llama(hidden=1024, ffn=2816, heads=8, kv_heads=8, layers=2, vocabulary=32000)
K, WRITERS, RANK = 2, 16, 37
BESIDE, READING, PLANNING = 128.0, 1.2, 1.5
KINDS = {"model.{}": "BF16", "optim.state.{}.exp_avg": "F32", "optim.state.{}.exp_avg_sq": "F32"}


@lru_cache(maxsize=256)
def archive(dtype: str, shape: tuple[int, ...]) -> OutFile:
    """A torch.save archive of one tensor with nothing in it."""
    return lay_out("chunk", Room(dtype, shape))[0]


def write_checkpoint(path: Path, shapes: Shapes, writers: int) -> None:
    """What `writers` ranks of FSDP2 would have saved, with holes for data."""
    path.mkdir()
    entries: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    files = [(path / f"__{rank}_0.distcp").open("wb") for rank in range(writers)]
    ends = [0] * writers
    for name, shape in shapes.items():
        rows = -(-shape[0] // writers)
        for key, dtype in KINDS.items():
            chunks: list[Any] = []
            for rank in range(writers):
                low, high = min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])
                if low == high:
                    continue
                size, start = (high - low, *shape[1:]), (low, *(0,) * (len(shape) - 1))
                made = archive(dtype, size)
                for at, data in made.chunks:
                    files[rank].seek(ends[rank] + at)
                    files[rank].write(data)
                index = metadata.MetadataIndex(key.format(name), torch.Size(start), len(chunks))
                storage[index] = filesystem._StorageInfo(f"__{rank}_0.distcp", ends[rank], made.size)
                chunks.append(metadata.ChunkStorageMetadata(torch.Size(start), torch.Size(size)))
                ends[rank] += made.size
            properties = metadata.TensorProperties(dtype=torch_dtype(dtype))
            entries[key.format(name)] = metadata.TensorStorageMetadata(properties, torch.Size(shape), chunks)
    for file, end in zip(files, ends, strict=True):
        file.truncate(end)
        file.close()
    whole = metadata.Metadata(state_dict_metadata=entries, planner_data={}, storage_data=storage)
    (path / ".metadata").write_bytes(pickle.dumps(whole))


def tree(shapes: Shapes) -> nn.Module:
    """A model that is nothing but its parameters, in bfloat16 on the meta device."""
    root = nn.Module()
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]  # type: ignore[assignment]
        module.register_parameter(leaf, nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta")))
    return root


def one_rank(base: Path, sizes: Llama, world: int) -> dict[str, float]:
    """Load the share of rank 37 and measure."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=RANK % world, world_size=world, store=FakeStore())
    plan = sizes.plan(K)
    model = tree({name: entry.wide_shape for name, entry in plan.tensors.items()})
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(mu.param_groups(model, plan, torch.optim.AdamW, lr=1e-4))
    first: list[float] = []
    original = fill.Filler.fill_

    def fill_(self: fill.Filler, filling: fill.Filling) -> None:
        first.append(time.process_time())
        original(self, filling)

    fill.Filler.fill_ = fill_  # type: ignore[method-assign]
    started, worked = time.perf_counter(), time.process_time()
    run = mu.load_wide(base, mu.Run(model, optimizer), plan=plan, noise=sizes.noise(plan))
    ended = time.perf_counter()
    tensors = [*run.model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    shards = sum(local_of(tensor).nbytes for tensor in tensors)
    wide = sum(local_rectangle(p).numel for p in run.model.parameters())
    return {
        "planning": first[0] - worked,
        "seconds": ended - started,
        "read": run.provenance["bytes"],
        "needed": sum(local_of(t).nbytes / float(plan_copies(p, plan, run.model)) for p in run.model.parameters() for t in (p, *optimizer.state[p].values())),
        "shards": shards,
        "entries": wide,
        "beside": peak_mib() - shards / 2**20,
    }  # fmt: skip


def plan_copies(parameter: nn.Parameter, plan: mu.Plan, model: nn.Module) -> float:
    """How many entries of a shard are made from one entry of the base."""
    names = _names(model)
    entry = plan[names[id(parameter)]]
    return torch.Size(entry.wide_shape).numel() / torch.Size(entry.base_shape).numel()


@lru_cache(maxsize=1)
def _names(model: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in model.named_parameters()}


def measured(base: Path, small: bool, world: int) -> dict[str, float]:
    command = [
        sys.executable,
        __file__,
        "--rank-of",
        str(world),
        "--base",
        str(base),
        *(["--small"] if small else []),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(chosen: argparse.Namespace) -> Outcome:
    if chosen.rank_of:
        sizes = SMALL if chosen.small else LLAMA_70B
        print(json.dumps(one_rank(chosen.base, sizes, chosen.rank_of)))
        return Outcome("")
    with tempfile.TemporaryDirectory(dir=chosen.dir) as name:
        folder, started = Path(name), time.perf_counter()
        write_checkpoint(folder / "base", LLAMA_70B.shapes(), WRITERS)
        write_checkpoint(folder / "small", SMALL.shapes(), WRITERS)
        record, took = (folder / "base" / ".metadata").stat().st_size, time.perf_counter() - started
        print(f"checkpoint of {WRITERS} ranks in {took:.0f} s, .metadata has {record / 1e6:.0f} MB")
        small = measured(folder / "small", True, 4)
        found = {world: measured(folder / "base", False, world) for world in (512, 4096)}
    print_table(found)
    return judged(found, small)


def print_table(found: dict[int, dict[str, float]]) -> None:
    """What was measured, and what follows for 64 ranks: shards and reading by bytes, time by entries."""
    large = found[512]
    rate = (large["seconds"] - large["planning"]) / large["entries"]
    print(
        "| ranks | shards of a rank, GB | read by a rank, GB | beside the shards, MiB | planning, CPU s | seconds |"
    )
    print("|---|---|---|---|---|---|")
    for world in (64, 512, 4096):
        if world in found:
            row = found[world]
            cells = [row["shards"] / 1e9, row["read"] / 1e9, row["beside"], row["planning"], row["seconds"]]
            print(f"| {world:,} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
        else:
            times = 512 / world
            seconds = large["planning"] + rate * large["entries"] * times
            print(
                f"| {world:,} (computed) | {large['shards'] * times / 1e9:.2f} | {large['read'] * times / 1e9:.2f} "
                f"| {large['beside']:.2f} | {large['planning']:.2f} | {seconds:.2f} |"
            )


def judged(found: dict[int, dict[str, float]], small: dict[str, float]) -> Outcome:
    beside = max(row["beside"] - small["beside"] for row in found.values())
    reading = max(row["read"] / row["needed"] for row in found.values())
    planning = found[4096]["planning"] / found[512]["planning"]
    failed = []
    if beside > BESIDE:
        failed.append(
            f"{beside:.0f} MiB beside the shards more than for a small model, the bound is {BESIDE:.0f}"
        )
    if reading > READING:
        failed.append(f"{reading:.2f} times the bytes that are needed were read, the bound is {READING}")
    if planning > PLANNING:
        failed.append(f"planning took {planning:.2f} times as long on 4,096 ranks, the bound is {PLANNING}")
    seconds = found[512]["seconds"]
    return Outcome(
        f"seconds={seconds:.1f} rss_mib={beside:.0f} reading={reading:.3f} planning_ratio={planning:.2f}",
        failed,
    )


OPTIONS = (
    option("--dir", type=Path, help="a folder on a disk with about 1 GB free"),
    option("--rank-of", type=int, help=argparse.SUPPRESS),
    option("--base", type=Path, help=argparse.SUPPRESS),
    option("--small", action="store_true", help=argparse.SUPPRESS),
)

if __name__ == "__main__":
    sys.exit(run(measure, *OPTIONS, doc=__doc__))
