"""How one dimension of a tensor grows: a product of factors, outer to inner, each with its copies.

A factor (size, k, pad) turns `size` units into k·size + pad: every unit becomes k neighbours, then
`pad` zeros follow. Grouped attention's query rows are (KV, k)(G, 1)(D, 1); plain interleaving is a
single factor. Dimensions with unequal parts are segments of such products.

Knows: which wide index reads which base index, in whole numbers. Knows nothing about tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any, Literal

from ..errors import MupscaleError

Role = Literal["in", "out"]
Entries = Sequence[tuple[int, ...]]
Layout = int | Entries | Sequence[Entries]

_FACTOR = re.compile(r"^(\d+)(?:x(\d+(?:/\d+)?))?(?:\+(\d+))?$")


@dataclass(frozen=True, slots=True)
class Factor:
    """`size` units that become k·size + pad."""

    size: int
    k: Fraction = Fraction(1)
    pad: int = 0

    @property
    def live(self) -> Fraction:
        return self.size * self.k

    @property
    def wide(self) -> int:
        return int(self.live) + self.pad

    def __str__(self) -> str:
        return str(self.size) + (f"x{self.k}" if self.k != 1 else "") + (f"+{self.pad}" if self.pad else "")


Product = tuple[Factor, ...]


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


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a tensor in its base and its wide size.

    >>> axis = Axis.parse("out: 2x2 * 3")              # two blocks of three, each block twice
    >>> axis.base, axis.wide, [axis.source(i) for i in range(axis.wide)]
    (6, 12, [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5])
    """

    segments: tuple[Product, ...]
    role: Role | None = None

    @staticmethod
    def of(*segments: Sequence[Factor], role: Role | None = None) -> Axis:
        """An axis in normal form, so that equal maps are equal values."""
        merged: list[Product] = []
        for segment in segments:
            product = _normal(segment)
            if merged and (joined := _join(merged[-1], product)) is not None:
                merged[-1] = joined
            else:
                merged.append(product)
        axis = Axis(tuple(merged), role)
        for factor in (factor for segment in merged for factor in segment):
            if factor.live.denominator != 1:
                raise MupscaleError(f"{factor.size} units times {factor.k} is not a whole number")
        multipliers = {prod((f.k for f in s), start=Fraction(1)) for s in merged}
        if len(multipliers) > 1:
            raise MupscaleError(
                f"the parts of axis {axis} are copied {', '.join(map(str, sorted(multipliers)))} times; one "
                "tensor has one learning rate and one eps, so all its parts need the same number of copies"
            )
        return axis if axis.grows else Axis(axis.segments, None)

    @staticmethod
    def fixed(size: int) -> Axis:
        return Axis.of((Factor(size),))

    @staticmethod
    def between(base: int, wide: int, role: Role | None, layout: Layout = 1, pad: bool = False) -> Axis:
        """The axis that takes `base` to `wide` under a layout.

        A whole number b means blocks of b that move together. Pairs (size, k) or triples
        (size, k, pad) spell the factors out; a sequence of such sequences gives segments.
        """
        if not isinstance(layout, int):
            axis = Axis.of(*_segments(layout), role=role)
            if (axis.base, axis.wide) != (base, wide):
                raise MupscaleError(
                    f"layout {axis} takes {axis.base} to {axis.wide}, the models have {base} and {wide}"
                )
            return axis
        if base % layout or wide % layout:
            raise MupscaleError(f"blocks of {layout} do not divide {base} and {wide}")
        size, goal = base // layout, wide // layout
        outer = Factor(size, Fraction(goal, size))
        if pad and goal % size:
            outer = Factor(size, Fraction(goal // size), goal % size)
        return Axis.of((outer, Factor(layout)), role=role)

    @staticmethod
    def parse(text: str) -> Axis:
        """Read what `str` prints: "in: 64x2+32", "out: 2x2 * 32 | 2x2 * 16", "5"."""
        head, _, body = text.rpartition(":")
        segments = []
        for part in body.split("|"):
            factors = []
            for term in part.split("*"):
                match = _FACTOR.match(term.strip())
                if match is None or head.strip() not in ("", "in", "out"):
                    raise MupscaleError(
                        f"{text!r} is not an axis; expected e.g. 'in: 64x2' or 'out: 2x2 * 32'"
                    )
                factors.append(Factor(int(match[1]), Fraction(match[2] or 1), int(match[3] or 0)))
            segments.append(factors)
        role: Role | None = "in" if head.strip() == "in" else "out" if head.strip() else None
        return Axis.of(*segments, role=role)

    def __str__(self) -> str:
        body = " | ".join(" * ".join(map(str, segment)) for segment in self.segments)
        return f"{self.role}: {body}" if self.role else body

    @property
    def base(self) -> int:
        return sum(prod(f.size for f in segment) for segment in self.segments)

    @property
    def wide(self) -> int:
        return sum(prod(f.wide for f in segment) for segment in self.segments)

    @property
    def k(self) -> Fraction:
        """How many copies each base index has."""
        return prod((f.k for f in self.segments[0]), start=Fraction(1))

    @property
    def fill(self) -> Fraction:
        """The share of wide indices that are not padding."""
        return Fraction(self.k * self.base) / self.wide if self.wide else Fraction(1)

    @property
    def grows(self) -> bool:
        return any(f.k != 1 or f.pad for segment in self.segments for f in segment)

    @property
    def padded(self) -> bool:
        return any(f.pad for segment in self.segments for f in segment)

    @property
    def duplicates(self) -> bool:
        """True when every multiplier is a whole number, so that copies can be made."""
        return all(f.k.denominator == 1 for segment in self.segments for f in segment)

    def source(self, index: int) -> int | None:
        """The base index that wide `index` copies, or None for padding. This is the definition."""
        offset = 0
        for segment in self.segments:
            size = prod(f.wide for f in segment)
            if index < size:
                found = 0
                for position, factor in enumerate(segment):
                    inner = prod(f.wide for f in segment[position + 1 :])
                    digit, index = divmod(index, inner)
                    if digit >= factor.live:
                        return None
                    found = found * factor.size + digit // int(factor.k)
                return offset + found
            index -= size
            offset += prod(f.size for f in segment)
        raise IndexError(index)

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[Piece]:
        """Cut the wide range [start, stop) into the fewest products and runs of zeros."""
        stop = self.wide if stop is None else stop
        wide_offset = base_offset = 0
        for segment in self.segments:
            size = prod(f.wide for f in segment)
            low, high = max(start - wide_offset, 0), min(stop - wide_offset, size)
            if low < high:
                yield from _cut(segment, low, high, wide_offset, base_offset)
            wide_offset += size
            base_offset += prod(f.size for f in segment)

    def cover(self, start: int, stop: int) -> tuple[int, int]:
        """The smallest contiguous base range that wide [start, stop) reads; (0, 0) if it reads none."""
        live = [piece for piece in self.pieces(start, stop) if piece.factors is not None]
        if not live:
            return 0, 0
        return (
            min(piece.base_start for piece in live),
            max(piece.base_start + piece.base_length for piece in live),
        )

    def then(self, other: Axis) -> Axis:
        """The axis that grows by this one and then by `other`."""
        if self.wide != other.base:
            raise MupscaleError(f"axis {self} ends at {self.wide}, axis {other} starts at {other.base}")
        if self.role and other.role and self.role != other.role:
            raise MupscaleError(f"axis {self} and axis {other} disagree about in and out")
        first, second = _align(self, other)
        composed = [_compose(a, b) for a, b in zip(first, second, strict=True)]
        return Axis.of(*composed, role=self.role or other.role)


def _segments(layout: Entries | Sequence[Entries]) -> list[list[Factor]]:
    nested: Any = [layout] if isinstance(layout[0][0], int) else layout
    return [
        [Factor(size, Fraction(*rest[:1] or (1,)), *rest[1:]) for size, *rest in segment]
        for segment in nested
    ]


def _normal(factors: Sequence[Factor]) -> Product:
    """Merge what is one factor: (a)(b x k) = (ab x k), (a x k)(1 x l) = (a x kl), and drop ones."""
    out: list[Factor] = []
    for factor in factors:
        if factor == Factor(1):
            continue
        if out and not factor.pad:
            last = out[-1]
            if last.k == 1 and not last.pad:
                out[-1] = Factor(last.size * factor.size, factor.k)
                continue
            if factor.size == 1:
                out[-1] = Factor(last.size, last.k * factor.k, int(last.pad * factor.k))
                continue
        out.append(factor)
    return tuple(out) or (Factor(1),)


def _join(left: Product, right: Product) -> Product | None:
    """Two neighbouring segments of one shape are one segment."""
    if left[1:] == right[1:] and left[0].k == right[0].k and not left[0].pad:
        return (Factor(left[0].size + right[0].size, left[0].k, right[0].pad), *left[1:])
    return None


def _cut(factors: Product, low: int, high: int, wide0: int, base0: int) -> Iterator[Piece]:
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
        yield from _cut(inner, at - start, end - start, wide0 + start, base)
        at = end


def _align(first: Axis, second: Axis) -> tuple[list[Product], list[Product]]:
    """Cut both axes at every segment boundary of either, counted in the width between them."""
    cuts = set()
    for sizes in (
        [prod(f.wide for f in s) for s in first.segments],
        [prod(f.size for f in s) for s in second.segments],
    ):
        total = 0
        for size in sizes:
            total += size
            cuts.add(total)
    return _split(first, sorted(cuts), wide=True), _split(second, sorted(cuts), wide=False)


def _split(axis: Axis, cuts: Sequence[int], wide: bool) -> list[Product]:
    """Split segments at `cuts`, given as wide or base positions."""
    parts: list[Product] = []
    position = 0
    pending = list(cuts)
    for segment in axis.segments:
        head, inner = segment[0], segment[1:]
        unit = prod(f.wide if wide else f.size for f in inner)
        per = int(head.k) * unit if wide else unit
        size = prod(f.wide if wide else f.size for f in segment)
        start = position
        done = 0
        while pending and pending[0] < position + size:
            count, rest = divmod(pending.pop(0) - start, per)
            if rest or count > head.size:
                raise MupscaleError(f"axis {axis} cannot be cut at {start + count * per + rest}")
            parts.append((Factor(count - done, head.k), *inner))
            done = count
        parts.append((Factor(head.size - done, head.k, head.pad), *inner))
        position += size
        if pending and pending[0] == position:
            pending.pop(0)
    return parts


def _compose(first: Product, second: Product) -> Product:
    """Insert the copies of `second` between the digits that `first` writes."""
    if not all(f.k.denominator == 1 for f in (*first, *second)):
        if [f.wide for f in first] != [f.size for f in second]:
            raise MupscaleError("axes with fractional multipliers compose only factor by factor")
        return tuple(
            Factor(a.size, a.k * b.k, int(a.pad * b.k) + b.pad) for a, b in zip(first, second, strict=True)
        )
    digits = [digit for factor in first for digit in _digits(factor)]
    parts: list[Product] = []
    for factor in reversed(second):
        taken: list[Factor] = []
        need = factor.size
        while need > 1:
            if not digits:
                raise MupscaleError("the two layouts do not compose: their factors do not line up")
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
                raise MupscaleError("the two layouts do not compose: their factors do not line up")
        product = _normal([*taken, Factor(1, factor.k)])
        if factor.pad:
            if len(product) > 1:
                raise MupscaleError("the two layouts do not compose: a pad would fall between copies")
            only = product[0]
            product = (Factor(only.size, only.k, only.pad + factor.pad),)
        parts.insert(0, product)
    return _normal([*digits, *(f for part in parts for f in part)])


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
