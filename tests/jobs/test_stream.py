"""A streamed directory has the bits of the kernel, however it was cut, shared out, killed or resumed."""

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial as partial_call
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

import mupscale as mu
from harness.closeness import assert_bitwise
from harness.llama_files import Llama, job_for, write_directory
from harness.profiles import examples
from harness.refusals import refusal
from mupscale.checkpoints.shards import weight_moves
from mupscale.files.directory import read_directory
from mupscale.files.places import Place
from mupscale.jobs import partial as partial_module
from mupscale.jobs import worker as worker_module
from mupscale.jobs.bytes import blocks, output_files
from mupscale.jobs.bytes.blocks import BlockMaker, MoveMaker, Reader, StoredBase
from mupscale.jobs.bytes.fingerprints import GRAIN, as_text, fingerprint, total
from mupscale.jobs.bytes.output_files import OutputFiles
from mupscale.jobs.digests import make_job, stretch_sums
from mupscale.jobs.job import Job, Move, Text
from mupscale.jobs.job_check import check_job
from mupscale.jobs.journal.entries import (
    BaseStamp,
    BlockDone,
    Ended,
    Entry,
    Holds,
    Measured,
    PartSent,
    StretchRead,
    lines,
    read_lines,
)
from mupscale.jobs.journal.journals import read_journals
from mupscale.jobs.journal.writer import FileSink, JournalWriter
from mupscale.jobs.partial import create, partial, prepare
from mupscale.jobs.progress import Progress
from mupscale.jobs.publish import publish as publish_module
from mupscale.jobs.publish.publish import publish
from mupscale.jobs.verify_bytes import check_alone, check_bytes
from mupscale.jobs.work_units import Block, Stretch, WorkUnits
from mupscale.jobs.worker import run_job, run_worker
from mupscale.noise.resolved import NoisePlan, ResolvedNoise, restore_noise
from mupscale.tensors.expand import RUN, expand
from mupscale.tensors.making import Making
from mupscale.tensors.noise import TensorNoise, Waking
from mupscale.tensors.parts import Rectangle
from mupscale.tensors.philox import Stream
from tests.tensors.test_noise import woken

MODEL = Llama(hidden=32, ffn=48, heads=4, kv_heads=2, layers=2, vocabulary=50)
PLAN = MODEL.plan(2)
NOISE = MODEL.noise(PLAN)
SMALL: Any = {"shard_bytes": 60_000, "block_bytes": 2048}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("streams") / "base"
    write_directory(path, MODEL.shapes(), "F32", 3)
    return path


def job_in(base: Path, out: Path, noise: NoisePlan | None = NOISE, **options: Any) -> Job:
    return job_for(PLAN, read_directory(base), out, noise, **(SMALL | options))


@pytest.fixture(scope="module")
def want(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the job that nothing disturbs."""
    out = tmp_path_factory.mktemp("want") / "wide"
    run_job(job_in(base, out))
    return bytes_in(out)


def tensors_in(path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found


def bytes_in(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def wanted(plan: mu.Plan, tensors: dict[str, Tensor], noise: NoisePlan | None) -> dict[str, Tensor]:
    return {
        name: expand(entry.source(tensors), entry.making(None if noise is None else noise.tensor(name)))
        for name, entry in plan.tensors.items()
    }


def assert_tensors(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        assert_bitwise(found[name], tensor, name)


@pytest.mark.parametrize("noise", [None, NOISE], ids=["exact", "noisy"])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16", "F64"])
def test_streamed_tensors_have_the_bits_of_the_kernel(tmp_path, dtype, noise):
    """The law of one kernel: a streamed file equals the live tensors."""
    directory = write_directory(tmp_path / "base", MODEL.shapes(), dtype, 2)
    run_job(job_for(PLAN, directory, tmp_path / "wide", noise, **SMALL))
    want = wanted(PLAN, tensors_in(tmp_path / "base"), noise)
    assert_tensors(tensors_in(tmp_path / "wide"), want)
    other = wanted(PLAN, tensors_in(tmp_path / "base"), MODEL.noise(PLAN, seed=1))
    assert not torch.equal(want["lm_head.weight"], other["lm_head.weight"]), "control: another seed is seen"


def test_the_directory_is_complete_and_nothing_else(base, tmp_path):
    job = job_in(base, tmp_path / "wide")
    run_job(job)
    names = set(bytes_in(tmp_path / "wide"))
    count = len(job.files)
    assert count > 2
    assert names == {
        *(f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)),
        *("config.json", "tokenizer.json", "model.safetensors.index.json", "mupscale.json"),
    }
    assert not partial(job.folder).exists()
    again = read_directory(tmp_path / "wide")
    assert set(again.tensors) == set(PLAN.tensors)
    about = json.loads((tmp_path / "wide" / "mupscale.json").read_text())
    assert about["base"]["files"].keys() == {file.name for file in job.sources}
    assert str(tmp_path) not in (tmp_path / "wide" / "mupscale.json").read_text()
    single, _, index = weight_moves(PLAN, read_directory(base))
    assert index is None
    assert [file.name for file in single] == ["model.safetensors"]


def test_a_file_is_the_one_save_file_writes(base, tmp_path):
    run_job(job_in(base, tmp_path / "wide", shard_bytes=10**9))
    want = wanted(PLAN, tensors_in(base), NOISE)
    save_file(want, tmp_path / "want.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "wide" / "model.safetensors").read_bytes() == (
        tmp_path / "want.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("block", [1024, 5000, 1 << 20])
@pytest.mark.parametrize("workers", [1, 3, 7])
def test_blocks_and_workers_do_not_matter(base, want, tmp_path, block, workers):
    job = job_in(base, tmp_path / "wide", block_bytes=block)
    finished = [run_worker(job, worker, workers) for worker in reversed(range(workers))]
    assert finished == [False] * (workers - 1) + [True]
    assert bytes_in(tmp_path / "wide") == want


@pytest.mark.parametrize("shards", [1, 5])
def test_shards_of_the_base_do_not_matter(base, tmp_path, shards):
    write_directory(tmp_path / "base", MODEL.shapes(), "F32")
    save = tensors_in(base)
    for file in (tmp_path / "base").glob("model*"):
        file.unlink()
    parts = [dict(list(save.items())[i::shards]) for i in range(shards)]
    for i, part in enumerate(parts):
        save_file(part, tmp_path / "base" / f"m{i}.safetensors")
    index = {name: f"m{i}.safetensors" for i, part in enumerate(parts) for name in part}
    (tmp_path / "base" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    run_job(job_in(base, tmp_path / "a"))
    run_job(job_in(tmp_path / "base", tmp_path / "b"))
    ours = ("mupscale.json",)  # it says what the base was, file by file
    first, second = bytes_in(tmp_path / "a"), bytes_in(tmp_path / "b")
    assert {k: v for k, v in first.items() if k not in ours} == {
        k: v for k, v in second.items() if k not in ours
    }


def test_threads_do_the_same_and_report(base, want, tmp_path):
    told: list[tuple[int, int]] = []
    job = job_in(base, tmp_path / "wide")
    run_job(job, workers=3, report=lambda done, total: told.append((done, total)))
    assert bytes_in(tmp_path / "wide") == want
    total = sum(move.target.bytes for move in job.moves)
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_worker_processes_share_one_output(base, want, tmp_path):
    """As a job array does: processes that know the job and their number."""
    job = job_in(base, tmp_path / "wide")
    (tmp_path / "job.json").write_text(job.to_json())
    code = (
        "import sys; from pathlib import Path\n"
        "from mupscale.jobs.job import Job\n"
        "from mupscale.jobs.worker import run_worker\n"
        "run_worker(Job.from_json(Path(sys.argv[1]).read_bytes()), int(sys.argv[2]), 2, threads=2)\n"
        "sys.exit(any(name in sys.modules for name in ('transformers', 'numba', 'lightning')))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "job.json")]
    workers = [subprocess.Popen([*command, str(worker)]) for worker in range(2)]
    assert [worker.wait() for worker in workers] == [0, 0]
    assert bytes_in(tmp_path / "wide") == want


def test_units_cover_the_output_once_and_shares_cover_the_units():
    directory_job = Move(
        "w",
        Making((mu.rules.Axis.parse("out: 20x2"), mu.rules.Axis.parse("in: 15x2"))),
        (Place("b", 0, "F32", (20, 15)),),
        Place("f", 0, "F32", (40, 30)),
    )
    job = Job(Path("b"), Path("o"), (), (directory_job,) * 3, (), block_bytes=100)
    units = WorkUnits(job)
    seen = torch.zeros(3, 40, 30)
    for number in range(units.blocks):
        block = units[number]
        assert isinstance(block, Block)
        assert block.bytes <= 100
        (r, c), (h, w) = block.start, block.shape
        seen[number * 3 // units.blocks, r : r + h, c : c + w] += 1
    assert (seen == 1).all()
    for workers in (1, 2, 5, 1000):
        shares = [list(units.share(worker, workers)) for worker in range(workers)]
        assert sorted(unit for share in shares for unit in share) == list(range(len(units)))
        sizes = [sum(units[unit].bytes for unit in share) for share in shares]
        assert max(sizes) - min(sizes) <= 200, "shares are even, up to a unit at each end"


def wide_job(path: Path, axes: list[str], tensors: list[Tensor], **options: Any) -> tuple[Job, Move, Tensor]:
    """A job with one tensor made from `tensors`, its only move, and the tensor it must give."""
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    save_file({f"w{i}": tensor for i, tensor in enumerate(tensors)}, path / "model.safetensors")
    parsed = tuple(map(mu.rules.Axis.parse, axes))
    cat = options.pop("cat", None)
    fold = mu.rules.Scale.of(options.pop("fold", "1"))
    names = tuple(f"w{i}" for i in range(len(tensors)))
    shift, mean = options.pop("shift", 0), options.pop("mean", ())
    entry = mu.plans.TensorPlan(names, parsed, cat=cat, fold=fold, shift=shift, mean=mean)
    noise = options.pop("noise", None)
    resolved = None
    if noise is not None:
        one = ResolvedNoise(0.0, noise.paired, noise.split, std=noise.std, zeros=noise.zeros)
        resolved = NoisePlan({"wide": one})
    plan = mu.Plan({"wide": entry})
    block = options.pop("block_bytes", 1024)
    files, moves, _ = weight_moves(plan, read_directory(path), resolved, **options)
    job = make_job(path, path.with_name("wide"), files, moves, block_bytes=block)
    base = torch.cat(tensors, cat) if cat is not None else tensors[0]
    return job, moves[0], expand(base, entry.making(moves[0].making.noise))


def woken_noise(*cut: int, split: int | None = None) -> TensorNoise:
    """New units that are copies of trained ones, besides what copies get."""
    return TensorNoise(Stream(0, "wide"), 0.0, split=split, zeros=Waking(0.1, cut, copied=True))


CASES: dict[str, tuple[list[str], list[tuple[int, ...]], dict[str, Any]]] = {
    "a scalar": ([], [()], {}),
    "a vector": (["out: 700x3"], [(700,)], {"fold": "1/3"}),
    "one row larger than a block": (["3", "in: 900x2"], [(3, 900)], {}),
    "blocks far apart": (["out: 1x2 * 100", "in: 20x2"], [(100, 20)], {}),
    "grouped heads": (["out: 3x2 * 40", "in: 3x2 * 40"], [(120, 120)], {}),
    "segments": (["out: 30x2 | 5x2 * 8", "7"], [(70, 7)], {}),
    "pads": (["out: 30x2+17", "in: 20x2+3"], [(30, 20)], {}),
    "experts": (["4", "out: 20x2", "in: 15x2"], [(4, 20, 15)], {}),
    "a kernel of four dimensions": (["out: 8x2", "in: 6x2", "3", "3"], [(8, 6, 3, 3)], {}),
    "joined rows": (["out: 60x2", "in: 20x2"], [(25, 20), (35, 20)], {"cat": 0}),
    "joined columns": (["out: 20x2", "in: 60x2"], [(20, 25), (20, 30), (20, 5)], {"cat": 1}),
    "a gain of one plus w": (["out: 600x2"], [(600,)], {"fold": "1/2", "shift": 1}),
    "nothing": (["out: 0x2", "in: 3x2"], [(0, 3)], {}),
    "noise": (["out: 40x2", "in: 33x2"], [(40, 33)], {"noise": TensorNoise(Stream(0, "wide"), 0.1)}),
    "paired rows": (["in: 40x2", "out: 33x2"], [(40, 33)], {"noise": TensorNoise(Stream(0, "wide"), 0.1, 0)}),
    "paired columns": (["out: 40x2", "in: 33x2"], [(40, 33)], {"noise": TensorNoise(Stream(0, "wide"), 0.1, 1)}),
    "paired far apart": (["in: 1x2 * 40", "out: 33x2"], [(40, 33)], {"noise": TensorNoise(Stream(0, "wide"), 0.1, 0)}),
    "split rows": (["in: 1x2 * 40", "out: 33x2"], [(40, 33)], {"noise": woken_noise(split=0), "fold": "1/2"}),
    "split columns": (["out: 20x2+9", "in: 1x3 * 11 | 2x3"], [(20, 13)], {"noise": woken_noise(split=1), "fold": "1/3"}),
    "copied units": (["out: 40+100", "in: 33+10"], [(40, 33)], {"noise": woken_noise()}),
    "copied heads": (["out: 3+2 * 7+4", "in: 33+40"], [(21, 33)], {"noise": woken_noise()}),
    "copied experts, cut": (["4", "out: 20+30", "in: 15+9"], [(4, 20, 15)], {"noise": woken_noise(2)}),
    "copied and joined": (["out: 25+25 | 35+70", "in: 20+1"], [(25, 20), (35, 20)], {"cat": 0, "noise": woken_noise()}),
    "means of rows": (["out: 150+90", "in: 20+3"], [(150, 20)], {"mean": (0,), "fold": "2^(1/2)"}),
    "means of columns": (["in: 33x2", "out: 70+90"], [(33, 70)], {"mean": (1,), "fold": "1/3"}),
    "means of a vector": (["out: 700+500"], [(700,)], {"mean": (0,)}),
    "means of experts": (["4", "out: 65+30", "in: 15+9"], [(4, 65, 15)], {"mean": (1,), "noise": woken_noise(1)}),
    "means and copied units": (["out: 140+90", "in: 33+10"], [(140, 33)], {"mean": (0,), "noise": woken_noise(0)}),
    "means of joined rows": (["out: 150+10", "in: 20+2"], [(70, 20), (80, 20)], {"cat": 0, "mean": (0,)}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_shape_of_move_gives_the_kernels_bits(tmp_path, case):
    axes, shapes, options = CASES[case]
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    job, _, want = wide_job(tmp_path / "base", axes, tensors, **options)
    run_job(job)
    assert_bitwise(load_file(job.folder / "model.safetensors")["wide"], want, case)
    assert check_bytes(job) == []
    if want.numel() * 4 > 1024:
        assert WorkUnits(job).blocks > 1


def test_means_are_taken_of_pieces_and_once_for_all_blocks_of_a_tensor(monkeypatch):
    base, reads = torch.randn(1000, 300), [0]
    made = Making((mu.rules.Axis.parse("out: 1000+400"), mu.rules.Axis.fixed(300)), mean=(0,))

    def read_(lows: list[int], room: Tensor) -> None:
        reads.append(room.numel())
        room.copy_(Rectangle(tuple(lows), tuple(room.shape)).within(base, (0, 0)))

    monkeypatch.setattr(blocks, "_MEANS", 128)
    stored, maker = StoredBase(base.dtype, (0, 0), tuple(base.shape), read_), BlockMaker()
    for start in (1000, 1100, 1399):
        found = maker.make(made, stored, (start, 0), (1, 300), base.dtype)
        assert_bitwise(found, expand(base, made)[start : start + 1])
    assert max(reads) <= 128 * RUN < sum(reads) == base.numel()


@pytest.mark.parametrize(
    ("mean", "code"),
    [
        ((0,), None),
        ((0, 1), "plan.mean_in_parts"),
        ((2,), "plan.mean_in_parts"),
        ((1, 1), "plan.mean_in_parts"),
    ],
)
def test_a_job_takes_means_along_one_dimension(tmp_path, mean, code):
    job, move, _ = wide_job(tmp_path / "base", ["out: 40+9", "in: 5+5"], [torch.ones(40, 5)])
    moved = replace(job, moves=(replace(move, making=replace(move.making, mean=mean)),))
    assert Job.from_json(moved.to_json().encode()) == moved
    if code is None:
        check_job(moved)
    else:
        refusal(lambda: check_job(moved), code)


@pytest.mark.parametrize(
    ("source", "target", "compute"),
    [
        (torch.float32, "BF16", torch.float32),
        (torch.bfloat16, "F32", torch.float32),
        (torch.float16, "BF16", torch.float32),
        (torch.float64, "F32", torch.float64),
        (torch.bfloat16, "F64", torch.float64),
        (torch.float64, "BF16", torch.float64),
    ],
    ids=str,
)
def test_a_cast_rounds_once_from_the_wider_type(tmp_path, source, target, compute):
    tensor = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)).to(source)
    noise = TensorNoise(Stream(0, "wide"), 0.1)
    job, move, _ = wide_job(tmp_path / "base", ["out: 40x3", "in: 30x3"], [tensor], noise=noise, dtype=target)
    run_job(job)
    found = load_file(job.folder / "model.safetensors")["wide"]
    exact = expand(tensor.to(compute), move.making)
    assert_bitwise(found, exact.to(found.dtype))
    twice = expand(tensor.to(found.dtype), move.making)
    if found.dtype.itemsize < source.itemsize:
        assert not torch.equal(found, twice), "control: rounding before the kernel is seen"


@pytest.mark.parametrize("rows", ["out: 1x2 * 4000", "out: 4000+9000"])
def test_memory_is_bounded_where_copies_lie_far_apart(tmp_path, rows):
    """Rows on both sides of a seam between copies read those rows, not the whole tensor between them.

    So it is where copies of new units begin again with the first unit.
    """
    noise = woken_noise() if "+" in rows else None
    job, _, _ = wide_job(
        tmp_path / "base", [rows, "50"], [torch.randn(4000, 50)], noise=noise, block_bytes=5000 * 4
    )
    with Reader(job.base) as reader:
        maker, units = MoveMaker(reader), WorkUnits(job)
        for number in range(units.blocks):
            block = units[number]
            assert isinstance(block, Block)
            maker.block(block)
        assert maker.room_bytes <= 8 * job.block_bytes + (1 << 20)


@examples(40)
@given(st.data())
def test_no_block_of_new_units_that_are_copies_reads_more_than_it_holds(cases: Any):
    base, made, _ = cases.draw(woken())
    start = [cases.draw(st.integers(0, axis.wide - 1)) for axis in made.axes]
    ends = zip(made.axes, start, strict=True)
    part = Rectangle(tuple(start), tuple(cases.draw(st.integers(1, axis.wide - at)) for axis, at in ends))
    counts = [0]

    def read_(lows: list[int], room: Tensor) -> None:
        counts.append(room.numel())
        room.copy_(Rectangle(tuple(lows), tuple(room.shape)).within(base, (0, 0)))

    stored = StoredBase(base.dtype, (0, 0), tuple(base.shape), read_)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_SMALL", 0)
        found = BlockMaker().make(made, stored, part.start, part.shape, base.dtype)
    assert_bitwise(found, part.within(expand(base, made), (0, 0)).contiguous())
    assert max(counts) <= part.numel


@pytest.mark.parametrize(
    ("rows", "noise", "code"),
    [
        ("out: 40+9", woken_noise(split=0), "noise.no_copies_to_split"),
        ("out: 40x2", woken_noise(split=2), "noise.no_copies_to_split"),
        ("out: 0+89", woken_noise(), "noise.no_units_to_copy"),
        ("out: 40x2+9", woken_noise(split=0), None),
    ],
)
def test_a_job_with_nothing_to_split_or_to_copy_is_refused(tmp_path, rows, noise, code):
    job, move, _ = wide_job(tmp_path / "base", ["out: 40x2+9", "5"], [torch.ones(40, 5)])
    axes = (mu.rules.Axis.parse(rows), move.making.axes[1])
    moved = replace(move, making=replace(move.making, axes=axes, noise=noise))
    if code is None:
        check_job(replace(job, moves=(moved,)))
    else:
        error = refusal(lambda: check_job(replace(job, moves=(moved,))))
        assert code in {fault.code for fault in error.faults}


def tied_directory(path: Path, *names: str, torn: bool = False) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    save_file(
        {name: torch.arange(12.0).view(3, 4) + (i if torn else 0) for i, name in enumerate(names)},
        path / "model.safetensors",
    )
    return path


def test_tied_weights_are_written_once_under_the_name_they_had(tmp_path):
    axes = (mu.rules.Axis.fixed(3), mu.rules.Axis.parse("out: 4x2"))
    plan = mu.Plan({"embed": mu.plans.TensorPlan(("embed",), axes)}, ties={"head": "embed"})
    for names in (["embed"], ["head"], ["embed", "head"]):
        directory = read_directory(tied_directory(tmp_path / "-".join(names), *names))
        _, moves, _ = weight_moves(plan, directory, NoisePlan({"embed": ResolvedNoise(std=0.1)}))
        assert [move.name for move in moves] == names[:1]
        noise = moves[0].making.noise
        assert noise is not None
        assert noise.stream.name == "embed", "noise goes by the planned name"
    torn = read_directory(tied_directory(tmp_path / "torn", "embed", "head", torn=True))
    refusal(lambda: weight_moves(plan, torn), "checkpoint.tie_not_equal", where=["embed", "head"])


def test_a_plan_must_fit_the_directory(tmp_path):
    directory = read_directory(tied_directory(tmp_path / "d", "w", "x"))
    axes = (mu.rules.Axis.fixed(3), mu.rules.Axis.parse("out: 4x2"))

    def entry(name: str, **options: Any) -> mu.plans.TensorPlan:
        return mu.plans.TensorPlan((name,), axes, **options)

    both = {"w": entry("w"), "x": entry("x")}
    weight_moves(mu.Plan(both), directory)

    def refused(tensors: dict[str, mu.plans.TensorPlan]) -> list[tuple[str, str]]:
        error = refusal(lambda: weight_moves(mu.Plan(tensors), directory))
        return [(fault.code, fault.where) for fault in error.faults]

    assert refused({"w": entry("w")}) == [("checkpoint.tensor_not_in_plan", "x")]
    for missing in (entry("y"), entry("y", kind="buffer")):
        assert refused(both | {"y": missing}) == [("checkpoint.tensor_missing", "y")]
    own = {"x": entry("x", kind="buffer", fill="own")}
    assert len(weight_moves(mu.Plan(both | own), directory)[1]) == 1, "what the model computes is left out"
    wrong = mu.plans.TensorPlan(("x",), (mu.rules.Axis.fixed(4), mu.rules.Axis.fixed(3)))
    assert refused(both | {"x": wrong}) == [("checkpoint.shape_differs", "x")]
    refusal(
        lambda: weight_moves(mu.Plan(both), directory, dtype="I8"), "argument.not_a_float_dtype", where="I8"
    )
    new = mu.Plan(both | {"z": mu.plans.TensorPlan((), (mu.rules.Axis.fixed(5),), fill="one")})
    files, moves, _ = weight_moves(new, directory)
    run_job(make_job(directory.path, tmp_path / "wide", files, moves))
    assert torch.equal(load_file(tmp_path / "wide" / "model.safetensors")["z"], torch.ones(5))


class KilledError(Exception):
    """A worker's death, for tests."""


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list of one number: after so many blocks, the worker dies without a word."""
    left = [10**9]
    write = OutputFiles.write

    def counted(self: Any, *arguments: Any) -> None:
        if left[0] == 0:
            raise KilledError
        left[0] -= 1
        write(self, *arguments)

    monkeypatch.setattr(OutputFiles, "write", counted)
    return left


def assert_not_loadable(folder: Path) -> None:
    names = {file.name for file in folder.iterdir()}
    assert "config.json" not in names
    assert not [name for name in names if name.endswith(".safetensors")]


def test_a_run_that_dies_is_resumed_and_does_not_start_over(base, want, tmp_path, dying):
    job = job_in(base, tmp_path / "wide")
    blocks = WorkUnits(job).blocks
    written = 0
    for count in (0, 3, 20, 40):
        dying[0] = count
        with pytest.raises(KilledError):
            run_job(job)
        written += count
        assert not job.folder.exists()
        assert_not_loadable(partial(job.folder))
    dying[0] = blocks
    run_job(job)
    assert dying[0] == written, "no block was written twice"
    assert bytes_in(tmp_path / "wide") == want
    dying[0] = 0
    run_job(job)
    assert run_worker(job, 0, 3), "a finished job is finished for everyone"


def test_other_numbers_of_workers_may_go_on(base, want, tmp_path, dying):
    job = job_in(base, tmp_path / "wide")
    run_worker(job, 1, 4)
    dying[0] = 5
    with pytest.raises(KilledError):
        run_worker(job, 0, 2)
    dying[0] = 10**6
    left = 10**6 - WorkUnits(job).blocks
    run_worker(job, 2, 3)
    run_job(job)
    assert dying[0] > left, "what others did counted"
    assert bytes_in(tmp_path / "wide") == want


WRITTEN_BY_0_2_0: dict[Entry, str] = {
    BaseStamp(
        "model-00001 of 2.safetensors", "1052672-1763408612"
    ): "ad385b24df0c6c86 s 1052672-1763408612 model-00001 of 2.safetensors",
    BlockDone(
        0, "1f00a2b3c4d5e6f7", "0:2:AQAAAAAAAAA="
    ): "a51052385f3611d5 b 0 1f00a2b3c4d5e6f7 0:2:AQAAAAAAAAA=",
    BlockDone(3, "0000000000000a17"): "45323fe20a27832c b 3 0000000000000a17 -",
    StretchRead(4, "AgAAAAAAAAADAAAAAAAAAA=="): "e284cd6ec1d83ab8 d 4 AgAAAAAAAAADAAAAAAAAAA==",
    PartSent(1, "2~upload-id", '"9b2cf535f27731c9"'): '2ec9f7087055042b p 1 2~upload-id "9b2cf535f27731c9"',
    Ended(): "9199c9d790b6e327 e 0 -",
}
"""Entries, and the lines that version 0.2.0 wrote for them."""
NORMS_OF_0_2_0 = b"cb7993d920f24dcd norms 0x1.8000000000000p+0,0x1.0000000000000p-3 h.0.w\n"
"""A norm that is bound to no bytes of the base: it is measured again."""


def test_lines_of_an_earlier_version_are_read_and_written_alike():
    raw = "".join(f"{line}\n" for line in WRITTEN_BY_0_2_0.values()).encode()
    assert list(read_lines(raw)) == list(WRITTEN_BY_0_2_0)
    assert list(read_lines(NORMS_OF_0_2_0)) == [], "kinds that are not known are passed over"
    assert lines(list(WRITTEN_BY_0_2_0)) == raw
    for at in range(len(raw)):
        assert len(list(read_lines(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :]))) < len(WRITTEN_BY_0_2_0)
    unknown = [Measured("x", (), "y"), Measured("a", (), "b c d")]
    assert list(read_lines(lines(unknown))) == [], "and so are words of no known entry"


def test_a_journal_says_where_its_lock_is_held():
    raw = lines([Holds("8a5b0f3c-0000-4000-8000-000000000001"), Ended()])
    assert list(read_lines(raw)) == [Holds("8a5b0f3c-0000-4000-8000-000000000001"), Ended()]


def test_torn_journals_are_shorter_and_never_wrong(tmp_path):
    sink = FileSink(tmp_path, 0, 1)
    with JournalWriter(sink) as journal:
        journal.add(*(BlockDone(unit, f"{unit:016x}") for unit in (1, 2, 3, 7)), StretchRead(8, "ab"))
    raw = sink.path.read_bytes()
    want = read_journals(tmp_path, 10)
    assert bytes(want.units) == bytes([0, 1, 1, 1, 0, 0, 0, 1, 1, 0])
    for size in range(len(raw)):
        sink.path.write_bytes(raw[:size])
        units = read_journals(tmp_path, 10).units
        assert all(a <= b for a, b in zip(units, want.units, strict=True))
    for at in range(0, len(raw), 3):
        torn = raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :]
        sink.path.write_bytes(torn)
        units = read_journals(tmp_path, 10).units
        assert all(a <= b for a, b in zip(units, want.units, strict=True))
        left = len(list(read_lines(torn)))
        assert left < len(list(read_lines(raw))), "control: a damaged line does not count"


def test_dying_while_finishing_is_harmless(base, want, tmp_path, monkeypatch):
    """At any of its steps the finish may be cut off; it is repeated and gives the same directory."""
    step, survived = 0, False
    while not survived:
        job = job_in(base, tmp_path / f"wide{step}")
        assert not run_worker(job, 0, 2)
        with monkeypatch.context() as patched, suppress(KilledError):
            die_after(step, patched)
            survived = run_worker(job, 1, 2)
        if not job.folder.exists() and (partial(job.folder) / "config.json").exists():
            names = {file.name for file in partial(job.folder).iterdir()}
            assert {file.name for file in job.files} <= names, "a config means that all weights are there"
        run_job(job)
        assert bytes_in(job.folder) == want, f"step {step}"
        step += 3
    assert step > 20, "control: there were steps to die at"


def die_after(count: int, patched: pytest.MonkeyPatch) -> None:
    """Let `count` more steps of finishing happen."""
    left = [count]

    def dies(function: Any) -> Any:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            if left[0] == 0:
                raise KilledError
            left[0] -= 1
            return function(*arguments, **options)

        return wrapped

    steps: Any = {"sync_path": publish_module, "write_all": partial_module, "replace": os, "rename": os}
    for name, owner in steps.items():
        patched.setattr(owner, name, dies(getattr(owner, name)))


@pytest.mark.parametrize("locks", [True, False])
def test_two_finishers_at_once_are_harmless(base, want, tmp_path, monkeypatch, locks):
    if not locks:
        monkeypatch.setattr("fcntl.flock", no_locks)
    for attempt in range(3):
        job = job_in(base, tmp_path / f"wide{attempt}")
        units = WorkUnits(job)
        run_worker(job, 0, 2)
        prepare(job)
        _leave_all_but_finishing(job, units)
        errors: list[BaseException] = []

        def work(worker: int, job: Job = job, errors: list[BaseException] = errors) -> None:
            try:
                assert run_worker(job, worker, 4)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        found = bytes_in(job.folder)
        if not locks:  # the one that came second may leave a draft of a small file
            found = {name: raw for name, raw in found.items() if not name.startswith(".mupscale.")}
        assert found == want


def _leave_all_but_finishing(job: Job, units: WorkUnits) -> None:
    """Do what is left of a job, without its finish."""
    done = read_journals(partial(job.folder), len(units))
    todo = [unit for unit in range(len(units)) if not done.units[unit]]
    with JournalWriter(FileSink(partial(job.folder), 0, 1)) as journal:
        create(job, {file.name for file in job.files})
        share = worker_module._Share(job, 0, 1, 1, None)
        share._do(iter(todo), journal, worker_module._count(units, todo, done, None)[0])


def test_another_job_for_the_same_output_is_refused_with_what_differs(base, tmp_path):
    job = job_in(base, tmp_path / "wide")
    run_worker(job, 0, 2)
    other = job_in(base, tmp_path / "wide", MODEL.noise(PLAN, seed=1))
    refusal(lambda: run_job(other), "job.entry_differs", where="about.noise.seed")
    third = job_in(base, tmp_path / "wide", block_bytes=4096)
    refusal(lambda: run_job(third), "job.entry_differs", where=["block_bytes", "2048", "4096"])
    run_job(job)
    refusal(lambda: run_job(other), "directory.not_empty", where=str(tmp_path / "wide"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    full = job_in(base, tmp_path / "full")
    refusal(lambda: run_job(full), "directory.not_empty", where=str(full.folder))
    (tmp_path / "empty").mkdir()
    run_job(job_in(base, tmp_path / "empty"))
    assert bytes_in(tmp_path / "empty") == bytes_in(tmp_path / "wide")


def copied(base: Path, path: Path) -> Path:
    path.mkdir()
    for file in base.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def test_a_base_that_changes_is_noticed(base, tmp_path):
    mine = copied(base, tmp_path / "base")
    job = job_in(mine, tmp_path / "wide")
    run_worker(job, 0, 2)
    file = mine / job.sources[0].name
    raw = file.read_bytes()
    file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    refusal(lambda: run_worker(job, 1, 2), "job.other_base", where=file.name)
    file.write_bytes(raw)
    refusal(lambda: run_worker(job, 1, 2), "job.base_stamp_changed", where=file.name)
    file.unlink()
    refusal(lambda: run_worker(job, 1, 2), "file.does_not_exist", where=file.name)
    mine = copied(base, tmp_path / "other")
    job = job_in(mine, tmp_path / "wide2")
    (mine / "tokenizer.json").write_text("[]")
    refusal(lambda: run_job(job), "job.carried_file_changed", where="tokenizer.json")


def test_a_full_or_closed_disk_is_said_with_the_figure(base, tmp_path, monkeypatch):
    job = job_in(base, tmp_path / "wide")
    real = os.statvfs

    class Full:
        f_bavail, f_frsize = 1000, 1

    monkeypatch.setattr(os, "statvfs", lambda path: Full())
    refusal(lambda: run_job(job), "disk.too_small", where=str(tmp_path))
    assert not partial(job.folder).exists(), "nothing was begun"
    monkeypatch.setattr(os, "statvfs", real)

    def full(*arguments: Any) -> int:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patched:
        patched.setattr(output_files, "write_all", full)
        refusal(lambda: run_job(job), "disk.is_full", where=str(tmp_path / "wide"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", full)
        other = job_in(base, tmp_path / "other")
        refusal(lambda: run_job(other), "disk.is_full", where=str(tmp_path / "other"))
    run_job(job)
    assert check_bytes(job) == []
    refusal(lambda: run_job(job, workers=0), "argument.below_one", where="threads")
    refusal(lambda: run_worker(job_in(base, tmp_path / "third"), 3, 3), "job.no_such_worker")


def test_a_failing_or_interrupted_thread_ends_them_all(base, tmp_path, monkeypatch, dying):
    job = job_in(base, tmp_path / "wide")
    dying[0] = 20
    with pytest.raises(KilledError):
        run_job(job, workers=4)
    assert_not_loadable(partial(job.folder))
    dying[0] = 10**6

    def interrupted(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    before = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        run_job(job, workers=2, report=interrupted)
    assert torch.get_num_threads() == before
    assert_not_loadable(partial(job.folder))
    run_job(job, workers=2)
    assert check_bytes(job) == []


def test_check_bytes_names_what_was_flipped(base, tmp_path):
    """Single bits, anywhere: in weights, headers, texts, carried files, provenance."""
    job = job_in(base, tmp_path / "wide", block_bytes=1 << 20)
    run_job(job)
    assert check_bytes(job) == []
    generator = torch.Generator().manual_seed(0)
    files = [file for file in sorted((tmp_path / "wide").iterdir()) for _ in range(4)]
    assert len(files) > 30
    for path in files:
        raw = bytearray(path.read_bytes())
        at = int(torch.randint(len(raw), (1,), generator=generator))
        bit = 1 << int(torch.randint(8, (1,), generator=generator))
        raw[at] ^= bit
        path.write_bytes(raw)
        named = path.name
        for move in job.moves:
            if move.target.file == path.name and move.target.offset <= at < move.target.end:
                named = move.name
        told = check_bytes(job)
        assert any(named in fault.where for fault in told), (path.name, at, told)
        assert check_alone(job.out) != [], "the directory's own record sees it as well"
        raw[at] ^= bit
        path.write_bytes(raw)
    assert check_bytes(job) == []


def test_check_bytes_sees_what_is_missing_longer_or_not_ours(base, tmp_path):
    job = job_in(base, tmp_path / "wide")
    run_job(job)
    first = tmp_path / "wide" / job.files[0].name
    raw = first.read_bytes()
    for wrong, code in ((raw + b"x", "job.other_file_size"), (raw[:-9], "file.cut_short")):
        first.write_bytes(wrong)
        assert code in {fault.code for fault in check_bytes(job)}
    first.unlink()
    assert "file.does_not_exist" in {fault.code for fault in check_bytes(job) if fault.where == first.name}
    first.write_bytes(raw)
    (tmp_path / "wide" / "adapter_model.bin").touch()
    assert [fault.where for fault in check_bytes(job)] == ["adapter_model.bin"]
    (tmp_path / "wide" / "adapter_model.bin").unlink()
    (tmp_path / "wide" / "notes.txt").touch()
    assert check_bytes(job) == [], "control: a note of the user's is no fault"
    other = job_in(base, tmp_path / "wide", MODEL.noise(PLAN, seed=1))
    assert any("lm_head" in fault.where for fault in check_bytes(other)), "control: another seed is seen"


def test_jobs_are_json_and_equal_after_reading(base, tmp_path):
    job = job_in(base, tmp_path / "wide")
    assert Job.from_json(job.to_json().encode()) == job
    for name, code in (("mupscale.json", "job.name_is_taken"), ("../x", "file.name_with_folders")):
        text = [Text(name, "")]
        call = partial_call(make_job, base, tmp_path / "w", job.files, job.moves, texts=text)
        refusal(call, code, where=name)
    for moves in ((*job.moves, job.moves[0]), job.moves[1:]):
        refusal(partial_call(make_job, base, tmp_path / "w", job.files, moves), "job.gap_or_overlap")


def test_digests_do_not_depend_on_blocks(monkeypatch, base, tmp_path):
    from mupscale.jobs import work_units as units_module

    monkeypatch.setattr(units_module, "DIGEST_BYTES", GRAIN)
    job = job_in(base, tmp_path / "wide")
    units = WorkUnits(job)
    parts = [
        unit for unit in (units[n] for n in range(units.blocks, len(units))) if isinstance(unit, Stretch)
    ]
    assert sum(part.bytes for part in parts) == sum(file.size for file in job.sources)
    run_worker(job, 0, 2)
    run_worker(job, 1, 2)
    assert check_bytes(job) == []


def test_progress_is_a_bar_on_a_terminal_and_nothing_elsewhere(monkeypatch):
    class Screen:
        def __init__(self, terminal: bool) -> None:
            self.terminal, self.text = terminal, ""

        def isatty(self) -> bool:
            return self.terminal

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            pass

    clock = [0.0]
    monkeypatch.setattr("mupscale.jobs.progress.monotonic", lambda: clock[0])
    screens: list[Any] = [Screen(True), Screen(False)]
    for screen in screens:
        clock[0] = 0.0
        progress = Progress(screen)
        for second in range(31):
            clock[0] = float(second)
            progress(second * 10**9, 60 * 10**9)
        progress.close()
    bar, nothing = (screen.text for screen in screens)
    assert bar.count("\r") > 20
    assert bar.count("\n") == 1
    assert "| 30.0 GB/60.0 GB [00:30<00:30, 1.0 GB/s]" in bar
    assert not nothing, "a file gets no progress"


def no_locks(*arguments: Any) -> None:
    raise OSError(95, "Operation not supported")


def test_finish_needs_no_lock(monkeypatch, base, tmp_path):
    """Where the filesystem has no locks, the steps are the same."""

    monkeypatch.setattr("fcntl.flock", no_locks)
    job = job_in(base, tmp_path / "wide")
    run_job(job)
    publish(job, WorkUnits(job), {}, {}, {})
    assert check_bytes(job) == []


def test_fingerprints_see_every_word_and_pairs_of_signs(tmp_path):
    """A base in which two signs flip or one word changes is another base."""
    generator = torch.Generator().manual_seed(0)
    raw = bytearray(bytes(torch.randint(256, (3_000_001,), generator=generator).tolist()))

    def fingerprint(content: bytes) -> str:
        (tmp_path / "f").write_bytes(content)
        with Reader(tmp_path) as reader:
            return as_text(total(0, stretch_sums(reader, "f", Stretch(0, 0, 0, len(content)))))

    first = fingerprint(bytes(raw))
    assert fingerprint(bytes(raw)) == first
    seen = {first}
    ends = ((2_999_999,), (1_048_576,), (1_048_579, 1_048_583), (3_000_000,))
    for places in ((7, 15), (3, 11), (7, 11), *ends):
        changed = bytearray(raw)
        for at in places:
            changed[at] ^= 0x80
        seen.add(fingerprint(bytes(changed)))
    assert len(seen) == 8


def test_a_block_that_was_damaged_after_it_was_written_is_made_again(
    base, want, tmp_path, dying, monkeypatch
):
    for checked in (True, False):
        job = job_in(base, tmp_path / f"wide{checked}")
        dying[0] = 20
        with pytest.raises(KilledError):
            run_job(job)
        dying[0] = 10**9
        block = WorkUnits(job)[0]
        assert isinstance(block, Block)
        path = partial(job.folder) / f"{block.move.target.file}.partial"
        raw = bytearray(path.read_bytes())
        raw[block.move.target.offset + 5] ^= 1
        path.write_bytes(raw)
        with monkeypatch.context() as patched:
            if not checked:
                patched.setattr(publish_module, "_right_files", lambda *_: {})
            run_job(job)
        same = bytes_in(job.folder) == want
        assert same == checked, "control: without the second look it is published"
        assert (check_bytes(job) == []) == checked
        assert (check_alone(job.out) == []) == checked


@pytest.mark.parametrize("trusted", [False, True])
def test_a_base_that_changes_with_its_time_put_back_is_noticed(base, tmp_path, monkeypatch, trusted):
    """By one more read, and where two blocks have used the same 64 KiB even without it."""
    monkeypatch.setattr("mupscale.jobs.digests._END", 64)  # these files are small; large ones have a middle
    own = copied(base, tmp_path / "own")
    job = replace(job_in(own, tmp_path / "wide"), trust_base=trusted)
    write, left = OutputFiles.write, [40]

    def changing(self: Any, *arguments: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            change_middle(own)
        write(self, *arguments)

    monkeypatch.setattr(OutputFiles, "write", changing)
    refusal(lambda: run_job(job), "job.base_bytes_changed")
    assert not job.folder.exists()


def test_a_trusted_base_is_read_once_and_that_is_recorded(base, tmp_path):
    jobs = [replace(job_in(base, tmp_path / f"wide{t}"), trust_base=t) for t in (False, True)]
    for job in jobs:
        run_job(job)
        assert check_bytes(job) == []
    twice, once = (json.loads((job.folder / "mupscale.json").read_text())["base"] for job in jobs)
    assert (twice["read"], once["read"]) == ("twice", "once")
    assert twice["files"] == once["files"], "the digests are of the bytes that were used"


def test_an_output_inside_its_base_is_refused(base, tmp_path):
    own = copied(base, tmp_path / "own")
    (tmp_path / "link").symlink_to(own)
    for out in (own / "wide", tmp_path / "link" / "wide", own / "a" / ".." / "wide"):
        refusal(partial_call(job_in, own, out), "job.output_inside_base", where=str(own))
    assert job_in(own, tmp_path / "ownwide"), "control: next to it"


def change_middle(folder: Path) -> None:
    """Change every file of weights in its first half, and put its time back."""
    for path in folder.glob("*.safetensors"):
        before, raw = path.stat(), bytearray(path.read_bytes())
        raw[len(raw) // 3] ^= 16
        with open(path, "r+b") as file:
            file.write(raw)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_copied_output_is_checked_without_its_base(base, tmp_path):
    job = job_in(base, tmp_path / "wide")
    run_job(job)
    copy = copied(job.folder, tmp_path / "copy")
    assert check_alone(copy, threads=2) == []
    for path in sorted(copy.iterdir()):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
        assert check_alone(copy), path.name
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    assert check_alone(copy) == []


def test_compiled_sums_are_those_of_the_portable_code(monkeypatch):
    pytest.importorskip("numba")
    raw = bytes(torch.randint(256, (300_007,), generator=torch.Generator().manual_seed(1)).tolist())
    found = {}
    for kernel in ("portable", "compiled"):
        monkeypatch.setenv("MUPSCALE_KERNEL", kernel)
        found[kernel] = [
            fingerprint(raw[at:], offset) for at in (0, 1, 8) for offset in (0, 5, GRAIN, 3 * GRAIN - 8)
        ]
    assert found["portable"] == found["compiled"]
    assert len(set(found["portable"])) == 12


def test_a_worker_that_died_while_it_wrote_the_job_leaves_nothing_in_the_way(base, tmp_path, monkeypatch):
    job = job_in(base, tmp_path / "wide")
    for step in range(3):
        with monkeypatch.context() as patched, suppress(KilledError):
            die_after(step, patched)
            patched.setattr(os, "link", os.replace)
            run_job(job)
        assert not job.folder.exists()
    run_job(job)
    assert check_bytes(job) == []


def gpt2(width: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {
        "n_embd": width,
        "n_head": width // 8,
        "n_layer": 1,
        "vocab_size": 97,
        "n_positions": 64,
    }
    drops: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0))


@pytest.mark.parametrize("by", ["units", "copies", "means"])
def test_new_units_and_split_entries_are_those_that_a_live_model_saves(tmp_path, by):
    """By one worker, by two, by three, and by a process that is killed in the middle and goes on."""
    pytest.importorskip("transformers")
    from harness.sharded_bases import kill_in_the_middle
    from harness.sharded_cases import SIZES, UNITS, llama_model, words_loss

    torch.manual_seed(0)
    if by == "means":
        live = gpt2(32)
        wide = mu.upscale(live, lambda: gpt2(48), mu.NewUnits(), loss=words_loss, seed=5)
        assert wide.plan is not None
        assert wide.plan.carries_mean
        plan = wide.plan
    else:
        live, sizes = llama_model(SIZES), UNITS if by == "units" else {**SIZES, "intermediate_size": 100}
        plan = mu.infer_plan(live, lambda: llama_model(sizes), loss=words_loss, by=by)
        wide = mu.upscale(live, lambda: llama_model(sizes), mu.NewUnits(), plan=plan, seed=5, prove=False)
    for model, name in ((live, "base"), (wide.model, "want")):
        model.save_pretrained(tmp_path / name)  # type: ignore[operator]
    assert wide.provenance["noise"]["split" if by == "copies" else "copied"]
    want = (tmp_path / "want" / "model.safetensors").read_bytes()
    stored = replace(plan, tensors={n: t for n, t in plan.tensors.items() if t.kind == "parameter"})

    def job(name: str, seed: int = 5) -> Job:
        noise = replace(restore_noise(wide.provenance["noise"], plan), seed=seed)
        made = job_for(stored, read_directory(tmp_path / "base"), tmp_path / name, noise, block_bytes=1024)
        assert Job.from_json(made.to_json().encode()) == made
        return made

    for name, workers in (("one", 1), ("two", 2), ("three", 3), ("resumed", 1)):
        if name == "resumed":
            kill_in_the_middle(job(name))
        for worker in range(workers):
            run_worker(job(name), worker, workers)
        assert (tmp_path / name / "model.safetensors").read_bytes() == want, name
    assert check_bytes(job("one")) == []
    run_job(job("other", seed=6))
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != want, "control: another seed"
