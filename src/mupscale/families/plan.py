"""Plan the growth of a stock checkpoint: found on a small copy of its configuration, lifted to its full size.

The full model exists only on the meta device. Nothing is returned that has not passed the gradient identity on
the copy, tensor by tensor; `prove.py` adds real optimizer steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path as File
from typing import Any

import torch

from ..errors import Fault, raise_faults
from ..extras import needs
from ..files.directory import has_weights, read_directory
from ..models.names import pattern_of
from ..noise.where import exempt_of
from ..plans.plan import Plan
from ..tensors.devices import on_cpu
from .configs import Path, edits, following, nested_configs, with_edits
from .declarations import Declarations
from .depth import deepened, depth_of, new_blocks, refuse_spelling, try_blocks
from .experts import entered, experts_plan, refuse_wider, small_copies, try_experts
from .export import check_export, wide_of
from .goal import Goal
from .grown import refuse_nothing
from .lift import Tensors, lift
from .losses import NoBatchError
from .models import (
    Config,
    as_data,
    config_from,
    factory,
    fresh,
    model_class,
    not_stored,
    on_meta,
    read_config,
)
from .multipliers import Multipliers
from .padded import refuse_layer_norms, try_other_size
from .reading import reading_of
from .record import Evidence, FamilyPlan
from .rows import ROWS
from .shrink import count, growth, growth_of
from .small_search import TOKENS, declared_layouts, search_small
from .stored import stored_parts
from .tables import edits_of, more_of, table_plan, try_more, with_more


@contextmanager
def _on_the_cpu() -> Iterator[None]:
    """A configuration is on no device: small copies are made and tried on the CPU, whatever the default is."""
    with torch.device("cpu"):
        yield


@_on_the_cpu()
@on_cpu()
def family_plan(
    config: Mapping[str, Any] | str | File,
    multipliers: str | int | Multipliers = 1,
    *,
    to: str | None = None,
    architecture: str | None = None,
    export: str | None = None,
    stored: Sequence[str] | None = None,
    declared: Declarations | Mapping[str, Any] | None = None,
) -> FamilyPlan:
    """The plan that grows a checkpoint of this configuration, tested on a small copy; raises with reasons if none is exact.

    - `config` is the content of a config.json, or a directory that has one; `multipliers` is what `parse_multipliers` reads.
    - `to` is what `--to` says: "layers=8" gives the model new blocks, which sleep until noise wakes them; "hidden=96,heads=6"
      names sizes, at which zeros follow the copies where they are no whole multiples; "vocab=+64" adds words, and
      "positions=4096" positions; "experts=8,top_k=2,expert_ffn=64" adds experts that sleep next to the dense layers, in the
      class of "into=granitemoeshared" or the first that holds the base.
    - `export="granite"` grows Llama-like models into Granite, whose configuration shows the multipliers.
    - `stored` are the names of the tensors in the checkpoint, which for a directory with weights are read from it; the
      plan's `reading` says how the stock class reads them.
    - `declared` are roles, layouts and folds as `--declare` reads them, which override what is inferred.

    >>> sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4}
    >>> config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 97, **sizes}
    >>> family_plan(config, 2).plan["model.layers.0.mlp.up_proj.weight"].wide_shape
    (80, 64)
    """
    started = time.monotonic()
    if not isinstance(declared, Declarations):
        declared = Declarations.of_json(dict(declared or {}))
    raw = read_config(config)
    goal = Goal.parse(multipliers, to)
    with needs("family_plan", "hf"):
        base = config_from(raw)
    cls = model_class(base, architecture)
    check_export(export)
    if to is not None and export is not None:
        what = f"{export}, and --to {to}: what --to adds is added in the base's own class"
        raise_faults(
            "a model is exported or grows deeper",
            [Fault("goal.export_and_growth", "--export", what, "leave one of them out")],
        )
    refuse_wider(goal)
    mixture = None if goal.to.experts is None else entered(base, cls, goal.to.experts)
    first, own = (base, cls) if mixture is None else (mixture.config, mixture.cls)
    more = more_of(as_data(first), goal.to)
    longer = with_more(first, more) if more else first
    depth = depth_of(as_data(longer), goal.to) if goal.to.layers else None
    start = longer if depth is None else deepened(longer, depth)
    wide, wide_cls = wide_of(start, goal, export, own)
    if depth is None and mixture is None and not more:
        refuse_nothing(as_data(start), goal)
    wide_model = on_meta(wide, wide_cls)
    base_model = on_meta(base, cls)
    short = base_model if first is base else on_meta(first, own)
    tables = table_plan(short, first, more, own) if more else None
    unwidened = base_model if start is base else on_meta(start, own)
    base_end, wide_end = Tensors.of(unwidened), Tensors.of(wide_model)
    kept = growth(base_end.shapes, wide_end.shapes) if mixture is None else growth_of(base, goal, cls)
    try:
        copy = small_copies(base, goal, cls, kept)
        refuse_layer_norms(fresh(copy.first, own), base_end, wide_end)
        found = search_small(copy.first, copy.goals[0], own, export, declared)
    except NoBatchError:  # a model may build at sizes at which it does not run
        copy = small_copies(base, goal, cls, kept, gently=True)
        found = search_small(copy.first, copy.goals[0], own, export, declared)
    for other in copy.goals[1:]:
        found = replace(found, worst=max(found.worst, try_other_size(found, copy.first, other, own)))
    layouts = declared_layouts(as_data(start), goal, list(wide_end.shapes), declared)
    plan, powers = lift(found.plan, base_end, wide_end, layouts, found.powers)
    if depth is not None:
        found = replace(found, worst=max(found.worst, try_blocks(copy.first, own)))
        shallow = short if longer is first else on_meta(longer, own)
        plan = new_blocks(shallow, unwidened, depth, copy.first, own).then(plan)
    if tables is not None:
        found = replace(found, worst=max(found.worst, try_more(copy.first, more, own)))
        plan = tables.then(plan)
    if mixture is not None and copy.mixture is not None:
        found = replace(found, worst=max(found.worst, try_experts(copy.small, cls, copy.mixture)))
        plan = experts_plan(base_model, short, mixture.target).then(plan)
    plan = replace(plan, proof="copy")
    structure = {**edits_of(more), **({} if depth is None else depth.edits)}
    types = {str(part.get("model_type")) for _, part in nested_configs(as_data(base))}
    evidence = Evidence(
        "row" if types & ROWS.keys() else "search",
        found.trials,
        found.worst,
        found.gap,
        count(Tensors.of(on_meta(copy.small, cls)).shapes),
        round(time.monotonic() - started, 3),
    )
    parts = stored_parts(factory(cls)(copy.small), Tensors.of(base_model).shapes)
    names = _stored_names(config) if stored is None else stored
    reading = reading_of(base_model, names, parts)
    if depth is not None or mixture is not None:
        refuse_spelling(plan, parts, reading)
    return FamilyPlan(
        base.model_type,
        cls.__name__,
        wide_cls.__name__,
        goal,
        raw,
        _wide_data(raw, start, wide, goal, export, structure) if mixture is None else _written(wide),
        plan,
        evidence,
        as_data(copy.small),
        copy.goals[0],
        powers,
        tuple(not_stored(wide_model)),
        tuple(_notes(plan)),
        export,
        parts,
        reading,
        exempt_of(wide_model, plan, "wide"),
        declared,
        () if depth is None else depth.new,
    )


def _written(config: Config) -> dict[str, Any]:
    """What config.json says of a class that the base is not of."""
    return {key: value for key, value in as_data(config).items() if value is not None and key[0] != "_"}


def _stored_names(config: Mapping[str, Any] | str | File) -> Sequence[str]:
    """The names of the tensors in a directory; none where only a configuration is given."""
    if isinstance(config, Mapping) or not has_weights(File(config)):
        return ()
    return list(read_directory(config).tensors)


def _wide_data(
    raw: Mapping[str, Any],
    base: Config,
    wide: Config,
    goal: Goal,
    export: str | None,
    structure: Mapping[Path, Any],
) -> dict[str, Any]:
    """The content of the wide config.json: the base's fields with those that grow replaced, or Granite's fields.

    `structure` are the fields of new blocks, words and positions.
    """
    if export == "granite":
        return _written(wide)
    changed = edits(as_data(base), goal)
    written = with_edits(raw, {**structure, **changed})
    written = with_edits(written, following(written))
    # A field that is left out (for example a head size) may be derived from one that grew, so it is written.
    ends = dict(nested_configs(as_data(wide)))
    for path, part in nested_configs(as_data(config_from(written))):
        derived = {
            (*path, key): ends[path][key]
            for key, value in part.items()
            if ends[path].get(key, value) != value
        }
        written = with_edits(written, derived)
    return written


def _notes(plan: Plan) -> list[str]:
    notes = []
    roots = [n for n, t in plan.tensors.items() if t.change.s.fraction is None]
    if roots:
        notes.append(
            f"{', '.join(dict.fromkeys(map(pattern_of, roots)))} absorbs an irrational factor: in bf16 keep fp32 masters"
        )
    shifted = [n for n, t in plan.tensors.items() if t.shift and not t.fold.is_one]
    if shifted:
        notes.append(
            f"{', '.join(dict.fromkeys(map(pattern_of, shifted)))} is used as (1 + w): its weight decay must be 0"
        )
    tokens = [n for n, t in plan.tensors.items() if n.endswith(TOKENS) and t.grows]
    if tokens:
        notes.append(f"{', '.join(tokens)}: no batch reaches it, so it is taken for an embedding by its name")
    return [*notes, *sorted(plan.needs)]
