"""From the plan of a small copy to the plan of the full model.

A full tensor takes the plan of the small tensor with the same name up to numbers. Blocks keep their size; their
number follows from the full model. A size that is not a whole number of blocks is a fault.

The copy of Llama 70B in shrink.py has q_proj rows "2x2 * 1024": 2 blocks of 8 heads of 128 rows. The full
model has 8,192 rows, hence 8 blocks. Its stream of 48 channels, "48x2", becomes "8192x2":

>>> str(_axis(Axis.parse("out: 2x2 * 1024"), 8192, 16384)), str(_axis(Axis.parse("in: 48x2"), 8192, 16384))
('out: 8x2 * 1024', 'in: 8192x2')
"""

from __future__ import annotations

from collections.abc import Mapping
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
from ...rules.products import Factor, Product
from ...rules.scale import Scale


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
                _axis(axis, a, b, declared.get(dim))
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


def _axis(axis: Axis, base: int, wide: int, declared: Any = None) -> Axis:
    """An axis of the copy at the sizes of the full model.

    Only the number of outer units changes, in every segment by the same ratio. A fused "2x2 * 16 | 4x2 * 8"
    (queries, then keys and values) of 64 rows, in a full model with 4 times as many heads:

    >>> str(_axis(Axis.parse("out: 2x2 * 16 | 4x2 * 8"), 256, 512))
    'out: 8x2 * 16 | 16x2 * 8'
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
        found = Axis.between(base, wide, axis.role, declared)
    else:
        segments = []
        for segment in axis.segments:
            number = Fraction(segment[0].size * base, axis.base)
            if number.denominator != 1:
                raise MupscaleError(
                    f"{base} units are not a whole number of the blocks in {axis}",
                    code="family.blocks_not_whole",
                )
            segments.append((Factor(int(number), segment[0].k, 0), *segment[1:]))
        found = Axis.of(*_padded(axis, segments, wide), role=axis.role)
    if (found.base, found.wide) != (base, wide):
        raise MupscaleError(
            f"the layout {axis} of the small copy gives {found.base} -> {found.wide}, the full model has {base} -> {wide}",
            code="family.layout_does_not_lift",
        )
    return found


def _padded(axis: Axis, segments: list[Product], wide: int) -> list[Product]:
    """The segments with the zeros that the full sizes ask for, where the copy has zeros.

    Query rows in blocks of 32, "2+1 * 32" in the copy, from 1,024 rows to 1,280:

    >>> (rows,) = _padded(Axis.parse("out: 2+1 * 32"), [(Factor(32), Factor(32))], 1280)
    >>> [str(factor) for factor in rows]
    ['32+8', '32']
    """
    if not axis.padded:
        return segments
    if len(segments) > 1 or any(factor.pad for factor in axis.segments[0][1:]):
        raise MupscaleError(
            f"the zeros of {axis} in the small copy lie inside its parts", code="family.zeros_inside_parts"
        )
    (head, *inner), (own, *_) = segments[0], axis.segments[0]
    block = prod(factor.wide for factor in inner)
    zeros, rest = divmod(wide - int(head.live) * block, block)
    if rest or zeros <= 0 or not own.pad:
        raise MupscaleError(
            f"{wide} units are not a whole number of the blocks in {axis}", code="family.blocks_not_whole"
        )
    return [(Factor(head.size, head.k, zeros), *inner)]


def _structure(plan: TensorPlan) -> tuple[Any, ...]:
    """Everything in a tensor's plan except the number of its outer units."""
    axes = tuple(
        (axis.role, tuple((s[0].k, bool(s[0].pad), s[1:]) for s in axis.segments) if axis.grows else None)
        for axis in plan.axes
    )
    how = (plan.fold, plan.shift, plan.kind, plan.fill, plan.trainable, plan.cat)
    return axes, *how, plan.cut, plan.mean, plan.gain, plan.typical


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
