"""What two models leave open, as a short list of knobs, each with its likely settings first.

A knob changes roles, layouts or folds of a few tensors at once. The gradient identity decides;
this file only proposes, from the integer attributes (heads, groups) of the two models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations, product

from torch import nn

from ..rules.axes import Axis, Layout, Role
from ..rules.scale import ONE, Scale
from .draft import Draft, Entry
from .names import pattern_of

_ATTENTION = re.compile(r"att", re.IGNORECASE)
_COUNTS = re.compile(r"^(?!.*(size|dim)).*(head|group|kv)", re.IGNORECASE)
_HEADS_OUT = re.compile(
    r"^(q|k|v|qkv|wq|wk|wv|query|key|value|c_attn|in_proj.*|.*(q|k|v|qkv|query|key|value)(_proj)?)$"
)
_HEADS_IN = re.compile(r"^(o|wo|out|proj|dense|c_proj|o_proj|out_proj|.*out.*)$")


@dataclass(frozen=True)
class Setting:
    """One value of a knob."""

    says: str
    roles: Mapping[str, Mapping[int, Role]]
    layouts: Mapping[str, Mapping[int, Layout]]
    folds: Mapping[str, Scale]

    def apply(self, draft: Draft) -> Draft:
        changed: dict[str, Entry] = {}
        for name in {*self.roles, *self.layouts, *self.folds}:
            entry = draft.entries[name]
            changed[name] = replace(
                entry,
                roles=self.roles.get(name, entry.roles),
                layouts={**entry.layouts, **self.layouts.get(name, {})},
                fold=entry.fold * self.folds.get(name, ONE),
            )
        return draft.with_entries(changed)


Knob = list[Setting]


def _setting(says: str, roles=None, layouts=None, folds=None) -> Setting:  # type: ignore[no-untyped-def]
    return Setting(says, roles or {}, layouts or {}, folds or {})


def role_knobs(draft: Draft) -> Iterator[Knob]:
    """A raw parameter with one growing axis is tried as out and as in; with several, as a matrix first."""
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for entry in draft.open:
        groups.setdefault((pattern_of(entry.name), tuple(entry.growing)), []).append(entry.name)
    for names in groups.values():
        growing = draft.entries[names[0]].growing
        choices: list[dict[int, Role]]
        if len(growing) == 1:
            choices = [{growing[0]: "out"}, {growing[0]: "in"}]
        else:
            first, last = growing[-2], growing[-1]
            rest: dict[int, Role] = dict.fromkeys(growing[:-2], "out")
            choices = [
                {**rest, first: "out", last: "in"},
                {**rest, first: "in", last: "out"},
                {**rest, first: "out", last: "out"},
            ]
        yield [
            _setting(f"{pattern_of(names[0])} is {choice}", roles=dict.fromkeys(names, choice))
            for choice in choices
        ]


def readout_knobs(draft: Draft, norms: list[str]) -> Iterator[Knob]:
    """A tied readout needs 1/k in the last norm, unless the model divides by its width itself."""
    for name in draft.conflicts:
        entry = draft.entries[name]
        if entry.declared_fold is not None:
            continue
        k = copies(draft, entry, entry.growing[-1])
        settings = []
        for norm in reversed(norms):
            gains = [
                n
                for n in draft.entries
                if n.rpartition(".")[0] == norm
                and draft.entries[n].growing
                and draft.entries[n].kind == "parameter"
            ]
            if gains:
                settings.append(
                    _setting(f"1/{k} folded into {norm}", folds=dict.fromkeys(gains, Scale.of(1 / k)))
                )
                break
        settings.append(_setting(f"the model divides what {name} reads out by its width", folds={}))
        yield settings
    for names in _by_pattern(e.name for e in draft.entries.values() if _reads_only(e)).values():
        entry = draft.entries[names[0]]
        k = copies(draft, entry, entry.growing[0])
        plain = _setting(f"{names[0]} sums over the width")
        scaled = _setting(
            f"the model divides {names[0]} by its width", folds=dict.fromkeys(names, Scale.of(k))
        )
        yield [plain, scaled]


def copies(draft: Draft, entry: Entry, dim: int) -> Fraction:
    """How many copies an axis makes when its layout is plain."""
    return Axis.between(entry.base_shape[dim], entry.wide_shape[dim], None, pad=draft.pad).k


def _reads_only(entry: Entry) -> bool:
    roles = {(entry.roles or {}).get(dim) for dim in entry.growing}
    return (
        roles == {"in"}
        and entry.declared_fold is None
        and entry.kind == "parameter"
        and len(entry.growing) == 1
    )


def layout_knobs(draft: Draft) -> Iterator[Knob]:
    """Axes inside a module with a growing number of heads or groups: whole blocks, or neighbours."""
    groups: dict[tuple[str, str], list[tuple[str, int]]] = {}
    counting = counting_modules(draft)
    for entry in draft.entries.values():
        if not any(_inside(entry.name, path) for path in counting):
            continue
        for dim in entry.growing:
            if dim not in entry.layouts and entry.kind == "parameter":
                role = (entry.roles or {}).get(dim, "open")
                owner = pattern_of(entry.name.rpartition(".")[0])
                groups.setdefault((owner, role if entry.roles else f"{role} {entry.name}"), []).append(
                    (entry.name, dim)
                )
    for (owner, role), axes in groups.items():
        name, dim = axes[0]
        entry = draft.entries[name]
        counts = next(counts for path, counts in counting.items() if _inside(name, path))
        blocks = block_sizes(draft, entry, dim, counts)
        if not blocks:
            continue
        leaf = (owner or name).rpartition(".")[2]
        heads = bool((_HEADS_OUT if role == "out" else _HEADS_IN).match(leaf)) or role.startswith("open")
        layouts: list[Layout] = [*blocks, 1] if heads else [1, *blocks]
        usable = [b for b in layouts if all(_fits(draft, n, d, b) for n, d in axes)]
        yield [_setting(f"{owner} ({role}) in blocks of {b}", layouts=_per_name(axes, b)) for b in usable]


def _per_name(axes: list[tuple[str, int]], layout: Layout) -> dict[str, dict[int, Layout]]:
    found: dict[str, dict[int, Layout]] = {}
    for name, dim in axes:
        found.setdefault(name, {})[dim] = layout
    return found


def _fits(draft: Draft, name: str, dim: int, layout: Layout) -> bool:
    entry = draft.entries[name]
    a, b = entry.base_shape[dim], entry.wide_shape[dim]
    if not isinstance(layout, int):
        return True
    return a % layout == 0 and b % layout == 0 and (draft.pad or (b // layout) % (a // layout) == 0)


def block_sizes(draft: Draft, entry: Entry, dim: int, counts: list[tuple[int, int]]) -> list[int]:
    """Block sizes that keep heads (or groups) whole, from the counts that grow in the two models."""
    base, wide = entry.base_shape[dim], entry.wide_shape[dim]
    found: list[int] = []
    for a, b in counts:
        if base % a == 0 and wide % b == 0 and base // a == wide // b:
            found.append(base // a)
    units = {other // a for other in _sizes_near(draft, entry) for a, _ in counts if other % a == 0}
    found += [u for u in sorted(units, reverse=True) if base % u == 0 and wide % u == 0]
    return [b for b in dict.fromkeys(found) if 1 < b < base]


def counting_modules(draft: Draft) -> dict[str, list[tuple[int, int]]]:
    """Paths of the innermost modules that hold a growing number of heads or groups, with (base, wide) counts.

    Own attributes tell most; a configuration object, which every module may carry, is believed for modules
    named after attention.
    """
    owners = [dict(model.named_modules()) for model in draft.models]
    own: dict[str, list[tuple[int, int]]] = {}
    shared: dict[str, list[tuple[int, int]]] = {}
    for path, base in owners[0].items():
        wide = owners[1].get(path)
        if wide is None:
            continue
        own[path] = _counts(vars(base), vars(wide))
        configs = [getattr(m, "config", None) or getattr(m, "cfg", None) for m in (base, wide)]
        if all(hasattr(c, "__dict__") and not isinstance(c, nn.Module) for c in configs):
            shared[path] = _counts(vars(configs[0]), vars(configs[1]))
    named = {path: counts for path, counts in shared.items() if counts and _ATTENTION.search(path)}
    found = (
        {path: counts for path, counts in own.items() if counts}
        or named
        or {p: c for p, c in shared.items() if c}
    )
    return {
        path: counts for path, counts in found.items() if not any(_inside(other, path) for other in found)
    }


def _counts(base: Mapping[str, object], wide: Mapping[str, object]) -> list[tuple[int, int]]:
    pairs = [(base[key], wide.get(key)) for key in base if _COUNTS.search(key)]
    return sorted({(a, b) for a, b in pairs if type(a) is int and type(b) is int and 1 <= a < b})


def _inside(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))


def _sizes_near(draft: Draft, entry: Entry) -> set[int]:
    """Growing sizes in the same block of the model: the head size is one of them over a count."""
    parent = entry.name.rpartition(".")[0].rpartition(".")[0]
    return {
        e.base_shape[d]
        for e in draft.entries.values()
        if e.name.startswith(f"{parent}." if parent else "")
        for d in e.growing
    }


def _by_pattern(names) -> dict[str, list[str]]:  # type: ignore[no-untyped-def]
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(pattern_of(name), []).append(name)
    return found


def combinations_of(knobs: list[Knob], flips: int) -> Iterator[tuple[Setting, ...]]:
    """Every knob at its likeliest setting, then one changed, then two, …"""
    likely = [knob[0] for knob in knobs]
    for count in range(min(flips, len(knobs)) + 1):
        for which in combinations(range(len(knobs)), count):
            for others in product(*(knobs[i][1:] for i in which)):
                chosen = list(likely)
                for i, setting in zip(which, others, strict=True):
                    chosen[i] = setting
                yield tuple(chosen)
