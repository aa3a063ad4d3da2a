"""A plan while it is being decided: shapes, roles, layouts and folds, some of them still open.

Made by diffing two models; completed by declarations and by the search; turned into a frozen `Plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from ..errors import Fault, MupscaleError
from ..rules.axes import Axis, Factor, Layout, Role
from ..rules.scale import ONE, Exact, Scale
from . import modules
from .names import named_tensors, strip_wrappers, unwrap
from .plan import Edit, Fill, Kind, Plan, TensorPlan

RoleSpec = str | Mapping[int, str]
LayoutSpec = Layout | Mapping[int, Layout]


@dataclass(frozen=True)
class Declared:
    """What the user states by name pattern; it wins over everything inferred."""

    roles: Mapping[str, RoleSpec] = field(default_factory=dict)
    layouts: Mapping[str, LayoutSpec] = field(default_factory=dict)
    folds: Mapping[str, Exact] = field(default_factory=dict)
    plus_one: Sequence[str] = ()
    pad: bool = False


@dataclass(frozen=True)
class Entry:
    """One tensor of the draft."""

    name: str
    kind: Kind
    base_shape: tuple[int, ...]
    wide_shape: tuple[int, ...]
    module: tuple[nn.Module, nn.Module]
    roles: Mapping[int, Role] | None
    layouts: Mapping[int, Layout | tuple[Factor, ...]]
    fold: Scale = ONE
    fill: Fill = "zero"
    shift: int = 0
    settled: bool = False
    """True when the user declared its role or its fold."""

    @property
    def growing(self) -> list[int]:
        return [d for d, (a, b) in enumerate(zip(self.base_shape, self.wide_shape, strict=True)) if a != b]

    def plan(self, pad: bool) -> TensorPlan:
        axes = []
        for dim, (a, b) in enumerate(zip(self.base_shape, self.wide_shape, strict=True)):
            role = (self.roles or {}).get(dim) if a != b else None
            layout = self.layouts.get(dim, 1)
            try:
                if not isinstance(layout, int) and layout and isinstance(layout[0], Factor):
                    axis = Axis.of(layout, role=role)  # type: ignore[arg-type]
                    if (axis.base, axis.wide) != (a, b):
                        raise MupscaleError(f"layout {axis} takes {axis.base} to {axis.wide}, not {a} to {b}")
                else:
                    axis = Axis.between(a, b, role, layout, pad) if a != b else Axis.fixed(a)  # type: ignore[arg-type]
            except MupscaleError as error:
                raise MupscaleError(f"axis {dim}: {error.claim}") from None
            axes.append(axis)
        return TensorPlan(
            (self.name,), tuple(axes), self.fold, kind=self.kind, fill=self.fill, shift=self.shift
        )


@dataclass(frozen=True)
class Draft:
    entries: Mapping[str, Entry]
    ties: Mapping[str, str]
    conflicts: Mapping[str, str]
    """Tied tensors that one use wants as "in" and another as "out": name -> the reading use."""
    pad: bool
    models: tuple[nn.Module, nn.Module]

    @property
    def open(self) -> list[Entry]:
        """Tensors that grow and whose roles nobody has stated."""
        return [e for e in self.entries.values() if e.growing and e.roles is None]

    def with_entries(self, changes: Mapping[str, Entry]) -> Draft:
        return replace(self, entries={**self.entries, **changes})

    def plan(self) -> Plan:
        """The frozen plan, or one error with every tensor whose axes cannot be built."""
        tensors: dict[str, TensorPlan] = {}
        faults: list[Fault] = []
        for name, entry in self.entries.items():
            try:
                tensors[name] = entry.plan(self.pad)
            except MupscaleError as error:
                faults.append(Fault(name, error.claim))
        edits: list[Edit] = []
        needs: set[str] = set()
        if not faults and any(t.padded for t in tensors.values()):
            needs = modules.padding_needs(self.models[0])
            edits, faults = _pad_norms(self.entries, tensors)
        if faults:
            raise MupscaleError("no plan fits these two models", faults)
        return Plan(tensors, dict(self.ties), tuple(edits), needs=frozenset(needs))


def draft(base: nn.Module, wide: nn.Module, declared: Declared) -> tuple[Draft, list[Fault]]:
    """Diff two models: which axes grow, what their modules say, what the user declared."""
    base, wide = unwrap(base), unwrap(wide)
    found = {strip_wrappers(n): (k, t) for n, k, t in named_tensors(base)}
    goal = {strip_wrappers(n): (k, t) for n, k, t in named_tensors(wide)}
    faults = _unmatched(found.keys(), goal.keys())
    owners = (_modules(base), _modules(wide))
    first: dict[int, str] = {}
    entries: dict[str, Entry] = {}
    ties: dict[str, str] = {}
    conflicts: dict[str, str] = {}
    refused: set[str] = set()
    for name, (kind, tensor) in goal.items():
        if name not in found:
            continue
        source = found[name][1]
        if source.dim() != tensor.dim():
            faults.append(
                Fault(name, f"{source.dim()} dimensions in the base, {tensor.dim()} in the wide model")
            )
            continue
        entry, problems = _entry(name, kind, (source, tensor), owners)  # type: ignore[arg-type]
        owner = name.rpartition(".")[0]
        if entry.growing and owner not in refused:
            refused.add(owner)
            problems += list(modules.unsupported(*entry.module, owner))
        faults += problems
        if id(tensor) in first:
            ties[name] = first[id(tensor)]
            planned = entries[ties[name]]
            if entry.growing and entry.roles and planned.roles != entry.roles:
                conflicts[ties[name]] = name
            continue
        first[id(tensor)] = name
        entries[name] = entry
    made = Draft(entries, ties, conflicts, declared.pad, (base, wide))
    made, more = _declare(made, declared)
    lifted = {n for n, e in made.entries.items() if e.kind == "buffer" and e.layouts}
    return made, [f for f in faults if f.where not in lifted] + more


def _entry(
    name: str,
    kind: Kind,
    tensors: tuple[torch.Tensor, torch.Tensor],
    owners: tuple[dict[str, nn.Module], ...],
) -> tuple[Entry, list[Fault]]:
    source, tensor = tensors
    path, _, leaf = name.rpartition(".")
    pair = (owners[0][path], owners[1][path])
    above = path.rpartition(".")[0]
    parents = (owners[0][above], owners[1][above]) if path else None
    entry = Entry(name, kind, tuple(source.shape), tuple(tensor.shape), pair, None, {})
    if not entry.growing:
        own = kind == "buffer" and _width_dependent(source, tensor)
        return replace(entry, roles={}, fill="own" if own else "zero"), []
    if kind == "buffer":
        return _growing_buffer(entry, source)
    if modules.parametrized(name):
        return entry, [
            Fault(
                name,
                "a weight_norm or spectral_norm parametrization divides by a norm that depends on the width",
                "remove it first: torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')",
            )
        ]
    known = modules.facts(*pair, leaf, tensor.dim(), parents)
    roles = known.roles
    if roles is not None and any(dim not in roles for dim in entry.growing):
        dim = next(d for d in entry.growing if d not in roles)
        what = f"dimension {dim} of {type(pair[0]).__name__}.{leaf} is not a width, yet it grows"
        return entry, [
            Fault(
                name,
                f"{what} from {source.shape[dim]} to {tensor.shape[dim]}",
                f'if it is one, declare roles={{"{name}": {{{dim}: "out"}}}}',
            )
        ]
    return replace(entry, roles=roles, layouts=known.layouts, fold=known.fold), []


def _growing_buffer(entry: Entry, source: torch.Tensor) -> tuple[Entry, list[Fault]]:
    if source.is_floating_point() or source.is_complex():
        return replace(entry, roles=dict.fromkeys(entry.growing, "out")), []
    return replace(entry, roles=dict.fromkeys(entry.growing, "out")), [
        Fault(
            entry.name,
            f"a buffer of {source.dtype} grows; indices cannot be duplicated blindly",
            f'declare layouts={{"{entry.name}": 1}} to copy its entries, or make it no buffer',
        )
    ]


def _width_dependent(source: torch.Tensor, tensor: torch.Tensor) -> bool:
    """A constant that each model computes for itself, such as 1/head_size, differs when freshly built."""
    if source.is_meta or tensor.is_meta or source.dtype != tensor.dtype:
        return False
    return not torch.equal(source.cpu(), tensor.cpu())


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    return {strip_wrappers(f"{n}.").rstrip("."): m for n, m in model.named_modules(remove_duplicate=False)}


def _unmatched(found: Any, goal: Any) -> list[Fault]:
    missing = [
        Fault(n, "in the base model only", "the wide model must have every tensor of the base")
        for n in found
        if n not in goal
    ]
    extra = [
        Fault(n, "in the wide model only", "no base tensor feeds it; build both models the same way")
        for n in goal
        if n not in found
    ]
    return missing + extra


def _declare(made: Draft, declared: Declared) -> tuple[Draft, list[Fault]]:
    faults: list[Fault] = []
    names = [*made.entries, *made.ties]

    def targets(pattern: str, what: str) -> list[Entry]:
        hits = [n for n in names if n == pattern or fnmatchcase(n, pattern)]
        if not hits:
            faults.append(Fault(pattern, f"declared in {what}, but no tensor has such a name"))
        return [made.entries[n] for n in dict.fromkeys(made.ties.get(h, h) for h in hits)]

    for pattern, spec in declared.roles.items():
        for entry in targets(pattern, "roles"):
            roles = dict(spec) if isinstance(spec, Mapping) else dict.fromkeys(entry.growing, spec)
            unclear = len(entry.growing) > 1 and not isinstance(spec, Mapping)
            if unclear or set(roles.values()) - {"in", "out"}:
                faults.append(
                    Fault(
                        entry.name,
                        f"roles {spec!r}",
                        'expected "in", "out", or {dim: "in" or "out"} when several axes grow',
                    )
                )
                continue
            made = made.with_entries({entry.name: replace(entry, roles=roles, settled=True)})  # type: ignore[arg-type]
    for pattern, layout in declared.layouts.items():
        for entry in targets(pattern, "layouts"):
            if not entry.growing:
                continue
            chosen = dict(layout) if isinstance(layout, Mapping) else {entry.growing[0]: layout}
            if not isinstance(layout, Mapping) and len(entry.growing) > 1:
                faults.append(
                    Fault(
                        entry.name,
                        f"{len(entry.growing)} axes grow",
                        "name the axis: layouts={name: {dim: layout}}",
                    )
                )
                continue
            now = made.entries[entry.name]
            made = made.with_entries({entry.name: replace(now, layouts={**now.layouts, **chosen})})
            made = _share_layout(made, entry.name, declared)
    for pattern, factor in declared.folds.items():
        for entry in targets(pattern, "folds"):
            now = made.entries[entry.name]
            made = made.with_entries(
                {entry.name: replace(now, fold=now.fold * Scale.of(factor), settled=True)}
            )
    for pattern in declared.plus_one:
        for entry in targets(pattern, "plus_one"):
            made = made.with_entries({entry.name: replace(made.entries[entry.name], shift=1)})
    return made, faults


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
            made = made.with_entries({bias: replace(other, layouts={0: layout})})
    return made


def _pad_norms(
    entries: Mapping[str, Entry], tensors: dict[str, TensorPlan]
) -> tuple[list[Edit], list[Fault]]:
    """Padding thins the mean square by the fill: RMSNorm's eps and gain absorb it, LayerNorm cannot."""
    edits: list[Edit] = []
    faults: list[Fault] = []
    for name, entry in entries.items():
        module, owner = entry.module[0], name.rpartition(".")[0]
        if not tensors[name].padded or entry.kind == "buffer":
            continue
        if isinstance(module, (nn.LayerNorm, nn.GroupNorm)):
            n, wide = entry.base_shape[-1], entry.wide_shape[-1]
            whole = wide // n
            faults.append(
                Fault(
                    name,
                    f"{type(module).__name__} over {n} -> {wide}: zeros would change its mean, so only whole multiples are exact",
                    f"nearest: {n * whole} (x{whole}), {n * (whole + 1)} (x{whole + 1})",
                )
            )
        elif isinstance(module, nn.RMSNorm):
            if module.eps is None:
                faults.append(
                    Fault(
                        owner,
                        "RMSNorm(eps=None) on a padded axis",
                        "give eps a number, so that it can be scaled",
                    )
                )
                continue
            fill = Scale.of(tensors[name].change.fill)
            tensors[name] = replace(tensors[name], fold=tensors[name].fold * fill ** Fraction(1, 2))
            edits.append(Edit(f"{owner}.eps" if owner else "eps", module.eps, fill))
    return edits, faults
