"""Products of factors: the integer arithmetic that an axis is made of.

A product is read like a number with mixed digits, outermost first. In "4x2 * 3" a wide index has three
digits: which of the 4 blocks, which of its 2 copies, which of the 3 entries in the block. Dropping the copy
digit gives the base index, so wide 8 = (1, 0, 2) reads base (1, 2) = 5. Everything below is arithmetic on
such digits.

Knows: normal forms, cutting a range into pieces, and composing two products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Literal, get_args

from ..errors import MupscaleError


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor of an axis: `size` units that become k · size + pad.

    Args:
        size: Its units in the base.
        k: How many copies each has.
        pad: How many zeros follow them.

    >>> factor = Factor(16, Fraction(3), pad=2)
    >>> str(factor), factor.wide
    ('16x3+2', 50)
    """

    size: int
    k: Fraction = Fraction(1)
    pad: int = 0

    @property
    def live(self) -> Fraction:
        """How many wide units are copies; the pad comes after them."""
        return self.size * self.k

    @property
    def wide(self) -> int:
        """Its units in the wide model, the pad included."""
        return int(self.live) + self.pad

    def __str__(self) -> str:
        return str(self.size) + (f"x{self.k}" if self.k != 1 else "") + (f"+{self.pad}" if self.pad else "")


By = Literal["copies", "padded", "units"]
"""How a space grows: by copies of every unit, by copies and zeros where no whole number of copies fits, or by new units,
which are zeros behind the units of the base."""


@dataclass(frozen=True, slots=True)
class Ways:
    """How every space of a model grows: one way, and the sizes that grow by copies all the same.

    >>> ways = Ways("units", frozenset({(4, 8)}))
    >>> str(ways.grow(4, 8)), str(ways.grow(6, 12)), str(Ways("padded").grow(4, 10)), str(Ways().grow(4, 10))
    ('4x2', '6+6', '4x2+2', '4x5/2')
    >>> heads = Ways("units", copied_blocks=frozenset({(16, 32)}))        # 2 heads of 8, and 16 single units
    >>> str(heads.grow(2, 4, 8)), str(heads.grow(16, 32))
    ('2x2', '16+16')
    """

    by: By = "copies"
    copied: frozenset[tuple[int, int]] = frozenset()
    """Base and wide sizes of spaces that cannot have zeros."""
    copied_blocks: frozenset[tuple[int, int]] = frozenset()
    """The same of spaces whose blocks, as heads are, cannot have zeros."""
    centred: bool = False
    """Whether new channels of a space that norms subtract the mean of may carry the mean of the others. Outputs are exact
    then, and training is not the base's, asleep or awake."""

    def __post_init__(self) -> None:
        if self.by not in get_args(By):
            known = ", ".join(f'by="{way}"' for way in get_args(By))
            raise MupscaleError(
                f"by={self.by!r} is no way to grow; write one of {known}", code="argument.unknown_way"
            )

    def grow(self, size: int, goal: int, block: int = 1) -> Factor:
        """The factor that takes `size` blocks to `goal`. Blocks, as heads are, may have zeros where single units may not."""
        copied = (size * block, goal * block) in (self.copied if block == 1 else self.copied_blocks)
        by = "copies" if copied else self.by
        copies = 1 if by == "units" else goal // size
        if by == "copies" or goal <= size or goal == size * copies:
            return Factor(size, Fraction(goal, size))
        return Factor(size, Fraction(copies), goal - size * copies)

    @property
    def pads(self) -> bool:
        """Whether zeros are allowed at all."""
        return self.by != "copies"


COPIES = Ways()

Product = tuple[Factor, ...]
"""Factors, outermost first."""

_NOT_ALIGNED = "the two layouts do not compose: their factors do not line up"


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous range of wide indices that is one product of (size, k).

    It reads a contiguous range of the base that begins at `base_start`. `factors` is None for a range of
    zeros.
    """

    start: int
    length: int
    base_start: int
    factors: tuple[tuple[int, int], ...] | None

    @property
    def base_length(self) -> int:
        return prod(size for size, _ in self.factors or ())


def as_text(factors: Sequence[Factor]) -> str:
    """How a product is written.

    >>> as_text((Factor(4, Fraction(2)), Factor(3)))
    '4x2 * 3'
    """
    return " * ".join(map(str, factors))


def normal(factors: Sequence[Factor]) -> Product:
    """Merge neighbouring factors that act as one, so that equal maps are equal products.

    Three identities, tried in this order from left to right (a factor 1 disappears):

    >>> def merged(*factors: Factor) -> str:
    ...     return as_text(normal(factors))
    >>> merged(Factor(4, pad=1), Factor(3, Fraction(2)))  # (a + p)(b x k) = ab x k + pbk: 1 block of 6 zeros
    '12x2+6'
    >>> merged(Factor(1, pad=2), Factor(3, Fraction(2), pad=1))  # (1 + p)(b x k + q) = b x k + q + p(bk + q)
    '3x2+15'
    >>> merged(Factor(4, Fraction(2)), Factor(1, Fraction(3)))  # (a x k)(1 x l) = a x kl: copies of copies
    '4x6'

    Blocks that are copied stay apart from what is inside them, because their copies are not neighbours:

    >>> merged(Factor(4, Fraction(2)), Factor(3))
    '4x2 * 3'
    """
    out: list[Factor] = []
    for factor in factors:
        if factor == Factor(1):
            continue
        last = out[-1] if out else None
        if last is not None and last.k == 1 and not factor.pad:
            out[-1] = Factor(last.size * factor.size, factor.k, last.pad * factor.wide)
        elif last is not None and last.k == 1 and last.size == 1:
            out[-1] = Factor(factor.size, factor.k, factor.pad + last.pad * factor.wide)
        elif last is not None and factor.size == 1 and not factor.pad:
            out[-1] = Factor(last.size, last.k * factor.k, int(last.pad * factor.k))
        else:
            out.append(factor)
    return tuple(out) or (Factor(1),)


def join(left: Product, right: Product) -> Product | None:
    """Two neighbouring segments as one where they have the same form, else None.

    >>> two, three, block = Factor(2, Fraction(2)), Factor(3, Fraction(2)), Factor(5)
    >>> as_text(join((two, block), (three, block)) or ())
    '5x2 * 5'
    >>> join((two, block), (three,)) is None
    True
    """
    # Equal apart from the number of outer units. Only the right one may be padded: zeros of the left one
    # would come to lie between copies.
    if left[1:] == right[1:] and left[0].k == right[0].k and not left[0].pad:
        return (Factor(left[0].size + right[0].size, left[0].k, right[0].pad), *left[1:])
    # Equal including a pad, "2x2+1 | 2x2+1": the pair is a block that occurs twice, "2 * 2x2+1" ...
    if left == right:
        return (Factor(2), *left)
    # ... and a third one makes it three: "2 * 2x2+1 | 2x2+1" is "3 * 2x2+1".
    if left[0] == Factor(left[0].size) and left[1:] == right:
        return (Factor(left[0].size + 1), *right)
    return None


def cut(factors: Product, low: int, high: int, wide0: int, base0: int) -> Iterator[Piece]:
    """The pieces of wide [low, high) of one product whose first wide and base indices are `wide0` and `base0`.

    "4x2 * 3" reads base 0 1 2 0 1 2 | 3 4 5 3 4 5 | 6 7 8 6 7 8 | 9 10 11 9 10 11. Its slice [2, 20) begins
    inside the first copy of block 0 and ends inside the first copy of block 3:

    >>> for piece in cut((Factor(4, Fraction(2)), Factor(3)), 2, 20, 0, 0):
    ...     print(piece.start, piece.length, "from", piece.base_start, piece.factors)
    2 1 from 2 ((1, 1),)
    3 3 from 0 ((1, 1), (3, 1))
    6 12 from 3 ((2, 2), (3, 1))
    18 2 from 9 ((2, 1),)

    In words: the last entry of a copy; the other copy of block 0; blocks 1 and 2 whole, each twice; two
    entries of block 3.
    """
    head, inner = factors[0], factors[1:]
    inner_wide, inner_base = prod(f.wide for f in inner), prod(f.size for f in inner)
    k, live = int(head.k), int(head.live) * inner_wide
    if low < min(high, live):
        yield from _cut_live(k, inner, low, min(high, live), wide0, base0, inner_wide, inner_base)
    if high > live:
        start = max(low, live)
        yield Piece(wide0 + start, high - start, 0, None)


def _cut_live(
    k: int, inner: Product, low: int, high: int, wide0: int, base0: int, inner_wide: int, inner_base: int
) -> Iterator[Piece]:
    """`cut` before the pad of the outermost factor: at every position, the largest piece that starts there."""
    # A piece has no zeros inside, so blocks that contain a pad are never taken whole: they are cut one by
    # one.
    whole = not any(f.pad for f in inner)
    tail = tuple((f.size, int(f.k)) for f in inner)
    group = k * inner_wide  # all copies of one unit; 6 in the example of `cut`
    at = low
    while at < high:
        unit, within = divmod(at, group)
        base = base0 + unit * inner_base
        # Whole units with all their copies: blocks 1 and 2 in the example.
        if whole and within == 0 and (count := (high - at) // group):
            yield Piece(wide0 + at, count * group, base, ((count, k), *tail))
            at += count * group
            continue
        copy, inside = divmod(within, inner_wide)
        end = min(high, (unit + 1) * group)
        # Whole copies of one unit: the second copy of block 0.
        if whole and inside == 0 and (count := (end - at) // inner_wide):
            yield Piece(wide0 + at, count * inner_wide, base, ((1, count), *tail))
            at += count * inner_wide
            continue
        # A part of one copy: cut what is inside it, in coordinates that begin at the copy.
        start = unit * group + copy * inner_wide
        end = min(high, start + inner_wide)
        yield from cut(inner, at - start, end - start, wide0 + start, base)
        at = end


def compose(first: Product, second: Product) -> Product:
    """The product that grows by `first` and then by `second`: the copies of `second` among the digits of `first`.

    `first` = "4x2 * 3" writes 24 units, whose digits are block (4), copy (x2) and entry (3). `second` has to
    group the same 24 units. From the innermost factor outwards, each takes as many digits as its size needs,
    and its own copies follow them:

    >>> first = Factor(4, Fraction(2)), Factor(3)
    >>> two, three = Fraction(2), Fraction(3)
    >>> as_text(compose(first, (Factor(24, two),)))  # takes 3, x2 and 4; copies each entry
    '4x2 * 3x2'
    >>> as_text(compose(first, (Factor(8, two), Factor(3))))  # 3 takes the entries, 8x2 takes x2 and 4
    '4x4 * 3'
    >>> as_text(compose(first, (Factor(2, three), Factor(12))))  # 12 takes 3, x2 and half of the digit 4
    '2x3 * 2x2 * 3'

    A factor that would end inside a digit is refused: here pairs of entries, where blocks have three.

    >>> try:
    ...     compose(first, (Factor(12, two), Factor(2)))
    ... except MupscaleError as error:
    ...     print(error.code)
    layout.not_aligned
    """
    digits = [digit for factor in first for digit in _digits(factor)]
    parts: list[Product] = []
    for factor in reversed(second):
        taken: list[Factor] = []
        need = factor.size
        while need > 1:
            if not digits:
                raise MupscaleError(_NOT_ALIGNED, code="layout.not_aligned")
            digit = digits.pop()
            # The whole digit belongs to this factor.
            if need % digit.wide == 0:
                taken.insert(0, digit)
                need //= digit.wide
            # Only its inner part does; the outer part is left for the next factor. The zeros of a padded
            # digit lie at its end, so it has no equal parts.
            elif digit.wide % need == 0 and not digit.pad:
                outer, split = _halve(digit, need)
                digits.append(outer)
                taken.insert(0, split)
                need = 1
            else:
                raise MupscaleError(_NOT_ALIGNED, code="layout.not_aligned")
        product = normal([*taken, Factor(1, factor.k)])
        # Zeros behind the units of this factor: expressible only if these units are one factor, whose pad
        # they join.
        if factor.pad:
            if len(product) > 1:
                raise MupscaleError(
                    "the two layouts do not compose: a pad would fall between copies",
                    code="layout.pad_between_copies",
                )
            only = product[0]
            product = (Factor(only.size, only.k, only.pad + factor.pad),)
        parts.insert(0, product)
    # Digits are left over only on an empty axis, "0x2" then "0x3": a size of 0 takes none.
    return normal([*digits, *(f for part in parts for f in part)])


def _digits(factor: Factor) -> list[Factor]:
    """The digits of a wide index: the unit, then its copy. A padded factor is one digit.

    >>> as_text(_digits(Factor(4, Fraction(2)))), as_text(_digits(Factor(4, Fraction(2), pad=1)))
    ('4 * 1x2', '4x2+1')
    """
    if factor.pad:
        return [factor]
    return [d for d in (Factor(factor.size), Factor(1, factor.k)) if d != Factor(1)]


def _halve(digit: Factor, inner: int) -> tuple[Factor, Factor]:
    """A digit as two: its outer part, and an inner part of `inner` values. Copies stay copies, units stay units.

    >>> [str(part) for part in _halve(Factor(12), 4)], [str(part) for part in _halve(Factor(1, Fraction(6)), 2)]
    (['3', '4'], ['1x3', '1x2'])
    """
    outer = digit.wide // inner
    if digit.size == 1:
        return Factor(1, Fraction(outer)), Factor(1, Fraction(inner))
    return Factor(outer), Factor(inner)


def align(first: Sequence[Product], second: Sequence[Product]) -> tuple[list[Product], list[Product]]:
    """Cut both at every segment boundary of either, so that segments correspond one to one.

    The boundaries are counted in the width between the two: the wide side of `first`, the base side of
    `second`. "6x2" writes 12 units, and "4x2 | 4x2 * 2" reads 4 and then 8 of them, so "6x2" is cut after 2
    of its base units:

    >>> six, four = Factor(6, Fraction(2)), Factor(4, Fraction(2))
    >>> first, second = align([(six,)], [(four,), (four, Factor(2))])
    >>> [as_text(part) for part in first], [as_text(part) for part in second]
    (['2x2', '4x2'], ['4x2', '4x2 * 2'])
    """
    cuts = set()
    for sizes in (
        [prod(f.wide for f in s) for s in first],
        [prod(f.size for f in s) for s in second],
    ):
        total = 0
        for size in sizes:
            total += size
            cuts.add(total)
    return split(first, sorted(cuts), wide=True), split(second, sorted(cuts), wide=False)


def split(segments: Sequence[Product], cuts: Sequence[int], wide: bool) -> list[Product]:
    """Split segments at `cuts`, given as wide or base positions.

    A cut must fall between whole units of the outermost factor, with all their copies. The pad stays at the
    end:

    >>> [as_text(part) for part in split([(Factor(4, Fraction(2), pad=1), Factor(3))], [6, 18], wide=True)]
    ['1x2 * 3', '2x2 * 3', '1x2+1 * 3']
    """
    parts: list[Product] = []
    position = 0
    pending = list(cuts)
    for segment in segments:
        head, inner = segment[0], segment[1:]
        unit = prod(f.wide if wide else f.size for f in inner)
        per = int(head.k) * unit if wide else unit  # positions per outer unit
        size = prod(f.wide if wide else f.size for f in segment)
        start = position
        done = 0  # outer units of this segment that are already in `parts`
        while pending and pending[0] < position + size:
            count, rest = divmod(pending.pop(0) - start, per)
            if rest or count > head.size:
                layout = " | ".join(map(as_text, segments))
                raise MupscaleError(
                    f"the layout {layout} cannot be cut at {start + count * per + rest}",
                    code="layout.cannot_be_cut",
                )
            parts.append((Factor(count - done, head.k), *inner))
            done = count
        parts.append((Factor(head.size - done, head.k, head.pad), *inner))
        position += size
        if pending and pending[0] == position:
            pending.pop(0)
    return parts
