"""Declarations of the user by name pattern, applied to a draft.

A declaration overrides everything inferred; one that matches no tensor is a fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ..arguments import wrong_kind, wrong_list
from ..errors import Fault, MupscaleError, raise_faults
from ..rules.axes import Layout
from ..rules.scale import Exact, Scale
from .draft import Draft, DraftEntry
from .megatron import megatron_layouts

RoleSpec = str | Mapping[int, str]
LayoutSpec = Layout | Mapping[int, Layout]
_UNREADABLE = "these declarations cannot be read"


@dataclass(frozen=True)
class Declared:
    """What you know of a model and shapes do not show, by name of tensor or pattern; it overrides everything inferred.

    Args:
        roles: Whether a growing axis is summed over, "in", or not, "out"; by axis where several grow: `{0: "out", 1: "in"}`.
        layouts: Blocks that are copied as one, such as the size of a head; by axis where several grow: `{0: 64}`.
        folds: Constants that tensors absorb, exactly: a fraction such as "1/2", or a root such as "2^(-1/4)".
        plus_one: Gains that the model uses as 1 + w.

    >>> import torch, mupscale as mu
    >>> make = lambda n: torch.nn.Sequential(torch.nn.Linear(3, n), torch.nn.ReLU(), torch.nn.Linear(n, 2))
    >>> wide = mu.grow(make(4), lambda: make(8), declared=mu.Declared(layouts={"0.weight": 2, "2.weight": 2}))
    >>> str(wide.plan["2.weight"].axes[1])
    'in: 2x2 * 2'
    """

    roles: Mapping[str, RoleSpec] = field(default_factory=dict)
    layouts: Mapping[str, LayoutSpec] = field(default_factory=dict)
    folds: Mapping[str, Exact] = field(default_factory=dict)
    plus_one: Sequence[str] = ()

    @classmethod
    def megatron(cls, base: nn.Module, wide: nn.Module, **more: Any) -> Declared:
        """What shapes do not show of two of Megatron's `GPTModel`s: query, key and value fused by groups, gate and up by halves.

        The size of heads and the number of queries in a group stay; `num_attention_heads` and `num_query_groups` grow by one factor.

        Args:
            base: The base on one rank.
            wide: The wide model on one rank.
            **more: Further declarations: roles, layouts of other tensors, folds, plus_one.

        Raises:
            MupscaleError: If heads or groups have other sizes in the wide model.
        """
        found, own = megatron_layouts(base, wide), more.pop("layouts", {})
        remedy = 'write layouts={"<name>": 8}'
        raise_faults("these declarations cannot be read", wrong_kind("layouts", own, Mapping, remedy))
        return cls(layouts={**found, **own}, **more)

    @property
    def any(self) -> bool:
        """Whether anything is declared."""
        return bool(self.roles or self.layouts or self.folds or self.plus_one)

    def faults(self) -> list[Fault]:
        """Faults for declarations of the wrong type, and for folds that are not exact."""
        found = wrong_list("plus_one", self.plus_one)
        forms = {"roles": '"out"', "layouts": "8", "folds": '"1/2"'}
        for option, form in forms.items():
            remedy = f'write declared=mu.Declared({option}={{"<name>": {form}}})'
            found += wrong_kind(option, getattr(self, option), Mapping, remedy)
        for pattern, factor in self.folds.items() if isinstance(self.folds, Mapping) else ():
            try:
                Scale.of(factor)
            except MupscaleError as error:
                found.append(Fault(error.code, f"folds, {pattern!r}", error.claim))
        return found


def sound(declared: Declared | None) -> Declared:
    """What was declared, or nothing; raises for what cannot be read."""
    if declared is None:
        return Declared()
    example = 'write declared=mu.Declared(layouts={"<name>": 8})'
    raise_faults(_UNREADABLE, wrong_kind("declared", declared, Declared, example))
    raise_faults(_UNREADABLE, declared.faults())
    return declared


def sound_with(declared: Declared | None, plan: object) -> Declared:
    """The same, next to a plan that may be given: it holds what was declared when it was made."""
    if declared is not None and plan is not None:
        what = "plan= is given too, and holds what was declared when it was made"
        raise_faults(
            _UNREADABLE,
            [Fault("argument.plan_and_declared", "declared", what, "leave out plan= or declared=")],
        )
    return sound(declared)


def declare(made: Draft, declared: Declared) -> tuple[Draft, list[Fault]]:
    """The draft with all declarations applied, and faults for those that match nothing."""
    faults: list[Fault] = []
    names = [*made.entries, *made.ties]

    def targets(pattern: str, what: str) -> list[DraftEntry]:
        hits = [n for n in names if n == pattern or fnmatchcase(n, pattern)]
        if not hits:
            remedy = "write the name of a tensor, or a pattern such as *.weight"
            faults.append(
                Fault(
                    "argument.pattern_matches_nothing",
                    pattern,
                    f"declared in {what}, but no tensor has such a name",
                    remedy,
                )
            )
        return [made.entries[n] for n in dict.fromkeys(map(made.planned, hits))]

    for pattern, spec in declared.roles.items():
        matching = targets(pattern, "roles")
        faults += _beyond("roles", pattern, spec, matching)
        for entry in matching:
            roles = dict(spec) if isinstance(spec, Mapping) else dict.fromkeys(entry.growing, spec)
            unclear = len(entry.growing) > 1 and not isinstance(spec, Mapping)
            missing = set(entry.growing) - set(roles)
            if unclear or missing or set(roles.values()) - {"in", "out"}:
                forms = ", ".join(f'{dim}: "in" or "out"' for dim in entry.growing)
                one = '"in", "out" or ' if len(entry.growing) == 1 else ""
                faults.append(
                    Fault("plan.wrong_roles", entry.name, f"roles {spec!r}", f"expected {one}{{{forms}}}")
                )
                continue
            made = made.with_entries({entry.name: replace(entry, roles=roles, declared_role=True)})  # type: ignore[arg-type]
    for pattern, layout in declared.layouts.items():
        matching = targets(pattern, "layouts")
        faults += _beyond("layouts", pattern, layout, matching)
        for entry in matching:
            if not entry.growing:
                continue
            # Single units are the same layout on every axis; other layouts belong to one.
            dims = entry.growing if layout == 1 else entry.growing[:1]
            chosen = dict(layout) if isinstance(layout, Mapping) else dict.fromkeys(dims, layout)
            if not isinstance(layout, Mapping) and len(entry.growing) > 1 and layout != 1:
                faults.append(
                    Fault(
                        "layout.axis_not_named",
                        entry.name,
                        f"{len(entry.growing)} axes grow, and the layout {layout!r} names none of them",
                        f'write declared=mu.Declared(layouts={{"{entry.name}": {{{entry.growing[0]}: {layout!r}}}}})',
                    )
                )
                continue
            now = made.entries[entry.name]
            layouts, dims_declared = {**now.layouts, **chosen}, now.declared_layouts | chosen.keys()
            made = made.with_entries(
                {entry.name: replace(now, layouts=layouts, declared_layouts=dims_declared)}
            )
            made = _share_layout(made, entry.name, declared)
    for pattern, factor in declared.folds.items():
        for entry in targets(pattern, "folds"):
            faults += _unscalable(entry)
            now = made.entries[entry.name]
            made = made.with_entries(
                {entry.name: replace(now, fold=now.fold * Scale.of(factor), declared_fold=Scale.of(factor))}
            )
    for pattern in declared.plus_one:
        for entry in targets(pattern, "plus_one"):
            made = made.with_entries({entry.name: replace(made.entries[entry.name], shift=1)})
    return made, faults


def _unscalable(entry: DraftEntry) -> list[Fault]:
    """A fault for a fold of a buffer that cannot be multiplied: whole numbers, or one that the wide model computes."""
    if entry.kind == "parameter":
        return []
    tensor = getattr(entry.module[0], entry.name.rpartition(".")[2])
    if entry.fill == "own":
        what = "a fold of a buffer that each model computes for itself"
        return [
            Fault("scale.fold_of_computed_buffer", entry.name, what, "fold into a parameter that reads it")
        ]
    if not (tensor.is_floating_point() or tensor.is_complex()):
        what = f"a fold of a buffer of {tensor.dtype}, expected a floating type"
        return [Fault("scale.fold_of_whole_numbers", entry.name, what, "fold into a parameter that reads it")]
    return []


def _beyond(option: str, pattern: str, spec: object, matching: Sequence[DraftEntry]) -> list[Fault]:
    """A fault for an axis that no matching tensor has: too large, or counted from the end."""
    most = max((len(entry.base_shape) for entry in matching), default=0)
    dims = [dim for dim in spec if dim not in range(most)] if isinstance(spec, Mapping) and most else []
    what = f"declared in {option} for axis {{}}, expected axes from 0 to {most - 1}"
    return [
        Fault("axis.out_of_range", pattern, what.format(dim), "count axes from 0, the first one")
        for dim in dims
    ]


def _share_layout(made: Draft, name: str, declared: Declared) -> Draft:
    """The bias of a layer is laid out like the rows of its weight, unless it is declared itself."""
    bias = f"{name.removesuffix('weight')}bias"
    weight, other = made.entries[name], made.entries.get(bias)
    if other is None or other is weight or any(fnmatchcase(bias, p) for p in declared.layouts):
        return made
    for dim, layout in weight.layouts.items():
        same = len(other.base_shape) == 1 and (weight.roles or {}).get(dim) == "out"
        if same and (weight.base_shape[dim], weight.wide_shape[dim]) == (
            *other.base_shape,
            *other.wide_shape,
        ):
            own = frozenset({0} if dim in weight.declared_layouts else ())
            made = made.with_entries({bias: replace(other, layouts={0: layout}, declared_layouts=own)})
    return made
