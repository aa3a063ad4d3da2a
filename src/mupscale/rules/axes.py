"""How one dimension of a tensor grows: a product of factors, outer to inner, each with its copies.

A factor (size, k, pad) turns `size` units into k·size + pad: every unit becomes k neighbours, then
`pad` zeros follow. Grouped attention's query rows are (KV, k)(G, 1)(D, 1); plain interleaving is a
single factor. Dimensions with unequal parts are segments of such products.

Knows: which wide index reads which base index, in integers only. Knows nothing about tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from numbers import Integral, Rational
from typing import Any, Literal, get_args

from ..arguments import shown
from ..errors import Fault, MupscaleError
from .products import COPIES, Factor, Piece, Product, Ways, align, as_text, compose, cut, join, normal

Role = Literal["in", "out"]
Entries = Sequence[tuple[int, ...]]
Layout = int | Entries | Sequence[Entries]

# "64", "64x2", "64x3/2", "64+32", "64x2+32": the size, then optionally the copies and the pad. No copies are
# "x0".
_FACTOR = re.compile(r"^(\d+)(?:x([1-9]\d*(?:/[1-9]\d*)?))?(?:\+(\d+))?$")


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a tensor in its base and its wide size. Written with `Axis.parse`, or made by `Axis.between`.

    Args:
        segments: Its parts, one behind the other; each is a product of factors, outer to inner.
        role: "in" for a dimension that is summed over, "out" for one that is not, None for one that does not grow.

    >>> axis = Axis.parse("out: 2x2 * 3")              # two blocks of three, each block twice
    >>> axis.base, axis.wide, [axis.source(i) for i in range(axis.wide)]
    (6, 12, [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5])
    """

    segments: tuple[Product, ...]
    role: Role | None = None

    @staticmethod
    def of(*segments: Sequence[Factor], role: Role | None = None) -> Axis:
        """An axis in normal form, so that equal maps are equal values."""
        if role is not None and role not in get_args(Role):
            raise MupscaleError(
                f'the role of an axis is {shown(role)}; expected "in", "out" or None',
                code="axis.unknown_role",
            )
        if not segments:
            raise MupscaleError(
                "an axis has no parts, expected one or more; for example write Axis.fixed(size)",
                code="axis.no_parts",
            )
        merged: list[Product] = []
        for segment in segments:
            _refuse_unlike_factors(segment)
            product = normal(segment)
            if merged and (joined := join(merged[-1], product)) is not None:
                merged[-1] = joined
            else:
                merged.append(product)
        axis = Axis(tuple(merged), role)
        for factor in (factor for segment in merged for factor in segment):
            if factor.live.denominator != 1:
                raise MupscaleError(
                    f"{factor.size} units times {factor.k}, expected a whole number",
                    code="axis.not_whole_units",
                )
        multipliers = {prod((f.k for f in s), start=Fraction(1)) for s in merged}
        if len(multipliers) > 1:
            raise MupscaleError(
                f"the parts of axis {axis} are copied {', '.join(map(str, sorted(multipliers)))} times, expected one number: "
                "one tensor has one learning rate and one eps; write the same k for all parts",
                code="axis.parts_differ_in_copies",
            )
        return axis if axis.grows else Axis(axis.segments, None)

    @staticmethod
    def fixed(size: int) -> Axis:
        """The axis that does not grow."""
        return Axis.of((Factor(size),))

    @staticmethod
    def between(base: int, wide: int, role: Role | None, layout: Layout = 1, ways: Ways = COPIES) -> Axis:
        """The axis that takes `base` to `wide` under a layout.

        An integer b means blocks of b that are copied together. Pairs (size, k) or triples
        (size, k, pad) give the factors; a sequence of such sequences gives segments.

        >>> str(Axis.between(12, 24, "out")), str(Axis.between(12, 24, "out", layout=3))
        ('out: 12x2', 'out: 4x2 * 3')
        >>> str(Axis.between(12, 24, "out", [[(2, 2), (4, 1)], [(2, 2), (2, 1)]]))
        'out: 2x2 * 4 | 2x2 * 2'
        """
        if not _is_layout(layout):
            raise MupscaleError(
                f"{layout!r} is not a layout; write a block size, pairs ((size, k), …), or a sequence of such sequences",
                code="layout.not_a_layout",
            )
        if not isinstance(layout, int):
            axis = Axis.of(*_segments(layout), role=role)
            if (axis.base, axis.wide) != (base, wide):
                raise MupscaleError(
                    f"layout {axis} takes {axis.base} to {axis.wide}, the models have {base} and {wide}",
                    code="layout.other_sizes",
                )
            return axis
        if not base:
            raise MupscaleError(
                f"an axis of 0 units cannot grow to {wide}; build the base with 1 unit or more",
                code="axis.no_units_to_grow",
            )
        if base % layout or wide % layout:
            raise MupscaleError(
                f"blocks of {layout} do not divide {base} and {wide}; write a divisor of both",
                code="layout.not_a_divisor",
            )
        return Axis.of((ways.grow(base // layout, wide // layout, layout), Factor(layout)), role=role)

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
                        f'{text!r} is not an axis; for example write "in: 64x2" or "out: 2x2 * 32"',
                        code="axis.not_an_axis",
                    )
                factors.append(Factor(int(match[1]), Fraction(match[2] or 1), int(match[3] or 0)))
            segments.append(factors)
        role: Role | None = "in" if head.strip() == "in" else "out" if head.strip() else None
        return Axis.of(*segments, role=role)

    def __str__(self) -> str:
        body = " | ".join(map(as_text, self.segments))
        return f"{self.role}: {body}" if self.role else body

    @property
    def base(self) -> int:
        """Its size in the base."""
        return sum(prod(f.size for f in segment) for segment in self.segments)

    @property
    def wide(self) -> int:
        """Its size in the wide model."""
        return sum(prod(f.wide for f in segment) for segment in self.segments)

    @property
    def k(self) -> Fraction:
        """How many copies each base index has."""
        return prod((f.k for f in self.segments[0]), start=Fraction(1))

    @property
    def filled(self) -> Fraction:
        """The share of wide indices that are not padding."""
        return Fraction(self.k * self.base) / self.wide if self.wide else Fraction(1)

    @property
    def grows(self) -> bool:
        """True when there are copies or zeros, or fewer units than in the base."""
        return any(f.k != 1 or f.pad for segment in self.segments for f in segment)

    @property
    def padded(self) -> bool:
        """True when zeros follow the copies somewhere."""
        return any(f.pad for segment in self.segments for f in segment)

    @property
    def duplicates(self) -> bool:
        """True when every multiplier is a whole number, so that copies can be made."""
        return all(f.k.denominator == 1 for segment in self.segments for f in segment)

    def source(self, index: int) -> int | None:
        """The base index that wide `index` copies, or None for padding. This is the definition.

        In "4x2 * 3", wide 8 has the digits 2 (of 8 block copies) and 2 (of 3 entries). Block copy 2 is a copy
        of block 2 // 2 = 1, so it reads base 1 · 3 + 2:

        >>> Axis.parse("4x2 * 3").source(8)
        5
        """
        offset, rest = 0, index
        for segment in self.segments:
            size = prod(f.wide for f in segment)
            if 0 <= rest < size:
                found = 0
                for position, factor in enumerate(segment):
                    inner = prod(f.wide for f in segment[position + 1 :])
                    digit, rest = divmod(rest, inner)
                    # The zeros of a factor lie behind its copies, and everything inside them is zero too.
                    if digit >= factor.live:
                        return None
                    found = found * factor.size + digit // int(factor.k)
                return offset + found
            rest -= size
            offset += prod(f.size for f in segment)
        raise IndexError(f"index {index} of an axis of {self.wide}")

    @property
    def new(self) -> list[int]:
        """The wide indices that copy no base index.

        >>> Axis.parse("2x2+1 * 2").new
        [8, 9]
        """
        return [index for index in range(self.wide) if self.source(index) is None]

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[Piece]:
        """Cut the wide range [start, stop) into the fewest products and ranges of zeros."""
        stop = self.wide if stop is None else stop
        wide_offset = base_offset = 0
        for segment in self.segments:
            size = prod(f.wide for f in segment)
            low, high = max(start - wide_offset, 0), min(stop - wide_offset, size)
            if low < high:
                yield from cut(segment, low, high, wide_offset, base_offset)
            wide_offset += size
            base_offset += prod(f.size for f in segment)

    def cover(self, start: int, stop: int) -> tuple[int, int]:
        """The smallest contiguous base range that wide [start, stop) reads; (0, 0) if it reads none.

        >>> Axis.parse("4x2 * 3").cover(8, 14)  # reads 5, 3, 4, 5, 6, 7
        (3, 8)
        """
        live = [piece for piece in self.pieces(start, stop) if piece.factors is not None]
        if not live:
            return 0, 0
        return (
            min(piece.base_start for piece in live),
            max(piece.base_start + piece.base_length for piece in live),
        )

    def resized(self, wide: int, role: Role | None) -> Axis:
        """An axis from the same base to another width, for sizes and units only: its layout is plain.

        >>> str(Axis.parse("out: 4x2 * 3").resized(36, None))
        'out: 12x3'
        """
        return Axis.of((Factor(self.base, Fraction(wide, self.base)),), role=self.role or role)

    def then(self, other: Axis) -> Axis:
        """The axis that grows by this one and then by `other`.

        >>> str(Axis.parse("out: 4x2 * 3").then(Axis.parse("out: 24x2")))
        'out: 4x2 * 3x2'
        >>> str(Axis.parse("out: 4x3/2").then(Axis.parse("out: 6x2")))  # not copies: only sizes and units compose
        'out: 4x3'
        >>> str(Axis.parse("out: 8x1/2").then(Axis.parse("out: 4+4")))
        'out: 8x1/2+4'
        """
        if self.wide != other.base:
            raise MupscaleError(
                f"axis {self} ends at {self.wide}, axis {other} starts at {other.base}; expected the same size",
                code="axis.sizes_do_not_meet",
            )
        if self.role and other.role and self.role != other.role:
            raise MupscaleError(
                f"axis {self} and axis {other} disagree about in and out; write declared=mu.Declared(roles=…) for both plans",
                code="axis.roles_disagree",
            )
        if not (self.duplicates and other.duplicates):
            if self.padded:
                raise MupscaleError(
                    f"axis {self} and axis {other}: a pad and a fractional multiplier do not compose",
                    code="axis.pad_with_fraction",
                )
            live = int(other.k * other.base)
            factor = Factor(self.base, Fraction(live, self.base), other.wide - live)
            return Axis.of((factor,), role=self.role or other.role)
        first, second = align(self.segments, other.segments)
        composed = [compose(a, b) for a, b in zip(first, second, strict=True)]
        return Axis.of(*composed, role=self.role or other.role)


def nearest_copies(base: int, wide: int) -> str:
    """The whole multiples of a size that are nearest to a larger one, without the size itself.

    >>> nearest_copies(4, 10), nearest_copies(24, 36)
    ('8 (x2), 12 (x3)', '48 (x2)')
    """
    return ", ".join(f"{base * k} (x{k})" for k in (wide // base, wide // base + 1) if k > 1)


def fraction_fault(where: str, axis: Axis) -> Fault:
    """The fault of an axis that copies cannot make, with the nearest sizes that they can.

    >>> fraction_fault("w, axis 0", Axis.parse("out: 4x5/2")).remedy
    'nearest: 8 (x2), 12 (x3); or add new units: plan=mu.infer_plan(base, wide, by="units", loss=loss)'
    """
    if axis.wide < axis.base:
        what = f"shrinks from {axis.base} to {axis.wide}, and copies only add units"
        return Fault(
            "axis.shrinks_by_copies",
            where,
            what,
            "give the narrower model first; the way back is narrow, by the plan that widened",
        )
    return Fault(
        "axis.not_whole_copies",
        where,
        f"grows from {axis.base} to {axis.wide}, which is not a whole number of copies",
        f'nearest: {nearest_copies(axis.base, axis.wide)}; or add new units: plan=mu.infer_plan(base, wide, by="units", loss=loss)',
    )


def _refuse_unlike_factors(segment: Sequence[Factor]) -> None:
    """Raise unless a segment is a sequence of factors whose numbers can be sizes, copies and pads."""
    for factor in segment if isinstance(segment, Sequence) else [segment]:
        if not isinstance(factor, Factor):
            raise MupscaleError(
                f"a part of an axis is {shown(factor)}, expected a sequence of factors; write Axis.of((Factor(4),))",
                code="axis.not_a_factor",
            )
        counts: tuple[object, ...] = (factor.size, factor.pad)
        whole = all(isinstance(n, Integral) and int(n) >= 0 for n in counts)
        if not (whole and isinstance(factor.k, Rational) and factor.k > 0):
            raise MupscaleError(
                f"{factor!r}: expected whole numbers for size and pad and a fraction above 0 for k; "
                "for example write Factor(4, Fraction(2))",
                code="axis.factor_out_of_range",
            )


def _is_layout(layout: Any) -> bool:
    if isinstance(layout, int):
        return layout >= 1
    parts = layout if isinstance(layout, (list, tuple)) else ()
    if not parts or not all(isinstance(part, (list, tuple)) and part for part in parts):
        return False
    entries = parts if isinstance(parts[0][0], int) else [entry for part in parts for entry in part]
    return all(
        isinstance(e, (list, tuple)) and 1 <= len(e) <= 3 and all(type(n) is int for n in e) for e in entries
    )


def _segments(layout: Entries | Sequence[Entries]) -> list[list[Factor]]:
    nested: Any = [layout] if isinstance(layout[0][0], int) else layout
    return [
        [Factor(size, Fraction(*rest[:1] or (1,)), *rest[1:]) for size, *rest in segment]
        for segment in nested
    ]
