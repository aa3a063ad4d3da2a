"""Noise is a pure function of (seed, name, element): its bits, its statistics, and every way of cutting it."""

import hashlib
import math
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mupscale as mu
from harness.closeness import assert_bitwise, assert_close
from harness.oracle import copied, expand_slowly, like_slowly, wake_slowly
from harness.profiles import examples
from harness.refusals import refusal
from harness.strategies import axes, making
from mupscale.models.float64 import lifted_casts
from mupscale.rules.axes import Axis
from mupscale.tensors import compiled
from mupscale.tensors import expand as expanding
from mupscale.tensors import noise as noises
from mupscale.tensors.entry_sources import copies_of, models_of
from mupscale.tensors.expand import expand, expand_
from mupscale.tensors.making import Making
from mupscale.tensors.noise import TensorNoise, Waking, rectangle
from mupscale.tensors.parts import Rectangle
from mupscale.tensors.philox import Stream, normals, philox, quantiles, uniform_bits, uniforms

CPU = torch.device("cpu")
COUNT = 1 << 20
TABLE = "2097c6182f48fccc991def377c953bb07f1889112d2df09adf4929bc0d455410"
ONES = 0xFFFFFFFF
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.fixture(autouse=True, scope="module", params=["portable", "compiled"])
def kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every law of noise holds for the portable code and for the compiled kernel."""
    if request.param == "compiled" and find_spec("numba") is None:
        pytest.skip("numba is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUPSCALE_KERNEL", request.param)
        yield


def line(seed: int, name: str, count: int = COUNT, start: int = 0) -> Tensor:
    return normals(Stream(seed, name), torch.tensor([start]), count)[0].double()


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """Ten rounds in whole numbers of any size: the slow, obvious twin."""
    for _ in range(10):
        a, b = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [(b >> 32) ^ counter[1] ^ key[0], b & ONES, (a >> 32) ^ counter[3] ^ key[1], a & ONES]
        key = [(key[0] + 0x9E3779B9) & ONES, (key[1] + 0xBB67AE85) & ONES]
    return counter


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_gives_the_known_answers_of_random123(counter: Any, key: Any, answer: Any):
    words = philox(tuple(torch.tensor([c]) for c in counter), key)  # type: ignore[arg-type]
    assert tuple(int(word) for word in words) == answer
    assert tuple(plain_philox(list(counter), list(key))) == answer, "the twin"


@pytest.mark.parametrize("index", [0, 5, 1 << 33, (1 << 34) + 3, (1 << 40) + 2])
def test_an_element_far_out_is_counted_in_64_bits(index: int):
    stream = Stream(3, "far")
    key0, key1, high0, high1 = stream.words
    block = index >> 2
    want = plain_philox([block & ONES, block >> 32, high0, high1], [key0, key1])[index % 4]
    assert int(uniform_bits(stream, torch.tensor([index]), 1)) == want


def test_the_quantile_table_has_the_same_bits_on_every_platform():
    assert hashlib.sha256(quantiles().numpy().tobytes()).hexdigest() == TABLE
    assert_close(quantiles().double().square().mean(), torch.tensor(0.5, dtype=torch.float64), 1e-6)


def assert_normal(z: Tensor) -> None:
    """Mean, variance, kurtosis and tails within five standard errors."""
    n = z.numel()
    assert abs(float(z.mean())) <= 5 / math.sqrt(n), "mean"
    assert abs(float(z.square().mean()) - 1) <= 5 * math.sqrt(2 / n), "variance"
    assert abs(float(z.pow(3).mean())) <= 5 * math.sqrt(15 / n), "skewness"
    assert abs(float(z.pow(4).mean()) - 3) <= 5 * math.sqrt(96 / n), "kurtosis"
    for bound in (1, 2, 3, 4):
        share = math.erfc(bound / math.sqrt(2))
        found = float((z.abs() > bound).double().mean())
        assert abs(found - share) <= 5 * math.sqrt(share / n), f"P(|z| > {bound})"


def test_a_million_numbers_are_standard_normal_and_a_uniform_is_not():
    assert_normal(line(0, "blocks.0.weight"))
    flat = uniforms(Stream(0, "w"), torch.tensor([0]), COUNT)[0].double()
    assert abs(float(flat.mean()) - 0.5) <= 5 / math.sqrt(12 * COUNT)
    assert float(flat.min()) > 0
    assert float(flat.max()) < 1
    with pytest.raises(AssertionError, match="kurtosis"):
        assert_normal((flat * 2 - 1) * math.sqrt(3))


def correlation(a: Tensor, b: Tensor) -> float:
    """In standard errors."""
    assert a.numel() == b.numel()
    return abs(float((a * b).mean())) * math.sqrt(a.numel())


def test_tensors_seeds_and_neighbours_are_independent():
    z = line(0, "a.weight")
    others = {
        "tensor": line(0, "b.weight"),
        "one letter": line(0, "a.weighs"),
        "seed": line(1, "a.weight"),
        "a seed that differs above 32 bits": line(1 << 32, "a.weight"),
        "a negative seed": line(-1, "a.weight"),
    }
    for what, other in others.items():
        assert correlation(z, other) <= 5, what
    for lag in (1, 2, 3, 4, 5, 8, 64, 4096):
        assert correlation(z[:-lag], z[lag:]) <= 5, f"neighbours {lag} apart"
        assert correlation(z[:-lag].square() - 1, z[lag:].square() - 1) <= 10, f"sizes {lag} apart"
    assert correlation(z, z + line(1, "a.weight") * 100) > 5, "control: one hundredth is seen"


@st.composite
def rectangles(draw: Any) -> tuple[list[int], list[int], list[int]]:
    """A tensor of up to four dimensions and a rectangle of it."""
    whole = draw(st.lists(st.integers(1, 9), min_size=0, max_size=4))
    start = [draw(st.integers(0, n - 1)) for n in whole]
    shape = [draw(st.integers(0, n - at)) for n, at in zip(whole, start, strict=True)]
    return whole, start, shape


def cut(tensor: Tensor, start: list[int], shape: list[int]) -> Tensor:
    for dim, (at, size) in enumerate(zip(start, shape, strict=True)):
        tensor = tensor.narrow(dim, at, size)
    return tensor


@examples(150)
@given(rectangles())
def test_any_rectangle_of_any_tensor_is_cut_from_the_same_numbers(drawn: Any):
    whole, start, shape = drawn
    stream = Stream(7, "w")
    full = rectangle(stream, whole, [0] * len(whole), whole, CPU)
    assert_bitwise(full.flatten(), normals(stream, torch.tensor([0]), full.numel())[0])
    assert_bitwise(rectangle(stream, whole, start, shape, CPU), cut(full, start, shape))


@examples(60)
@given(st.data())
def test_a_noisy_slice_is_the_slice_of_the_noisy_whole(data: Any):
    grown = [data.draw(axes(longest=14, segments=2)) for _ in range(data.draw(st.integers(1, 3)))]
    base = torch.randn([a.base for a in grown], generator=torch.Generator().manual_seed(0))
    pairable = [None, *(d for d, a in enumerate(grown) if a.k > 1)]
    paired = data.draw(st.sampled_from(pairable))
    many = data.draw(st.booleans())
    std = tuple(0.1 + 0.01 * i for i in range(grown[0].wide)) if many else 0.1
    added = TensorNoise(Stream(1, "w"), std, paired)
    whole = expand(base, making(grown, "1/3", noise=added))
    start = [data.draw(st.integers(0, a.wide - 1)) for a in grown]
    shape = [data.draw(st.integers(1, a.wide - at)) for a, at in zip(grown, start, strict=True)]
    part = expand_(torch.empty(shape), base, making(grown, "1/3", noise=added), out_start=start)
    assert_bitwise(part, cut(whole, start, shape).contiguous())


MATRIX = [mu.rules.Axis.parse("out: 5x3+1"), mu.rules.Axis.parse("in: 4x3 * 3")]
NOISE = TensorNoise(Stream(2, "m"), 0.3)


def weight(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(5, 12, generator=torch.Generator().manual_seed(5)).to(dtype)


def test_the_default_dtype_changes_no_bit():
    """Numbers, sums and the loading of the kernel itself under float64 as the default."""
    noise, whole = TensorNoise(Stream(0, "w"), 0.3), [mu.rules.Axis.fixed(5), mu.rules.Axis.fixed(9)]
    want = noise.add_(torch.ones(5, 9), whole, [0, 0])
    torch.set_default_dtype(torch.float64)
    try:
        compiled.load_kernel.cache_clear()
        found = noise.add_(torch.ones(5, 9, dtype=torch.float32), whole, [0, 0])
        drawn = rectangle(noise.stream, (5, 9), (0, 0), (5, 9), torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert_bitwise(found, want)
    assert drawn.dtype == torch.float32


def test_rows_may_be_filled_in_any_order():
    whole = expand(weight(), making(MATRIX, "1/3", noise=NOISE))
    out = torch.empty_like(whole)
    for row in torch.randperm(16, generator=torch.Generator().manual_seed(0)).tolist():
        expand_(out[row : row + 1], weight(), making(MATRIX, "1/3", noise=NOISE), out_start=[row, 0])
    assert_bitwise(out, whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_storage_rounds_the_sum_of_weight_and_noise_once(dtype: torch.dtype):
    base = weight(dtype)
    found = expand(base, making(MATRIX, "1/3", noise=NOISE))
    z = rectangle(NOISE.stream, (16, 36), (0, 0), (16, 36), CPU)
    exact = copied(base.float(), MATRIX) / torch.tensor(3.0)
    assert_bitwise(found, (exact + z * 0.3).to(dtype))
    if dtype != torch.float32:
        twice = exact.to(dtype) + (z * 0.3).to(dtype)
        assert not torch.equal(found, twice), "control: rounded on the way"


def test_float64_gets_the_same_numbers_times_a_float64_size():
    base = weight(torch.float64)
    found = expand(base, making(MATRIX, "1/3", noise=NOISE))
    z = rectangle(NOISE.stream, (16, 36), (0, 0), (16, 36), CPU).double()
    assert_bitwise(found, copied(base, MATRIX) / 3 + z * 0.3)


def test_noise_is_added_after_the_division_and_the_papers_code_divides_it_too():
    found = expand(weight(torch.float64), making(MATRIX, "1/3", noise=NOISE))
    exact = expand(weight(torch.float64), making(MATRIX, "1/3"))
    size = float((found - exact).std())
    assert abs(size / 0.3 - 1) <= 5 / math.sqrt(2 * found.numel())
    divided = (copied(weight(torch.float64), MATRIX) + (found - exact)) / 3 - exact
    assert abs(float(divided.std()) / 0.3 - 1) > 0.5, "control: noise that is divided by k as well"


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 16])
@pytest.mark.parametrize("paired", [None, 1])
def test_threads_and_block_sizes_change_no_bit(block: int, paired: int | None, monkeypatch: Any):
    added = TensorNoise(Stream(2, "m"), 0.3, paired)
    want = expand(weight(), making(MATRIX, "1/3", noise=added))
    monkeypatch.setattr(noises, "_BLOCK", block)
    monkeypatch.setattr(expanding, "_BLOCK", 4 * block)
    monkeypatch.setattr(expanding, "_NOISY_BLOCK", 4 * block)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert_bitwise(expand(weight(), making(MATRIX, "1/3", noise=added)), want, f"{count} threads")
    finally:
        torch.set_num_threads(threads)
    assert not torch.equal(want, expand(weight(), making(MATRIX, "1/3"))), "control: there is noise"


def test_threads_change_no_bit_of_a_tensor_large_enough_to_be_shared_among_them():
    grown = [mu.rules.Axis.parse("out: 300x2"), mu.rules.Axis.parse("in: 200x3")]
    base = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(
                expand(base, making(grown, "1/3", noise=TensorNoise(Stream(0, "big"), 0.1, paired=1)))
            )
    finally:
        torch.set_num_threads(threads)
    assert_bitwise(found[0], found[1])


PAIRED = {
    "k = 2": ("out: 40x2", "in: 30x2"),
    "k = 3": ("out: 40x3", "in: 30x3"),
    "pads": ("out: 40x2+5", "in: 30x3+7"),
    "blocks": ("out: 40x2", "in: 10x2 * 4"),
    "two factors": ("out: 40x2", "in: 5x2 * 6x3"),
    "segments": ("out: 40", "in: 10x3 * 2 | 20x3"),
}


@pytest.mark.parametrize("kind", PAIRED)
def test_paired_noise_sums_to_zero_over_copies_and_keeps_its_variance(kind: str):
    grown = [mu.rules.Axis.parse(text) for text in PAIRED[kind]]
    shape = [axis.wide for axis in grown]
    like = torch.empty(0, dtype=torch.float64)
    z = TensorNoise(Stream(4, "p"), 1.0, paired=1).slice(grown, [0, 0], shape, like)
    sources = [grown[1].source(i) for i in range(grown[1].wide)]
    for unit in range(grown[1].base):
        together = z[:, [i for i, source in enumerate(sources) if source == unit]]
        assert float(together.sum(1).abs().max()) <= 1e-14
    live = z[:, [i for i, source in enumerate(sources) if source is not None]]
    error = 5 * math.sqrt(2 / live.numel() * int(grown[1].k) / (int(grown[1].k) - 1))
    assert abs(float(live.square().mean()) - 1) <= error
    uncorrected = 1 - 1 / int(grown[1].k)
    assert abs(uncorrected - 1) > error, "control: without the correction the variance is seen to be wrong"


PADDED = (mu.rules.Axis.parse("out: 2x2+2 * 3"), mu.rules.Axis.parse("in: 5+4"))
"""12 rows of copies, then 6 of zeros; 5 columns, then 4 of zeros."""


@examples(25)
@given(st.integers(0, 17), st.integers(1, 18), st.integers(0, 8), st.integers(1, 9))
def test_a_slice_of_noise_with_zeros_is_a_slice_of_the_whole(row, rows, column, columns):
    noise = TensorNoise(Stream(3, "w"), 0.5, zeros=Waking(2.0, (1,), 0.25))
    rows, columns = min(rows, 18 - row), min(columns, 9 - column)
    whole = noise.slice(PADDED, [0, 0], [18, 9], torch.empty(0))
    part = noise.add_(torch.zeros(rows, columns), PADDED, [row, column])
    assert_bitwise(part, whole[row : row + rows, column : column + columns])


def test_zeros_have_noise_of_their_own_and_none_at_a_cut():
    z = rectangle(Stream(3, "w"), (18, 9), (0, 0), (18, 9), CPU)
    found = TensorNoise(Stream(3, "w"), 0.5, zeros=Waking(2.0, (1,), 0.25)).slice(
        PADDED, [0, 0], [18, 9], torch.empty(0)
    )
    assert_bitwise(found[:12, :5], 0.5 * z[:12, :5])
    assert_bitwise(found[12:, :5], 2.0 * z[12:, :5] + 0.25)
    assert not bool(found[:, 5:].any()), "the columns are cut"
    still = TensorNoise(Stream(3, "w"), 0.0, zeros=Waking(2.0)).slice(PADDED, [0, 0], [18, 9], torch.empty(0))
    assert not bool(still[:12, :5].any()), "without copies, what was trained gets none"
    assert bool((still[12:] != 0).all())
    assert bool((still[:, 5:] != 0).all())


def test_the_padding_row_of_a_table_with_zeros_gets_none():
    noise = TensorNoise(Stream(3, "w"), 0.5, without_row=1, zeros=Waking(2.0))
    found = noise.slice(PADDED, [0, 0], [18, 9], torch.empty(0))
    assert not bool(found[1].any())
    assert bool((found[2] != 0).all())


@examples(60)
@given(axes(longest=40))
def test_new_units_are_like_the_units_of_their_factor_in_turn(axis: mu.rules.Axis):
    found = models_of(axis).tolist()
    assert found == [like_slowly(axis, index) for index in range(axis.wide)]
    assert models_of(axis, 3, 7).tolist() == found[3:7]
    sources = [axis.source(index) for index in range(axis.wide)]
    assert all(source in (None, unit) for source, unit in zip(sources, found, strict=True)), (
        "copies are copies"
    )


@st.composite
def woken(draw: Any, dims: int = 2, std: float = 0.0) -> tuple[Tensor, Making, TensorNoise]:
    """A tensor with copies and zeros along its dimensions, new units that are copies, and entries that are split."""
    small: Any = {"longest": 24} if dims < 3 else {"size": 2, "segments": 1, "longest": 9}
    grown = tuple(draw(axes(**small)) for _ in range(dims))
    splits = [dim for dim, axis in enumerate(grown) if axis.k > 1]
    split = draw(st.sampled_from([None, *splits]))
    cut = tuple(draw(st.sets(st.integers(0, dims - 1))))
    noise = TensorNoise(Stream(5, "w"), std, zeros=Waking(0.5, cut, copied=True), split=split)
    base = torch.randn([axis.base for axis in grown], dtype=torch.float64)
    return base, making(grown, draw(st.sampled_from(["1", "1/2", "1/3"])), noise=noise), noise


def part_of(base: Tensor, made: Making, part: Rectangle) -> Tensor:
    """A rectangle of the wide tensor from the covering part of the base, and from nothing else."""
    read = made.reads.cover(part)
    out = torch.empty(part.shape, dtype=base.dtype)
    given = read.within(base, [0] * base.dim())
    return expand_(out, given, made, out_start=part.start, base_start=read.start)


@examples(60)
@given(st.data())
def test_a_slice_of_copied_units_and_split_entries_is_a_slice_of_the_whole(cases: Any):
    base, made, noise = cases.draw(
        woken(cases.draw(st.integers(1, 3)), cases.draw(st.sampled_from([0.0, 0.25])))
    )
    start, shape = [], []
    for axis in made.axes:
        start.append(cases.draw(st.integers(0, axis.wide - 1)))
        shape.append(cases.draw(st.integers(1, axis.wide - start[-1])))
    part, first = Rectangle(tuple(start), tuple(shape)), [0] * len(shape)
    z, u = (
        rectangle(noise.stream, made.wide_shape, first, made.wide_shape, CPU, d) for d in (normals, uniforms)
    )
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        whole = expand(base.to(dtype), made)
        assert_bitwise(whole, wake_slowly(base.to(dtype), made, z, u), "the slow twin")
        assert_bitwise(part_of(base.to(dtype), made, part), part.within(whole, first).contiguous())


def test_a_slice_that_ignores_where_it_begins_is_another_one():
    """Control: of random numbers, of models and of the copy that an entry goes to."""
    texts, part = ("out: 4x2+5", "in: 3x2+2"), Rectangle((6, 2), (6, 5))
    for split, cut, std in ((1, (0, 1), 0.0), (None, (), 0.0), (None, (), 0.5)):
        noise = TensorNoise(Stream(5, "w"), 0.0, zeros=Waking(std, cut, copied=True), split=split)
        made = making(list(map(mu.rules.Axis.parse, texts)), noise=noise)
        base = torch.randn(4, 3)
        want = part.within(expand(base, made), (0, 0))
        assert torch.equal(part_of(base, made, part), want)
        assert not torch.equal(part_of(base, made, Rectangle((0, 0), part.shape)), want)


@examples(60)
@given(woken())
def test_zeros_that_wake_are_trained_entries_plus_noise_and_the_others_stay(drawn: Any):
    base, made, noise = drawn
    found = expand(base, made)
    z = rectangle(noise.stream, made.wide_shape, (0, 0), made.wide_shape, CPU).double() * 0.5
    like = base[models_of(made.axes[0])][:, models_of(made.axes[1])]
    scale = made.scale.fraction
    like = like / scale.denominator if scale.denominator > 1 else like
    new = [torch.tensor([axis.source(i) is None for i in range(axis.wide)]) for axis in made.axes]
    rows, columns = new[0][:, None], new[1][None, :]
    cut_off = rows & (0 in noise.zeros.cut) | columns & (1 in noise.zeros.cut)
    wakes = (rows | columns) & ~cut_off
    assert_bitwise(found[wakes], (like + z)[wakes])
    assert not bool(found[cut_off].any())
    if noise.split is None:
        assert_bitwise(
            found[~(rows | columns)], expand_slowly(base, made.axes, made.scale)[~(rows | columns)]
        )


@pytest.mark.parametrize("kind", PAIRED)
def test_a_split_gives_every_entry_whole_to_one_copy_and_every_copy_an_equal_share(kind: str):
    grown = [mu.rules.Axis.parse(text) for text in PAIRED[kind]]
    k, base = int(grown[1].k), torch.randn(40, grown[1].base, dtype=torch.float64)
    noise = TensorNoise(Stream(6, "s"), 0.0, split=1)
    found = expand(base, making(grown, f"1/{k}", noise=noise))
    rows = copies_of(grown[0])
    parts = torch.stack([found[:, copies_of(grown[1])[:, copy]] for copy in range(k)])
    for copy in range(rows.shape[1]):
        assert_bitwise(parts.sum(0)[rows[:, copy]], base, "for any k: the entry itself, and zeros")
    shares = (parts != 0).double().mean((1, 2))
    live = parts[0].numel() * len(rows.flatten()) / grown[0].wide
    filled = len(rows.flatten()) / grown[0].wide
    assert float((shares / filled - 1 / k).abs().max()) <= 5 * math.sqrt(1 / k * (1 - 1 / k) / live)
    if rows.shape[1] > 1:
        assert not torch.equal(found[rows[:, 0]], found[rows[:, 1]]), "copies of a row are split apart"
    whole = expand(base, making(grown, f"1/{k}"))
    assert bool((whole[rows.flatten()] != 0).sum() > (found[rows.flatten()] != 0).sum()), "control: not split"


def test_a_slice_of_the_base_that_lacks_the_copied_units_is_refused():
    made = making(
        [mu.rules.Axis.parse("out: 4+4")], noise=TensorNoise(Stream(0, "w"), 0.0, zeros=Waking(copied=True))
    )
    whole = expand(torch.arange(4.0), made)
    assert whole.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    part = expand_(torch.empty(2), torch.arange(2.0), made, out_start=[4], base_start=[0])
    assert part.tolist() == [0, 1]
    refusal(
        lambda: expand_(torch.empty(2), torch.arange(2.0), made, out_start=[6], base_start=[0]),
        "noise.copies_whole_tensor",
    )


def test_noise_that_is_the_same_for_all_units_is_cut_like_any_other():
    """Copy a of every unit gets one row d_a, the rows sum to zero, and any rectangle is that of the whole."""
    axes, base = (Axis.parse("out: 5x3"), Axis.fixed(7)), torch.randn(5, 7)
    making = Making(axes, noise=TensorNoise(Stream(1, "router"), 0.3, apart=0))
    whole = expand(base, making)
    rows = whole.view(5, 3, 7) - base[:, None]
    assert_close(rows, rows[:1].expand_as(rows), 1e-6)
    assert float(rows.sum(1).abs().max()) < 1e-6 < float(rows.abs().max())
    part = expand_(torch.empty(4, 3), base, making, out_start=(5, 2))
    assert_bitwise(part, whole[5:9, 2:5])
    with lifted_casts():
        assert_close(expand(base.double(), making), whole.double(), 1e-6)
