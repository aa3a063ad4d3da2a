"""Axes as values: one normal form for one map, text and back, exact covers, composition of maps."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import chain, product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import mupscale as mu
from harness.profiles import examples
from harness.refusals import refusal
from harness.strategies import axes

Map = list[int | None]


def source_map(axis: mu.rules.Axis) -> Map:
    return [axis.source(i) for i in range(axis.wide)]


def written_out(factors: Sequence[mu.rules.Factor]) -> Map:
    """The map of one product, from the words: every unit becomes k neighbours, then zeros follow."""
    if not factors:
        return [0]
    head, *inner = factors
    unit = written_out(inner)
    size = 1 + max(i for i in unit if i is not None)
    copies = [
        None if i is None else u * size + i
        for u in range(head.size)
        for _ in range(int(head.k))
        for i in unit
    ]
    return copies + [None] * (head.pad * len(unit))


@st.composite
def products(draw) -> list[mu.rules.Factor]:
    def factor() -> mu.rules.Factor:
        k, pad = draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from([0, 0, 1, 2]))
        return mu.rules.Factor(draw(st.integers(1, 3)), Fraction(k), pad)

    return [factor() for _ in range(draw(st.integers(1, 3)))]


@examples(300)
@given(products())
def test_the_source_of_an_index_is_what_the_factors_say(factors):
    assert source_map(mu.rules.Axis.of(factors, role="out")) == written_out(factors)


def test_equal_maps_have_one_normal_form():
    """Every product of a few small factors: two that make the same map are the same value."""
    numbers = [mu.rules.Factor(n, Fraction(k), p) for n in (1, 2, 3) for k in (1, 2) for p in range(5)]
    small = [f for f in numbers if f.size < 3 and f.pad < 2]
    products = [(f,) for f in numbers], product(numbers, numbers), product(small, small, small)
    found: dict[tuple[int | None, ...], mu.rules.Axis] = {}
    clashes = []
    for factors in chain(*products):
        axis = mu.rules.Axis.of(factors, role="out")
        first = found.setdefault(tuple(source_map(axis)), axis)
        if first.segments != axis.segments:
            clashes.append(f"{first} and {axis}")
    assert not clashes, f"{len(clashes)} pairs, such as {clashes[:4]}"


@examples(200)
@given(products(), products())
def test_unequal_maps_are_unequal_values(one, two):
    a, b = mu.rules.Axis.of(one, role="in"), mu.rules.Axis.of(two, role="in")
    if source_map(a) != source_map(b):
        assert a != b
        assert str(a) != str(b)


@examples(200)
@given(axes())
def test_what_an_axis_prints_can_be_read_back(axis):
    assert mu.rules.Axis.parse(str(axis)) == axis
    assert str(mu.rules.Axis.parse(str(axis))) == str(axis)


@pytest.mark.parametrize("text", ["", "out:", "x2", "4x", "4 x", "in: 4*", "side: 4", "4+1x2", "-4", "4x0.5"])
def test_what_is_not_an_axis_is_refused(text):
    refusal(lambda: mu.rules.Axis.parse(text), "axis.not_an_axis", where=repr(text))
    assert mu.rules.Axis.parse("in: 64x2").wide == 128, "control"


@examples(200)
@given(axes(), st.data())
def test_pieces_cover_a_range_exactly_and_read_what_the_definition_reads(axis, cases):
    low, high = sorted(cases.draw(st.tuples(st.integers(0, axis.wide), st.integers(0, axis.wide))))
    found: Map = []
    for piece in axis.pieces(low, high):
        assert piece.start == low + len(found), "no gap and no overlap"
        if piece.factors is None:
            found += [None] * piece.length
            continue
        inside = written_out([mu.rules.Factor(n, Fraction(k)) for n, k in piece.factors])
        assert len(inside) == piece.length
        found += [piece.base_start + i for i in inside if i is not None]
    assert found == source_map(axis)[low:high]


@examples(200)
@given(axes(), st.data())
def test_cover_is_the_smallest_range_that_is_read(axis, cases):
    low, high = sorted(cases.draw(st.tuples(st.integers(0, axis.wide), st.integers(0, axis.wide))))
    read = [i for i in source_map(axis)[low:high] if i is not None]
    assert axis.cover(low, high) == ((min(read), max(read) + 1) if read else (0, 0))


def test_a_plain_axis_is_one_piece():
    assert len(list(mu.rules.Axis.parse("out: 64x2").pieces())) == 1
    assert len(list(mu.rules.Axis.parse("out: 8x2 * 8").pieces())) == 1
    assert len(list(mu.rules.Axis.parse("out: 64x2").pieces(1, 127))) == 3, "a torn unit at either end"


@examples(300)
@given(axes(segments=2), st.data())
def test_growing_twice_composes_the_maps(first, cases):
    """Where two layouts compose at all, the result reads through both; where not, they are refused."""
    k, block = cases.draw(st.integers(1, 3)), cases.draw(st.sampled_from([1, 2, 3, 4, 6, first.wide]))
    assume(first.wide % block == 0)
    second = mu.rules.Axis.of(
        (mu.rules.Factor(first.wide // block, Fraction(k)), mu.rules.Factor(block)), role=first.role
    )
    try:
        whole = first.then(second)
    except mu.MupscaleError as error:
        composing = {
            "layout.not_aligned",
            "layout.pad_between_copies",
            "layout.cannot_be_cut",
            "axis.pad_with_fraction",
        }
        assert set(error.codes) <= composing  # noqa: PT017
        return
    middle = source_map(first)
    assert source_map(whole) == [None if i is None else middle[i] for i in source_map(second)]
    assert (whole.base, whole.wide, whole.k) == (first.base, second.wide, first.k * second.k)


def test_constants_of_a_wider_reference_compose_with_new_units():
    narrower, units = (mu.rules.Axis.parse(text) for text in ("out: 8x1/2", "out: 4+4"))
    whole = narrower.then(units)
    assert (whole.base, whole.wide, whole.k, whole.padded) == (8, 8, Fraction(1, 2), True)
    refusal(lambda: units.then(narrower), "axis.pad_with_fraction")


@examples(100)
@given(axes(segments=1, pads=False), st.integers(1, 3), st.integers(0, 2))
def test_neighbours_and_an_end_pad_always_compose(first, k, pad):
    second = mu.rules.Axis.of((mu.rules.Factor(first.wide, Fraction(k), 0),), role=first.role)
    plain = first.then(second)
    middle = source_map(first)
    assert source_map(plain) == [middle[i] for i in source_map(second) if i is not None]
    simple = mu.rules.Axis.parse(f"out: {first.base}x{first.k}")
    padded = simple.then(mu.rules.Axis.of((mu.rules.Factor(simple.wide, Fraction(k), pad),), role="out"))
    assert padded == mu.rules.Axis.of((mu.rules.Factor(first.base, first.k * k, pad),), role="out")


def test_composition_is_associative():
    a, b, c = (mu.rules.Axis.parse(f"out: {text}") for text in ("2x2 * 3", "12x2+2", "26x3+1"))
    other = (
        mu.rules.Axis.parse("out: 6x2"),
        mu.rules.Axis.parse("out: 12x2+2"),
        mu.rules.Axis.parse("out: 26x3+1"),
    )
    assert other[0].then(other[1]).then(other[2]) == other[0].then(other[1].then(other[2]))
    plain = a, mu.rules.Axis.parse("out: 12x2"), mu.rules.Axis.parse("out: 24x3")
    assert plain[0].then(plain[1]).then(plain[2]) == plain[0].then(plain[1].then(plain[2]))
    refusal(lambda: a.then(b).then(c), "layout.pad_between_copies")


def test_heads_times_two_then_head_size_times_three_is_both_at_once():
    heads, size = mu.rules.Axis.parse("out: 4x2 * 5"), mu.rules.Axis.parse("out: 8 * 5x3")
    assert (
        heads.then(size)
        == mu.rules.Axis.parse("out: 4x2 * 5x3")
        == mu.rules.Axis.between(20, 120, "out", [(4, 2), (5, 3)])
    )
    assert heads.then(size) != mu.rules.Axis.parse("out: 20x6"), "control: neighbours are another map"


def test_layouts_are_spelled_in_several_ways():
    assert mu.rules.Axis.between(6, 12, "out", 3) == mu.rules.Axis.parse("out: 2x2 * 3")
    assert mu.rules.Axis.between(
        6, 15, "out", 3, ways=mu.rules.products.Ways("padded")
    ) == mu.rules.Axis.parse("out: 2x2+1 * 3")
    assert mu.rules.Axis.between(6, 9, "in", [(6, 1, 3)]) == mu.rules.Axis.parse("in: 6+3")
    segments: list[list[tuple[int, ...]]] = [[(2, 2), (2,)], [(3, 2)]]
    assert mu.rules.Axis.between(7, 14, "in", segments) == mu.rules.Axis.parse("in: 2x2 * 2 | 3x2")
    assert mu.rules.Axis.between(4, 10, "in").k == Fraction(5, 2)
    assert mu.rules.Axis.between(8, 2, "in").k == Fraction(1, 4), "sizes of init accept any ratio"
    refusal(lambda: mu.rules.Axis.between(6, 12, "out", 4), "layout.not_a_divisor")
    refusal(lambda: mu.rules.Axis.between(6, 12, "out", [(3, 2)]), "layout.other_sizes")


def test_parts_copied_unequally_are_refused():
    refusal(lambda: mu.rules.Axis.parse("out: 4x2 | 4x3"), "axis.parts_differ_in_copies")
    refusal(
        lambda: mu.rules.Axis.parse("in: 4x2").then(mu.rules.Axis.parse("out: 8x2")), "axis.roles_disagree"
    )
    refusal(
        lambda: mu.rules.Axis.parse("in: 4x2").then(mu.rules.Axis.parse("in: 9x2")), "axis.sizes_do_not_meet"
    )
