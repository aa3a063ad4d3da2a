"""From the plan of a small copy to the plan of the full model.

A full tensor takes the plan of the small tensor with the same name up to numbers. Blocks keep their size; their
number follows from the full model. A size that is not a whole number of blocks is a fault.

The copy of Llama 70B in shrink.py has q_proj rows "2x2 * 1024": 2 blocks of 8 heads of 128 rows. The full
model has 8,192 rows, hence 8 blocks. Its stream of 48 channels, "48x2", becomes "8192x2". By new units the factor with
zeros is the one whose size follows from the full model.

>>> str(_axis(Axis.parse("out: 2x2 * 1024"), 8192, 16384)), str(_axis(Axis.parse("in: 48x2"), 8192, 16384))
('out: 8x2 * 1024', 'in: 8192x2')
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import Any

from torch import nn

from ...errors import Fault, MupscaleError, raise_faults
from ...models.names import named_tensors, pattern_of, unique_tensors
from ...plans.plan import Plan
from ...plans.tensor_plan import Powers, TensorPlan
from ...rules.axes import Axis
from ...rules.products import COPIES, Factor, Product, Ways
from ...rules.scale import Scale
from ..types.symbols import in_units


@dataclass(frozen=True)
class Tensors:
    """Names, kinds and shapes of a model's tensors, and which are one tensor under several names."""

    kinds: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    ties: Mapping[str, str]

    @staticmethod
    def of(model: nn.Module) -> Tensors:
        named = list(named_tensors(model))
        shapes = {name: tuple(tensor.shape) for name, _, tensor in named}
        return Tensors({name: kind for name, kind, _ in named}, shapes, unique_tensors(model)[1])


def lift(
    small: Plan,
    base: Tensors,
    wide: Tensors,
    layouts: Mapping[str, Mapping[int, Any]] | None = None,
    powers: Powers | None = None,
) -> tuple[Plan, Powers]:
    """The plan from `base` to `wide` that corresponds to the plan `small` of the copy, and the powers in its folds.

    `layouts` are those that a row of the registry gives for the full sizes, by name and dimension. `powers` are the parts
    of folds that depend on how much of an axis is filled: they are computed again for the full sizes.
    """
    faults: list[Fault] = []
    if base.ties != wide.ties:
        odd = sorted(set(base.ties.items()) ^ set(wide.ties.items()))
        faults += [Fault("family.tied_at_one_end", f"{a} = {b}", "tied at one end only") for a, b in odd]
    if base.shapes.keys() != wide.shapes.keys():
        odd_names = sorted(base.shapes.keys() ^ wide.shapes.keys())
        faults += [
            Fault("family.tensor_at_one_end", name, "in one of the two full models only")
            for name in odd_names
        ]
    raise_faults("the two full models do not correspond", faults)
    twins = _Twins(small, list(base.shapes))
    ratios = _ratios(small, base, twins)
    tensors: dict[str, TensorPlan] = {}
    lifted: dict[str, Mapping[int, Fraction]] = {}
    for name in wide.shapes:
        if name in wide.ties:
            if pattern_of(name) not in {pattern_of(alias) for alias in small.ties}:
                faults.append(
                    Fault(
                        "family.tie_not_in_small_copy",
                        name,
                        "tied in the full model, and not in its small copy",
                    )
                )
            continue
        try:
            other = twins.of(name)
            twin, held = small.tensors[other], (powers or {}).get(other, {})
            declared = (layouts or {}).get(name, {})
            axes = tuple(
                _axis(axis, a, b, declared.get(dim), ratios)
                for dim, (axis, a, b) in enumerate(
                    zip(twin.axes, base.shapes[name], wide.shapes[name], strict=True)
                )
            )
            fold = _refilled(twin.fold, held, twin.axes, axes)
            tensors[name] = replace(twin, sources=(name,) if twin.sources else (), axes=axes, fold=fold)
            if held:
                lifted[name] = held
        except (MupscaleError, ValueError) as error:
            faults.append(
                Fault(
                    error.code if isinstance(error, MupscaleError) else "family.axis_does_not_lift",
                    name,
                    error.claim if isinstance(error, MupscaleError) else str(error),
                )
            )
    raise_faults("the plan of the small copy does not fit the full model", faults)
    return replace(small, tensors=tensors, ties=dict(wide.ties)), lifted


def _refilled(
    fold: Scale, powers: Mapping[int, Fraction], small: tuple[Axis, ...], full: tuple[Axis, ...]
) -> Scale:
    """A fold of the copy at the full sizes, where other shares of the axes are filled.

    >>> from_56, from_4096 = (Axis.parse("out: 56+14"),), (Axis.parse("out: 4096+1024"),)
    >>> str(_refilled(Scale.of("4/5") ** Fraction(1, 2), {0: Fraction(1, 2)}, from_56, from_4096))
    '2*5^(-1/2)'
    """
    for dim, power in powers.items():
        fold = fold * (Scale.of(full[dim].filled) / Scale.of(small[dim].filled)) ** power
    return fold


def _axis(
    axis: Axis, base: int, wide: int, declared: Any = None, ratios: Set[Fraction] = frozenset()
) -> Axis:
    """An axis of the copy at the sizes of the full model.

    Only the number of units that grow changes, in every segment by the same ratio, which must be that of a space of its
    own (`ratios`) where segments differ. A fused "2x2 * 16 | 4x2 * 8" (queries, then keys and values) of 64 rows, in a
    full model with 4 times as many heads, by copies and by new units:

    >>> str(_axis(Axis.parse("out: 2x2 * 16 | 4x2 * 8"), 256, 512, None, {Fraction(4)}))
    'out: 8x2 * 16 | 16x2 * 8'
    >>> str(_axis(Axis.parse("out: 32+32 | 2 * 16+16"), 256, 512, None, {Fraction(4)}))
    'out: 128+128 | 2 * 64+64'
    """
    if base == wide:
        if axis.grows:
            raise MupscaleError(
                f"an axis of {base} stays, and grows in the small copy", code="family.only_small_axis_grows"
            )
        return Axis.fixed(base)
    if not axis.grows:
        raise MupscaleError(
            f"an axis grows from {base} to {wide}, and stays in the small copy",
            code="family.only_full_axis_grows",
        )
    if declared is not None:
        units = axis.padded
        declared = in_units(declared, Fraction(wide, base)) if units else declared
        found = Axis.between(base, wide, axis.role, declared, Ways("units") if units else COPIES)
    else:
        ratio = Fraction(base, axis.base)
        if len(axis.segments) > 1 and axis.padded and ratio not in ratios:
            raise MupscaleError(
                f"the parts of {axis} do not all grow {ratio} times from the small copy to the full model",
                code="family.parts_of_several_spaces",
            )
        segments = [_lifted(axis, segment, ratio, Fraction(wide, base)) for segment in axis.segments]
        found = Axis.of(*segments, role=axis.role)
    if (found.base, found.wide) != (base, wide):
        raise MupscaleError(
            f"the layout {axis} of the small copy gives {found.base} -> {found.wide}, the full model has {base} -> {wide}",
            code="family.layout_does_not_lift",
        )
    return found


def _lifted(axis: Axis, segment: Product, ratio: Fraction, share: Fraction) -> Product:
    """A segment of an axis at `ratio` times its size, with the zeros that take it to `share` times that.

    Query rows in blocks of 32, "2+1 * 32" in the copy, from 1,024 rows to 1,280; three projections in one:

    >>> def lifted(text: str, ratio: int, share: Fraction) -> str:
    ...     axis = Axis.parse(text)
    ...     return str(Axis.of(_lifted(axis, axis.segments[0], Fraction(ratio), share)))
    >>> lifted("out: 64+32", 16, Fraction(5, 4)), lifted("out: 3 * 16+16", 4, Fraction(2))
    ('1024+256', '3 * 64+64')
    """
    at = _growing(segment)
    outer, own, inner = segment[:at], segment[at], segment[at + 1 :]
    number, zeros = own.size * ratio, Fraction(0)
    if any(factor.pad for factor in (*outer, *inner)) or any(factor.k != 1 for factor in outer):
        raise MupscaleError(
            f"the zeros of {axis} in the small copy lie inside its parts", code="family.zeros_inside_parts"
        )
    if axis.padded:
        if len({Fraction(prod(f.wide for f in s), prod(f.size for f in s)) for s in axis.segments}) > 1:
            raise MupscaleError(
                f"the parts of {axis} in the small copy have unlike shares of zeros",
                code="family.zeros_inside_parts",
            )
        zeros = number * share * prod(f.size for f in inner) / prod(f.wide for f in inner) - number * own.k
    if number.denominator != 1 or zeros.denominator != 1 or zeros < 0 or bool(zeros) != bool(own.pad):
        raise MupscaleError(
            f"{axis.base * ratio * share} units are not a whole number of the blocks in {axis}",
            code="family.blocks_not_whole",
        )
    return (*outer, Factor(int(number), own.k, int(zeros)), *inner)


def _growing(segment: Product) -> int:
    """Which factor of a segment has a number of units that depends on the size: the one with zeros, or the outermost."""
    return next((at for at, factor in enumerate(segment) if factor.pad), 0)


def _ratios(small: Plan, base: Tensors, twins: _Twins) -> Set[Fraction]:
    """How many times larger than in the small copy the spaces of the full model are, by axes that belong to one space."""
    found = set()
    for name, shape in base.shapes.items():
        with suppress(MupscaleError):  # a tensor without a twin is refused by `lift`
            axes = small.tensors[twins.of(name)].axes
            plain = [(axis, size) for axis, size in zip(axes, shape, strict=True) if len(axis.segments) == 1]
            found |= {Fraction(size, axis.base) for axis, size in plain if axis.grows}
    return found


def _structure(plan: TensorPlan) -> tuple[Any, ...]:
    """Everything in a tensor's plan except the number of its outer units."""
    axes = tuple(
        (axis.role, tuple(_form(s) for s in axis.segments) if axis.grows else None) for axis in plan.axes
    )
    how = (plan.fold, plan.shift, plan.kind, plan.fill, plan.trainable, plan.cat)
    return axes, *how, plan.cut, plan.mean, plan.gain, plan.typical


def _form(segment: Product) -> tuple[Any, ...]:
    at = _growing(segment)
    return segment[:at], segment[at].k, bool(segment[at].pad), segment[at + 1 :]


class _Twins:
    """Which tensor of the copy corresponds to one of the full model.

    Any layer does if all layers of the copy have the same plan. If they do not, tensors with the same name
    correspond when both models have the same layers; otherwise the last layer corresponds to the last, and
    the others to the others: the 1/k of a tied readout may be folded into the last layer only.
    """

    def __init__(self, small: Plan, full: list[str]) -> None:
        self._small = small
        self._last = {"small": _last_numbers([*small.tensors, *small.ties]), "full": _last_numbers(full)}
        self._names: dict[str, list[str]] = {}
        for name in small.tensors:
            self._names.setdefault(pattern_of(name), []).append(name)
        self._full: dict[str, set[str]] = {}
        for name in full:
            self._full.setdefault(pattern_of(name), set()).add(name)

    def of(self, name: str) -> str:
        pattern = pattern_of(name)
        candidates = self._names.get(pattern, [])
        if not candidates:
            raise MupscaleError(
                "the small copy has no tensor of this kind", code="family.kind_not_in_small_copy"
            )
        plans = [self._small.tensors[c] for c in candidates]
        if len({_structure(p) for p in plans}) == 1:
            return name if name in candidates else candidates[0]
        if set(candidates) == self._full[pattern]:
            return name
        place = _place(name, self._last["full"])
        alike = [c for c in candidates if _place(c, self._last["small"]) == place]
        if len({_structure(self._small.tensors[c]) for c in alike}) != 1:
            raise MupscaleError(
                "layers of the small copy treat it differently, and none corresponds to this one",
                code="family.layers_differ",
            )
        return alike[0]


def _last_numbers(names: list[str]) -> dict[str, int]:
    """The last number of every list of modules, by the pattern of what comes before it.

    >>> _last_numbers(["h.0.mlp.0.weight", "h.0.mlp.2.weight", "h.1.mlp.0.weight"])
    {'h': 1, 'h.*.mlp': 2}
    """
    last: dict[str, int] = {}
    for name in names:
        parts = name.split(".")
        for i, word in enumerate(parts):
            if word.isdigit():
                prefix = pattern_of(".".join(parts[:i]))
                last[prefix] = max(last.get(prefix, 0), int(word))
    return last


def _place(name: str, last: Mapping[str, int]) -> tuple[bool, ...]:
    """For every number in a name, whether it is the last of its list.

    >>> _place("h.11.mlp.0.weight", {"h": 11, "h.*.mlp": 2})
    (True, False)
    """
    parts = name.split(".")
    return tuple(
        int(word) == last[pattern_of(".".join(parts[:i]))] for i, word in enumerate(parts) if word.isdigit()
    )
