"""The fast kernel gives the bits of its slow twin, on any slice; the way back gives the base."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mupscale as mu
from harness.closeness import assert_bitwise
from harness.oracle import expand_slowly, mean_slowly
from harness.profiles import examples
from harness.refusals import refusal
from harness.strategies import axes, making
from mupscale.tensors import expand as kernel
from mupscale.tensors.collapse import collapse
from mupscale.tensors.expand import expand, expand_
from mupscale.tensors.making import Making
from mupscale.tensors.parts import Rectangle

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
INTEGERS = [torch.int64, torch.int32, torch.uint8, torch.bool]
SCALES = ["1", "1/2", "1/3", "2^(-1/2)", "3/5", "4"]
LONGEST = {0: 1, 1: 60, 2: 24, 3: 9, 4: 6}


@st.composite
def shapes(draw: Any) -> list[mu.rules.Axis]:
    dims = draw(st.integers(0, 4))
    small: Any = {"size": 3 if dims < 3 else 2, "segments": 3 if dims < 3 else 1, "longest": LONGEST[dims]}
    return [draw(axes(**small)) for _ in range(dims)]


def filled(growth: list[mu.rules.Axis], dtype: torch.dtype, seed: int, strided: bool = False) -> torch.Tensor:
    """A base tensor of random entries; with `strided`, a view whose neighbours lie apart."""
    sizes = [axis.base for axis in growth]
    wide = [2 * n + 1 for n in sizes] if strided else sizes
    values = 3 * torch.randn(wide, generator=torch.Generator().manual_seed(seed))
    values = values.abs().to(dtype) if dtype in INTEGERS else values.to(dtype)
    if not strided:
        return values
    view = values[tuple(slice(1, None, 2) for _ in sizes)]
    assert list(view.shape) == sizes
    return view


@st.composite
def rectangles(draw: Any, growth: list[mu.rules.Axis]) -> list[tuple[int, int]]:
    ends = [sorted(draw(st.tuples(st.integers(0, a.wide), st.integers(0, a.wide)))) for a in growth]
    return [(low, high) for low, high in ends]


@examples(250)
@given(st.data())
def test_any_slice_of_the_fast_kernel_has_the_bits_of_the_slow_twin(cases):
    growth = cases.draw(shapes())
    dtype = cases.draw(st.sampled_from(FLOATS + INTEGERS))
    scale = mu.rules.Scale.of("1" if dtype in INTEGERS else cases.draw(st.sampled_from(SCALES)))
    base = filled(growth, dtype, cases.draw(st.integers(0, 99)), strided=cases.draw(st.booleans()))
    want = expand_slowly(base, growth, scale)
    assert_bitwise(expand(base, making(growth, scale)), want, "the whole tensor")

    where = cases.draw(rectangles(growth))
    covers = [axis.cover(*ends) for axis, ends in zip(growth, where, strict=True)]
    margins = [cases.draw(st.tuples(st.integers(0, 2), st.integers(0, 2))) for _ in growth]
    reads = [
        (max(low - m, 0), min(high + n, axis.base))
        for (low, high), (m, n), axis in zip(covers, margins, growth, strict=True)
    ]
    piece = base[tuple(slice(*ends) for ends in reads)]
    out = torch.empty([high - low for low, high in where], dtype=dtype)
    starts: Any = {"out_start": [low for low, _ in where], "base_start": [low for low, _ in reads]}
    assert expand_(out, piece, making(growth, scale), **starts) is out
    assert_bitwise(out, want[tuple(slice(*ends) for ends in where)], "a slice")


@examples(60)
@given(st.data())
def test_any_slice_of_means_has_the_bits_of_the_slow_twin_and_of_parts(cases):
    """From the whole base, and from the range that `Making.reads` covers; of one row more or less there are other means."""
    dim, size = cases.draw(st.integers(0, 1)), cases.draw(st.sampled_from([1, 2, 7, 64, 65, 131]))
    growth = [mu.rules.Axis.parse(cases.draw(st.sampled_from(["3", "in: 2x2", "2+2", "1x2 * 2+1"])))]
    growth.insert(dim, mu.rules.Axis.parse(f"out: {size}+{cases.draw(st.integers(1, 9))}"))
    dtype, scale = cases.draw(st.sampled_from(FLOATS)), mu.rules.Scale.of(cases.draw(st.sampled_from(SCALES)))
    base = filled(growth, dtype, cases.draw(st.integers(0, 99)), strided=cases.draw(st.booleans()))
    made = Making(tuple(growth), scale, mean=(dim,))
    want = mean_slowly(base, growth, dim, scale)
    assert_bitwise(expand(base, made), want)
    (top, bottom), (left, right) = cases.draw(rectangles(growth))
    part = Rectangle((top, left), (bottom - top, right - left))
    read = made.reads.cover(part)
    slice_ = read.within(base, (0, 0))
    found = expand_(base.new_empty(part.shape), slice_, made, out_start=part.start, base_start=read.start)
    assert_bitwise(found, part.within(want, (0, 0)).contiguous())
    if size > 2 and part.numel and right == growth[1].wide and bottom == growth[0].wide:
        short = slice_.narrow(dim, 1, size - 1)
        begin = [at + (d == dim) for d, at in enumerate(read.start)]
        refusal(
            lambda: expand_(base.new_empty(part.shape), short, made, out_start=part.start, base_start=begin),
            "plan.mean_in_parts",
        )


def test_the_slow_twin_is_not_blind():
    """Control: another scale, another axis or another slice is seen."""
    growth = [mu.rules.Axis.parse("out: 2x2 * 3"), mu.rules.Axis.parse("in: 4x3+1")]
    base = filled(growth, torch.float32, 0)
    found = expand(base, making(growth, "1/3"))
    assert torch.equal(found, expand_slowly(base, growth, mu.rules.Scale.of("1/3")))
    for axis, scale in (("out: 2x2 * 3", "1/2"), ("out: 6x2", "1/3"), ("out: 1x2 * 6", "1/3")):
        other = expand_slowly(base, [mu.rules.Axis.parse(axis), growth[1]], mu.rules.Scale.of(scale))
        assert not torch.equal(found, other)


@examples(40)
@given(st.data())
def test_the_result_may_be_any_view(cases):
    growth = cases.draw(shapes())
    base = filled(growth, torch.float32, 0)
    room = torch.full([2 * a.wide + 1 for a in growth], -7.0)
    view = room[tuple(slice(1, None, 2) for _ in growth)]
    expand_(view, base, making(growth, "1/3"))
    assert_bitwise(view.contiguous(), expand_slowly(base, growth, mu.rules.Scale.of("1/3")))
    assert int((room == -7).sum()) == room.numel() - view.numel(), "nothing next to it is touched"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "layout", ["out: 24x2", "out: 1x2 * 24", "out: 3x2 * 8", "out: 4x2+3 * 6", "out: 12x2 | 12x2+1"]
)
def test_block_size_and_threads_do_not_matter(monkeypatch, layout, dtype):
    growth = [mu.rules.Axis.parse(layout), mu.rules.Axis.parse("in: 5x3"), mu.rules.Axis.fixed(2)]
    base, scale = filled(growth, dtype, 1), mu.rules.Scale.of("1/3")
    want = expand_slowly(base, growth, scale)
    before = torch.get_num_threads()
    try:
        for threads, block in product((1, 2), (1, 100, 4096, 1 << 30)):
            torch.set_num_threads(threads)
            monkeypatch.setattr(kernel, "_BLOCK", block)
            assert_bitwise(expand(base, making(growth, scale)), want, f"{threads} threads, blocks of {block}")
    finally:
        torch.set_num_threads(before)


@examples(120)
@given(st.data())
def test_collapse_undoes_expand_bit_for_bit_when_s_is_a_power_of_two(cases):
    growth = cases.draw(shapes())
    dtype = cases.draw(st.sampled_from(FLOATS))
    scale = mu.rules.Scale.of(cases.draw(st.sampled_from(["1", "1/2", "4", "1/8"])))
    base = filled(growth, dtype, cases.draw(st.integers(0, 99)))
    assert_bitwise(collapse(expand(base, making(growth, scale)), making(growth, scale)), base)


@examples(80)
@given(st.data())
def test_collapse_is_the_average_of_the_copies(cases):
    """Also when the copies have moved apart, and wherever pads lie between them."""
    growth = cases.draw(shapes())
    wide = torch.randn(
        [a.wide for a in growth], generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    total, count = (torch.zeros([a.base for a in growth], dtype=torch.float64) for _ in range(2))
    for index in product(*(range(a.wide) for a in growth)):
        source = tuple(axis.source(i) for axis, i in zip(growth, index, strict=True))
        if None not in source:
            total[source] += 2 * wide[index]
            count[source] += 1
    found = collapse(wide, making(growth, "1/2"))
    torch.testing.assert_close(found, total / count, rtol=1e-12, atol=1e-12)


def test_a_gain_used_as_one_plus_w_is_scaled_around_minus_one():
    growth = [mu.rules.Axis.parse("out: 3x2")]
    gain = torch.tensor([0.5, -1.0, 0.0], dtype=torch.float64)
    shifted = making(growth, "1/2", shift=1)
    found = expand(gain, shifted)
    assert_bitwise(found + 1, ((gain + 1) / 2).repeat_interleave(2))
    assert_bitwise(collapse(found, shifted), gain)


def test_what_the_kernel_cannot_do_is_refused():
    growth = [mu.rules.Axis.parse("out: 4x2"), mu.rules.Axis.fixed(3)]
    copied = making(growth)
    base = torch.ones(4, 3)
    whole = torch.empty(8, 3)
    refusal(
        lambda: expand_(torch.empty(4, 3), base[:1], copied, out_start=[2, 0], base_start=[1, 0]),
        "axis.range_outside_base",
        where=["2..6", "1..3", "1..2"],
    )
    refusal(
        lambda: expand_(whole, base[1:], copied, base_start=[1, 0]),
        "axis.range_outside_base",
        where=["0..4", "1..4"],
    )
    refusal(lambda: expand_(whole, base, copied, out_start=[1, 0]), "axis.range_outside_base", where="1..9")
    refusal(lambda: expand_(whole, base[0], copied), "axis.not_one_per_dimension", where="(3,)")
    refusal(
        lambda: expand(base.long(), making(growth, "1/2")),
        "scale.not_a_float_tensor",
        where=["torch.int64", "1/2"],
    )
    half = [mu.rules.Axis.parse("out: 4x5/2"), mu.rules.Axis.fixed(3)]
    refusal(lambda: expand(base, making(half)), "axis.not_whole_copies", where=["10", "12"])
    assert torch.equal(expand_(whole, base, copied), torch.ones(8, 3)), "control: what fits is done"
