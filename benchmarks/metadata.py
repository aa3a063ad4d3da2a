"""What `.metadata` of a checkpoint of a thousand writers costs each rank that loads it, against a rank that reads it alone.

A checkpoint of 180 tensors in 1,024 chunks each is described as torch does it; its data are not there. Of 512 pretended ranks, eight to a
node, one reads the pickle for its node and writes a table (`sharded/node.py`), and seven map it. Each then looks up
which chunks hold its shard of every tensor. Before, every rank read the pickle twice and kept an object for every chunk;
that code is kept here. Every process is new and measures its own CPU time and the growth of its peak of resident memory; a mapped table
counts for each of its ranks, although they share it.

    python benchmarks/metadata.py [--tensors 180] [--writers 1024]

`cpu_ratio` and `rss_ratio` are the mean over a node's ranks over the same of the earlier code; the rank that reads is printed
by itself. The last line is `chunks=… cpu_ratio=… rss_ratio=…`; the exit code is 1 above 0.25, or if a rank finds other chunks.
Figures for 2.2 million chunks (AdamW of 70 billion parameters, from 1,024 ranks) are extrapolated in proportion.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from harness.limited import peak_mib
from harness.program import Outcome, option, run
from mupscale.files.dcp import metadata as dcp
from mupscale.files.dcp.table import Chunk, DcpDirectory, map_table, write_table
from mupscale.files.elsewhere import DCP_METADATA
from mupscale.files.pickles.inert import read_metadata
from mupscale.files.strict import read_regular
from mupscale.tensors.parts import Rectangle

RANKS, NODE, RANK, MOST = 512, 8, 37, 0.25
ROWS, COLUMNS, ARCHIVE = 8, 64, 3000
LARGE = 2_200_000


def write_metadata(path: Path, tensors: int, writers: int) -> None:
    """Tensors of which each writer holds 8 rows; files are holes, long enough to explain the `.metadata`."""
    path.mkdir()
    described: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    for number in range(tensors):
        name, chunks = f"model.layers.{number}.weight", []
        for writer in range(writers):
            start = torch.Size([writer * ROWS, 0])
            chunks.append(metadata.ChunkStorageMetadata(start, torch.Size([ROWS, COLUMNS])))
            index = metadata.MetadataIndex(name, start, writer)
            stored[index] = filesystem._StorageInfo(f"__{writer}_0.distcp", number * ARCHIVE, ARCHIVE)
        described[name] = metadata.TensorStorageMetadata(
            metadata.TensorProperties(torch.float32), torch.Size([writers * ROWS, COLUMNS]), chunks
        )
    (path / DCP_METADATA).write_bytes(pickle.dumps(metadata.Metadata(described, None, stored)))
    for writer in range(writers):
        with open(path / f"__{writer}_0.distcp", "wb") as file:
            file.truncate(tensors * ARCHIVE)


def shard(shape: tuple[int, ...]) -> Rectangle:
    """The rows of a tensor that one of the pretended ranks holds."""
    rows = -(-shape[0] // RANKS)
    return Rectangle((RANK * rows, 0), (rows, shape[1]))


Found = list[tuple[str, tuple[int, ...], str, int]]


def before(path: Path) -> Found:
    """The earlier code: objects for all chunks of all tensors, and a second read for the digest."""
    raw = read_regular(path / DCP_METADATA, dcp.longest_metadata(path))
    described = read_metadata(raw, "")
    stored = {(index.fqn, dcp._wholes(index.offset)): info for index, info in described.storage_data.items()}
    tensors: dict[str, tuple[tuple[int, ...], tuple[tuple[Rectangle, Chunk], ...]]] = {}
    for name, entry in described.state_dict_metadata.items():
        shape, chunks = dcp._wholes(entry.size), []
        for chunk in entry.chunks:
            start, part = dcp._wholes(chunk.offsets), dcp._wholes(chunk.sizes)
            if not all(min(a, n) >= 0 and a + n <= m for a, n, m in zip(start, part, shape, strict=True)):
                raise SystemExit("a chunk sticks out")
            chunks.append(Chunk(start, part, *dcp._bytes_of(name, stored[name, start], [])))
        chunks = [chunk for chunk in chunks if prod(chunk.shape)]
        if not dcp._is_grid([list(c.start) for c in chunks], [list(c.shape) for c in chunks], shape):
            raise SystemExit("chunks do not fit")
        tensors[name] = shape, tuple((Rectangle(chunk.start, chunk.shape), chunk) for chunk in chunks)
    del described, stored, raw
    hashlib.sha256(read_regular(path / DCP_METADATA, 1 << 31)).hexdigest()
    found: Found = []
    for name, (shape, pieces) in tensors.items():
        wanted = shard(shape)
        found += [(name, c.start, c.file, c.offset) for r, c in pieces if r.meet(wanted).numel]
    return found


def looked_up(directory: DcpDirectory) -> Found:
    found: Found = []
    for name, tensor in directory.tensors.items():
        wanted = shard(tensor.shape)
        met = tensor.meeting(wanted.start, wanted.shape)
        found += [(name, chunk.start, chunk.file, chunk.offset) for chunk in met]
    return found


def measured(way: str, path: Path, table: Path) -> None:
    """The process that is measured; prints CPU seconds, MiB and a digest of what it found."""
    rss, cpu = peak_mib(), time.process_time()
    if way == "before":
        found = before(path)
    elif way == "reads":
        directory = dcp.read_dcp(path)
        with open(table, "wb") as file:
            write_table(directory, file)
        found = looked_up(directory)
    else:
        found = looked_up(map_table(table, path))
    cpu = time.process_time() - cpu
    digest = hashlib.sha256(repr(found).encode()).hexdigest()[:16]
    print(json.dumps([cpu, peak_mib() - rss, f"{len(found)} {digest}"]))


def measure(options: argparse.Namespace) -> Outcome:
    if options.measure:
        measured(options.measure[0], Path(options.measure[1]), Path(options.measure[2]))
        return Outcome("")
    chunks = options.tensors * options.writers
    with tempfile.TemporaryDirectory() as name:
        path, table = Path(name) / "checkpoint", Path(name) / "table"
        write_metadata(path, options.tensors, options.writers)
        size = os.path.getsize(path / DCP_METADATA)
        print(f"{chunks} chunks, {size / 1e6:.1f} MB of {DCP_METADATA}, rank {RANK} of {RANKS}")
        costs: dict[str, tuple[float, float, str]] = {}
        for way in ("before", "reads", "maps"):
            command = [sys.executable, __file__, "--measure", way, str(path), str(table)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            costs[way] = cpu, rss, _ = tuple(json.loads(done.stdout))
            print(f"{way:8} {cpu:7.2f} s of CPU  {rss:7.1f} MiB", flush=True)
    ratios = {}
    for at, figure in enumerate(("cpu", "rss")):
        was, reads, maps = (float(costs[way][at]) for way in ("before", "reads", "maps"))
        mean = (reads + (NODE - 1) * maps) / NODE
        ratios[figure] = mean / was
        unit = "s of CPU" if figure == "cpu" else "MiB"
        scale = LARGE / chunks
        print(
            f"{LARGE:,} chunks, extrapolated: {was * scale:,.0f} {unit} a rank before, {mean * scale:,.0f} on average now, "
            f"{reads * scale:,.0f} on the rank that reads"
        )
    failed = [
        f"{figure} {ratio:.2f}, allowed {MOST}" for figure, ratio in ratios.items() if not ratio <= MOST
    ]
    if len({found for _, _, found in costs.values()}) != 1:
        failed.append(f"ranks find other chunks: {[found for _, _, found in costs.values()]}")
    return Outcome(f"chunks={chunks} cpu_ratio={ratios['cpu']:.2f} rss_ratio={ratios['rss']:.2f}", failed)


if __name__ == "__main__":
    tensors, writers = option("--tensors", type=int, default=180), option("--writers", type=int, default=1024)
    measured_rank = option("--measure", nargs=3, help=argparse.SUPPRESS)
    sys.exit(run(measure, tensors, writers, measured_rank, doc=__doc__))
