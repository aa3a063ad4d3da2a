"""Which fields of a configuration grow, and by how much.

Knows configurations as plain nested data and the names of their fields; builds no model. `grown.py` says which goals
are refused, `copy/shrink.py` makes configurations small, `types/rows.py` holds what is special about a type.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from ..types.rows import row_for
from ..types.symbols import power, symbols
from .fields import EXPERTS, FIELDS, USUAL, first
from .goal import Goal

Path = tuple[str, ...]
_TEXTS = ("text_config", "llm_config", "language_config")


def nested_configs(data: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """A configuration and those nested in it, each with its path."""
    yield path, data
    for key, value in data.items():
        if isinstance(value, Mapping) and "model_type" in value:
            yield from nested_configs(value, (*path, key))


def growing_fields(data: Mapping[str, Any]) -> dict[str, list[str]]:
    """Width -> the fields of one configuration (without those nested in it) that it multiplies.

    >>> growing_fields({"model_type": "llama", "hidden_size": 64, "num_key_value_heads": None})
    {'hidden': ['hidden_size']}
    """
    row = row_for(str(data.get("model_type")))
    found = {}
    for width, names in (USUAL if row.grows is None else row.grows).items():
        fields = [n for n in names if n not in row.keeps and _whole(data.get(n))]
        if fields:
            found[width] = fields
    return found


def kept_first(value: Any, channels: Any) -> int:
    """How many numbers of a field do not grow: the first of a list, where it is the number of channels of an image."""
    return int(isinstance(value, list) and len(value) > 1 and value[0] == channels)


def expert_fields(data: Mapping[str, Any]) -> list[str]:
    """The fields of one configuration that are multiplied with its experts; [] where a token does not choose among experts.

    Copies of an expert have the same score, so twice as many of them are chosen for a token, and they share its weight.
    Groups, of which the best are chosen first, are copied whole.

    >>> expert_fields({"num_local_experts": 8, "num_experts_per_tok": 2, "n_group": 1})
    ['num_local_experts', 'num_experts_per_tok']
    >>> expert_fields({"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4})
    ['n_routed_experts', 'num_experts_per_tok', 'n_group', 'topk_group']
    """
    counts = [
        next((n for n in FIELDS[meaning].main if type(data.get(n)) is int and data[n] >= least), None)
        for meaning, least in (("experts", 2), ("top_k", 1), ("groups", 2), ("top_groups", 1))
    ]
    if None in counts[:2]:
        return []
    return [name for name in (counts if counts[2] else counts[:2]) if name is not None]


def edits(data: Mapping[str, Any], goal: Goal) -> dict[Path, Any]:
    """Every field that changes, by path, with its new value."""
    changed: dict[Path, Any] = {}
    for path, part in nested_configs(data):
        row, own = row_for(str(part.get("model_type"))), goal.within(path)
        for width, fields in growing_fields(part).items():
            for name in fields:
                if (new := _sized(part[name], width, own, part.get("num_channels"))) != part[name]:
                    changed[(*path, name)] = new
        multiple = own.size(EXPERTS, 1)
        changed |= {(*path, name): multiple * part[name] for name in expert_fields(part) if multiple != 1}
        if multiple != 1 and expert_fields(part):
            # The loss of balance is the sum over experts of share times score, times their number.
            balance = (name for name in FIELDS["balance"].main if isinstance(part.get(name), (int, float)))
            changed |= {(*path, name): part[name] / multiple for name in balance if part[name]}
        k = own.copies("hidden", symbols(part).get("E", 1))
        for name, text in row.config.items():
            if k != 1 and isinstance(part.get(name), (int, float)):
                changed[(*path, name)] = part[name] * float(power(text, k))
    return {**changed, **following(with_edits(data, changed), data)}


def following(data: Mapping[str, Any], before: Mapping[str, Any]) -> dict[Path, Any]:
    """Fields that must equal others and do not, with the value that they take; they may have been equal `before`.

    >>> def eyes(text: int, out: int) -> dict[str, object]:
    ...     return {"text_config": {"hidden_size": text}, "vision_config": {"model_type": "x", "out_hidden_size": out}}
    >>> following(eyes(128, 64), eyes(64, 64)), following(eyes(128, 32), eyes(64, 32))
    ({('vision_config', 'out_hidden_size'): 128}, {})
    """
    changed: dict[Path, Any] = {}
    for path, part in nested_configs(before):
        now, old = (_text_width(whole, path) for whole in (data, before))
        for inner, other in nested_configs(part, path) if now not in (None, old) else ():
            changed |= {(*inner, name): now for name in FIELDS["into_text"].every if other.get(name) == old}
    for path, part in nested_configs(data):
        for follower, leader in row_for(str(part.get("model_type"))).follows.items():
            value = _at(part, leader.split("."))
            if value is not None and _at(part, follower.split(".")) not in (None, value):
                changed[(*path, *follower.split("."))] = value
    return changed


def _text_width(data: Mapping[str, Any], path: Path) -> int | None:
    """The width of the text that is a part of one configuration."""
    for key in path:
        data = data.get(key) or {}
    texts = (data[name] for name in _TEXTS if isinstance(data.get(name), Mapping))
    return next((first(text, "hidden") for text in texts), None)


def _at(data: Mapping[str, Any], keys: list[str]) -> Any:
    for key in keys[:-1]:
        data = data.get(key) or {}
    return data.get(keys[-1])


def with_edits(data: Mapping[str, Any], changed: Mapping[Path, Any]) -> dict[str, Any]:
    """A deep copy of plain data with some fields set."""
    new = copy.deepcopy(dict(data))
    for path, value in changed.items():
        owner = new
        for key in path[:-1]:
            owner = owner.setdefault(key, {})
        owner[path[-1]] = value
    return new


def _whole(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(_whole(v) for v in value)
    return type(value) is int and value > 0


def _sized(value: Any, width: str, goal: Goal, channels: Any = None) -> Any:
    """A field at its new size; a list that begins with the channels of an image keeps these.

    >>> _sized([3, 32, 48], "hidden", Goal({"every": 2}), 3), _sized([3, 32, 48], "hidden", Goal({"every": 2}), 1)
    ([3, 64, 96], [6, 64, 96])
    """
    if not isinstance(value, list):
        return goal.size(width, value)
    kept = kept_first(value, channels)
    return [*value[:kept], *(_sized(v, width, goal) for v in value[kept:])]
