"""A making says all of it: sources are joined as the slow twin joins them, fillings need no source, files agree."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import mupscale as mu
from harness.closeness import assert_bitwise
from harness.oracle import expand_slowly, join_slowly
from harness.profiles import examples
from harness.refusals import refusal
from harness.strategies import axes, making
from mupscale.checkpoints.shards import weight_moves
from mupscale.files.directory import read_directory
from mupscale.jobs.digests import make_job
from mupscale.jobs.job import Job, Move
from mupscale.jobs.worker import run_job
from mupscale.tensors.entry_sources import copies_of
from mupscale.tensors.expand import expand, expand_
from mupscale.tensors.making import Join, Making
from mupscale.tensors.noise import TensorNoise
from mupscale.tensors.philox import Stream


@examples(60)
@given(st.data())
def test_sources_are_joined_as_the_slow_twin_joins_them(cases: Any):
    stacked = cases.draw(st.booleans())
    shape = cases.draw(st.lists(st.integers(0, 3), min_size=0 if stacked else 1, max_size=3))
    dim = cases.draw(st.integers(0, len(shape) - (not stacked)))
    sources = []
    for number in range(cases.draw(st.integers(1, 4))):
        own = list(shape)
        if not stacked:
            own[dim] = cases.draw(st.integers(0, 3))
        sources.append(torch.randn(own, generator=torch.Generator().manual_seed(number)))
    want = join_slowly(sources, dim, stacked)
    fixed = [mu.rules.Axis.fixed(n) for n in want.shape]
    assert_bitwise(making(fixed, join=Join(dim, stacked)).source(sources), want)


def test_the_slow_twin_of_joining_is_not_blind():
    """Control: another order, another dimension and the other way of joining are seen."""
    one, two = torch.arange(4.0).view(2, 2), torch.arange(4.0, 8.0).view(2, 2)
    found = making([mu.rules.Axis.fixed(4), mu.rules.Axis.fixed(2)], join=Join(0)).source([one, two])
    assert torch.equal(found, join_slowly([one, two], 0, False))
    assert not torch.equal(found, join_slowly([two, one], 0, False))
    assert found.shape != join_slowly([one, two], 1, False).shape
    assert found.shape != join_slowly([one, two], 0, True).shape


@examples(60)
@given(st.data())
def test_copies_are_the_wide_indices_with_one_source(cases: Any):
    axis = cases.draw(axes(longest=40, segments=3))
    rows: dict[int, list[int]] = {}
    for index in range(axis.wide):
        if (source := axis.source(index)) is not None:
            rows.setdefault(source, []).append(index)
    assert copies_of(axis).tolist() == [rows[source] for source in sorted(rows)]


@pytest.mark.parametrize("stacked", [False, True], ids=["concatenated", "stacked"])
def test_a_move_joins_its_sources_in_files_as_in_memory(tmp_path: Path, stacked: bool):
    join, count = Join(1, stacked), 3
    shape = (20, 15) if stacked else (20, 5, 15)
    sources = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(count)]
    middle = count if stacked else 5 * count
    grown = (mu.rules.Axis.parse("out: 20x2"), mu.rules.Axis.fixed(middle), mu.rules.Axis.parse("in: 15x2"))
    made = Making(grown, mu.rules.Scale.of("1/3"), join=join)
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "llama"}')
    save_file({f"w{i}": source for i, source in enumerate(sources)}, base / "model.safetensors")
    names = tuple(f"w{i}" for i in range(count))
    entry = mu.plans.TensorPlan(("w0",), tuple(mu.rules.Axis.fixed(n) for n in made.wide_shape))
    directory = read_directory(base)
    places = tuple(directory.tensors[name] for name in names)
    # The layout of the output file comes from a directory that holds one tensor of the wide shape.
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "config.json").write_text('{"model_type": "llama"}')
    save_file({"w0": torch.zeros(made.wide_shape)}, whole / "model.safetensors")
    files, moves, _ = weight_moves(mu.Plan({"w0": entry}), read_directory(whole))
    move = Move("w0", made, places, moves[0].target)
    job = make_job(base, tmp_path / "wide", files, [move], block_bytes=1024)
    assert Job.from_json(job.to_json().encode()).moves == (move,)
    run_job(job)
    want = expand_slowly(join_slowly(sources, 1, stacked), grown, made.scale)
    assert_bitwise(load_file(job.folder / "model.safetensors")["w0"], want)
    assert_bitwise(expand(made.source(sources), made), want)
    other = Move("w0", Making(grown, made.scale, join=Join(1, not stacked)), places, moves[0].target)
    refusal(
        lambda: run_job(make_job(base, tmp_path / "other", files, [other])), "job.sources_cannot_be_joined"
    )


def test_a_tensor_without_a_source_is_filled():
    noise = TensorNoise(Stream(0, "w"), 0.1)
    grown = (mu.rules.Axis.parse("out: 4x2"),)
    for fill, value in (("zero", 0.0), ("one", 1.0)):
        new = mu.plans.TensorPlan((), grown, fill=fill).making(noise)  # type: ignore[arg-type]
        woken = expand_(torch.empty(3), None, new, out_start=[2])
        assert_bitwise(woken, torch.full((3,), value) + noise.slice(grown, [2], [3], woken))
        asleep = mu.plans.TensorPlan((), grown, fill=fill).making()  # type: ignore[arg-type]
        assert_bitwise(expand_(torch.empty(3), None, asleep, out_start=[2]), torch.full((3,), value))
    own = mu.plans.TensorPlan(("w",), grown, kind="buffer", fill="own").making()
    refusal(lambda: expand(torch.ones(4), own), "plan.fill_without_number")
    refusal(lambda: expand_(torch.empty(8), None, Making(grown)), "plan.fill_without_number")
    refusal(lambda: Making(grown).source([torch.ones(4)] * 2), "plan.sources_without_join")


def test_parameters_are_scaled_and_buffers_too_if_declared():
    grown = (mu.rules.Axis.parse("out: 4x2"), mu.rules.Axis.parse("in: 3x2"))
    noise = TensorNoise(Stream(0, "w"), 0.1)
    parameter = mu.plans.TensorPlan(("w",), grown, shift=1)
    assert parameter.making(noise) == Making(grown, mu.rules.Scale.of("1/2"), 1, noise)
    assert parameter.gradient_making() == Making(grown, parameter.change.r)
    buffer = mu.plans.TensorPlan(("a", "b"), grown, kind="buffer", cat=1, fold=mu.rules.Scale.of("1/2"))
    assert buffer.making() == Making(grown, buffer.change.s, join=Join(1))
