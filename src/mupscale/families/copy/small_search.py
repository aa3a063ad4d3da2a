"""The exact plan of a small copy: a search on two small models, with what rows and declarations say.

`plan.py` makes the copy and lifts its plan to the full size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import partial
from typing import Any

import torch

from ...errors import Fault, MupscaleError, raise_faults
from ...models.build import build
from ...models.float64 import lifted_casts
from ...models.names import named_tensors
from ...planning.declare import Declared
from ...planning.infer import find_plan
from ...planning.search.search import Found
from ...plans.ends import identity_plan
from ...plans.plan import Plan
from ...rules.axes import Layout
from ...rules.products import By, Ways
from ...tensors.expand import expand
from ...tensors.random_states import forked
from ..config.fields import EXPERTS
from ..config.goal import Goal
from ..config.nested import edits, expert_fields, growing_fields, nested_configs
from ..models import Config, as_data, factory, not_stored, on_meta
from ..types.declarations import Declarations
from ..types.export import wide_of
from ..types.rows import row_for
from ..types.symbols import in_units, layout, power, symbols
from .losses import batch_for, loss_for
from .reached import TOKENS, Reach

_TOKEN_ROLES = {f"*{name}": "out" for name in TOKENS}
Growing = Mapping[str, tuple[tuple[int, int], ...]]
"""Every dimension of every tensor, by name: its size in the base and in the wide model."""
SECONDS = 24.0
"""CPU seconds that the search on a small copy may take, three times those of the hardest exact type of
`benchmarks/families_popular.jsonl`: after a refusal another plan is tried, and both together take less than a minute."""


def search_small(
    small: Config,
    goal: Goal,
    cls: Any,
    export: str | None = None,
    declared: Declarations | None = None,
    centred: bool = False,
) -> Found:
    """The exact plan of the small copy, and the statistics of the search; `centred` is as in `Ways`."""
    if not edits(as_data(small), goal) and export is None:
        return Found(identity_plan(on_meta(small, cls)), 0, 0.0, 0.0, ())
    wide, wide_cls = wide_of(small, goal, export, cls)
    makers = {"base": lambda: factory(cls)(small), "wide": lambda: factory(wide_cls)(wide)}
    with forked(seed=0):
        base_model, wide_model = makers["base"](), makers["wide"]()
    with lifted_casts():
        batch = batch_for(base_model, small)
        loss = loss_for(base_model, wide_model, batch)
    growing = growing_sizes(*({n: t.shape for n, _, t in named_tensors(m)} for m in (base_model, wide_model)))
    names = list(growing)
    experts, groups = _experts(as_data(small), goal), _groups(as_data(small), goal)
    sizes = symbols(as_data(small))
    row, declarations = row_for(small.model_type), declared or Declarations()
    reach = Reach(base_model, wide_model, batch, loss, row.idle)

    def tried(goal: Goal, way: By) -> Found:
        """The plan where what rows and declarations say of a width is said of copies, or of new units."""
        k = goal.copies("hidden", sizes.get("E", 1))
        layouts = declared_layouts(as_data(small), goal, growing)
        layouts |= declarations.values(
            sizes, replace(goal.declared, by="copies").copies("heads", sizes.get("H", 1))
        )  # type: ignore[arg-type]
        if goal.by == "units":
            share = Fraction(goal.size("heads", sizes.get("H", 1)), sizes.get("H", 1))
            layouts = {
                n: {d: in_units(one, share) for d, one in by.items()} if isinstance(by, dict) else by
                for n, by in layouts.items()
            }
        combined = Declared(
            roles={**_present({**_TOKEN_ROLES, **row.roles}, names), **declarations.roles},
            layouts=layouts,
            folds={
                # Zeros need other folds, which the search finds.
                **{p: power(f, k) for p, f in _present(row.folds, names).items() if goal.by == "copies"},
                **declarations.scales(goal.declared.copies("hidden", sizes.get("E", 1))),
            },
            plus_one=declarations.plus_one,
        )
        ways = Ways(way, experts, frozenset(groups), centred=centred and way == "units")
        # Needs are part of a job, which is resumed by its text, so modes are not among them.
        search = partial(
            find_plan, makers["base"], makers["wide"], loss, ways=ways, seconds=SECONDS, both_modes=False
        )
        return reach.decided(search, combined)

    copies = replace(goal, by="copies")
    whole: By = "padded" if _padded(base_model, wide_model) else "copies"
    if goal.by == "copies" or _outgrown(as_data(small), goal):
        found = tried(copies, whole)
    elif not (row.folds or row.layouts or declarations.folds or declarations.layouts):
        found = tried(goal, "units")
    else:
        try:
            found = tried(goal, "units")
        except MupscaleError as error:
            try:  # spaces about which something is declared by copies, the others by units
                found = tried(copies, "units")
            except MupscaleError:
                raise error from None
    _refuse_recomputed(found.plan, build(makers["base"]), build(makers["wide"]))
    return reach.checked(found)


def growing_sizes(base: Mapping[str, Sequence[int]], wide: Mapping[str, Sequence[int]]) -> Growing:
    """The dimensions of the tensors of two models, by the shapes of both.

    >>> growing_sizes({"w": (4, 3)}, {"w": (8, 3)})
    {'w': ((4, 8), (3, 3))}
    """
    return {name: tuple(zip(shape, wide[name], strict=True)) for name, shape in base.items() if name in wide}


def _experts(data: Mapping[str, Any], goal: Goal) -> frozenset[tuple[int, int]]:
    """Numbers of experts before and after: they grow by copies, since a router that is zero for an expert still chooses it."""
    k = goal.size(EXPERTS, 1)
    numbers = (part[name] for _, part in nested_configs(data) for name in expert_fields(part)[:1] if k > 1)
    return frozenset((n, k * n) for n in numbers)


def _groups(data: Mapping[str, Any], goal: Goal) -> dict[tuple[int, int], int]:
    """Numbers of experts that stand in groups, before and after, and how many of them are a group."""
    k = goal.size(EXPERTS, 1)
    parts = [(part, expert_fields(part)) for _, part in nested_configs(data) if k > 1]
    return {
        (part[own[0]], k * part[own[0]]): part[own[0]] // part[own[2]] for part, own in parts if len(own) > 2
    }


def _outgrown(data: Mapping[str, Any], goal: Goal) -> bool:
    """Whether query heads grow more than key heads: a new query head on a trained key head cannot sleep."""
    for path, part in nested_configs(data):
        names, own = symbols(part), goal.within(path)
        if "kv_heads" in growing_fields(part) and names.get("H"):
            grown = [own.size(width, names[key]) for width, key in (("heads", "H"), ("kv_heads", "KV"))]
            if grown[0] * names["KV"] > grown[1] * names["H"]:
                return True
    return False


def _padded(base: Any, wide: Any) -> bool:
    """Whether any axis gets zeros."""
    sizes = dict(wide.named_parameters())
    pairs = [
        (a, b) for name, p in base.named_parameters() for a, b in zip(p.shape, sizes[name].shape, strict=True)
    ]
    return any(a and b % a for a, b in pairs)


def declared_layouts(
    data: Mapping[str, Any], goal: Goal, growing: Growing, declared: Declarations | None = None
) -> dict[str, dict[int, Layout]]:
    """The layouts by copies that rows of the registry, and declarations by axis, give on one configuration, by tensor name.

    Experts that stand in groups are copied group by group, so that a copy has the score of its group.
    """
    goal, names = replace(goal, by="copies"), list(growing)
    found: dict[str, dict[int, Layout]] = {}
    for pair, block in _groups(data, goal).items():
        for name in (name for name in names if pair in growing[name]):
            found[name] = {d: block for d, size in enumerate(growing[name]) if size == pair}
    for path, part in nested_configs(data):
        k = goal.within(path).copies("heads", symbols(part).get("H", 1))
        for pattern, axes in row_for(str(part.get("model_type"))).layouts.items():
            for name in (n for n in names if fnmatchcase(n, pattern)):
                chosen = {d: layout(text, _layer_symbols(part, name), k) for d, text in axes.items()}
                found.setdefault(name, {}).update(chosen)
    sizes = symbols(data)
    values = (declared or Declarations()).values(sizes, goal.declared.copies("heads", sizes.get("H", 1)))
    for pattern, spec in values.items():
        for name in (n for n in names if isinstance(spec, dict) and fnmatchcase(n, pattern)):
            found.setdefault(name, {}).update(spec)  # type: ignore[arg-type]
    return found


def _layer_symbols(part: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The symbols of the layer of a tensor, where layers have sizes of their own.

    >>> part = {"num_attention_heads": 4, "head_dim": 16, "per_layer_config": {"1": {"head_dim": 32}}}
    >>> [_layer_symbols(part, f"layers.{i}.self_attn.q_proj.weight")["D"] for i in (0, 1)]
    [16, 32]
    """
    number = next((word for word in name.split(".") if word.isdigit()), "")
    return symbols({**part, **(part.get("per_layer_config") or {}).get(number, {})})


def _present(patterns: Mapping[str, str], names: list[str]) -> dict[str, str]:
    """A row applies to all classes of its type, so patterns without a tensor in this class are left out."""
    return {p: v for p, v in patterns.items() if any(fnmatchcase(n, p) for n in names)}


def _refuse_recomputed(plan: Plan, base: Any, wide: Any) -> None:
    """Raise unless tensors that no checkpoint stores, because the model computes them, are those of the plan."""
    missing = set(not_stored(wide))
    tensors = {n: t for n, _, t in named_tensors(base)}
    faults = []
    for name, _, own in named_tensors(wide):
        entry = plan[name]
        if name not in missing or not entry.sources or entry.fill == "own" or name in plan.ties:
            continue
        known = not (own.is_meta or tensors[entry.sources[0]].is_meta)
        if entry.grows and not (
            known and torch.equal(expand(tensors[entry.sources[0]], entry.making()), own)
        ):
            what = "the model computes it from its width and no checkpoint stores it, so a reload would lose its copies"
            faults.append(Fault("family.lost_on_reload", name, what))
    raise_faults("the wide model would not survive a reload", faults)
