"""Plan the growth of a stock checkpoint: found on a small copy of its configuration, lifted to its full size.

The full model exists only on the meta device. Nothing is returned that has not passed the gradient identity on
the copy, tensor by tensor; `prove.py` adds real optimizer steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path as File
from typing import Any

import torch

from ..errors import Fault, MupscaleError, raise_faults
from ..extras import needs
from ..files.directory import has_weights, read_directory
from ..models.names import pattern_of
from ..noise.where import exempt_of
from ..planning.search.search import Found
from ..plans.plan import Plan
from ..plans.tensor_plan import Powers
from ..tensors.devices import on_cpu
from .config.checks import refuse_nothing
from .config.goal import Goal, Way
from .config.multipliers import Multipliers
from .config.nested import edits, following, nested_configs, with_edits
from .copy.lift import Tensors
from .copy.losses import NoBatchError
from .copy.reached import TOKENS
from .copy.shrink import TOO_LARGE, count, goals_of, growth, growth_of, shrunk
from .copy.small_search import search_small
from .copy.trial import End
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
from .reading import reading_of
from .record import Evidence, FamilyPlan
from .steps.compose import compose, whole_plan
from .steps.depth import refuse_spelling
from .steps.experts import Mixture
from .steps.step import Chain
from .steps.width import Width, refuse_layer_norms, try_other_size
from .stored import stored_parts
from .types.declarations import Declarations
from .types.export import check_export
from .types.rows import ROWS


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
    by: Way = "copies",
    architecture: str | None = None,
    export: str | None = None,
    stored: Sequence[str] | None = None,
    declared: Declarations | Mapping[str, Any] | None = None,
    centred: bool = False,
) -> FamilyPlan:
    """Plan the growth of a checkpoint from its configuration; the plan is tested on a small copy, and no weights are needed.

    Args:
        config: The content of a config.json, or a directory that has one.
        multipliers: How many times wider: 2 for every width, or by name, as "hidden=2,ffn=4".
        to: What the larger model has, as `--to` of the command line. "layers=8" adds blocks, which sleep until they are woken;
            "hidden=96,heads=6" names sizes, at which zeros follow the copies where they are no whole multiples; "vocab=+64" adds
            words, and "positions=4096" positions; "experts=8,top_k=2,expert_ffn=64" adds experts that sleep next to the dense
            layers, in the class of "into=granitemoeshared" or the first that holds the base.
        by: "copies", or "units" for new units, zeros behind those of the base, wherever that is exact.
        architecture: The class of a configuration that does not name it.
        export: "granite" grows Llama-like models into Granite, whose configuration shows the multipliers.
        stored: The names of the tensors in the checkpoint. By default they are read from the directory, or those of the stock class.
        declared: Roles, layouts and folds as `--declare` reads them; they override what is inferred.
        centred: Whether new channels of a stream behind LayerNorm may carry the mean of the others. Outputs are exact then, and
            training is not the base's; `mupscale upscale` asks for it, because it wakes what is new anyway.

    Returns:
        The plan with the wide configuration, what proved it, and how the stock class reads the checkpoint.

    Raises:
        NotExact: If no exact plan is found.
        MupscaleError: If the model type is not supported, or the goal cannot be reached from this configuration.

    >>> sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4}
    >>> config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 97, **sizes}
    >>> family_plan(config, 2).plan["model.layers.0.mlp.up_proj.weight"].wide_shape
    (80, 64)
    """
    started = time.monotonic()
    if not isinstance(declared, Declarations):
        declared = Declarations.of_json(dict(declared or {}))
    raw = read_config(config)
    goal = Goal.parse(multipliers, to, by)
    with needs("family_plan", "hf"):
        base = config_from(raw)
    cls = model_class(base, architecture)
    check_export(export)
    start = End(base, cls)
    _refuse_both(to, export)
    chain, width = compose(start, goal), Width(goal, export, declared)
    wide = width.end(chain.last)
    if not chain.steps:
        refuse_nothing(as_data(start.config), goal)
    wide_model = on_meta(*wide)
    base_model = chain.models[0]
    copy, plan, powers = _lifted_from_copy(chain, width, Tensors.of(wide_model), centred)
    worst = copy.found.worst
    small = copy.chain.start.config
    held = Tensors.of(base_model).shapes
    more = {name: entry.base_shape for name, entry in plan.tensors.items() if name not in held}
    parts = stored_parts(factory(cls)(small), {**more, **held})
    own = {name: part for name, part in parts.items() if part.tensor in held}
    reading = reading_of(base_model, _stored_names(config) if stored is None else stored, own)
    if any(step.makes_tensors for step in chain.steps):
        refuse_spelling(plan, reading)
    return FamilyPlan(
        model_type=base.model_type,
        architecture=cls.__name__,
        wide_architecture=wide.cls.__name__,
        goal=goal,
        base_config=raw,
        wide_config=_wide_data(raw, chain, wide, width),
        plan=plan,
        evidence=_evidence(base, cls, copy, worst, started),
        small_config=as_data(small),
        small_goal=copy.goal,
        powers=powers,
        not_stored=tuple(not_stored(wide_model)),
        notes=tuple(_notes(plan)),
        export=export,
        stored=parts,
        reading=reading,
        exempt=exempt_of(wide_model, plan, "wide"),
        declared=declared,
        new_blocks=tuple(block for step in chain.steps for block in step.new_blocks),
    )


def _refuse_both(to: str | None, export: str | None) -> None:
    """Raise if a model is to be exported and to get something new."""
    if to is not None and export is not None:
        what = f"{export}, and --to {to}: what --to adds is added in the base's own class"
        raise_faults(
            "a model is exported or grows deeper",
            [Fault("goal.export_and_growth", "--export", what, "leave one of them out")],
        )


@dataclass(frozen=True)
class _Copy:
    """What a small copy has shown."""

    chain: Chain
    """What the copy becomes before its width grows."""
    goal: Goal
    """How wide it becomes."""
    plans: list[Plan]
    """The plans of the full model's steps."""
    found: Found
    """The plan of the copy's width."""


def _lifted_from_copy(chain: Chain, width: Width, wide: Tensors, centred: bool) -> tuple[_Copy, Plan, Powers]:
    """What a small copy has shown, its plan at the full sizes, and the powers in it; by copies where means do not lift."""
    copy = _found_on_copy(chain, width, wide, centred)
    source = copy.found.plan, copy.found.powers
    try:
        return copy, *whole_plan(chain, copy.plans, width, source, wide)
    except MupscaleError:
        if not copy.found.plan.carries_mean:
            raise
        return _lifted_from_copy(chain, width, wide, centred=False)


def _found_on_copy(chain: Chain, width: Width, wide: Tensors, centred: bool) -> _Copy:
    """Search on a small copy of the start of a chain, which is made in the class that the base has."""
    (start, cls), goal = chain.start, width.goal
    base = Tensors.of(chain.models[-1])
    kept = growth(base.shapes, wide.shapes) if chain.last.cls is cls else growth_of(start, goal, cls)

    def searched(gently: bool, centred: bool) -> _Copy:
        small = shrunk(start, goal, cls, kept, gently)
        copy = chain.small(End(small, cls))
        goals = _goals(chain, copy, goal)
        if not centred:
            refuse_layer_norms(fresh(*copy.own), base, wide)
        plans = chain.plans(copy)
        own, own_cls = copy.own
        found = search_small(own, goals[0], own_cls, width.export, width.declared, centred)
        try:
            worst = [try_other_size(found, own, other, own_cls) for other in goals[1:]]
        except MupscaleError:
            if not found.plan.carries_mean:
                raise
            return searched(gently, centred=False)
        return _Copy(copy, goals[0], plans, replace(found, worst=max([found.worst, copy.tried(), *worst])))

    try:
        return searched(gently=False, centred=centred)
    except NoBatchError as error:  # a model may build at sizes at which it does not run
        try:
            return searched(gently=True, centred=centred)
        except MupscaleError as larger:
            if larger.code != TOO_LARGE:
                raise
            raise error from None


def _goals(chain: Chain, copy: Chain, goal: Goal) -> list[Goal]:
    """The goals of a small copy of a chain, which has its own number of experts."""
    experts = next((step.experts for step in copy.steps if isinstance(step, Mixture)), None)
    goals = goals_of(goal, as_data(chain.start.config), as_data(copy.start.config))
    return [replace(one, to=one.to._replace(experts=experts)) for one in goals]


def _evidence(base: Config, cls: Any, copy: _Copy, worst: float, started: float) -> Evidence:
    types = {str(part.get("model_type")) for _, part in nested_configs(as_data(base))}
    return Evidence(
        source="row" if types & ROWS.keys() else "search",
        trials=copy.found.trials,
        worst_gradient=worst,
        loss_gap=copy.found.gap,
        parameters=count(Tensors.of(on_meta(copy.chain.start.config, cls)).shapes),
        seconds=round(time.monotonic() - started, 3),
    )


def _written(config: Config) -> dict[str, Any]:
    """What config.json says of a class that the base is not of."""
    return {key: value for key, value in as_data(config).items() if value is not None and key[0] != "_"}


def _stored_names(config: Mapping[str, Any] | str | File) -> Sequence[str]:
    """The names of the tensors in a directory; none where only a configuration is given."""
    if isinstance(config, Mapping) or not has_weights(File(config)):
        return ()
    return list(read_directory(config).tensors)


def _wide_data(raw: Mapping[str, Any], chain: Chain, wide: End, width: Width) -> dict[str, Any]:
    """The content of the wide config.json: the base's fields with those that grow replaced, or all of another class."""
    # A class that stands for another type reads the fields of its own, and would miss those with two names.
    borrowed = not isinstance(wide.config, wide.cls.config_class)
    if width.export == "granite" or chain.last.cls is not chain.start.cls or borrowed:
        return _written(wide.config)
    changed = edits(as_data(chain.last.config), width.goal)
    written = with_edits(raw, {**chain.edits, **changed})
    written = with_edits(written, following(written, written))
    # A field that is left out (for example a head size) may be derived from one that grew, so it is written.
    ends = dict(nested_configs(as_data(wide.config)))
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
