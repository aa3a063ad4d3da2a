"""Find the call at which the wide model's loss first goes wrong, and the factors on its inputs that would mend it.

Attention with a growing head size and 1/sqrt(head size), k = 2. Every call agrees with the base up to one factor,
until softmax, which turns a factor of its input into something else:

    linear (q)  1      linear (k)  1      matmul  2      div  2^(1/2)      softmax  no copies

The call to report is softmax. Called again with its input divided by 2^(1/2) it gives copies, so this is what must
be absorbed before it. A call that goes wrong without consequences is not reported: `T + eye(w)` is no set of copies
although `(T + eye(w)) @ x` is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from torch import Tensor

from ...models.attempts import attempted
from ...models.calls import Call, Trace
from ...rules.scale import ONE, Scale
from .up_to_copies import Comparison, is_batched

Mend = Mapping[int, Scale]
"""Factors on inputs of a call, by position."""


@dataclass(frozen=True)
class Deviation:
    """The first call that goes wrong."""

    aligned: Alignment
    index: int
    call: Call | None
    """None if the two models do not call the same functions."""
    excess: Scale | None = None
    """The factor of the loss, if nothing else is wrong."""


class Alignment:
    """The calls of a base and a wide model, compared one by one."""

    def __init__(self, base: Trace, wide: Trace, compare: Comparison) -> None:
        self.base, self.wide, self.compare = base, wide, compare
        self._factors: dict[int, Scale | None] = {}

    @cached_property
    def length(self) -> int:
        """How many calls have the same name in both, from the first on."""
        for i, (a, b) in enumerate(zip(self.base.calls, self.wide.calls, strict=False)):
            if a.name != b.name or a.parents != b.parents:
                return i
        return min(len(self.base.calls), len(self.wide.calls))

    def factor(self, index: int) -> Scale | None:
        """The factor of one call's outputs; None if one of them is no set of copies."""
        if index not in self._factors:
            self._factors[index] = self._measured(index)
        return self._factors[index]

    def _measured(self, index: int) -> Scale | None:
        found = ONE
        pairs = zip(self.base.calls[index].outputs, self.wide.calls[index].outputs, strict=False)
        for a, b in pairs:
            # A tensor inside vmap cannot be read outside; nothing speaks against it.
            if a.is_floating_point() and b.is_floating_point() and not (is_batched(a) or is_batched(b)):
                factor = self.compare.factor(a, b)
                if factor is None:
                    return None
                found = factor if found == ONE else found
        return found

    @cached_property
    def consumers(self) -> dict[int, list[int]]:
        """The calls that read the outputs of each call."""
        found: dict[int, list[int]] = {}
        for i, call in enumerate(self.base.calls):
            for parent in call.parents:
                if parent is not None:
                    found.setdefault(parent, []).append(i)
        return found

    @cached_property
    def trained(self) -> list[bool]:
        """For every call, whether a parameter or buffer of the model is behind it."""
        found: list[bool] = []
        for call in self.base.calls:
            behind = (p is not None and found[p] for p in call.parents)
            found.append(any(leaf is not None for leaf in call.leaves) or any(behind))
        return found

    def first(self, last: int) -> Deviation:
        """The first call that goes wrong and matters for call `last`, which returned the loss."""
        for i in range(min(self.length, last + 1)):
            if self.trained[i] and self.factor(i) is None and self._reaches(i, last):
                return Deviation(self, i, self.base.calls[i])
        if self.length <= last:
            return Deviation(self, self.length, None)
        return Deviation(self, last, self.base.calls[last], self.factor(last))

    def harmless(self, last: int) -> Deviation | None:
        """The first call that goes wrong although the loss is right: two wrong layouts can cancel."""
        for i in range(min(self.length, last + 1)):
            if self.trained[i] and self.factor(i) is None:
                return Deviation(self, i, self.base.calls[i])
        return None

    def _reaches(self, start: int, last: int) -> bool:
        """True if what is wrong in call `start` is passed on by wrong calls up to the loss."""
        stack, seen = [start], {start}
        while stack:
            i = stack.pop()
            # What happens after the first call that only one of the models makes is not known.
            if i == last or i == self.length - 1:
                return True
            for j in self.consumers.get(i, ()):
                if j not in seen and (j >= self.length or self.factor(j) is None):
                    seen.add(j)
                    stack.append(min(j, self.length - 1))
        return False

    def mends(self, index: int) -> Iterator[Mend]:
        """Factors on inputs of a call that make its output a set of copies, the likeliest first.

        Two inputs that mend it alone, like q and k of attention, are also tried with half of the factor each.
        """
        base, wide = self.base.calls[index], self.wide.calls[index]
        want = base.value
        floating = [i for i, t in enumerate(base.inputs) if t.is_floating_point()]
        # Calls of more than five tensors (concatenations, recurrent layers) are not tried input by input.
        if want is None or len(floating) > 5 or len(base.inputs) != len(wide.inputs):
            return
        found: dict[int, Scale] = {}
        for i in floating:
            for scale in self._candidates(base, index, i):
                if self._helps(wide, want, {i: scale}):
                    found[i] = scale
                    break
        ranked = sorted(found, key=lambda i: self._rank(base, i, found[i]))
        for i in ranked:
            half = found[i] ** Fraction(1, 2)
            for j in ranked:
                alike = found[j] == found[i] and self.base.weight(base, i) == self.base.weight(base, j)
                if j > i and alike and self._helps(wide, want, {i: half, j: half}):
                    yield {i: half, j: half}
        for i in ranked:
            yield {i: found[i]}

    def _helps(self, call: Call, want: Tensor, scales: Mend) -> bool:
        # A function may refuse to be called again; then it is not tried.
        got = attempted(
            lambda: call.again({i: call.inputs[i].detach() * float(scale) for i, scale in scales.items()})
        )
        return got is not None and self.compare.factor(want, got) is not None

    def _input_factor(self, call: Call, position: int) -> Scale:
        parent = call.parents[position]
        return (self.factor(parent) if parent is not None else None) or ONE

    def input_factors(self, call: Call) -> set[Scale]:
        """The factors other than 1 that a call gets with the batch, from earlier calls."""
        data = (i for i, parent in enumerate(call.parents) if parent is not None and self.base.batch[parent])
        return {self._input_factor(call, i) for i in data} - {ONE}

    def _candidates(self, call: Call, index: int, position: int) -> list[Scale]:
        """Powers of the growth ratios, the inverse factors of the inputs first."""
        known = [self._input_factor(call, i) for i in range(len(call.inputs)) if call.parents[i] is not None]
        quarters = (-2, 2, -4, 4, -1, 1, -3, 3, -8, 8)
        powers = [k ** Fraction(j, 4) for j in quarters for k in self.compare.bases]
        own = self._input_factor(call, position)
        ordered = [own**-1, *(f**-1 for f in known), *known, *powers]
        return [s for s in dict.fromkeys(ordered) if s != ONE]

    def _rank(self, call: Call, position: int, scale: Scale) -> tuple[bool, bool, bool]:
        """Undoing a factor that an input has comes first, in a weight of the call before its data; biases are last."""
        undone = {
            self._input_factor(call, i) ** -1 for i in range(len(call.inputs)) if call.parents[i] is not None
        }
        weight = self.base.weight(call, position)
        bias = call.inputs[position].dim() < 2 and weight
        return bias, scale not in undone - {ONE}, not weight
