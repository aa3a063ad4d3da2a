"""What a user states about a plan by name pattern, put into a draft.

A declaration wins over everything inferred; one that matches no tensor is a fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from ..errors import Fault
from ..rules.axes import Layout
from ..rules.scale import Exact, Scale
from .draft import Draft, Entry

RoleSpec = str | Mapping[int, str]
LayoutSpec = Layout | Mapping[int, Layout]


@dataclass(frozen=True)
class Declared:
    """What the user states by name pattern; it wins over everything inferred."""

    roles: Mapping[str, RoleSpec] = field(default_factory=dict)
    layouts: Mapping[str, LayoutSpec] = field(default_factory=dict)
    folds: Mapping[str, Exact] = field(default_factory=dict)
    plus_one: Sequence[str] = ()


def declare(made: Draft, declared: Declared) -> tuple[Draft, list[Fault]]:
    """The draft with everything that was declared, and the declarations that fit nothing."""
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
            missing = set(entry.growing) - set(roles)
            if unclear or missing or set(roles.values()) - {"in", "out"}:
                faults.append(
                    Fault(
                        entry.name,
                        f"roles {spec!r}",
                        f'expected "in", "out", or {{dim: "in" or "out"}} for each of the growing axes {entry.growing}',
                    )
                )
                continue
            made = made.with_entries({entry.name: replace(entry, roles=roles, declared_role=True)})  # type: ignore[arg-type]
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
                {entry.name: replace(now, fold=now.fold * Scale.of(factor), declared_fold=Scale.of(factor))}
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
