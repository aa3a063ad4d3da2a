"""A Hugging Face directory as a source: true slices of its safetensors, and of the state a Trainer left.

Positions in `optimizer.pt` follow the order of the model's parameters, so state is carried only with a family plan.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from torch import nn

from ..checkpoints.about import check_record
from ..checkpoints.shards import Spelling, plan_without, stored_tensors
from ..checkpoints.state.trainer_state import trainer_orders
from ..errors import Fault, MupscaleError, raise_faults
from ..families.record import FamilyPlan
from ..files.directory import OPTIMIZER, Directory, read_directory
from ..files.pickles.torch_file import read_tensor, read_tree
from ..files.places import Place
from ..jobs.digests import base_file
from ..optimizers.joined import state_of
from ..optimizers.read import parts
from ..plans.plan import Plan
from ..plans.tensor_plan import TensorPlan
from ..runs.growth_record import plans_of, read_about
from ..runs.provenance import Provenance
from ..storage.location import Location
from ..tensors.parts import Rectangle
from .source import FiledTensor, Source


def directory_source(
    path: Location, plan: Plan, family: FamilyPlan | None, wide: nn.Module, state: bool
) -> Source:
    """The tensors of a directory by planned name; with `state`, the moments of its Trainer too."""
    directory = read_directory(path)
    about = read_about(path)
    check_record(directory, about)
    spelling = Spelling() if family is None else Spelling.of(family)
    absent = [
        name
        for name, entry in plan.tensors.items()
        if entry.kind == "buffer" and not any(s in directory.tensors for s in entry.sources)
    ]
    pieces: dict[str, list[tuple[Rectangle, Place]]] = {}
    read: set[Place] = set()
    for found in stored_tensors(plan_without(plan, absent), directory, spelling):
        entry = plan[found.tensor]
        if not found.places or found.places[0] in read:  # an expert is listed once for each of its copies
            continue
        start = [0] * len(entry.axes)
        if cells := found.base_cells or found.cells:
            read.add(found.places[0])
            start = [which * (n // count) for n, (which, count) in zip(entry.base_shape, cells, strict=True)]
        for place in found.places:
            part = place if entry.join is None else replace(place, shape=entry.join.part(place.shape))
            pieces.setdefault(found.tensor, []).append((Rectangle(tuple(start), part.shape), part))
            if entry.join is not None:
                start[entry.join.dim] += part.shape[entry.join.dim]
    weights = {n: FiledTensor(of[0][1].dtype, plan[n].base_shape, tuple(of)) for n, of in pieces.items()}
    states, settings = _trainer(directory, plan, family, wide) if state else ({}, {})
    files = [*directory.weights, *([OPTIMIZER] if OPTIMIZER in directory.trainer else [])]
    text = repr([base_file(path, name) for name in files])
    identity = f"directory {hashlib.sha256(text.encode()).hexdigest()}"
    since = None if about is None else plans_of(about, path)[1]
    return Source(path, identity, weights, states, settings, since, Provenance.from_json(about or {}))


def _trainer(
    directory: Directory, plan: Plan, family: FamilyPlan | None, wide: nn.Module
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    if OPTIMIZER not in directory.trainer:
        return {}, {}
    if family is None:
        what = "it names parameters by position, and a plan alone does not determine their order"
        remedy = "pass mu.plans.family_plan(directory, k) as the plan, or a run without optimizers"
        raise MupscaleError(
            "the optimizer state cannot be read",
            [Fault("trainer.state_needs_family", OPTIMIZER, what, remedy)],
        )
    from ..families.models import config_from, model_class, on_meta

    config = config_from(directory.config)
    base = on_meta(config, model_class(config, family.architecture))
    groups, state = parts(read_tree(directory.path / OPTIMIZER), OPTIMIZER)
    order, wide_order = trainer_orders(groups, plan, base, wide, None)
    keys = {
        n: (k, g) for g, of in zip(groups, order, strict=True) for k, n in zip(g["params"], of, strict=True)
    }
    states: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for name in (name for of in wide_order for name in of):
        entry = plan[name]
        key, group = keys[entry.sources[0] if entry.like is None else entry.like]
        if entry.new:
            continue
        # A tensor that has had no gradient yet has settings and no state, as one that sleeps.
        settings[name] = {k: v for k, v in group.items() if k != "params"}
        if entry.join is not None:
            held = {source: state[keys[source][0]] for source in entry.sources if keys[source][0] in state}
            states[name] = _joined(name, entry, held, directory.path)
        elif key in state:
            states[name] = {
                k: FiledTensor.whole(v) if isinstance(v, Place) else v for k, v in state[key].items()
            }
    return {name: of for name, of in states.items() if of}, settings


def _joined(
    name: str, entry: TensorPlan, held: dict[str, dict[str, Any]], folder: Location
) -> dict[str, Any]:
    """The state of a tensor that is made from several; {} where none of them has any."""
    # Single numbers are read, so that they can be compared.
    read = {
        source: {
            k: read_tensor(folder, v) if isinstance(v, Place) and not v.shape else v for k, v in of.items()
        }
        for source, of in held.items()
    }
    found = state_of(entry, read) or {}
    faults = [f for key, value in found.items() for f in value.faults(entry.base_shape, name, key)]
    raise_faults("the optimizer state cannot be read", faults)
    numbers = {k: v for k, v in held.get(entry.sources[0], {}).items() if not found[k].shape}
    one = {k: FiledTensor.whole(v) if isinstance(v, Place) else v for k, v in numbers.items()}
    whole = {
        k: FiledTensor.joined([replace(part, shape=v.join.part(part.shape)) for part in v.parts], v.join.dim)
        for k, v in found.items()
        if v.shape
    }
    return {**whole, **one}
