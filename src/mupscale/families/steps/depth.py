"""Deeper stock models: what `--to layers=8` says, the configuration that follows, and the plan of the new blocks.

The plan is tried on a small copy with twice its blocks, in the order of the full model: the gradient identity must hold, and
waking the new blocks must not change the loss. A new block is of the kind of the block that it is like, because lists by layer
say so. Knows fields that count layers; a field that it does not know is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from ...errors import Fault, raise_faults
from ...models.float64 import lifted_casts
from ...models.names import pattern_of
from ...planning.deeper import check_asleep, check_woken
from ...plans.new_blocks import NewBlocks, Order, block_plan, first_values, nearest, new_in, order_of
from ...plans.plan import Plan
from ..config.fields import FIELDS, LISTED
from ..config.multipliers import To
from ..config.nested import Path, nested_configs, with_edits
from ..copy.trial import End, Trial
from ..models import Config, as_data, config_from, fresh
from ..record import Reading
from ..types.rows import WRITERS, row_for
from .step import Step

_WIDTH = "mupscale plan BASE -k 2 says whether its width can grow instead"
_LISTS = frozenset(LISTED.values())
"""Lists that are known to hold one entry for every layer."""


@dataclass(frozen=True)
class Depth:
    """Where blocks are new, in a configuration that has more layers."""

    order: Order
    edits: Mapping[Path, Any]
    """Every field of the configuration that changes, by path."""

    @property
    def new(self) -> tuple[int, ...]:
        """The numbers of the new blocks."""
        return tuple(new_in(self.order))

    @property
    def after(self) -> bool:
        """Whether new blocks stand where the user put them, and not in stack order."""
        return None in self.order


def _layer_count(data: Mapping[str, Any]) -> tuple[Path, Mapping[str, Any], str]:
    """The part of a configuration that counts layers, with its path, and the field; refused unless there is exactly one."""
    counted = [
        (path, part, key)
        for path, part in nested_configs(data)
        for key, value in part.items()
        if FIELDS["layers"].has(key) and type(value) is int
    ]
    if len(counted) != 1:
        names = ", ".join(".".join((*path, key)) for path, _, key in counted) or "none"
        what = f"this configuration counts layers in {names}, expected one field"
        raise_faults(
            "this model cannot grow deeper",
            [Fault("depth.layers_not_counted_once", "--to layers", what, _WIDTH)],
        )
    return counted[0]


def depth_of(data: Mapping[str, Any], to: To) -> Depth:
    """Where the new blocks go in this configuration, and its fields; refused where a field is not understood.

    >>> depth_of({"model_type": "llama", "num_hidden_layers": 2}, To(4)).new
    (2, 3)
    """
    path, part, key = _layer_count(data)
    layers = part[key]
    order = order_of(layers, to.layers, to.after)
    raise_faults("this model cannot grow deeper exactly", _shown(data))
    raise_faults("this configuration counts its layers", _counted(part, key, layers))
    changed: dict[Path, Any] = {(*path, key): to.layers}
    like = nearest(order)
    for name, value in part.items():
        if isinstance(value, list) and len(value) == layers and not FIELDS["other_list"].has(name):
            changed[(*path, name)] = [value[block] for block in like]
    return Depth(order, changed)


def _shown(data: Mapping[str, Any]) -> list[Fault]:
    """Fields by which a model returns the logits of every router, and adds a loss of them that would move new blocks."""
    what = "it is true: the balance loss counts the routers of new blocks too, so it would move the base before they wake"
    field = "output_router_logits"
    return [
        Fault("depth.balance_loss_on", field, what, _WIDTH)
        for _, part in nested_configs(data)
        if part.get(field)
    ]


def _counted(part: Mapping[str, Any], own: str, layers: int) -> list[Fault]:
    """Fields that may mean layers by their number, so that new blocks would change which layers they mean."""
    fields = [key for key, value in part.items() if key != own and not _understood(key, value, part, layers)]
    what = "it is {}, and may mean layers by their number, which new blocks change"
    return [Fault("depth.field_counts_layers", key, what.format(part[key]), _WIDTH) for key in fields]


def _understood(key: str, value: Any, part: Mapping[str, Any], layers: int) -> bool:
    """Whether a field means no layer, or says entry by entry what every layer is.

    >>> [_understood(key, 2, {"layer_types": ["a", "b"]}, 2) for key in ("hidden_size", "max_window_layers", "moe_layers")]
    [True, True, False]
    >>> _understood("layer_types", ["a", "b"], {}, 2), _understood("moe_layers", [0, 1], {}, 2)
    (True, False)
    """
    if key == "scale_attn_by_inverse_layer_idx":
        return not value
    if isinstance(value, list) and len(value) == layers:
        # A list of all the layers' own numbers is not one of entries.
        numbers = all(type(entry) is int for entry in value) and sorted(value) == list(range(layers))
        return FIELDS["other_list"].has(key) or key in _LISTS or (FIELDS["by_layer"].has(key) and not numbers)
    if not FIELDS["by_layer"].has(key) or isinstance(value, (bool, float, Mapping, type(None))) or not value:
        return True
    if isinstance(value, str):
        return len(value) != layers
    if value == 1 and FIELDS["every_nth"].has(key):
        return True
    listed = part.get(LISTED.get(key, ""))
    return isinstance(listed, list) and len(listed) == layers


def deepened(config: Config, depth: Depth) -> Config:
    """The configuration with its new blocks; refused if its class changes what was set."""
    made = config_from(with_edits(as_data(config), depth.edits))
    data = dict(nested_configs(as_data(made)))
    faults = [
        Fault(
            "config.class_changes_field",
            ".".join(path),
            f"set to {value}, and its class makes {data[path[:-1]].get(path[-1])} of it",
            _WIDTH,
        )
        for path, value in depth.edits.items()
        if data[path[:-1]].get(path[-1]) != value
    ]
    raise_faults("this configuration cannot be written with new blocks", faults)
    return made


def small_depth(small: Config, full: Depth) -> Depth:
    """The depth on which new blocks are tried: twice that of the small copy, in the order of the full model."""
    data = as_data(small)
    _, part, key = _layer_count(data)
    return depth_of(data, To(2 * part[key], tuple(range(part[key])) if full.after else None))


def new_blocks(base: nn.Module, deeper: nn.Module, depth: Depth, copy: End) -> Plan:
    """The plan from a model to the deeper one, both of one width; a small copy shows what fresh vectors hold."""
    _, part, _ = _layer_count(as_data(copy.config))
    row = row_for(str(part.get("model_type")))
    biases = [name.removesuffix("weight") + "bias" for name in WRITERS if name.endswith(".weight")]
    new = NewBlocks(first_values(fresh(*copy)), tuple(row.silenced) or WRITERS, row.silenced, biases)
    return block_plan(base, deeper, depth.order, new)


@dataclass(frozen=True)
class Blocks(Step):
    """More blocks in a model, which sleep until noise wakes them."""

    depth: Depth

    @cached_property
    def end(self) -> End:
        return End(deepened(self.start.config, self.depth), self.start.cls)

    @property
    def edits(self) -> Mapping[Path, Any]:
        return self.depth.edits

    @property
    def new_blocks(self) -> tuple[int, ...]:
        return self.depth.new

    def plan(self, base: nn.Module, wide: nn.Module, copy: End) -> Plan:
        """The plan of the new blocks, whose writers must be known; the copy shows what fresh vectors hold."""
        plan = new_blocks(base, wide, self.depth, copy)
        if not any(entry.quiet for entry in plan.tensors.values()):
            what = "which weights of a block write into its stream is not known for this type"
            kind = str(copy.config.model_type)
            raise_faults(
                "this model cannot grow deeper", [Fault("depth.writers_unknown", kind, what, _WIDTH)]
            )
        return plan

    def small(self, copy: End) -> Blocks:
        return Blocks(copy, small_depth(copy.config, self.depth))

    def judged(self, done: Trial) -> float:
        """Raises where blocks do not sleep, or do not wake silently."""
        kind = str(self.start.config.model_type)
        with lifted_casts():
            worst = check_asleep(done.base, done.wide, done.plan, done.loss, kind, _WIDTH)
        done.wake_()
        with lifted_casts():
            check_woken(done.base, done.wide, done.plan, done.loss, kind, _WIDTH)
        return worst


def step_of(start: End, to: To) -> Blocks | None:
    """The blocks that a goal adds; None where it adds none."""
    return Blocks(start, depth_of(as_data(start.config), to)) if to.layers else None


def refuse_spelling(plan: Plan, reading: Reading) -> None:
    """Raise where a directory stores tensors that move under names that save_pretrained does not write: new ones have none."""
    moved = {pattern_of(name) for name, entry in plan.tensors.items() if entry.sources != (name,)}
    what = "stored under another name than the model's, and new tensors have no such name"
    remedy = "load it with from_pretrained and save it with save_pretrained once"
    faults = [
        Fault("checkpoint.no_names_for_new", stored, what, remedy)
        for stored, name in reading.names.items()
        if stored != name and pattern_of(name) in moved
    ]
    raise_faults("this checkpoint cannot get new tensors", faults[:2])
