"""A checkpoint of Megatron in, a wider one out, streamed, with the state of its optimizer; and what a wide job needs.

Megatron is imported by `megatron_overrides` alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch import nn

from ..checkpoints.engine_job import write_grown
from ..checkpoints.engine_state import WideFiles
from ..checkpoints.megatron import wide_megatron
from ..checkpoints.megatron_fsdp import endings_of, groups_of, weights_of, wide_fsdp
from ..checkpoints.megatron_groups import GROUPS, NAMES, OVERRIDDEN, grown_before
from ..checkpoints.megatron_parts import spellings, spots_of, weight_parts
from ..errors import Fault, MupscaleError, raise_faults
from ..files.fsdp_dtensor import is_fsdp_dtensor, read_fsdp_dtensor
from ..files.torch_dist import read_torch_dist
from ..jobs.job import Move
from ..noise.kinds import Noise
from ..noise.resolved import NoisePlan
from ..optimizers.read import Names
from ..plans.ends import expect_proved
from ..plans.plan import Plan
from ..rules.axes import Layout
from ..rules.optimizer_rule import OptimizerRule
from ..runs.growth_record import NAME
from ..storage.location import Location, location
from ..storage.looking import exists
from .titan_layouts import other_heads

Growing = tuple[Location, list[Move], Callable[[NoisePlan | None], WideFiles]]
"""The folder of the base, the moves of its weights, and what makes the wide files for a noise."""
_LAYER = re.compile(r"\blayers\.\d+\.")


def grow_megatron_checkpoint(
    base: Location | str,
    out: Location | str,
    *,
    plan: Plan,
    noise: Noise | None = None,
    seed: int = 0,
    optimizer_class: str | None = None,
    names: Names | None = None,
    prove: bool = True,
    rules: Mapping[str, OptimizerRule] | None = None,
) -> dict[str, str]:
    """Write the checkpoint from which a wide Megatron job continues; returns what was not carried, with reasons.

    `base` is a folder with `latest_checkpointed_iteration.txt`, or the folder of one iteration, in the format torch_dist or
    fsdp_dtensor. `plan` leads from the base's `GPTModel` on one rank to the wide one. Weights, their float32 copies, first
    and second moments are grown tensor by tensor, each in its units. Without `noise` the result trains exactly like the base.
    Build the wide optimizer with `config_overrides=megatron_overrides(out)`, and load with Megatron's own loader.

    Groups of torch_dist do not say which tensors they hold: Megatron's rule is taken, unless `names` lists them group
    by group. A run that was stopped is resumed by the same call.

    >>> import tempfile, mupscale as mu
    >>> plan = mu.plans.plan_between(lambda n: nn.Linear(n, n), 2, 4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     try:
    ...         grow_megatron_checkpoint(folder, f"{folder}/wide", plan=plan)
    ...     except mu.MupscaleError as error:
    ...         print(error.code)
    megatron.no_metadata
    """
    expect_proved(plan, prove)
    grow = _grow_fsdp if is_fsdp_dtensor(base) else _grow_torch_dist
    path, moves, make = grow(base, plan, names=names, optimizer=optimizer_class, rules=rules)
    record = _record(location(base))
    if noise is not None and record is None and grown_before(_groups_in(base)):
        what = "it was grown before, and the sizes of noise are those of its first base, which no mupscale.json next to it tells"
        remedy = "copy mupscale.json of the folder that grow_megatron_checkpoint wrote into this one"
        raise MupscaleError(
            "this checkpoint cannot get noise", [Fault("noise.first_base_unknown", str(base), what, remedy)]
        )
    return write_grown(path, out, plan, noise, seed, weights=moves, make=make, record=record or path)


def _record(base: Location) -> Location | None:
    """The folder that says how a checkpoint was grown: the one that is named, or that of an iteration's run."""
    folders = (base, base.parent) if base.name.startswith("iter_") else (base,)
    return next((folder for folder in folders if exists(folder / NAME)), None)


def _grow_torch_dist(base: Location | str, plan: Plan, **given: Any) -> Growing:
    told = read_torch_dist(base)
    spots = spots_of(told, plan)
    weights = weight_parts(told, plan, spots)
    moves = [parts.move(name, plan[name].making(), parts.places[0]) for name, parts in weights.items()]
    return told.path, moves, lambda noise: wide_megatron(told, plan, spots, weights, noise=noise, **given)


def _grow_fsdp(base: Location | str, plan: Plan, **given: Any) -> Growing:
    told = read_fsdp_dtensor(base)
    endings = endings_of(told, plan)
    weights = weights_of(told, plan, endings)
    moves = [move for name, stored in weights.items() for move in stored.moves(name, plan[name].making())]
    return told.path, moves, lambda noise: wide_fsdp(told, plan, endings, weights, noise=noise, **given)


def megatron_overrides(wide: Location | str) -> dict[Any, dict[str, Any]]:
    """The `config_overrides` of Megatron's `get_megatron_optimizer` for a grown checkpoint: every tensor's rates, decay and eps.

    >>> import tempfile, mupscale as mu
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     try:
    ...         megatron_overrides(folder)
    ...     except mu.MupscaleError as error:
    ...         print(error.code)
    megatron.no_metadata
    """
    groups = _groups_in(wide)
    if not grown_before(groups) or not all(isinstance(group.get(NAMES), list) for group in groups):
        what = "its groups are not those of a checkpoint that was grown"
        remedy = "name the folder that grow_megatron_checkpoint wrote, or that the wide job has saved since"
        raise MupscaleError(
            "this checkpoint has no overrides", [Fault("megatron.was_not_grown", str(wide), what, remedy)]
        )
    try:
        key: Any = import_module("megatron.core.optimizer").ParamKey
    except ModuleNotFoundError as error:
        raise MupscaleError(
            f"overrides are Megatron's own: pip install megatron-core ({error})", code="extra.missing"
        ) from None
    patterns = _patterns([group[NAMES] for group in groups])
    return {
        key(name=names): {k: group[k] for k in OVERRIDDEN if k in group}
        for names, group in zip(patterns, groups, strict=True)
    }


def _groups_in(path: Location | str) -> list[dict[str, Any]]:
    """The groups of a checkpoint with the names of their tensors, where they have them; none if they have another form."""
    if is_fsdp_dtensor(path):
        groups, members = groups_of(read_fsdp_dtensor(path))
        return [{**group, NAMES: names} for group, names in zip(groups, members, strict=True)]
    tree: Any = read_torch_dist(path).common.get("optimizer")
    for _ in range(2):
        tree = tree if not isinstance(tree, dict) or GROUPS in tree else tree.get("optimizer")
    found = tree.get(GROUPS) if isinstance(tree, dict) else None
    return found if isinstance(found, list) and all(isinstance(each, dict) for each in found) else []


def _patterns(members: Names) -> list[tuple[str, ...]]:
    """Patterns that match the names of each group and no other, behind any number of wrappers.

    A stage of a pipeline counts its layers from 0, so numbers of layers are left open where all layers are alike. Norms
    have a second name, which fused layers of Transformer Engine give them.

    >>> _patterns([["layers.0.a", "layers.1.a", "b"], ["layers.0.c"]])
    [('*module.b', '*module.layers.*.a', 'b', 'layers.*.a'), ('*module.layers.*.c', 'layers.*.c')]
    >>> _patterns([["layers.0.a"], ["layers.1.a"]])
    [('*module.layers.0.a', 'layers.0.a'), ('*module.layers.1.a', 'layers.1.a')]
    """
    loose = [{_LAYER.sub("layers.*.", name) for name in names} for names in members]
    alike = sum(map(len, loose)) == len(set[str]().union(*loose))
    every = [{own for name in of for own in spellings(name)} for of in (loose if alike else members)]
    return [tuple(sorted(before + name for name in of for before in ("", "*module."))) for of in every]


def megatron_layouts(base: nn.Module, wide: nn.Module) -> dict[str, dict[int, Layout]]:
    """The `layouts=` of a plan between two `GPTModel`s on one rank: fused query, key and value by groups, gate and up by halves.

    The size of heads and the number of queries in a group stay; `num_attention_heads` and `num_query_groups` grow by one factor.

    >>> from types import SimpleNamespace
    >>> def make(heads):
    ...     model = nn.Module()
    ...     model.linear_qkv = nn.Linear(4, 4 * heads, bias=False)
    ...     model.config = SimpleNamespace(
    ...         kv_channels=2, num_attention_heads=2 * heads, num_query_groups=heads, gated_linear_unit=True
    ...     )
    ...     return model
    >>> megatron_layouts(make(2), make(4))
    {'linear_qkv.weight': {0: 8}}
    """
    (size, group), others = _heads(base), _heads(wide)
    remedy = "keep both, and multiply num_attention_heads and num_query_groups by one factor"
    raise_faults("these two models cannot be planned", other_heads("config", (size, group), others, remedy))
    gated = bool(getattr(base.config, "gated_linear_unit", False))
    layouts: dict[str, dict[int, Layout]] = {}
    for name, tensor in base.named_parameters():
        shape = wide.get_parameter(name).shape
        layer, _, kind = name.rpartition(".")
        grown = {dim: 1 for dim, n in enumerate(tensor.shape) if n != shape[dim]}
        own: dict[int, Layout] = dict(grown)
        if layer.endswith("linear_qkv") and 0 in grown and kind in ("weight", "bias"):
            own[0] = (group + 2) * size
        elif layer.endswith("linear_proj") and 1 in grown:
            own[1] = group * size
        elif layer.endswith("linear_fc1") and 0 in grown and gated:
            half = (tensor.shape[0] // 2, shape[0] // tensor.shape[0])
            own[0] = [[half], [half]]
        if own != grown:
            layouts[name] = own
    return layouts


def _heads(model: Any) -> tuple[int, int]:
    """The size of a head, and how many queries share a key."""
    config = model.config
    groups = config.num_query_groups or config.num_attention_heads
    return config.kv_channels, config.num_attention_heads // groups
