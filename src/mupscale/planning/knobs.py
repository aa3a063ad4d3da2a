"""What two models leave open, as a short list of knobs, each with its likeliest setting first.

Shapes do not determine a layout. GPT-2's fused projection of q, k and v grows from 48 to 96 rows (16 = 2
heads of 8 become 4 heads), and three layouts fit: blocks of 24 (q, k, v of one head together, as in
GPT-NeoX), blocks of 8 (all heads of q, then of k, then of v: GPT-2), or single rows. One knob holds these
three settings for all layers.

A knob changes roles, layouts or folds of a few tensors at once. The gradient identity decides;
this module only proposes, from the integer attributes (heads, groups) of the two models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import product
from typing import Any

from torch import nn

from ..errors import MupscaleError
from ..models.kinds import is_norm
from ..models.names import pattern_of
from ..rules.axes import Axis, Layout, Role
from ..rules.products import COPIES, Ways
from ..rules.scale import ONE, Scale
from .draft import Draft, DraftEntry

# The patterns below order the settings, or propose more of them; with a name that none of them knows, a search
# needs more trials, or finds nothing. The names are those of the attention modules in transformers; a number says
# how many model types of version 5.22 use a name.

# Modules named after attention: attn, attention, self_attn, SelfAttention.
_ATTENTION = re.compile(r"att", re.IGNORECASE)
# Attributes that count heads or groups: num_heads (142), num_attention_heads (113), num_key_value_heads (31),
# n_heads, n_head, n_head_kv, n_groups (Mamba-2). Sizes are no counts: head_dim, head_size, kv_dim.
_COUNTS = re.compile(r"^(?!.*(size|dim)).*(head|group|kv)", re.IGNORECASE)
# Projections that write heads: q_proj, k_proj, v_proj (Llama and some 290 others), query, key, value (BERT,
# ViT: 79), qkv, qkv_proj (Phi-3), Wqkv (MPT, ModernBERT), query_key_value (BLOOM, Falcon, GPT-NeoX), q, k, v
# (T5), q_lin (DistilBERT), linear_q (ESM), kv_b_proj, q_b_proj (DeepSeek's second, low-rank factor), c_attn
# (GPT-2), wq, wk, wv (the first Llama code), in_proj_weight (nn.MultiheadAttention).
_HEADS_OUT = re.compile(
    r"^(wq|wk|wv|c_attn|in_proj.*|.*(q|k|v|kv|qkv|query|key|value)(_b)?(_proj|_lin|_linear)?)$"
)
# Projections that read heads: o_proj (Llama: 221), out_proj (OPT, BART: 151), dense (BERT, GPT-NeoX: 114),
# proj (vision models: 67), wo, o (T5), c_proj (GPT-2), out_lin (DistilBERT), linear_out (ESM), to_out.
_HEADS_IN = re.compile(r"^(o|wo|out|proj|dense|c_proj|o_proj|out_proj|.*out.*)$")


@dataclass(frozen=True)
class Setting:
    """One value of a knob: what it changes in which tensors, by name."""

    roles: Mapping[str, Mapping[int, Role]] = field(default_factory=dict)
    layouts: Mapping[str, Mapping[int, Layout]] = field(default_factory=dict)
    folds: Mapping[str, Scale] = field(default_factory=dict)
    shifts: Mapping[str, int] = field(default_factory=dict)
    fills: Mapping[str, Mapping[int, Fraction]] = field(default_factory=dict)
    """Powers of the filled share of an axis, by tensor and dimension."""

    def __str__(self) -> str:
        """What is set, once for all layers.

        >>> print(Setting(folds={"h.0.norm.weight": Scale.of("1/2"), "h.1.norm.weight": Scale.of("1/2")}))
        h.*.norm.weight folds 1/2
        """
        changes = ((word, change) for word, changes in vars(self).items() for change in changes.items())
        return ", ".join(dict.fromkeys(f"{pattern_of(name)} {word} {to}" for word, (name, to) in changes))

    def apply(self, draft: Draft) -> Draft:
        """The draft with this setting applied; folds multiply those already there."""
        changed: dict[str, DraftEntry] = {}
        for name in {*self.roles, *self.layouts, *self.folds, *self.shifts, *self.fills}:
            entry = draft.entries[name]
            changed[name] = replace(
                entry,
                roles=self.roles.get(name, entry.roles),
                layouts={**entry.layouts, **self.layouts.get(name, {})},
                fold=entry.fold * self.folds.get(name, ONE),
                shift=self.shifts.get(name, entry.shift),
                fills=_added(entry.fills, self.fills.get(name, {})),
            )
        return draft.with_entries(changed)


def _added(one: Mapping[int, Fraction], other: Mapping[int, Fraction]) -> dict[int, Fraction]:
    """Exponents of a product.

    >>> _added({0: Fraction(1, 2)}, {0: Fraction(-1, 2), 1: Fraction(1)})
    {1: Fraction(1, 1)}
    """
    total = {dim: one.get(dim, Fraction(0)) + other.get(dim, Fraction(0)) for dim in {**one, **other}}
    return {dim: power for dim, power in total.items() if power}


Knob = list[Setting]


def role_knobs(draft: Draft) -> Iterator[Knob]:
    """A raw parameter with one growing axis is tried as out and as in; with several, as a matrix first.

    An `nn.Linear` says which of its axes is read; an `nn.Parameter` of shape (n,) may be a gain ("out") or a
    readout vector ("in"). Most are gains and biases, so "out" comes first.
    """
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for entry in draft.open:
        groups.setdefault((pattern_of(entry.name), tuple(entry.growing)), []).append(entry.name)
    # Parameters of a model's own norm classes come last: they are gains, for which "out" is right, and a
    # search varies early knobs first.
    for names in sorted(groups.values(), key=lambda names: is_norm(draft.entries[names[0]].module[0])):
        growing = draft.entries[names[0]].growing
        choices: list[dict[int, Role]]
        if len(growing) == 1:
            choices = [{growing[0]: "out"}, {growing[0]: "in"}]
        else:
            # torch's order (out, in), then the order of x @ w, then a table that is only written. Axes before
            # the last two are stacked copies of the matrix, such as experts.
            first, last = growing[-2], growing[-1]
            rest: dict[int, Role] = dict.fromkeys(growing[:-2], "out")
            choices = [
                {**rest, first: "out", last: "in"},
                {**rest, first: "in", last: "out"},
                {**rest, first: "out", last: "out"},
            ]
        yield [Setting(roles=dict.fromkeys(names, choice)) for choice in choices]


def copies(draft: Draft, entry: DraftEntry, dim: int) -> Fraction:
    """How many copies an axis makes when its layout is plain."""
    return Axis.between(entry.base_shape[dim], entry.wide_shape[dim], None, ways=draft.ways).k


def layout_knobs(draft: Draft, everywhere: bool = False) -> Iterator[Knob]:
    """Axes inside a module with a growing number of heads or groups: whole blocks, or neighbours.

    With `everywhere`, projections next to such a module (by their names) are open too; only a search that can
    measure asks for that.
    """
    # One knob per module pattern and role, so that all layers, and weight and bias, are decided together. A
    # tensor without known roles gets a knob of its own.
    groups: dict[tuple[str, str], list[tuple[str, int]]] = {}
    counting = counting_modules(draft)
    found: dict[str, list[tuple[int, int]]] = {}
    for entry in draft.entries.values():
        counts = _counts_for(entry, counting, everywhere)
        if not counts:
            continue
        found[entry.name] = counts
        for dim in entry.growing:
            if dim not in entry.layouts and entry.kind == "parameter":
                role = f"open {pattern_of(entry.name)}" if entry.raw else (entry.roles or {}).get(dim, "open")
                owner = pattern_of(entry.name.rpartition(".")[0])
                groups.setdefault((owner, role), []).append((entry.name, dim))
    for (owner, role), axes in sorted(groups.items(), key=lambda group: _faces_stream(*group[0])):
        name, dim = axes[0]
        entry = draft.entries[name]
        blocks = block_sizes(draft, entry, dim, found[name])
        if not blocks:
            continue
        # The side of a projection that faces the heads probably moves whole heads; the other side is the
        # residual stream, whose channels are copied one by one.
        leaf = (owner or name).rpartition(".")[2]
        heads = bool((_HEADS_OUT if role == "out" else _HEADS_IN).match(leaf)) or role.startswith("open")
        layouts: list[Layout] = [*blocks, 1] if heads else [1, *blocks]
        if everywhere:
            parts = parts_with_units(draft, entry, dim)
            # What is written and read at one size, as the heads between q_proj and o_proj, is probably no row of parts.
            whole = not heads or _is_passed_on(draft, entry, dim)
            layouts = [*layouts, *parts] if whole else [*parts, *layouts]
            layouts += fused_layouts(entry, dim, found[name], draft.ways)
        usable = [b for b in layouts if all(_fits(draft, n, d, b) for n, d in axes)]
        yield [Setting(layouts=per_name(axes, b)) for b in _unlike(draft, axes, usable)]


def _is_passed_on(draft: Draft, entry: DraftEntry, dim: int) -> bool:
    """Whether a parameter of another role has an axis of the same two sizes: one of them writes what the other reads."""
    sizes, role = (entry.base_shape[dim], entry.wide_shape[dim]), (entry.roles or {}).get(dim)
    return any(
        (other.base_shape[d], other.wide_shape[d]) == sizes and its not in (None, role)
        for other in draft.entries.values()
        for d, its in (other.roles or {}).items()
    )


def _unlike(draft: Draft, axes: list[tuple[str, int]], layouts: list[Layout]) -> list[Layout]:
    """The layouts without those that put every unit where an earlier one does: zeros behind 4 blocks of 8, or behind 32 units."""
    found: dict[object, Layout] = {}
    for layout in layouts:
        axis: object = layout
        with suppress(MupscaleError):  # a layout that does not fit is tried, and its error reported
            axis = [
                Axis.between(e.base_shape[d], e.wide_shape[d], None, layout, draft.ways)
                for e, d in ((draft.entries[name], d) for name, d in axes)
            ]
        found.setdefault(repr(axis), layout)
    return list(found.values())


def paired_knobs(draft: Draft) -> Iterator[Knob]:
    """Raw parameters with an axis twice as long as another: two halves, or pairs of neighbours (gate and up).

    An expert's fused `gate_up_proj` of 2·I rows next to a `down_proj` that reads I: Mixtral stores all gates,
    then all ups; GPT-OSS alternates them, so that pairs of rows are copied together.
    """
    groups: dict[tuple[str, int], list[tuple[str, int]]] = {}
    sizes: dict[str, set[int]] = {}
    for entry in draft.entries.values():
        owner = pattern_of(entry.name.rpartition(".")[0])
        sizes.setdefault(owner, set()).update(entry.base_shape[d] for d in entry.growing)
        raw = entry.raw and entry.kind == "parameter" and not is_norm(entry.module[0])
        for dim in entry.growing if raw else ():
            if dim not in entry.layouts and entry.base_shape[dim] % 2 == 0:
                groups.setdefault((owner, entry.base_shape[dim]), []).append((entry.name, dim))
    for (owner, size), axes in groups.items():
        if size // 2 in sizes[owner]:
            yield [Setting(), Setting(layouts=per_name(axes, 2))]


def _faces_stream(owner: str, role: str) -> bool:
    """True for the side of a projection that by its name faces away from the heads; such knobs come last.

    >>> _faces_stream("h.*.attn.c_attn", "in"), _faces_stream("h.*.attn.c_attn", "out")
    (True, False)
    """
    leaf = owner.rpartition(".")[2]
    return bool((_HEADS_OUT if role == "in" else _HEADS_IN).match(leaf)) and not role.startswith("open")


def _counts_for(
    entry: DraftEntry, counting: Mapping[str, list[tuple[int, int]]], everywhere: bool
) -> list[tuple[int, int]]:
    """The counts of the module that contains a tensor, or, with `everywhere`, of one next to it.

    BERT needs the second: `attention.self` holds the number of heads, `attention.output.dense` reads them.
    """
    inside = next((counts for path, counts in counting.items() if _inside(entry.name, path)), [])
    if inside or not everywhere:
        return inside
    leaf = entry.name.rpartition(".")[0].rpartition(".")[2]
    if not (_ATTENTION.search(entry.name) and (_HEADS_IN.match(leaf) or _HEADS_OUT.match(leaf))):
        return []
    siblings = (counts for path, counts in counting.items() if _inside(entry.name, path.rpartition(".")[0]))
    return next(siblings, [])


def part_knobs(draft: Draft, decided: set[tuple[str, int]]) -> Iterator[Knob]:
    """Rows that new units may follow part by part, as gates and ups in one matrix; `decided` are axes of other knobs."""
    groups: dict[tuple[str, int, int], list[tuple[str, int]]] = {}
    read = set()
    for entry in draft.entries.values():
        for dim in entry.growing if draft.ways.by == "units" and entry.kind == "parameter" else ():
            sizes = (entry.base_shape[dim], entry.wide_shape[dim])
            if (entry.roles or {}).get(dim) == "in":
                read.add(sizes)
            elif dim not in entry.layouts and (entry.name, dim) not in decided:
                groups.setdefault((pattern_of(entry.name.rpartition(".")[0]), *sizes), []).append(
                    (entry.name, dim)
                )
    for (_, n, m), axes in groups.items():
        parts = parts_with_units(draft, draft.entries[axes[0][0]], axes[0][1])
        # A space that something reads as a whole is probably no row of parts.
        layouts = [1, *parts] if (n, m) in read else [*parts, 1]
        if parts:
            yield [Setting(layouts=per_name(axes, b)) for b in layouts]


def parts_with_units(draft: Draft, entry: DraftEntry, dim: int) -> list[Layout]:
    """Layouts of an axis whose equal parts each end with new units, for parts of a size that grows elsewhere.

    The 48 rows of GPT-2's fused projection are 3 parts of the stream's size, 16. Doubled, they are 3 times 16 rows and 16
    zeros, because the wide model takes its first 32 rows for the queries.
    """
    if draft.ways.by != "units":
        return []
    base, wide = entry.base_shape[dim], entry.wide_shape[dim]
    sizes = {(e.base_shape[d], e.wide_shape[d]) for e in draft.entries.values() for d in e.growing}
    parts = [(base // n, n, m - n) for n, m in sorted(sizes, reverse=True) if base % n == 0]
    return [((c, 1), (n, 1, pad)) for c, n, pad in parts if c > 1 and c * (n + pad) == wide]


def fused_layouts(
    entry: DraftEntry, dim: int, counts: list[tuple[int, int]], ways: Ways = COPIES
) -> list[Layout]:
    """Segments of fused projections of grouped attention: queries in groups, then keys and values.

    Phi-3 with 4 query heads, 2 key heads and head size 8 has a `qkv_proj` of (4 + 2·2)·8 = 64 rows. Doubled,
    each of the 2 groups of 2 query heads (16 rows) is copied as a whole, then each of the 2·2 key and value
    heads (8 rows):

    >>> entry = DraftEntry("qkv_proj.weight", "parameter", (64, 32), (128, 64), (nn.Linear(32, 64),) * 2, None, {})
    >>> fused_layouts(entry, 0, [(2, 4), (4, 8)])
    [(((2, 2), (16, 1)), ((4, 2), (8, 1)))]
    """
    base, wide = entry.base_shape[dim], entry.wide_shape[dim]
    found: list[Layout] = []
    for (heads, more), (kv, more_kv) in product(counts, counts):
        rows, goal = heads + 2 * kv, more + 2 * more_kv  # in heads
        if (
            kv < heads
            and heads % kv == 0
            and base % rows == 0
            and base * goal == wide * rows
            and more % heads == 0
        ):
            size, k, group = base // rows, more // heads, heads // kv
            if ways.by != "units":
                found.append((((kv, k), (group * size, 1)), ((2 * kv, k), (size, 1))))
            else:
                pad = kv * (k - 1)
                found.append((((kv, 1, pad), (group * size, 1)), ((2, 1), (kv, 1, pad), (size, 1))))
    return found


def per_name(axes: list[tuple[str, int]], layout: Any) -> dict[str, dict[int, Any]]:
    """One layout for several axes, each (name, dimension), as a setting holds it."""
    found: dict[str, dict[int, Any]] = {}
    for name, dim in axes:
        found.setdefault(name, {})[dim] = layout
    return found


def _fits(draft: Draft, name: str, dim: int, layout: Layout) -> bool:
    entry = draft.entries[name]
    a, b = entry.base_shape[dim], entry.wide_shape[dim]
    if not isinstance(layout, int):
        return True
    return a % layout == 0 and b % layout == 0 and (draft.ways.pads or (b // layout) % (a // layout) == 0)


def block_sizes(draft: Draft, entry: DraftEntry, dim: int, counts: list[tuple[int, int]]) -> list[int]:
    """Block sizes that keep heads (or groups) whole, from the counts that grow in the two models.

    GPT-2's fused rows, 48 to 96 with 2 heads to 4: 48 / 2 = 24 rows per head come first. Other sizes in the
    same block of the model, divided by the count, are the further candidates: the stream of 16 gives the head
    size 16 / 2 = 8.
    """
    base, wide = entry.base_shape[dim], entry.wide_shape[dim]
    found: list[int] = []
    for a, b in counts:
        if base % a == 0 and wide % b == 0 and base // a == wide // b:
            found.append(base // a)
    units = {other // a for other in _sizes_near(draft, entry) for a, _ in counts if other % a == 0}
    found += [u for u in sorted(units, reverse=True) if base % u == 0 and wide % u == 0]
    return [b for b in dict.fromkeys(found) if 1 < b <= base]


def counting_modules(draft: Draft) -> dict[str, list[tuple[int, int]]]:
    """Paths of the innermost modules that hold a growing number of heads or groups, with (base, wide) counts.

    Attributes of the module itself count most. A configuration object may be shared by all modules, so its counts are
    used for modules named after attention, themselves or by their class, that have none, and for others only if nothing else is found.
    Both occur in one model: CLIP's attention and Mamba's mixer hold their numbers of heads, Llama's attention beside
    them does not.
    """
    owners = [dict(model.named_modules()) for model in draft.models]
    own: dict[str, list[tuple[int, int]]] = {}
    shared: dict[str, list[tuple[int, int]]] = {}
    for path, base in owners[0].items():
        wide = owners[1].get(path)
        if wide is None:
            continue
        if counts := _counts(vars(base), vars(wide)):
            own[path] = counts
        configs = [getattr(m, "config", None) or getattr(m, "cfg", None) for m in (base, wide)]
        if all(hasattr(c, "__dict__") and not isinstance(c, nn.Module) for c in configs):
            shared[path] = _counts(vars(configs[0]), vars(configs[1]))
    kinds = {path: f"{path} {type(module).__name__}" for path, module in owners[0].items()}
    named = {
        p: c for p, c in shared.items() if c and _ATTENTION.search(kinds[p]) and not _has_own_counts(p, own)
    }
    found = {**own, **named} or {p: c for p, c in shared.items() if c}
    return {
        path: sorted({*counts, *shared.get(path, ())})
        for path, counts in found.items()
        if not any(_inside(other, path) for other in found)
    }


def _has_own_counts(path: str, own: Mapping[str, object]) -> bool:
    """Whether the attention that a module is part of has counts of its own.

    >>> _has_own_counts("h.0.attention.output", {"h.0.attention.self": 2}), _has_own_counts("h.0.self_attn", {"h.0.mamba": 2})
    (True, False)
    """
    parent = path.rpartition(".")[0]
    whole = parent if _ATTENTION.search(parent.rpartition(".")[2]) else path
    return any(_inside(other, whole) or _inside(path, other) or other == path for other in own)


def _counts(base: Mapping[str, object], wide: Mapping[str, object]) -> list[tuple[int, int]]:
    pairs = [(base[key], wide.get(key)) for key in base if _COUNTS.search(key)]
    return sorted({(a, b) for a, b in pairs if type(a) is int and type(b) is int and 1 <= a < b})


def _inside(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(f"{outer}."))


def _sizes_near(draft: Draft, entry: DraftEntry) -> set[int]:
    """Growing sizes in the same block of the model: one of them, divided by a count, is the head size."""
    parent = entry.name.rpartition(".")[0].rpartition(".")[0]
    return {
        e.base_shape[d]
        for e in draft.entries.values()
        if e.name.startswith(f"{parent}." if parent else "")
        for d in e.growing
    }
