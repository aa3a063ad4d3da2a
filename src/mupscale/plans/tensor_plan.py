"""How one wide tensor is made from the base's: axes, fold, sources, and the units that follow.

A frozen value, one entry of a `Plan`. Knows JSON and composition of one tensor, and the names of its sources only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import prod
from typing import Any, Literal, get_args

from torch import Tensor

from ..errors import MupscaleError
from ..files.strict import printable
from ..files.typed import flag, integer, many, short_numbers, text, texts, whole
from ..models.names import Kind
from ..rules.axes import Axis
from ..rules.scale import ONE, Scale
from ..rules.units import Change
from ..tensors.expand import expand_
from ..tensors.making import Fill, Join, Making
from ..tensors.noise import TensorNoise

Rows = Literal["words", "positions", "experts"]
Becomes = Literal["fold", "typical", "mean"]
"""What zeros become: the fold of a gain, the root mean square of the base's entries, or the mean of its rows."""
Powers = Mapping[str, Mapping[int, Fraction]]
"""Tensor -> dimension -> the power of that axis's filled share in its fold, so that other sizes get their own fold."""
_DIGITS = 12  # of a number in JSON: trial division of 10^12 takes a tenth of a second


@dataclass(frozen=True)
class Sleep:
    """What noise makes of the part of a tensor that the base does not have, which sleeps as zeros until then.

    >>> padded, words = (Axis.parse("out: 4+2"), Axis.fixed(3)), (Axis.parse("5+3"), Axis.fixed(3))
    >>> TensorPlan(("w",), padded).sleep, TensorPlan(("w",), words, rows="words").sleep
    (Sleep(wakes=True, becomes=None, cut=()), Sleep(wakes=False, becomes='mean', cut=()))
    >>> TensorPlan((), words, like="w").sleep.wakes, TensorPlan((), words, like="w", quiet=True).sleep.wakes
    (True, False)
    """

    wakes: bool
    """Whether noise of the size of trained weights wakes it: a new tensor, or zeros of a width behind copies."""
    becomes: Becomes | None
    """What its zeros become besides noise."""
    cut: tuple[int, ...] = ()
    """Dimensions whose new entries stay as they are."""


@dataclass(frozen=True)
class TensorPlan:
    """How one wide tensor is made: W' = s · dup(W), with s, c and everything else following from this.

    >>> t = TensorPlan(("w",), (Axis.parse("out: 4x3"), Axis.parse("in: 6x2")))
    >>> str(t.change.s), str(t.change.r), t.base_shape, t.wide_shape
    ('1/2', '1/3', (4, 6), (12, 12))
    """

    sources: tuple[str, ...]
    """Base names: none for a new tensor, several when they are concatenated along `cat`."""
    axes: tuple[Axis, ...]
    """One axis for every dimension: its size in the base and in the wide model, and what lies between."""
    fold: Scale = ONE
    """A constant absorbed by this tensor instead of by the model's code; part of s."""
    spread: Fraction = Fraction(1)
    """How many wide tensors share each source: copies that lie in other tensors."""
    shift: int = 0
    """1 for gains that the model uses as (1 + w)."""
    cat: int | None = None
    """The dimension along which several sources are concatenated."""
    kind: Kind = "parameter"
    """Whether it is a parameter or a buffer."""
    fill: Fill = "zero"
    """What a tensor without a source holds; "own" keeps what the wide model computes by itself."""
    trainable: bool = True
    """Whether it gets gradients."""
    like: str | None = None
    """Of a new tensor: the base tensor whose parameter group it joins, and whose norm decides the size of its noise."""
    quiet: bool = False
    """Of a new tensor: whether it stays as it is when noise wakes the others, so that waking does not change the output."""
    repeats: bool = False
    """Of a new tensor: whether it becomes a copy of the tensor that it is like when it wakes. So do those of new blocks."""
    cut: tuple[int, ...] = ()
    """Dimensions whose zeros stay zero when noise wakes the other zeros, so that waking does not change the output."""
    mean: tuple[int, ...] = ()
    """Dimensions whose new entries are the mean of the others in place of zeros: channels of a space that norms subtract the
    mean of, where this tensor writes into it."""
    gain: bool = False
    """Whether it is the gain of a norm over a space with zeros: awake, the zeros of the gain become its fold."""
    typical: bool = False
    """Whether its zeros become the root mean square of the base's entries when they wake: a gain of one's own, whose unit is zero
    without it, and the gain and the running variance of a batch norm."""
    rows: Rows | None = None
    """What the zeros along its axis without a role are: words, positions or experts that the base does not have. Awake, a new
    word is the mean of the base's words, a new expert a copy of one of the base's; a new position stays zero."""
    pad: int = 0
    """What stands behind the base's entries: a bias that keeps every token from new experts, and zero elsewhere."""
    chosen: int | None = None
    """The dimension that counts experts of which a token goes to as few as in the base: each copy of an expert gets a part of
    its tokens, so that the gradients of copies add up to the base's, and are not r times it each."""
    stack: int | None = None
    """The dimension of a tensor of experts that counts them, where the base has a dense layer and no such dimension. Of a
    tensor with sources its axis is "out: 1xE": E copies of the dense layer."""

    @cached_property
    def change(self) -> Change:
        """The change of units: s from the fold and the axes that are summed over, c from all of them."""
        s = self.fold
        for axis in self.axes:
            if axis.role == "in":
                s = s / Scale.of(axis.k)
        c = prod((axis.k for axis in self.axes), start=self.spread)
        return Change(s, c, prod((axis.filled for axis in self.axes), start=Fraction(1)))

    @property
    def join(self) -> Join | None:
        """How several sources, or one in a stack of copies, become one base tensor."""
        if not self.sources or self.stack is None:
            return None if self.cat is None else Join(self.cat)
        if self.cat is None:
            return Join(self.stack, stacked=True)
        return Join(self.cat + (self.stack <= self.cat), under=self.stack)

    def making(self, noise: TensorNoise | None = None) -> Making:
        """How the wide weight or buffer is made: copied, and scaled by s."""
        fill = self.fill if self.fill == "own" or not self.sources else None
        drawn = None if fill == "own" else noise
        return Making(self.axes, self.change.s, self.shift, drawn, fill, self.join, self.mean, self.pad)

    def woken_as_copy(self) -> TensorPlan:
        """A new tensor that repeats another, as it is made when it wakes: from the tensor that it is like.

        >>> new = TensorPlan((), (Axis.fixed(2),), fill="one", like="h.0.norm", repeats=True)
        >>> new.woken_as_copy().sources, new.woken_as_copy().making().fill
        (('h.0.norm',), None)
        """
        assert self.like is not None, "only what is like another tensor repeats it"
        return replace(self, sources=(self.like,), fill="zero")

    def gradient_making(self) -> Making:
        """How the wide gradient is expected to follow from the base's: r · dup(G)."""
        return Making(self.axes, self.change.r, join=self.join)

    def write_(
        self, out: Tensor, tensors: Mapping[str, Tensor], making: Making, start: Sequence[int] | None = None
    ) -> Tensor:
        """Write the wide tensor, or the part of it that begins at `start`, as `making` says from the base's tensors."""
        return expand_(out, self.source(tensors).detach() if self.sources else None, making, out_start=start)

    def source(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The base tensor that the wide one is made from, several sources joined."""
        return self.making().source([tensors[name] for name in self.sources])

    @property
    def base_shape(self) -> tuple[int, ...]:
        """Its shape in the base, several sources concatenated."""
        return tuple(axis.base for axis in self.axes)

    @property
    def source_shape(self) -> tuple[int, ...]:
        """The shape of each of its sources; several are equal parts of the base's shape.

        >>> TensorPlan(("gate", "up"), (Axis.fixed(8), Axis.fixed(3)), cat=0).source_shape
        (4, 3)
        """
        shape = [n for dim, n in enumerate(self.base_shape) if dim != self.stack]
        if self.cat is not None:
            shape[self.cat] //= len(self.sources)
        return tuple(shape)

    @property
    def wide_shape(self) -> tuple[int, ...]:
        """Its shape in the wide model."""
        return tuple(axis.wide for axis in self.axes)

    @property
    def new(self) -> bool:
        """True for a parameter that the base does not have."""
        return self.kind == "parameter" and not self.sources

    @property
    def grows(self) -> bool:
        """True when one of its axes does."""
        return any(axis.grows for axis in self.axes)

    @property
    def padded(self) -> bool:
        """True when one of its axes has zeros."""
        return any(axis.padded for axis in self.axes)

    @property
    def sleep(self) -> Sleep:
        """What noise makes of the part of it that the base does not have."""
        if not self.sources:
            named = self.new and self.like is not None
            return Sleep(named and self.fill == "zero" and not self.quiet, None)
        tables = ("words", "positions")
        width = any(axis.padded and (axis.role or self.rows not in tables) for axis in self.axes)
        words = self.rows == "words" and self.kind == "parameter"
        becomes: Becomes | None = (
            "fold" if self.gain else "typical" if self.typical else "mean" if words else None
        )
        return Sleep(width, becomes, tuple(sorted({*self.cut, *self.mean})))

    def summed_over(self, dim: int) -> TensorPlan:
        """The same growth with copies along a dimension taken for an `in` axis, whose 1/k the fold takes back.

        The outputs of experts are added with weights that share what was one weight, so their stack can be either.

        >>> stack = TensorPlan(("w",), tuple(map(Axis.parse, ("out: 4x2", "5", "3"))))
        >>> summed = stack.summed_over(0)
        >>> str(summed.axes[0]), summed.fold == Scale.of(2), summed.change == stack.change
        ('in: 4x2', True, True)
        """
        axis = self.axes[dim]
        axes = (*self.axes[:dim], replace(axis, role="in"), *self.axes[dim + 1 :])
        return replace(self, axes=axes, fold=self.fold * Scale.of(axis.k))

    def then(self, late: TensorPlan) -> TensorPlan:
        """The tensor that grows by this plan and then by `late`, exactly."""
        if len(self.axes) == len(late.axes) == 3 and {self.axes[0].role, late.axes[0].role} == {"in", "out"}:
            if self.axes[0].role == "out":
                return self.summed_over(0).then(late)
            return self.then(late.summed_over(0))
        if late.cat is not None or len(late.sources) != 1:
            raise MupscaleError(
                "a tensor made from several sources composes only as the first step",
                code="plan.joins_in_second_step",
            )
        if len(self.axes) != len(late.axes):
            raise MupscaleError(
                f"{len(self.axes)} dimensions in the first plan, {len(late.axes)} in the second; expected the same tensor",
                code="plan.other_dimensions",
            )
        plain = [one for one in (self, late) if not one.shift]
        if self.shift != late.shift and not all(one.fold.is_one for one in plain):
            raise MupscaleError(
                "a (1 + w) gain in one plan and not in the other; declare it in both: declared=mu.Declared(plus_one=[…])",
                code="plan.gain_declared_once",
            )
        return replace(
            self,
            axes=tuple(a.then(b) for a, b in zip(self.axes, late.axes, strict=True)),
            fold=self.fold * late.fold,
            spread=self.spread * late.spread,
            shift=max(self.shift, late.shift),
            trainable=self.trainable and late.trainable,
            fill=late.fill if late.fill == "own" else self.fill,
            cut=tuple(sorted({*self.cut, *late.cut})),
            mean=tuple(sorted({*self.mean, *late.mean})),
            gain=self.gain or late.gain,
            typical=self.typical or late.typical,
            rows=self.rows or late.rows,
            pad=self.pad or late.pad,
            chosen=late.chosen if self.chosen is None else self.chosen,
        )

    def mixes_experts(self, late: TensorPlan) -> bool:
        """Whether one of two plans gives tokens to one of several copies of an expert, and the other copies experts for all tokens.

        From 4 experts to 8 for all, and to 16 of which each token gets as few: of the four copies of an expert two belong together,
        and the axis of both plans does not say which.
        """
        if (self.chosen is None) == (late.chosen is None):
            return False
        parted, copied = (late, self) if self.chosen is None else (self, late)
        return copied.axes[parted.chosen or 0].k > 1

    def as_json(self) -> dict[str, Any]:
        """The entry as plain values; what is usual is left out."""
        entry: dict[str, Any] = {
            "sources": list(self.sources),
            "axes": [str(axis) for axis in self.axes],
            "s": str(self.change.s),
            "c": str(self.change.c),
        }
        optional = {
            "fold": (str(self.fold), "1"),
            "spread": (str(self.spread), "1"),
            "shift": (self.shift, 0),
            "cat": (self.cat, None),
            "kind": (self.kind, "parameter"),
            "fill": (self.fill, "zero"),
            "trainable": (self.trainable, True),
            "like": (self.like, None),
            "quiet": (self.quiet, False),
            "repeats": (self.repeats, False),
            "cut": (list(self.cut), []),
            "mean": (list(self.mean), []),
            "gain": (self.gain, False),
            "typical": (self.typical, False),
            "rows": (self.rows, None),
            "stack": (self.stack, None),
            "pad": (self.pad, 0),
            "chosen": (self.chosen, None),
        }
        entry.update({key: value for key, (value, usual) in optional.items() if value != usual})
        return entry

    @staticmethod
    def of_json(entry: Mapping[str, Any]) -> TensorPlan:
        """The entry that `as_json` wrote. Its s and c are for readers, and must agree with the axes."""
        unknown = sorted(set(entry) - {"sources", "axes", "s", "c", "fold", "spread", *_READ})
        if unknown:
            raise ValueError(f"{printable(unknown[0])} is not a part of a tensor's plan")
        plan = TensorPlan(
            sources=texts(entry["sources"]),
            axes=tuple(Axis.parse(short_numbers(axis, _DIGITS)) for axis in many(entry["axes"])),
            fold=stored_scale(entry.get("fold", "1")),
            spread=Fraction(short_numbers(entry.get("spread", "1"), _DIGITS)),
            **{key: read(entry[key]) for key, read in _READ.items() if key in entry},
        )
        if (str(plan.change.s), str(plan.change.c)) != (entry["s"], entry["c"]):
            raise MupscaleError(
                f"{', '.join(plan.sources)}: the plan says s = {entry['s']}, c = {entry['c']}, its axes and fold give "
                f"s = {plan.change.s}, c = {plan.change.c}; make the plan again",
                code="plan.contradicts_itself",
            )
        return plan


def stored_scale(value: Any) -> Scale:
    """A scale as plans write it. Its numbers are factorised by trial, so they may not be long."""
    return Scale.of(short_numbers(value, _DIGITS))


def _one_of(*known: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if text(value) not in known:
            raise ValueError(f"{printable(value)} is none of {', '.join(known)}")
        return str(value)

    return read


_READ: dict[str, Callable[[Any], Any]] = {
    "shift": whole,
    "cat": whole,
    "kind": _one_of("parameter", "buffer"),
    "fill": _one_of(*get_args(Fill)),
    "trainable": flag,
    "like": text,
    "quiet": flag,
    "repeats": flag,
    "cut": lambda value: tuple(whole(dim) for dim in many(value)),
    "mean": lambda value: tuple(whole(dim) for dim in many(value)),
    "gain": flag,
    "typical": flag,
    "rows": _one_of(*get_args(Rows)),
    "stack": whole,
    "pad": integer,
    "chosen": whole,
}
