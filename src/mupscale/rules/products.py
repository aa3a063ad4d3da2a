"""Products of factors: the arithmetic under an axis, in whole numbers.

Knows: normal forms, cutting a range into pieces, and inserting the copies of one product into another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from ..errors import MupscaleError


@dataclass(frozen=True, slots=True)
class Factor:
    """`size` units that become k·size + pad.

    >>> factor = Factor(16, Fraction(3), pad=2)
    >>> str(factor), factor.wide
    ('16x3+2', 50)
    """

    size: int
    k: Fraction = Fraction(1)
    pad: int = 0

    @property
    def live(self) -> Fraction:
        """The units that are copies, before the pad."""
        return self.size * self.k

    @property
    def wide(self) -> int:
        return int(self.live) + self.pad

    def __str__(self) -> str:
        return str(self.size) + (f"x{self.k}" if self.k != 1 else "") + (f"+{self.pad}" if self.pad else "")


def grow(size: int, goal: int, pad: bool = False) -> Factor:
    """The factor that takes `size` units to `goal`: copies, and zeros where they are allowed and needed.

    >>> str(grow(4, 12)), str(grow(4, 10)), str(grow(4, 10, pad=True))
    ('4x3', '4x5/2', '4x2+2')
    """
    if pad and goal % size:
        return Factor(size, Fraction(goal // size), goal % size)
    return Factor(size, Fraction(goal, size))


Product = tuple[Factor, ...]

_NOT_ALIGNED = "the two layouts do not compose: their factors do not line up; grow in one plan"


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of wide indices that is one product of (size, k), read from `base_start` on.

    `factors` is None for a run of zeros.
    """

    start: int
    length: int
    base_start: int
    factors: tuple[tuple[int, int], ...] | None

    @property
    def base_length(self) -> int:
        return prod(size for size, _ in self.factors or ())


def normal(factors: Sequence[Factor]) -> Product:
    """Merge what is one factor, so that equal maps are equal products.

    (a + p)(b x k) = (ab x k + pbk);  (a x k)(1 x l) = (a x kl);  (1 + p)(b x k + q) = (b x k + q + p(bk + q)).
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
    """Two neighbouring segments of one shape are one segment."""
    if left[1:] == right[1:] and left[0].k == right[0].k and not left[0].pad:
        return (Factor(left[0].size + right[0].size, left[0].k, right[0].pad), *left[1:])
    if left == right:
        return (Factor(2), *left)
    if left[0] == Factor(left[0].size) and left[1:] == right:
        return (Factor(left[0].size + 1), *right)
    return None


def cut(factors: Product, low: int, high: int, wide0: int, base0: int) -> Iterator[Piece]:
    """The pieces of wide [low, high) of one product whose first wide and base indices are `wide0` and `base0`."""
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
    whole = not any(f.pad for f in inner)
    tail = tuple((f.size, int(f.k)) for f in inner)
    group = k * inner_wide
    at = low
    while at < high:
        unit, within = divmod(at, group)
        base = base0 + unit * inner_base
        if whole and within == 0 and (count := (high - at) // group):
            yield Piece(wide0 + at, count * group, base, ((count, k), *tail))
            at += count * group
            continue
        copy, inside = divmod(within, inner_wide)
        end = min(high, (unit + 1) * group)
        if whole and inside == 0 and (count := (end - at) // inner_wide):
            yield Piece(wide0 + at, count * inner_wide, base, ((1, count), *tail))
            at += count * inner_wide
            continue
        start = unit * group + copy * inner_wide
        end = min(high, start + inner_wide)
        yield from cut(inner, at - start, end - start, wide0 + start, base)
        at = end


def compose(first: Product, second: Product) -> Product:
    """Insert the copies of `second` between the digits that `first` writes."""
    digits = [digit for factor in first for digit in _digits(factor)]
    parts: list[Product] = []
    for factor in reversed(second):
        taken: list[Factor] = []
        need = factor.size
        while need > 1:
            if not digits:
                raise MupscaleError(_NOT_ALIGNED)
            digit = digits.pop()
            if need % digit.wide == 0:
                taken.insert(0, digit)
                need //= digit.wide
            elif digit.wide % need == 0 and not digit.pad:
                outer, split = _halve(digit, need)
                digits.append(outer)
                taken.insert(0, split)
                need = 1
            else:
                raise MupscaleError(_NOT_ALIGNED)
        product = normal([*taken, Factor(1, factor.k)])
        if factor.pad:
            if len(product) > 1:
                raise MupscaleError(
                    "the two layouts do not compose: a pad would fall between copies; grow in one plan"
                )
            only = product[0]
            product = (Factor(only.size, only.k, only.pad + factor.pad),)
        parts.insert(0, product)
    return normal([*digits, *(f for part in parts for f in part)])


def _digits(factor: Factor) -> list[Factor]:
    """The digits of a wide index: the unit, then its copy. A padded factor is one digit."""
    if factor.pad:
        return [factor]
    return [d for d in (Factor(factor.size), Factor(1, factor.k)) if d != Factor(1)]


def _halve(digit: Factor, inner: int) -> tuple[Factor, Factor]:
    outer = digit.wide // inner
    if digit.size == 1:
        return Factor(1, Fraction(outer)), Factor(1, Fraction(inner))
    return Factor(outer), Factor(inner)


def align(first: Sequence[Product], second: Sequence[Product]) -> tuple[list[Product], list[Product]]:
    """Cut both at every segment boundary of either, counted in the width between them."""
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
    """Split segments at `cuts`, given as wide or base positions."""
    parts: list[Product] = []
    position = 0
    pending = list(cuts)
    for segment in segments:
        head, inner = segment[0], segment[1:]
        unit = prod(f.wide if wide else f.size for f in inner)
        per = int(head.k) * unit if wide else unit
        size = prod(f.wide if wide else f.size for f in segment)
        start = position
        done = 0
        while pending and pending[0] < position + size:
            count, rest = divmod(pending.pop(0) - start, per)
            if rest or count > head.size:
                layout = " | ".join(" * ".join(map(str, s)) for s in segments)
                raise MupscaleError(
                    f"the layout {layout} cannot be cut at {start + count * per + rest}; grow in one plan"
                )
            parts.append((Factor(count - done, head.k), *inner))
            done = count
        parts.append((Factor(head.size - done, head.k, head.pad), *inner))
        position += size
        if pending and pending[0] == position:
            pending.pop(0)
    return parts
